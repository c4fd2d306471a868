"""What the ops compute, exactly: float64 accumulation, and one rounding at the very end."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .moe.activations import activate, activation, constants
from .moe.routing import local_experts
from .weights.codec import dequantize

__all__ = ["gemm", "grouped_gemm", "moe", "round_once", "row_scales", "scale_input"]

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


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    global_scale: Tensor,
    expert_offsets: Tensor,
    *,
    round_output: bool = True,
) -> Tensor:
    """Each expert's weight on its own rows of x: `gemm` by groups. Rows that belong to no expert give zeros.

    Parameters
    ----------
    x
        [M, K] bfloat16 or float16, any strides.
    weight, weight_scale
        uint8 [E, N, K/2]; float8_e4m3fn or uint8 [E, N, K/16].
    global_scale
        float32 [E], [E, 1], or [E, 2]: one for the first half of an expert's rows and one for the second.
    expert_offsets
        Integers [E + 1], ascending: rows [offsets[e], offsets[e + 1]) of x are expert e's.
    round_output
        As for `gemm`.

    Returns
    -------
    [M, N] in x's dtype or float64.
    """
    out = torch.zeros((x.shape[0], weight.shape[1]), dtype=torch.float64, device=x.device)
    for expert, (first, last) in enumerate(pairwise(expert_offsets.tolist())):
        if first >= last:
            continue
        scale_2 = row_scales(global_scale, expert, weight.shape[1])
        out[first:last] = gemm(x[first:last], weight[expert], weight_scale[expert], scale_2, round_output=False)
    return round_once(out, x.dtype) if round_output else out


def moe(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_scale_2: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_scale_2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str = "swiglu",
    pre_quant_scale: Tensor | None = None,
    w2_pre_quant_scale: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    round_output: bool = True,
) -> Tensor:
    """A layer of experts: the exact result.

    For every token and each of its experts: a = w13 (x * pre_quant_scale) + bias, times the router's weight if that
    goes to the input; act(a), rounded once to x's dtype, times w2_pre_quant_scale, rounded again; w2 times that, plus
    bias, times the router's weight otherwise. The sum over a token's experts is rounded once. Products, sums and the
    activation are float64. `nvfp4.moe` describes the arguments.

    Returns
    -------
    [T, hidden] in x's dtype, or float64 if not `round_output`.
    """
    experts, rows, hidden = w13.shape[0], w13.shape[1], w2.shape[1]
    gated = _gated(activation)
    values = constants(activation, limit=limit, alpha=alpha, beta=beta)
    h = scale_input(x, pre_quant_scale)
    out = torch.zeros((x.shape[0], hidden), dtype=torch.float64, device=x.device)
    local = local_experts(topk_ids, experts, expert_map)
    for expert in range(experts):
        token, slot = (local == expert).nonzero(as_tuple=True)
        if not token.numel():
            continue
        router = topk_weights[token, slot].double().unsqueeze(1)
        bias = None if w13_bias is None else w13_bias[expert]
        scale_2 = row_scales(w13_scale_2, expert, rows)
        a = gemm(h[token], w13[expert], w13_scale[expert], scale_2, bias, round_output=False)
        if apply_router_weight_on_input:
            a *= router
        g, u = a.chunk(2, dim=1) if gated else (a, None)
        m = round_once(activate(activation, g, u, values), x.dtype)
        vector = None if w2_pre_quant_scale is None else w2_pre_quant_scale.expand(experts, -1)[expert]
        bias = None if w2_bias is None else w2_bias[expert]
        scale_2 = row_scales(w2_scale_2, expert, hidden)
        y = gemm(m, w2[expert], w2_scale[expert], scale_2, bias, vector, round_output=False)
        out.index_add_(0, token, y if apply_router_weight_on_input else y * router)
    return round_once(out, x.dtype) if round_output else out


def row_scales(global_scale: Tensor, expert: int, rows: int) -> Tensor:
    """float32 [rows]: one expert's global scales ([E], [E, 1] or [E, 2]), each for an equal part of its rows."""
    own = global_scale.reshape(global_scale.shape[0], -1)[expert].float()
    return own.repeat_interleave(rows // own.shape[0])


def _gated(name: str) -> bool:
    return activation(name).gated


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
