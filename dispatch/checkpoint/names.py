"""Names of modules in checkpoints: the spellings of one module, fused linears and their parts, experts, patterns."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "aliases",
    "ancestors",
    "expert_of",
    "fused_around",
    "fused_parts",
    "in_layer_order",
    "is_linear_name",
    "is_of_mtp",
    "join",
    "layer_number",
    "number_of",
    "pattern_matcher",
    "split",
]

# A fused linear and what it is made of, in the order of its rows.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "w13": ("w1", "w3"),
}

# Multimodal models spell the language model's prefix in three ways.
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEAD = "lm_head"
# The block of a router and experts, which some models call otherwise than their checkpoints do.
BLOCK = re.compile(r"\.(mlp|block_sparse_moe)\.(?=(?:experts|gate|e_score_correction_bias)\b)")
OTHER_BLOCK = {"mlp": "block_sparse_moe", "block_sparse_moe": "mlp"}

# As lists of modules count: "03", other scripts' digits and numbers that no list reaches would be second names.
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
EXPERT = re.compile(rf"(.*\bexperts)\.({NUMBER.pattern})\.(\w+)")
LINEAR = re.compile(r"(?:\w*proj(?:_\w+)?|lm_head|w[123]|fc[12])")


def split(name: str) -> tuple[str, str]:
    """Module and last part of a tensor's name: "a.b.weight" gives "a.b" and "weight"."""
    module, _, leaf = name.rpartition(".")
    return module, leaf


def join(module: str, leaf: str) -> str:
    """The name that `split` takes apart."""
    return f"{module}.{leaf}" if module else leaf


def aliases(name: str) -> tuple[str, ...]:
    """The name itself, then the other spellings of the same module."""
    if name == HEAD or name.endswith("." + HEAD):
        return tuple(dict.fromkeys((name, HEAD, f"language_model.{HEAD}", *(prefix + HEAD for prefix in PREFIXES))))
    for prefix in PREFIXES:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            names = tuple(dict.fromkeys((name, *(other + rest for other in PREFIXES))))
            break
    else:
        names = (name,)
    if BLOCK.search(name) is None:
        return names
    return (*names, *(BLOCK.sub(lambda found: f".{OTHER_BLOCK[found[1]]}.", one) for one in names))


def fused_parts(name: str) -> tuple[str, ...]:
    """Full names of the parts of a fused linear; empty for any other name."""
    module, leaf = split(name)
    return tuple(join(module, part) for part in FUSED.get(leaf, ()))


def fused_around(name: str) -> tuple[str, ...]:
    """Full names of the fused linears that a linear may be part of: qkv_proj for q_proj."""
    module, leaf = split(name)
    return tuple(join(module, fused) for fused, parts in FUSED.items() if leaf in parts)


def ancestors(name: str) -> Iterator[str]:
    """Modules around a module, the nearest first."""
    while name:
        name, _ = split(name)
        if name:
            yield name


def expert_of(name: str) -> tuple[str, int, str] | None:
    """("….experts", 3, "up_proj") for "….experts.3.up_proj"; None for what is no linear of an expert."""
    found = EXPERT.fullmatch(name)
    return (found[1], int(found[2]), found[3]) if found else None


def in_layer_order(names: Iterable[str]) -> list[str]:
    """Sorted, layer 2 before layer 10."""
    return sorted(names, key=lambda name: [_place(part) for part in name.split(".")])


def _place(part: str) -> tuple[int, str]:
    number = number_of(part)
    return (-1, part) if number is None else (number, "")


def layer_number(name: str) -> int | None:
    """Of the layer that a module is in: 3 for "model.layers.3.mlp.experts"; None outside of layers."""
    parts = name.split(".")
    number = next((after for part, after in itertools.pairwise(parts) if part == "layers"), "")
    return number_of(number)


def is_of_mtp(name: str) -> bool:
    """Whether a module is called as part of multi-token prediction, whose layers have numbers of their own."""
    return any(part.startswith(("mtp", "nextn")) for part in name.split("."))


def number_of(part: str) -> int | None:
    """The number of a layer or an expert that a part of a name is; None for any other part."""
    return int(part) if NUMBER.fullmatch(part) else None


def is_linear_name(name: str) -> bool:
    """Whether a module is called as linear layers are: embeddings, norms, routers and convolutions are not."""
    return LINEAR.fullmatch(split(name)[1]) is not None


def pattern_matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """A function that says whether any of ModelOpt's exclude patterns covers a module name.

    With a wildcard it is a glob on the whole name. Without one it covers the module, those inside it, and, as old files
    have it, every module with these parts in its name. Parts are compared whole: "layers.1" is not in "layers.10".
    """
    expressions = [f"(?:{_expression(pattern)})" for pattern in patterns if pattern]
    together = re.compile("|".join(expressions) or r"(?!)")
    return lambda name: together.match(name) is not None


def _expression(pattern: str) -> str:
    if any(character in pattern for character in "*?["):
        return fnmatch.translate(pattern)
    return rf"(?s:(?:.*\.)?{re.escape(pattern)}(?:\..*)?)\Z"
