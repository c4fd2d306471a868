"""Experts that `nvfp4.convert_` does not put into one `FusedMoE`, and the one warning that says so and why."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..errors import caller_level
from .checkpoint.names import split
from .moe_probe import OtherKind

__all__ = ["Left", "has_router", "warn_left"]

log = logging.getLogger("nvfp4.convert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Why experts are not fused, as `moe_probe` has it; and whether they are 3-D parameters, which then stay dense."""

    reason: str
    stacked: bool = False


def has_router(model: nn.Module, name: str, count: int) -> bool:
    """Whether a block with a list of `experts`, or the module around it, has a matrix with a row or column for each."""
    inside = f"{name}.experts." if name else "experts."
    around = split(name)[0]
    return any(
        tensor.ndim == 2 and count in tensor.shape
        for leaf, tensor in model.get_submodule(around).named_parameters(prefix=around)
        if not leaf.startswith(inside)
    )


def warn_left(left: Mapping[str, Left], how: str) -> None:
    """Warn about the first module of experts that was left, by name, and say how many more there are.

    Those that `nvfp4.moe` does not compute, however a model were written, are logged only: nothing is to be changed.

    Parameters
    ----------
    left
        By the name of the module.
    how
        What makes a FusedMoE of them: "from_checkpoint" or "from_dense".
    """
    others = {name: one for name, one in left.items() if isinstance(one.reason, OtherKind)}
    told = {name: one for name, one in left.items() if name not in others}
    if others:
        log.info("%s", _words(others))
    if told:
        warnings.warn(
            f"{_words(told)}. Change it, or call nvfp4.nn.FusedMoE, made by {how}, in its place: docs/checkpoints.md "
            "says what is recognised. fuse_experts=False leaves experts so without a warning",
            UserWarning,
            stacklevel=caller_level(),
        )


def _words(left: Mapping[str, Left]) -> str:
    name, first = next(iter(left.items()))
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    what = "dense, as they are" if first.stacked else "linear layers, run one by one, which is slow"
    return f"{name or 'the model'}{more}: experts stay {what}, and do not become nvfp4.nn.FusedMoE: {first.reason}"
