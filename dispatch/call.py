"""The path of a gemm call, in two steps.

`gemm` serves a call that is like an earlier one: the weight's address names guards, and one of them compares all
properties of all tensors at once. What is left is alignment, a bisect on M, the output and the launcher.

Everything else goes through `_gemm`: one key of plain values over everything that was checked, and a dict look-up.
Guard and key hold every property that a check reads (and no identity), so a tensor that takes the place of a freed one
is checked again unless all of them are equal; and because M is not among them, their number stays small.

Alignment: launchers get x, weight, weight_scale, bias, pre_quant_scale, out and a global scale per row on 16-byte
boundaries, and rows of x that start on one. A lone global scale may lie anywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor

from ..kernels.kernel import Launcher
from ..kernels.problem import Problem
from ..kernels.weights.weight import check_tensors, is_aligned, normalize_global_scale
from . import table
from .checks import (
    DTYPE_NAMES,
    LOW,
    check_gemm,
    check_memory,
    check_out,
    check_overlap,
    check_x,
    have_memory,
    refuse_grad,
)
from .guard import make_empty, reinterpret
from .recent import NO_BIAS, NO_PRE_QUANT_SCALE, NO_SCALE, Call, Prepare, Recent, recent, remember, unfit

__all__ = ["as_rows", "gemm"]

# by every property that was checked: what runs, and what it is recognised by
_calls: dict[tuple[Any, ...], tuple[Call, list[Recent]]] = {}
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
    try:
        shape, address = x.shape, weight.data_ptr()
    except AttributeError:
        check_tensors(x=x, weight=weight)  # torch passes None on
        raise
    rows, m = (x, shape[0]) if len(shape) == 2 else _flatten(x)
    scale = NO_SCALE if weight_scale is None else weight_scale
    for is_like, its_layout, its_out_features, dtype, look, call in recent.get(address, ()):
        # The guard compares every tensor's type, dtype, device, shape and strides with those of a call that passed all
        # checks, and sees that x needs no gradient. What it does not read: the number of rows, the addresses (that of
        # the weight is aligned, and no freed one's, for only such are found), layout, out_features and out.
        if (
            is_like(
                rows,
                weight,
                scale,
                weight_scale_2,
                NO_BIAS if bias is None else bias,
                NO_PRE_QUANT_SCALE if pre_quant_scale is None else pre_quant_scale,
            )
            and m
            and not ((at := rows.data_ptr()) | (scale_at := scale.data_ptr())) & 15
            and (
                (at > LOW and scale_at > LOW and weight_scale_2.data_ptr() > LOW)
                or have_memory(rows, scale, weight_scale_2)
            )
            and not (look and unfit(weight_scale_2, bias, pre_quant_scale))
            and layout == its_layout
            and out_features == its_out_features
            and out is None
        ):
            n, uppers, launchers, prepare, empty = call
            if prepare is not None:
                weight_scale, weight_scale_2, bias, pre_quant_scale = prepare(
                    weight_scale, weight_scale_2, bias, pre_quant_scale
                )
            result = empty((m, n), (n, 1), dtype)
            launchers[bisect_left(uppers, m)](rows, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, result)
            return result if rows is x else _unflatten(result, shape)
    return _gemm(x, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, layout, out_features, out)


def _flatten(x: Tensor) -> tuple[Tensor, int]:
    """x as contiguous rows, and their number; x and 0 where that takes more than a view."""
    elements = x.numel()
    if not elements or not x.ndim or not x.is_contiguous() or x.requires_grad:  # an alias would hide the latter
        return x, 0
    k = x.shape[-1]
    m = elements // k
    return reinterpret(x, (m, k), (k, 1)), m


def _unflatten(result: Tensor, shape: torch.Size) -> Tensor:
    """result [M, N] with the leading dimensions of `shape`."""
    n = result.shape[1]
    if len(shape) == 3:
        sequences, tokens, _ = shape
        return reinterpret(result, (sequences, tokens, n), (tokens * n, n, 1))
    return result.view(*shape[:-1], n)


def _gemm(
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
    """A call that is like none before it at this weight's address."""
    check_tensors(weight=weight, weight_scale_2=weight_scale_2)
    if x.requires_grad and _is_grad_enabled():
        refuse_grad()
    if not have_memory(x, weight, weight_scale, weight_scale_2, bias, pre_quant_scale):
        check_memory(x=x, weight=weight, weight_scale=weight_scale, weight_scale_2=weight_scale_2)
        check_memory(bias=bias, pre_quant_scale=pre_quant_scale)
    shape = x.shape
    if len(shape) == 2 and shape[0] and shape[1]:
        m, k = shape
        row, last = x.stride()
        # Kernels take every row stride that keeps rows apart and aligned. With one row the stride means nothing, and
        # may be absurd.
        rows = x
        if last != 1 or (row != k and (m == 1 or row < k or row & 7)) or x.data_ptr() & 15:
            rows = as_rows(x)
    else:
        k = check_x(x)
        if not x.numel():
            return _without_tokens(
                x, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, layout, out_features, out
            )
        rows = as_rows(x)
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
    found = _calls.get(key)
    if found is None:
        call = _bind(x, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, layout, out_features)
        found = _calls[key] = (call, [])
    call, guards = found
    n, uppers, launchers, prepare, empty = call
    if rows.stride(0) == k:
        remember(call, guards, rows, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, layout, out_features)
    if out is None:
        result = empty((m, n), (n, 1), rows.dtype)
    else:
        check_out(out, x, n)
        check_overlap(out, x=x, weight=weight, weight_scale=weight_scale, weight_scale_2=weight_scale_2)
        check_overlap(out, bias=bias, pre_quant_scale=pre_quant_scale)
        result = out.view(m, n)
    if prepare is not None:
        weight_scale, weight_scale_2, bias, pre_quant_scale = prepare(
            weight_scale, weight_scale_2, bias, pre_quant_scale
        )
    launchers[bisect_left(uppers, m)](rows, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, result)
    return result if len(shape) == 2 else _unflatten(result, shape)


def _key(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.is_contiguous(),
        tensor.get_device(),
        tensor.data_ptr() & 15,
    )


def as_rows(x: Tensor) -> Tensor:
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
) -> Call:
    """Check the arguments and bind their problem."""
    n, k = check_gemm(x, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, layout, out_features)
    prepare = _prepare(weight_scale, weight_scale_2, bias, pre_quant_scale)

    def load(launcher: Launcher, m: int) -> None:
        as_they_came = (weight_scale, weight_scale_2, bias, pre_quant_scale)
        launchable = as_they_came if prepare is None else prepare(*as_they_came)
        launcher(x.new_zeros((m, k)), weight, *launchable, x.new_empty((m, n)))

    problem = Problem(n=n, k=k, dtype=DTYPE_NAMES[x.dtype])
    uppers, launchers = table.bind(x.device, problem, layout, load if x.is_cuda else None)
    return n, uppers, launchers, prepare, make_empty(x.device)


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
            global_scale = reinterpret(global_scale, (1,), (1,))
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
