"""The "checkpoint" layout: the bytes as they are on disk. Every op accepts it; some kernel always works from it."""

from __future__ import annotations

import torch
from torch import Tensor

from .codec import GROUP
from .layouts import Layout
from .weight import Weight, is_aligned

__all__ = ["LAYOUTS", "pack", "to_checkpoint"]


def pack(weight: Tensor, weight_scale: Tensor, global_scale: Tensor) -> Weight:
    """A Weight over validated tensors: the same storage, or a copy where a view begins at an unaligned address."""
    return Weight(
        data=weight if is_aligned(weight) else weight.clone(),
        scale=weight_scale if is_aligned(weight_scale) else weight_scale.clone(),
        global_scale=global_scale if is_aligned(global_scale) else global_scale.clone(),
        layout="checkpoint",
        out_features=weight.shape[-2],
        in_features=2 * weight.shape[-1],
    )


def to_checkpoint(weight: Weight) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors themselves, not copies."""
    assert weight.scale is not None
    return weight.data, weight.scale.view(torch.float8_e4m3fn), weight.global_scale


LAYOUTS = (
    Layout(
        id="checkpoint",
        pack=pack,
        to_checkpoint=to_checkpoint,
        data_shape=lambda n, k: (n, k // 2),
        scale_shape=lambda n, k: (n, k // GROUP),
        experts=True,
    ),
)
