"""What to tune: problems from shipped models, a Hugging Face config.json or plain shapes, and the values of M."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import InvalidInput, message
from ..kernels.moe.model_config import MoeConfig
from ..kernels.problem import Problem
from ..kernels.untuned import ANCHORS
from ..kernels.weights.codec import GROUP
from .experts_workload import check_dtype, problems_of_experts

__all__ = [
    "ANCHORS",
    "QUICK_ANCHORS",
    "Linear",
    "model_names",
    "parse_ms",
    "parse_shape",
    "problems_of_config",
    "problems_of_linears",
    "problems_of_model",
    "resolve_model",
]

QUICK_ANCHORS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096)
LARGEST_M = 1 << 20

# A fused linear stands for its parts: serving engines run it instead of them.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz(fused)": ("in_proj_qkv", "in_proj_z"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
HALVES = "gate_up_proj"  # its two halves are sharded separately


class Linear(msgspec.Struct, frozen=True, kw_only=True):
    """One linear layer of a model, whole (before tensor parallelism)."""

    name: str
    n: int
    k: int
    shard: Literal["column", "row", "replicated"]
    kv_heads: int | None = None  # where rows belong to key and value heads
    head_dim: int | None = None


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Routed experts of a model's layers."""

    experts: int
    topk: int
    hidden: int
    inter: int
    activation: str  # with its constants in brackets


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of models.json; its other fields are for people."""

    model: str
    linears: tuple[Linear, ...]
    moe: Experts | None = None
    note: str = ""


@cache
def _models() -> dict[str, Model]:
    text = Path(__file__).with_name("models.json").read_bytes()
    return {entry.model: entry for entry in msgspec.json.decode(text, type=tuple[Model, ...])}


def model_names() -> tuple[str, ...]:
    """Names of the shipped models, in the file's order."""
    return tuple(_models())


def problems_of_model(name: str, *, tp: int = 1, ep: int = 1, dtype: str = "bfloat16") -> list[Problem]:
    """The problems of one shipped model on one rank: its dense layers, and its routed experts.

    Parameters
    ----------
    name : str
        Its name, or a unique prefix or suffix of it; case does not matter, an organisation before "/" is ignored.
    tp : int
        Tensor parallel size, of experts only without expert parallelism.
    ep : int
        Expert parallel size: with more than 1 a rank has some of the experts, whole. Where their number differs
        between ranks, both problems are there.
    dtype : str
        Of the activations: "bfloat16" or "float16".

    Raises
    ------
    InvalidInput
        The name is unknown or not unique, a layer cannot be split `tp` ways, or there are fewer experts than `ep`.
    """
    model = _models()[resolve_model(name)]
    if not model.linears:
        note = f" ({model.note})" if model.note else ""
        raise InvalidInput(
            message(f"the dense layers of {model.model} are unknown{note}", do="name shapes instead: --shape N,K")
        )
    plain = [linear for linear in model.linears if "(grouped" not in linear.name]  # those are several small matmuls
    found = problems_of_linears(plain, tp=tp, dtype=dtype)
    if model.moe is None:
        return found
    name = model.moe.activation.partition("(")[0]  # constants change no problem
    said = MoeConfig(
        top_k=(model.moe.topk,),
        activation=name,
        experts=model.moe.experts,
        hidden=model.moe.hidden,
        inter=model.moe.inter,
    )
    experts = problems_of_experts(said, None, gated=None, tp=tp, ep=ep, dtype=dtype)
    if isinstance(experts, tuple):
        return [*found, *experts]
    warnings.warn(f"{model.model}: its experts are left out: {experts}", UserWarning, stacklevel=2)
    return found


def resolve_model(name: str) -> str:
    """The shipped model that a name means: its own, or a unique prefix or suffix of it.

    Raises
    ------
    InvalidInput
        It is unknown or not unique.
    """
    wanted = name.rsplit("/", 1)[-1].strip().lower()
    names = {known.lower(): known for known in model_names()}
    if wanted in names:
        return names[wanted]
    found = [known for low, known in names.items() if wanted and (low.startswith(wanted) or low.endswith(wanted))]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidInput(
            message("the model's name is not unique", got=repr(name), expected=f"one of {', '.join(found)}")
        )
    close = difflib.get_close_matches(wanted, names, n=5, cutoff=0.4)
    raise InvalidInput(
        message(
            "no shipped model has this name",
            got=repr(name),
            expected=f"one like {', '.join(names[low] for low in close)}" if close else None,
            do="see `nvfp4 tune --list-models`, or name the model's config.json or shapes (--shape N,K) instead",
        )
    )


def problems_of_linears(linears: Iterable[Linear], *, tp: int = 1, dtype: str = "bfloat16") -> list[Problem]:
    """Problems of one tensor parallel rank: parts of fused linears and duplicates are left out.

    Raises
    ------
    InvalidInput
        A layer cannot be split `tp` ways; its name is in the message.
    """
    if tp < 1:
        raise InvalidInput(message("tensor parallel size", got=tp, expected="at least 1"))
    check_dtype(dtype)
    linears = tuple(linears)
    names = {linear.name for linear in linears}
    parts = {
        name.removesuffix(fused) + part
        for fused, members in FUSED.items()
        for name in names
        if name == fused or name.endswith("." + fused)
        for part in members
    }
    shards = (_shard(linear, tp) for linear in linears if linear.name not in parts)
    return list(dict.fromkeys(Problem(n=n, k=k, dtype=dtype) for n, k in shards))


