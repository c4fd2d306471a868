"""What the ops compute, exactly: float64 accumulation, and one rounding at the very end."""

from __future__ import annotations

import torch
from torch import Tensor

from .weights.codec import dequantize

__all__ = ["gemm", "round_once", "scale_input"]

BLOCK_BYTES = 64 << 20  # of float64 weights held at a time


def gemm(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None = None,
    pre_quant_scale: Tensor | None = None,
    *,
    round_output: bool = True,
) -> Tensor:
    """x times the transposed weight: the exact result.

    x * pre_quant_scale is rounded to x's dtype; its products with code * block scale are summed in float64; the sum is
    multiplied by the global scale, bias is added, and the result is rounded once to x's dtype.

    Parameters
    ----------
    x
        [..., K] bfloat16 or float16, any strides.
    weight, weight_scale
        uint8 [N, K/2]; float8_e4m3fn or uint8 [N, K/16].
    global_scale
        float32, one element or [N].
    bias
        [N], any floating dtype.
    pre_quant_scale
        [K] in x's dtype.
    round_output
        False: return float64 before the last rounding, to measure errors against.

    Returns
    -------
    [..., N] in x's dtype or float64.
    """
    n = weight.shape[0]
    rows = scale_input(x, pre_quant_scale).reshape(-1, x.shape[-1]).double()
    scale_2 = global_scale.float().double().reshape(-1).expand(n)
    one = torch.ones((), dtype=torch.float32, device=weight.device)
    out = torch.empty((rows.shape[0], n), dtype=torch.float64, device=x.device)
    step = max(1, BLOCK_BYTES // (8 * x.shape[-1]))
    for start in range(0, n, step):
        block = slice(start, min(n, start + step))
        dense = dequantize(weight[block], weight_scale[block], one, torch.float64)  # code * block scale, exact
        # An fp32 scale times such a sum fits float64 but for its own last bits, far below any rounding that is checked.
        out[:, block] = (rows @ dense.t()) * scale_2[block]
    if bias is not None:
        out += bias.double()
    out = out.view(*x.shape[:-1], n)
    return round_once(out, x.dtype) if round_output else out


def scale_input(x: Tensor, pre_quant_scale: Tensor | None) -> Tensor:
    """x * pre_quant_scale, rounded to x's dtype; x itself when there is none."""
    return x if pre_quant_scale is None else (x.float() * pre_quant_scale.float()).to(x.dtype)


def round_once(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 to a 16-bit dtype in one rounding to nearest even.

    torch converts through float32, which rounds twice. Here the step to float32 rounds to odd instead: it keeps, in
    the last bit, that something was cut off, so the second step decides ties rightly.
    """
    if dtype in (torch.float64, torch.float32):
        return exact.to(dtype)
    nearest = exact.float()
    back = nearest.double()
    bits = nearest.view(torch.int32)
    towards_zero = torch.where(back.abs() > exact.abs(), bits - 1, bits)
    odd = torch.where((back != exact) & torch.isfinite(exact), towards_zero | 1, bits)
    return odd.view(torch.float32).to(dtype)
