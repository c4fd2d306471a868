"""Problems of experts: from text such as "experts=8,top_k=2,hidden=256,inter=128", and from what a config says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..errors import InvalidInput, message
from ..kernels.moe.activations import activation
from ..kernels.moe.model_config import MoeConfig
from ..kernels.problem import DTYPES, SHORT_DTYPES, Problem
from ..kernels.weights.codec import GROUP
from ..kernels.weights.shard import expert_range

__all__ = ["check_dtype", "parse_grouped", "parse_moe", "parse_problem", "problems_of_experts"]

T = TypeVar("T")

MOE = "experts=8,top_k=2,hidden=256,inter=128,activation=swiglu"
GROUPED = "experts=8,n=256,k=128"
NAME = '"gemm 4096x14336 bf16"'
FORMS = f"N,K such as 4096,14336; {MOE}; {GROUPED}; or a name as tables print it, in quotes: {NAME}"

MOE_SIZES = ("experts", "top_k", "hidden", "inter")
GROUPED_SIZES = ("experts", "n", "k")
SHAPE = re.compile(r"\s*\d+\s*[x,]\s*\d+\s*", re.ASCII)
LABEL = re.compile(
    r"(?P<op>gemm|grouped_gemm|moe) (?P<n>\d+)x(?P<k>\d+)(?: (?P<dtype>[a-z]{2,}\d+))?"
    r"(?: e(?P<experts>\d+))?(?: top(?P<top_k>\d+) (?P<activation>\S+))?",
    re.ASCII,
)


def parse_moe(text: str, *, dtype: str = "bfloat16") -> Problem:
    """A problem of moe from "experts=8,top_k=2,hidden=256,inter=128,activation=swiglu"; swiglu may be left out.

    Raises
    ------
    InvalidInput
        A name is missing, unknown or named twice; a size is no whole number above 0, hidden or inter no multiple of
        16; or the activation is unknown.
    """
    found = _fields(text, "--moe", MOE_SIZES, MOE, {"activation": "swiglu"})
    sizes = {name: _size(name, found[name], MOE) for name in MOE_SIZES}
    _check(sizes, ("hidden", "inter"), dtype)
    return Problem(
        op="moe",
        n=sizes["inter"],
        k=sizes["hidden"],
        dtype=dtype,
        experts=sizes["experts"],
        top_k=sizes["top_k"],
        activation=activation(found["activation"]).name,
    )


def parse_grouped(text: str, *, dtype: str = "bfloat16") -> Problem:
    """A problem of grouped_gemm from "experts=8,n=256,k=128": out_features and in_features of every expert.

    Raises
    ------
    InvalidInput
        As for `parse_moe`.
    """
    found = _fields(text, "--grouped", GROUPED_SIZES, GROUPED, {})
    sizes = {name: _size(name, value, GROUPED) for name, value in found.items()}
    _check(sizes, ("k",), dtype)
    return Problem(op="grouped_gemm", n=sizes["n"], k=sizes["k"], dtype=dtype, experts=sizes["experts"])


def parse_problem(text: str, *, dtype: str | None = None) -> Problem:
    """A problem of any op: what `parse_moe`, `parse_grouped` or `workload.parse_shape` takes, or a problem's name.

    Names are those of `Problem.label`, with long or short names of dtypes, as tables print them.

    Parameters
    ----------
    dtype
        Of the activations; None: that of the name, or bfloat16.

    Raises
    ------
    InvalidInput
        As for these; none of these forms; or a name with another dtype.
    """
    from .workload import parse_shape

    if SHAPE.fullmatch(text.lower()):
        return parse_shape(text, dtype=dtype or DTYPES[0])
    names = {part.partition("=")[0].strip() for part in text.lower().split(",") if "=" in part}
    if names & {"hidden", "inter", "top_k", "activation"}:
        return parse_moe(text, dtype=dtype or DTYPES[0])
    if names & {"n", "k"}:
        return parse_grouped(text, dtype=dtype or DTYPES[0])
    return _parse_label(text, dtype)


def _parse_label(text: str, dtype: str | None) -> Problem:
    found = LABEL.fullmatch(" ".join(text.lower().split()))
    long = {short: name for name, short in SHORT_DTYPES.items()} | dict(zip(DTYPES, DTYPES, strict=True))
    named = None if found is None or found["dtype"] is None else long.get(found["dtype"], "")
    if found is None or named == "":
        raise InvalidInput(message("this names no problem", got=repr(text), expected=FORMS))
    if None not in (named, dtype) and named != dtype:
        raise InvalidInput(message("the problem's name has another dtype", got=repr(text), expected=dtype))
    op, n, k, chosen = found["op"], found["n"], found["k"], dtype or named or DTYPES[0]
    experts, top_k = found["experts"], found["top_k"]
    if (experts is not None, top_k is not None) != (op != "gemm", op == "moe"):
        raise InvalidInput(message("this names no problem", got=repr(text), expected=FORMS))
    if op == "moe":
        fields = f"experts={experts},top_k={top_k},hidden={k},inter={n},activation={found['activation']}"
        return parse_moe(fields, dtype=chosen)
    if op == "grouped_gemm":
        return parse_grouped(f"experts={experts},n={n},k={k}", dtype=chosen)
    return parse_problem(f"{n},{k}", dtype=chosen)


def problems_of_experts(
    said: MoeConfig, layer: int | None, *, gated: bool | None, tp: int, ep: int, dtype: str
) -> tuple[Problem, ...] | str:
    """What one layer's experts ask for on a rank.

    Without expert parallelism a rank has all of them, each with a share of `inter`; with it, some of them whole.

    Parameters
    ----------
    said
        Of the layer's experts.
    layer
        Its number, where top_k or the activation are given one a layer.
    gated
        Whether the experts have a gate; None where only the activation tells.
    tp
        Tensor parallel size.
    ep
        Expert parallel size; 1 for none.

    Returns
    -------
    A problem, or two where the number of experts differs between ranks, the larger first; or, where something is not
    known or cannot be divided, why, and how --moe takes what is known.

    Raises
    ------
    InvalidInput
        `ep` is below 1 or above the number of experts.
    """
    if not 1 <= ep <= said.experts:
        raise InvalidInput(
            message("expert parallel size", got=ep, expected=f"1 to {said.experts}, the number of experts of a layer")
        )
    counts = dict.fromkeys(len(expert_range(said.experts, rank, ep)) for rank in range(ep))
    reasons: list[str] = []

    def known(find: Callable[[], T]) -> T | None:
        try:
            return find()
        except InvalidInput as error:
            reasons.append(str(error))
            return None

    hidden = known(lambda: _part(said.hidden, "hidden size", 1))
    inter = known(lambda: _part(said.inter, "inner size", tp if ep == 1 else 1))
    top_k = known(lambda: said.top_k_of(layer))
    name = known(lambda: said.activation_of(layer, gated=gated))
    if hidden is None or inter is None or top_k is None or name is None:
        rest = f"top_k={top_k or '...'},hidden={hidden or '...'},inter={inter or '...'},activation={name or '...'}"
        options = " ".join(f"--moe experts={count},{rest}" for count in counts)
        spelled = "" if dtype == DTYPES[0] else f" --dtype {dtype}"
        return f"{'; '.join(reasons)}; or name it: {options}{spelled}"
    return tuple(
        Problem(op="moe", n=inter, k=hidden, dtype=dtype, experts=count, top_k=top_k, activation=name)
        for count in counts
    )


def _part(size: int, what: str, tp: int) -> int:
    """A rank's share of a size, in whole blocks; InvalidInput where there is none."""
    if size < 1:
        raise InvalidInput(message(f"config.json does not say the {what} of its experts"))
    if size % (tp * GROUP):
        ranks = f"{tp} ranks" if tp > 1 else f"blocks of {GROUP}"
        raise InvalidInput(
            message(
                f"the {what} cannot be divided over {ranks}",
                got=f"{size}, or {size / tp:g} a rank" if tp > 1 else size,
                expected=f"a multiple of {tp} x {GROUP}" if tp > 1 else f"a multiple of {GROUP}",
                do="use fewer ranks" if tp > 1 else "",
            )
        )
    return size // tp


