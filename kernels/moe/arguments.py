"""What the launchers of grouped_gemm and moe take. Who calls them has checked everything that is stated here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .activations import Constants

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GroupedLauncher", "MoeArguments", "MoeLauncher", "in_parts"]

# launcher(x, weight, weight_scale, global_scale, expert_offsets, out) -> None
#   x               [M, K] bfloat16 or float16; rows may be strided, the last dimension is contiguous; M >= 1
#   weight          uint8, contiguous, in the layout the kernel reads ("checkpoint": [E, N, K/2])
#   weight_scale    uint8 view of e4m3, contiguous ("checkpoint": [E, N, K/16]), or None for blobs that contain it
#   global_scale    float32 [E, 1] or [E, 2], contiguous: each for an equal part of an expert's rows
#   expert_offsets  int32 [E + 1], contiguous; its values were not checked: wrong ones give wrong results and no more
#   out             [M, N] in x's dtype, contiguous; every element is written, zeros where a row belongs to no expert
GroupedLauncher = Callable[["Tensor", "Tensor", "Tensor | None", "Tensor", "Tensor", "Tensor"], None]


@dataclass(slots=True, kw_only=True, eq=False)  # not frozen: that takes three times as long to make, in every call
class MoeArguments:
    """Everything a call of moe reads. E experts of which w13 has F rows each: 2 * inter with a gate, else inter.

    All tensors but x are contiguous, and all begin on 16-byte boundaries. Weights are in the layout that the kernel
    reads; w13 in its form for gate and up (`weights.layouts.first_layout`). Shapes of weights and their scales are
    those of "checkpoint"; blobs that contain the scales come without.
    """

    x: Tensor  # [T, hidden] bfloat16 or float16; rows may be strided, the last dimension is contiguous; T >= 1
    w13: Tensor  # uint8 [E, F, hidden/2]: gate, then up
    w13_scale: Tensor | None  # uint8 view of e4m3 [E, F, hidden/16]
    w13_scale_2: Tensor  # float32 [E, 1] or, with a gate, [E, 2]
    w2: Tensor  # uint8 [E, hidden, inter/2]
    w2_scale: Tensor | None  # uint8 view of e4m3 [E, hidden, inter/16]
    w2_scale_2: Tensor  # float32 [E, 1]
    topk_ids: Tensor  # int32 or int64 [T, top_k]; any values
    topk_weights: Tensor  # float32 [T, top_k]
    constants: Constants  # of the problem's activation
    w13_bias: Tensor | None = None  # [E, F] in x's dtype or float32
    w2_bias: Tensor | None = None  # [E, hidden] in x's dtype or float32
    pre_quant_scale: Tensor | None = None  # [hidden] in x's dtype
    w2_pre_quant_scale: Tensor | None = None  # [inter] or [E, inter] in x's dtype
    expert_map: Tensor | None = None  # int32 or int64, at least one element
    weights_on_input: bool = False  # router weights multiply the first product, not the second; top_k is 1


# launcher(arguments, out) -> None: out [T, hidden] in x's dtype, contiguous; every element is written
MoeLauncher = Callable[[MoeArguments, "Tensor"], None]


def in_parts(a: MoeArguments, out: Tensor, step: int, run: MoeLauncher) -> None:
    """Run a call; one of more than `step` tokens in parts of so many, one after the other."""
    tokens = out.shape[0]
    if tokens <= step:
        run(a, out)
        return
    for first in range(0, tokens, step):
        some = slice(first, first + step)
        part = replace(a, x=a.x[some], topk_ids=a.topk_ids[some], topk_weights=a.topk_weights[some])
        run(part, out[some])
