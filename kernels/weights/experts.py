"""Weights of several experts as one Weight: the tensors of a checkpoint, stacked, checked and converted."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InvalidInput, message
from .codec import GROUP, e4m3_bytes
from .layouts import layout, layout_ids
from .swizzle import unswizzle
from .weight import GLOBAL_SCALE_DTYPES, Weight, check_tensors, check_weight, validate

__all__ = ["pack_experts"]


def pack_experts(
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    *,
    layout_id: str = "checkpoint",
    scale_layout: str = "linear",
    repair_nan: bool = False,
) -> Weight:
    """Check the weights of experts and convert them; in "checkpoint" the result shares storage where it is aligned.

    Parameters
    ----------
    weight
        [E, N, K/2] uint8, contiguous.
    weight_scale
        [E, N, K/16] float8_e4m3fn or its uint8 view, contiguous; or, swizzled, each expert's scales in the 128x4 order.
    weight_scale_2
        float32, bfloat16 or float64 [E], [E, 1], or [E, 2]: one for each half of an expert's rows.
    layout_id
        The layout of the result; one that ends in -glu is for rows that are gate, then up.
    scale_layout, repair_nan
        As for `to_layout`.

    Raises
    ------
    InvalidInput
        The tensors or an option are wrong. Rows of different experts are counted on: row e * N + n.
    """
    check_tensors(weight=weight, weight_scale=weight_scale, weight_scale_2=weight_scale_2)
    target = layout(layout_id)
    if not target.experts:
        known = ", ".join(one for one in layout_ids() if layout(one).experts)
        raise InvalidInput(message("this layout takes no experts", got=repr(layout_id), expected=f"one of {known}"))
    if weight.ndim != 3 or 0 in weight.shape:
        raise InvalidInput(
            message("wrong shape of the experts' weight", got=tuple(weight.shape), expected="[E, N, K/2], no size 0")
        )
    if not weight.is_contiguous():
        raise InvalidInput(
            message("weight is not contiguous", got=f"strides {weight.stride()}", do="call .contiguous() once at load")
        )
    check_weight(weight.view(-1, weight.shape[2]))
    experts, n, k = weight.shape[0], weight.shape[1], 2 * weight.shape[2]
    if scale_layout == "swizzled":
        parts = weight_scale.reshape(experts, -1) if weight_scale.numel() % experts == 0 else [weight_scale]
        weight_scale = torch.stack([e4m3_bytes(unswizzle(part, n, k // GROUP)) for part in parts])
    elif scale_layout != "linear":
        raise InvalidInput(message("unknown scale_layout", got=repr(scale_layout), expected='"linear" or "swizzled"'))
    shapes = [(experts,), (experts, 1)] + ([(experts, 2)] if n % 2 == 0 else [])
    if tuple(weight_scale_2.shape) not in shapes or weight_scale_2.dtype not in GLOBAL_SCALE_DTYPES:
        raise InvalidInput(
            message(
                "wrong weight_scale_2 of experts",
                got=f"{weight_scale_2.dtype} {tuple(weight_scale_2.shape)}",
                expected=f"torch.float32 {' or '.join(map(str, shapes))}"
                + ("" if n % 2 == 0 else f": {n} rows have no halves"),
            )
        )
    if tuple(weight_scale.shape) != (experts, n, k // GROUP) or not weight_scale.is_contiguous():
        raise InvalidInput(
            message(
                "weight_scale does not fit the experts' weight",
                got=f"shape {tuple(weight_scale.shape)}, strides {weight_scale.stride()}",
                expected=f"contiguous {(experts, n, k // GROUP)}",
            )
        )
    scale = e4m3_bytes(weight_scale)
    if repair_nan:
        scale = torch.where((scale & 0x7F) == 0x7F, 0x7E, scale)
    factors = weight_scale_2.reshape(experts, -1).to(torch.float32).contiguous()
    validate(weight.view(-1, k // 2), scale.view(-1, k // GROUP), factors[0, 0], values=False)
    return target.convert(weight, scale, factors)