def _fields(
    text: str, option: str, needed: tuple[str, ...], example: str, defaults: Mapping[str, str]
) -> dict[str, str]:
    """Values by name, all lower case."""
    parts = [tuple(side.strip() for side in part.split("=")) for part in text.lower().split(",")]
    names = [part[0] for part in parts]
    if any(len(part) != 2 for part in parts):
        raise InvalidInput(message(f"{option} cannot be read", got=repr(text), expected=example))
    wrong = {
        "has an unknown key": [name for name in dict.fromkeys(names) if name not in (*needed, *defaults)],
        "lacks": [name for name in needed if name not in names],
        "has more than once": [name for name in dict.fromkeys(names) if names.count(name) > 1],
    }
    if any(wrong.values()):
        words = " and ".join(f"{what} {', '.join(those)}" for what, those in wrong.items() if those)
        raise InvalidInput(message(f"{option} {words}", got=repr(text), expected=example))
    return {**defaults, **{part[0]: part[1] for part in parts}}


def _size(name: str, text: str, example: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise InvalidInput(
            message(f"wrong {name}", got=repr(text), expected=f"a whole number above 0, as in {example}")
        )
    return int(text)


def _check(sizes: Mapping[str, int], in_blocks: tuple[str, ...], dtype: str) -> None:
    for name in in_blocks:
        if sizes[name] % GROUP:
            raise InvalidInput(message(f"wrong {name}", got=sizes[name], expected=f"a multiple of {GROUP}"))
    check_dtype(dtype)


def check_dtype(dtype: str) -> None:
    """Raise InvalidInput for a dtype that activations cannot have."""
    if dtype not in DTYPES:
        raise InvalidInput(message("unknown dtype of activations", got=repr(dtype), expected=f"one of {DTYPES}"))
