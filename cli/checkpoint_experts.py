"""The expert layers of a checkpoint as problems of moe: sizes from its headers, the rest from config.json."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ..dispatch.checkpoint import Checkpoint
from ..dispatch.checkpoint.expert_sources import Source, expert_source
from ..dispatch.checkpoint.files import listed
from ..dispatch.checkpoint.names import in_layer_order, is_of_mtp, layer_number
from ..errors import InvalidInput, Unsupported
from ..kernels.moe.model_config import MoeConfig
from ..kernels.problem import Problem
from ..tuner.experts_workload import problems_of_experts

__all__ = ["ExpertLayers", "experts_of", "has_experts", "left_out_words"]

SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """The expert layers of a checkpoint on one rank, in the order of the layers.

    Attributes
    ----------
    problems
        By the name of the module around the experts: what `nvfp4.moe` asks for there; two where ranks of expert
        parallelism have different numbers of experts.
    left_out
        By the same name, why there is none.
    """

    problems: Mapping[str, tuple[Problem, ...]]
    left_out: Mapping[str, str]


def has_experts(checkpoint: Checkpoint) -> bool:
    """Whether any experts are stored in NVFP4."""
    return bool(checkpoint.experts or checkpoint.fused_experts)


def experts_of(checkpoint: Checkpoint, *, tp: int, ep: int, dtype: str) -> ExpertLayers:
    """What becomes of every expert layer on a rank, as `tuner.experts_workload.problems_of_experts` divides it.

    Where config.json says other sizes than the tensors have, the tensors count and a warning names the layers.
    """
    problems: dict[str, tuple[Problem, ...]] = {}
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
        found = problems_of_experts(
            _said(checkpoint, source), _layer(name), gated=source.gated, tp=tp, ep=ep, dtype=dtype
        )
        if isinstance(found, tuple):
            problems[name] = found
        else:
            left_out[name] = found
    for words, names in contradicted.items():
        warnings.warn(f"{checkpoint.path}: {words}, which count: {listed(names)}", UserWarning, stacklevel=3)
    return ExpertLayers(problems=problems, left_out=left_out)


def _said(checkpoint: Checkpoint, source: Source) -> MoeConfig:
    """What config.json says, with the sizes of the tensors."""
    moe = checkpoint.config.model.moe
    return msgspec.structs.replace(moe, experts=source.count, hidden=source.hidden, inter=source.inter)


def _layer(name: str) -> int | None:
    return None if is_of_mtp(name) else layer_number(name)


def _contradictions(checkpoint: Checkpoint, source: Source) -> list[str]:
    """Where config.json says another size, in words."""
    moe = checkpoint.config.model.moe
    sizes = (
        ("experts a layer", moe.experts, source.count),
        ("hidden", moe.hidden, source.hidden),
        ("inter", moe.inter, source.inter),
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