def _shard(linear: Linear, tp: int) -> tuple[int, int]:
    """(n, k) of one rank."""
    if linear.k % GROUP:
        raise InvalidInput(
            message(f"layer {linear.name}: in_features", got=linear.k, expected=f"a multiple of {GROUP}")
        )
    if linear.shard == "replicated":
        return linear.n, linear.k
    if linear.shard == "row":
        return linear.n, _divide(linear, "in_features", linear.k, tp, GROUP)
    if linear.kv_heads is not None and linear.head_dim is not None:
        copies = 2 if linear.name.endswith("qkv_proj") else 1
        kv_rows = copies * linear.kv_heads * linear.head_dim
        heads = max(1, linear.kv_heads // tp)  # more ranks than heads: each head lives on several ranks
        if linear.kv_heads % tp and tp % linear.kv_heads:
            raise InvalidInput(
                message(f"layer {linear.name} has {linear.kv_heads} key/value heads", got=f"tp={tp}",
                        expected="a divisor or a multiple of that number")
            )  # fmt: skip
        query = linear.n - kv_rows
        return (
            _divide(linear, "query rows", query, tp, 1) if query else 0
        ) + copies * heads * linear.head_dim, linear.k
    return _divide(linear, "out_features", linear.n, tp, 2 if linear.name.endswith(HALVES) else 1), linear.k


def _divide(linear: Linear, what: str, size: int, tp: int, unit: int) -> int:
    if size % (tp * unit):
        raise InvalidInput(
            message(
                f"layer {linear.name} cannot be split over {tp} ranks: {what}",
                got=size,
                expected=f"a multiple of {tp} x {unit}" if unit > 1 else f"a multiple of {tp}",
                do="use a smaller tensor parallel size",
            )
        )
    return size // tp


def problems_of_config(path: str | Path, *, tp: int = 1, ep: int = 1, dtype: str | None = None) -> list[Problem]:
    """The problems of a model described by a Hugging Face config.json (a file, or the folder that holds it).

    Its dense layers, shared experts among them, fused as serving engines run them, and its routed experts last. A
    warning says what is left out: attention that is not like Llama's, and experts of which the config does not tell
    all. `tp` and `ep` are those of `problems_of_model`. `dtype=None` takes the config's own, or bfloat16 when it is
    neither bfloat16 nor float16.

    Raises
    ------
    InvalidInput
        The file cannot be read or lacks a field, a dense layer cannot be split `tp` ways, there are fewer experts than
        `ep`, or all is left out.
    """
    from .hf_config import read_config

    config = read_config(Path(path))
    dtype = dtype or config.dtype
    found = problems_of_linears(config.linears, tp=tp, dtype=dtype)
    missing = []
    if config.left_out:
        words = "linears outside MLPs, experts and the head are left out; name them: --shape N,K"
        missing.append(f"{path} describes {config.left_out}: {words}")
    left_out: dict[str, list[int]] = {}
    for layer in config.expert_layers:
        experts = problems_of_experts(config.moe, layer, gated=None, tp=tp, ep=ep, dtype=dtype)
        if isinstance(experts, tuple):
            found += experts
        else:
            left_out.setdefault(experts, []).append(layer)
    for reason, layers in left_out.items():
        count = len(config.expert_layers)
        where = "" if len(layers) == count else f" in {len(layers)} of {count} layers"
        missing.append(f"{path}: its experts{where} are left out: {reason}")
    if not found:
        raise InvalidInput("; ".join(missing))
    for words in missing:
        warnings.warn(words, UserWarning, stacklevel=2)
    return list(dict.fromkeys(found))


def parse_shape(text: str, *, dtype: str = "bfloat16") -> Problem:
    """A problem from "N,K" or "NxK": out_features, in_features.

    Raises
    ------
    InvalidInput
        Not two positive whole numbers, or K not a multiple of 16.
    """
    parts = text.lower().replace("x", ",").split(",")
    if len(parts) != 2 or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise InvalidInput(message("this is no shape of a layer", got=repr(text), expected="N,K such as 4096,14336"))
    n, k = (int(part) for part in parts)
    if n < 1 or k < GROUP or k % GROUP or max(n, k) >= 1 << 31:
        raise InvalidInput(
            message(
                "this is no shape of a layer",
                got=repr(text),
                expected=f"N of at least 1 and K a positive multiple of {GROUP}",
            )
        )
    check_dtype(dtype)
    return Problem(n=n, k=k, dtype=dtype)


def parse_ms(text: str, *, anchors: Sequence[int] = ANCHORS) -> tuple[int, ...]:
    """Values of M from "1,8,64-512": a range takes its two ends and the anchors between them.

    Raises
    ------
    InvalidInput
        Not numbers of tokens between 1 and 1048576, or a range that descends.
    """
    found: set[int] = set()
    for part in text.split(","):
        ends = [end.strip() for end in part.split("-")]
        if len(ends) > 2 or not all(end.isascii() and end.isdigit() for end in ends):
            raise InvalidInput(
                message("these are no values of M", got=repr(text), expected="numbers and ranges such as 1,8,64-512")
            )
        low, high = int(ends[0]), int(ends[-1])
        if not 1 <= low <= high <= LARGEST_M:
            raise InvalidInput(
                message("these are no values of M", got=repr(part.strip()), expected=f"1 to {LARGEST_M}, ascending")
            )
        found |= {low, high, *(m for m in anchors if low <= m <= high)}
    return tuple(sorted(found))
