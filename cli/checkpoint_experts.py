"""The expert layers of a checkpoint as problems of moe: sizes from its headers, the rest from config.json."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..dispatch.checkpoint import Checkpoint, Shard
from ..dispatch.checkpoint.expert_sources import Source, expert_source
from ..dispatch.checkpoint.files import listed
from ..dispatch.checkpoint.names import in_layer_order, is_of_mtp, layer_number
from ..errors import InvalidInput, Unsupported
from ..kernels.problem import DTYPES, Problem

__all__ = ["ExpertLayers", "experts_of", "has_experts", "left_out_words"]

T = TypeVar("T")

SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """The expert layers of a checkpoint on one rank, in the order of the layers.

    Attributes
    ----------
    problems
        By the name of the module around the experts: what `nvfp4.moe` asks for there.
    left_out
        By the same name, why there is none.
    """

    problems: Mapping[str, Problem]
    left_out: Mapping[str, str]


def has_experts(checkpoint: Checkpoint) -> bool:
    """Whether any experts are stored in NVFP4."""
    return bool(checkpoint.experts or checkpoint.fused_experts)


def experts_of(checkpoint: Checkpoint, *, tp: int, dtype: str) -> ExpertLayers:
    """What becomes of every expert layer: all experts are on every rank, each with its share of the inner size.

    Where config.json says other sizes than the tensors have, the tensors count and a warning names the layers.
    """
    problems: dict[str, Problem] = {}
    left_out: dict[str, str] = {}
    contradicted: dict[str, list[str]] = {}
    for name in in_layer_order({*checkpoint.experts, *checkpoint.fused_experts}):
        try:
            source = expert_source(checkpoint, name, None)
            source.check(range(source.count))
        except (InvalidInput, Unsupported) as error:
            left_out[name] = str(error)
            continue
        for words in _contradictions(checkpoint, source):
            contradicted.setdefault(words, []).append(name)
        found = _problem(checkpoint, source, tp, dtype)
        if isinstance(found, Problem):
            problems[name] = found
        else:
            left_out[name] = found
    for words, names in contradicted.items():
        warnings.warn(f"{checkpoint.path}: {words}, which count: {listed(names)}", UserWarning, stacklevel=3)
    return ExpertLayers(problems=problems, left_out=left_out)


def _problem(checkpoint: Checkpoint, source: Source, tp: int, dtype: str) -> Problem | str:
    """What the layer asks for; or why that is not known, and how the command line takes what is."""
    layer = None if is_of_mtp(source.name) else layer_number(source.name)
    said = checkpoint.config.model.moe
    reasons: list[str] = []

    def known(find: Callable[[], T]) -> T | None:
        try:
            return find()
        except InvalidInput as error:
            reasons.append(str(error))
            return None

    shard = Shard(rank=0, size=tp, how="row")  # as `load_experts` divides them
    inter = known(lambda: shard.range(1, source.inter, "the inner size")[1].stop)
    top_k = known(lambda: said.top_k_of(layer))
    activation = known(lambda: said.activation_of(layer, gated=source.gated))
    if inter is None or top_k is None or activation is None:
        sizes = f"experts={source.count},top_k={top_k or '...'},hidden={source.hidden},inter={inter or '...'}"
        option = "" if dtype == DTYPES[0] else f" --dtype {dtype}"
        return f"{'; '.join(reasons)}; or name it: --moe {sizes},activation={activation or '...'}{option}"
    return Problem(
        op="moe", n=inter, k=source.hidden, dtype=dtype, experts=source.count, top_k=top_k, activation=activation
    )


def _contradictions(checkpoint: Checkpoint, source: Source) -> list[str]:
    """Where config.json says another size, in words."""
    model = checkpoint.config.model
    sizes = (
        ("experts a layer", model.experts, source.count),
        ("hidden", model.moe.hidden, source.hidden),
        ("inter", model.moe.inter, source.inter),
    )
    return [
        f"config.json has {what} = {said}, but these experts' tensors have {there}"
        for what, said, there in sizes
        if said not in (0, there)
    ]


def left_out_words(left_out: Mapping[str, str]) -> str:
    """Which expert layers are left out and why, layers with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    shown = [f"{listed(names, SHOWN)}: {reason}" for reason, names in list(by_reason.items())[:SHOWN]]
    more = f" (and {len(by_reason) - SHOWN} more reasons)" if len(by_reason) > SHOWN else ""
    layers = "1 expert layer is" if len(left_out) == 1 else f"{len(left_out)} expert layers are"
    return f"{layers} left out: {' | '.join(shown)}{more}"
