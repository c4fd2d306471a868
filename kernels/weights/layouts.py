"""The registry of weight layouts, and `to_layout`, which converts a checkpoint's tensors into one of them.

Every module of this folder with a `LAYOUTS` tuple offers layouts: adding one means adding one file.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...errors import InvalidInput, message
from ..problem import DTYPES, Problem
from .codec import GROUP, e4m3_bytes
from .swizzle import unswizzle
from .weight import Weight, check_values, check_weight, validate

__all__ = ["GLU", "Layout", "family", "first_layout", "layout", "layout_ids", "to_layout"]

GLU = "-glu"  # ends the ids of layouts for the first weight of gated experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One layout: how to make it from validated tensors, how to undo it, and what its tensors must look like.

    `pack` takes what `validate` returns (uint8 [N, K/2], uint8 [N, K/16], float32 [1] or [N]) and works where those
    tensors are. `to_checkpoint` returns weight, weight_scale (float8_e4m3fn) and weight_scale_2.

    Attributes
    ----------
    data_shape
        (N, K) -> shape of `Weight.data`, uint8.
    scale_shape
        (N, K) -> shape of `Weight.scale`; None for layouts whose data contains the scales.
    dtypes
        The dtypes of x that it is for.
    experts
        Whether `pack` and `to_checkpoint` take experts too: [E, N, K/2], [E, N, K/16] and float32 [E, 1] or [E, 2].
        Each expert is packed by itself: E goes in front of the shapes.
    gated
        Whether it is for the first weight of gated experts only: rows are gate, then up.
    checks_values
        Whether `pack` looks for what `check_values` does, and raises the same: GPUs can do so on their way.
    """

    id: str
    pack: Callable[[Tensor, Tensor, Tensor], Weight]
    to_checkpoint: Callable[[Weight], tuple[Tensor, Tensor, Tensor]]
    data_shape: Callable[[int, int], tuple[int, ...]]
    scale_shape: Callable[[int, int], tuple[int, ...]] | None = None
    dtypes: tuple[str, ...] = DTYPES
    experts: bool = False
    gated: bool = False
    checks_values: bool = False

    def convert(self, weight: Tensor, weight_scale: Tensor, global_scale: Tensor) -> Weight:
        """`pack`, with the checks of `check_values`."""
        if not self.checks_values:
            check_values(weight_scale, global_scale)
        return self.pack(weight, weight_scale, global_scale)

    def bytes(self, n: int, k: int) -> int:
        """Of a weight [n, k], scales included, its global scale not."""
        scale = math.prod(self.scale_shape(n, k)) if self.scale_shape is not None else 0
        return math.prod(self.data_shape(n, k)) + scale


@cache
def _all() -> dict[str, Layout]:
    package = importlib.import_module(".", __package__)
    found: dict[str, Layout] = {}
    for info in pkgutil.iter_modules(package.__path__):
        for entry in getattr(importlib.import_module(f".{info.name}", __package__), "LAYOUTS", ()):
            assert entry.id not in found, entry.id
            found[entry.id] = entry
    return found


def layout_ids() -> tuple[str, ...]:
    """Ids of all layouts, sorted."""
    return tuple(sorted(_all()))


def layout(layout_id: str) -> Layout:
    """The layout of that id; InvalidInput names the known ones."""
    found = _all().get(layout_id)
    if found is None:
        raise InvalidInput(
            message("unknown weight layout", got=repr(layout_id), expected=f"one of {', '.join(layout_ids())}")
        )
    return found


def first_layout(layout_id: str, problem: Problem) -> str:
    """The layout of w13 for a moe kernel that reads `layout_id`: its -glu form, if there is a gate and such a form."""
    gated = layout_id + GLU
    return gated if problem.gated and gated in _all() else layout_id


def family(layout_id: str) -> str:
    """What kernels call a layout of experts: the id without -glu."""
    return layout_id.removesuffix(GLU)


def to_layout(
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    *,
    layout_id: str = "checkpoint",
    scale_layout: str = "linear",
    repair_nan: bool = False,
) -> Weight:
    """Check a checkpoint's tensors and convert them.

    Parameters
    ----------
    weight, weight_scale, weight_scale_2
        As `validate` takes them.
    layout_id
        The layout of the result.
    scale_layout
        "linear", or "swizzled" when weight_scale is in the 128x4 order (any shape).
    repair_nan
        Take 448 for NaN block scales instead of raising.

    Raises
    ------
    InvalidInput
        The tensors, the layout or the option is wrong.
    """
    target = layout(layout_id)
    if target.gated:
        raise InvalidInput(
            message(
                f'layout "{layout_id}" is for experts',
                got=f"a weight of shape {tuple(weight.shape)}",
                expected=f'[E, N, K/2], or layout "{family(layout_id)}"',
            )
        )
    if scale_layout == "swizzled":
        check_weight(weight)
        weight_scale = unswizzle(weight_scale, weight.shape[0], 2 * weight.shape[-1] // GROUP)
    elif scale_layout != "linear":
        raise InvalidInput(message("unknown scale_layout", got=repr(scale_layout), expected='"linear" or "swizzled"'))
    if repair_nan:
        scale = e4m3_bytes(weight_scale)
        weight_scale = torch.where((scale & 0x7F) == 0x7F, 0x7E, scale)
    return target.convert(*validate(weight, weight_scale, weight_scale_2, values=False))
