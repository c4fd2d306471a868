"""The path of a gemm call: one key of plain values over everything that was checked, a dict look-up, a bisect on M,
the launcher.

Because the key holds every property that a check reads (and no identity), a tensor that takes the place of a freed one
is checked again unless all of them are equal; and because M is not in it, the number of keys stays small.

Alignment: launchers get x, weight, weight_scale, bias, pre_quant_scale, out and a global scale per row on 16-byte
boundaries, and rows of x that start on one. A lone global scale may lie anywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..kernels.kernel import Launcher
from ..kernels.problem import Problem
from ..kernels.weights.weight import is_aligned, normalize_global_scale
from . import table
from .checks import DTYPE_NAMES, check_gemm, check_out, check_x, refuse_grad

__all__ = ["gemm"]

# (weight_scale, global_scale, bias, pre_quant_scale) as they came -> as launchers take them
Prepare: TypeAlias = Callable[
    [Tensor | None, Tensor, Tensor | None, Tensor | None], tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]
]

# key -> (N, upper ends of M, launchers, Prepare or None when all tensors can pass as they are)
_calls: dict[tuple[Any, ...], tuple[int, tuple[int, ...], tuple[Launcher, ...], Prepare | None]] = {}
table.on_clear(_calls.clear)

_is_grad_enabled = torch.is_grad_enabled


def gemm(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor,
    bias: Tensor | None = None,
    pre_quant_scale: Tensor | None = None,
    layout: str = "checkpoint",
    out_features: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`nvfp4.gemm` on tensors; the implementation of the ops on every device."""
    if x.requires_grad and _is_grad_enabled():
        refuse_grad()
    shape = x.shape
    if len(shape) == 2 and shape[0]:
        m, k = shape
        row, last = x.stride()
        # Kernels take every row stride that keeps rows apart and aligned. With one row the stride means nothing, and
        # may be absurd.
        rows = x
        if last != 1 or (row != k and (m == 1 or row < k or row & 7)) or x.data_ptr() & 15:
            rows = _as_rows(x)
    else:
        k = check_x(x)
        if not x.numel():
            return _without_tokens(
                x, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, layout, out_features, out
            )
        rows = _as_rows(x)
        m = rows.shape[0]
    if weight_scale is None:
        scale_dtype = scale_shape = scale_contiguous = scale_device = None
        address = weight.data_ptr()
    else:
        scale_dtype = weight_scale.dtype
        scale_shape = weight_scale.shape
        scale_contiguous = weight_scale.is_contiguous()
        scale_device = weight_scale.get_device()
        # One alignment for both: only if both are aligned is anything cached.
        address = weight.data_ptr() | weight_scale.data_ptr()
    key = (
        x.dtype,
        x.get_device(),
        k,
        weight.dtype,
        weight.shape,
        weight.is_contiguous(),
        weight.get_device(),
        scale_dtype,
        scale_shape,
        scale_contiguous,
        scale_device,
        address & 15,
        weight_scale_2.dtype,
        weight_scale_2.shape,
        weight_scale_2.is_contiguous(),
        weight_scale_2.get_device(),
        weight_scale_2.data_ptr() & 15,
        None if bias is None else _key(bias),
        None if pre_quant_scale is None else _key(pre_quant_scale),
        layout,
        out_features,
    )
    call = _calls.get(key)
    if call is None:
        call = _calls[key] = _bind(x, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, layout, out_features)
    n, uppers, launchers, prepare = call
    if prepare is not None:
        weight_scale, weight_scale_2, bias, pre_quant_scale = prepare(
            weight_scale, weight_scale_2, bias, pre_quant_scale
        )
    if out is None:
        result = rows.new_empty((m, n))
    else:
        check_out(out, x, n)
        result = out.view(m, n)
    launchers[bisect_left(uppers, m)](rows, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, result)
    return result if len(shape) == 2 else result.view(*shape[:-1], n)


def _key(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.is_contiguous(),
        tensor.get_device(),
        tensor.data_ptr() & 15,
    )


def _as_rows(x: Tensor) -> Tensor:
    """x as [M, K] with sound row strides: a view where one exists, else a copy."""
    k = check_x(x)
    rows = x.reshape(-1, k)
    m, row = rows.shape[0], rows.stride(0)
    if not is_aligned(rows) or (m > 1 and (row < k or row & 7)):
        return rows.clone(memory_format=torch.contiguous_format)
    return rows.as_strided((1, k), (k, 1)) if m == 1 else rows


def _bind(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor,
    bias: Tensor | None,
    pre_quant_scale: Tensor | None,
    layout: str,
    out_features: int | None,
) -> tuple[int, tuple[int, ...], tuple[Launcher, ...], Prepare | None]:
    """Check the arguments and bind their problem."""
    n, k = check_gemm(x, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, layout, out_features)
    prepare = _prepare(weight_scale, weight_scale_2, bias, pre_quant_scale)

    def load(launcher: Launcher, m: int) -> None:
        as_they_came = (weight_scale, weight_scale_2, bias, pre_quant_scale)
        launchable = as_they_came if prepare is None else prepare(*as_they_came)
        launcher(x.new_zeros((m, k)), weight, *launchable, x.new_empty((m, n)))

    problem = Problem(n=n, k=k, dtype=DTYPE_NAMES[x.dtype])
    uppers, launchers = table.bind(x.device, problem, layout, load if x.is_cuda else None)
    return n, uppers, launchers, prepare


def _prepare(
    weight_scale: Tensor | None, weight_scale_2: Tensor, bias: Tensor | None, pre_quant_scale: Tensor | None
) -> Prepare | None:
    """What must be done to tensors with these properties at every call; None for the forms that `pack` makes."""
    n = weight_scale_2.numel()
    plain_scale = weight_scale is None or weight_scale.dtype == torch.uint8
    plain_global = weight_scale_2.dtype == torch.float32 and weight_scale_2.ndim == 1 and weight_scale_2.is_contiguous()
    float_scalar = weight_scale_2.dtype == torch.float32 and n == 1 and not plain_global
    aligned = [
        tensor is None or is_aligned(tensor) for tensor in (weight_scale_2 if n > 1 else None, bias, pre_quant_scale)
    ]
    if plain_scale and plain_global and all(aligned):
        return None

    def prepare(
        scale: Tensor | None, global_scale: Tensor, bias: Tensor | None, pre_quant_scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
        if not plain_scale and scale is not None:
            scale = scale.view(torch.uint8)
        if float_scalar:
            global_scale = global_scale.view(1)
        elif not plain_global:
            global_scale = normalize_global_scale(global_scale, n)
        if not all(aligned):
            global_scale = global_scale if aligned[0] else global_scale.clone()
            bias = bias if aligned[1] or bias is None else bias.clone()
            pre_quant_scale = pre_quant_scale if aligned[2] or pre_quant_scale is None else pre_quant_scale.clone()
        return scale, global_scale, bias, pre_quant_scale

    return prepare


def _without_tokens(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor,
    bias: Tensor | None,
    pre_quant_scale: Tensor | None,
    layout: str,
    out_features: int | None,
    out: Tensor | None,
) -> Tensor:
    """The empty result of a call without tokens: checked like any other, and nothing is launched."""
    n, _ = check_gemm(x, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, layout, out_features)
    if out is not None:
        check_out(out, x, n)
        return out
    return x.new_empty((*x.shape[:-1], n))
