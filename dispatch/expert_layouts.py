"""What grouped_gemm and moe accept as weights: which layouts, and which shapes in each of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidInput, message
from ..kernels.weights.codec import GROUP
from ..kernels.weights.layouts import GLU, Layout, family, layout_ids
from ..kernels.weights.layouts import layout as get_layout
from .checks import DTYPE_NAMES

__all__ = ["check_blobs", "check_layout", "check_layouts", "check_size", "check_stack"]

SCALES = (torch.float8_e4m3fn, torch.uint8)


def check_layout(name: str, layout_id: str, x: Tensor, *, gated: bool = True) -> Layout:
    """A layout that experts can be in, and that is for x; one for gate and up rows only where that may be."""
    target = get_layout(layout_id)
    if not target.experts:
        known = ", ".join(one for one in layout_ids() if get_layout(one).experts)
        raise InvalidInput(
            message(f"{name} is in a layout without experts", got=repr(layout_id), expected=f"one of {known}")
        )
    if target.gated and not gated:
        raise InvalidInput(
            message(
                f"{name} is in a layout for gate and up rows", got=repr(layout_id), expected=repr(family(layout_id))
            )
        )
    if DTYPE_NAMES[x.dtype] not in target.dtypes:
        raise InvalidInput(
            message(
                f'layout "{layout_id}" of {name} is not for this x',
                got=f"x in {x.dtype}",
                expected=" or ".join(f"torch.{one}" for one in target.dtypes),
                do="cast x, or pack the checkpoint's weights with the dtype of x",
            )
        )
    return target


def check_layouts(w13_layout: str, w2_layout: str, activation: str, gated: bool, x: Tensor) -> tuple[Layout, Layout]:
    """The layouts of w13 and w2, which belong together: one kernel reads both."""
    first, second = check_layout("w13", w13_layout, x), check_layout("w2", w2_layout, x)
    glu = GLU if gated and family(w2_layout) != "checkpoint" else ""
    if second.gated or w13_layout != w2_layout + glu:
        raise InvalidInput(
            message(
                f"w13 and w2 are in layouts that do not belong together with activation {activation}",
                got=f"w13_layout={w13_layout!r}, w2_layout={w2_layout!r}",
                expected=f"{family(w2_layout) + glu!r} and {family(w2_layout)!r}",
                do="pack both for this activation",
            )
        )
    return first, second


def check_size(name: str, size: int | None, what: str, layout: str) -> int:
    """A size that padded blobs do not tell."""
    if size is None or size < 1:
        raise InvalidInput(message(f"wrong {name}", got=repr(size), expected=f'{what}, for layout "{layout}"'))
    return size


def check_blobs(name: str, weight: Tensor, scale: Tensor | None, target: Layout, n: int, k: int) -> int:
    """E of experts [N, K] in a layout whose data holds the block scales."""
    if k < 1 or k % GROUP or (target.gated and n % (2 * GROUP)):
        raise InvalidInput(
            message(f"wrong size of {name}", got=f"N = {n}, K = {k}", expected=f"inter and K multiples of {GROUP}")
        )
    shape = target.data_shape(n, k)
    if (
        weight.dtype != torch.uint8
        or weight.ndim != 1 + len(shape)
        or not weight.shape[0]
        or tuple(weight.shape[1:]) != shape
        or not weight.is_contiguous()
    ):
        raise InvalidInput(
            message(
                f'{name} is not one in layout "{target.id}" with N = {n}, K = {k}',
                got=f"{weight.dtype} {tuple(weight.shape)}, strides {weight.stride()}",
                expected=f"contiguous torch.uint8 (E, {', '.join(map(str, shape))})",
                do="pass data, layout and sizes of Weights from nvfp4.pack, and x with their K",
            )
        )
    if scale is not None:
        raise InvalidInput(
            message(
                f'block scales were given beside {name} in layout "{target.id}"',
                got=f"{scale.dtype} {tuple(scale.shape)}",
                expected="None: the weight contains them",
            )
        )
    return weight.shape[0]


def check_stack(name: str, weight: Tensor, scale: Tensor | None) -> tuple[int, int, int]:
    """E, N and K of a checkpoint's weight of several experts."""
    if weight.dtype != torch.uint8 or weight.ndim != 3 or 0 in weight.shape:
        raise InvalidInput(
            message(
                f"wrong {name}",
                got=f"{weight.dtype} {tuple(weight.shape)}",
                expected="torch.uint8 [E, N, K/2], two codes a byte, no size 0",
            )
        )
    experts, n, k = weight.shape[0], weight.shape[1], 2 * weight.shape[2]
    if k % GROUP:
        raise InvalidInput(
            message(
                f"K of {name} must be a multiple of 16",
                got=f"shape {tuple(weight.shape)}, so K = {k}",
                do="when sharding along K, cut at multiples of 16",
            )
        )
    if scale is None:
        raise InvalidInput(message(f"{name}'s block scales are missing", expected=f"e4m3 {(experts, n, k // GROUP)}"))
    if scale.dtype not in SCALES or tuple(scale.shape) != (experts, n, k // GROUP):
        raise InvalidInput(
            message(
                f"wrong block scales of {name}",
                got=f"{scale.dtype} {tuple(scale.shape)}",
                expected=f"torch.float8_e4m3fn or its uint8 view, {(experts, n, k // GROUP)}",
                do="shard and pad weight and weight_scale together",
            )
        )
    for tensor in (weight, scale):
        if not tensor.is_contiguous():
            raise InvalidInput(
                message(
                    f"{name} is not contiguous"
                    if tensor is weight
                    else f"the block scales of {name} are not contiguous",
                    got=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
                    do="call .contiguous() once at load",
                )
            )
    return experts, n, k
