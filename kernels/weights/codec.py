"""The number formats: e2m1 codes, e4m3 block scales, quantise and dequantise. Exact for every code.

A weight is code * block scale * global scale. The product of any e2m1 code and any finite e4m3 scale has at most six
significant bits, so it is exact in bfloat16, float16 and float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...errors import InvalidInput, message

__all__ = [
    "E2M1_VALUES",
    "GROUP",
    "dequantize",
    "e2m1_decode",
    "e2m1_encode",
    "e4m3_bytes",
    "pack_codes",
    "quantize",
    "scale_values",
    "swap_nibbles",
    "unpack_codes",
]

GROUP = 16  # weights per block scale, consecutive along k
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9  # the smallest positive e4m3
F32_TINY = 2.0**-149

# Value of each code; bit 3 is the sign, code 8 is minus zero.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# float32 [256, 2]: both values of a byte. Not float64: rows of 16 bytes get a CUDA block each, which is slow.
PAIRS = torch.tensor(
    [(E2M1_VALUES[b & 15], E2M1_VALUES[b >> 4]) for b in range(256)], dtype=torch.float32, device="cpu"
)

CHUNK_WEIGHTS = 1 << 22  # weights worked on at a time: bounds the temporaries to tens of MiB


def pack_codes(codes: Tensor) -> Tensor:
    """Two codes a byte, the even k in the low nibble.

    Parameters
    ----------
    codes
        [..., K] uint8, values 0 to 15; K even.

    Returns
    -------
    [..., K/2] uint8.
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise InvalidInput(
            message(
                "codes cannot be packed", got=f"{codes.dtype} {tuple(codes.shape)}", expected="uint8, even last size"
            )
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(weight: Tensor) -> Tensor:
    """Inverse of `pack_codes`: [..., K/2] uint8 to [..., K] uint8, values 0 to 15."""
    codes = weight.new_empty((*weight.shape[:-1], weight.shape[-1], 2))
    torch.bitwise_and(weight, 0x0F, out=codes[..., 0])
    codes[..., 1] = weight >> 4
    return codes.flatten(-2)


def swap_nibbles(weight: Tensor) -> Tensor:
    """Exchange the two codes of every byte.

    For checkpoints that keep the even k in the high nibble; nothing in a tensor tells the two orders apart.
    """
    return (weight << 4) | (weight >> 4)


def e2m1_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of codes 0 to 15, any shape; exact in every floating dtype."""
    table = torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def e2m1_encode(values: Tensor) -> Tensor:
    """Nearest code of each value, ties to even, saturating at 6; the sign bit is set where the value is below zero.

    Values must not be NaN (the result would be code 0).
    """
    magnitude = values.abs()
    codes = (magnitude > 0.25).to(torch.uint8)
    # Alternating > and >=: at a tie the even code wins.
    codes += magnitude >= 0.75
    codes += magnitude > 1.25
    codes += magnitude >= 1.75
    codes += magnitude > 2.5
    codes += magnitude >= 3.5
    codes += magnitude > 5.0
    return codes | ((values < 0).to(torch.uint8) << 3)


def e4m3_bytes(scale: Tensor) -> Tensor:
    """The uint8 view of an e4m3 tensor; uint8 passes through, anything else raises."""
    if scale.dtype == torch.uint8:
        return scale
    if scale.dtype == torch.float8_e4m3fn:
        return scale.view(torch.uint8)
    raise InvalidInput(
        message("wrong dtype of weight_scale", got=scale.dtype, expected="torch.float8_e4m3fn or its uint8 view")
    )


def scale_values(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of e4m3 scales (or of their uint8 view); exact; bytes 0x7F and 0xFF become NaN."""
    return e4m3_bytes(scale).view(torch.float8_e4m3fn).to(dtype)


def quantize(w: Tensor, *, global_scale: Tensor | float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Round a dense weight to NVFP4 by ModelOpt's rule.

    The global scale is amax/2688; a block's scale is its amax over 6 times the global scale, rounded to e4m3 (1 for a
    block of zeros; at least 2^-9, at most 448); the codes are w over the *rounded* block scale times the global scale,
    to nearest, ties to even.

    Parameters
    ----------
    w
        [N, K] floating point, finite; K a multiple of 16. Worked on in float32.
    global_scale
        Use this one: a number or float32 of one element; all-zero weights get 1 by default.

    Returns
    -------
    weight, weight_scale, weight_scale_2
        uint8 [N, K/2], float8_e4m3fn [N, K/16], float32 0-dim, on w's device.

    Raises
    ------
    InvalidInput
        w is not a finite floating [N, K] with K a multiple of 16, or the global scale is not positive and finite.
    """
    if not isinstance(w, Tensor):
        raise InvalidInput(message("w cannot be quantised", got=type(w).__name__, expected="a tensor"))
    if w.ndim != 2 or not w.is_floating_point() or w.shape[1] % GROUP or w.numel() == 0:
        raise InvalidInput(
            message(
                "w cannot be quantised",
                got=f"{w.dtype} {tuple(w.shape)}",
                expected="floating point [N, K], N at least 1, K a multiple of 16",
            )
        )
    if w.is_meta:
        raise InvalidInput(message("w cannot be quantised", got="a meta tensor", expected="values"))
    n, k = w.shape
    w = w.detach()
    amax = torch.stack([w[rows].float().abs().amax() for rows in _row_chunks(n, k)]).amax()
    if not torch.isfinite(amax):
        raise InvalidInput(
            message("w cannot be quantised", got="NaN or Inf in it (as float32)", expected="finite values")
        )
    if global_scale is None:
        gs = (amax / (E2M1_MAX * E4M3_MAX)).clamp_min(F32_TINY) if amax > 0 else torch.ones_like(amax)
    else:
        gs = torch.as_tensor(global_scale, dtype=torch.float32, device=w.device).detach()
        if gs.numel() != 1:
            raise InvalidInput(message("wrong global_scale", got=f"shape {tuple(gs.shape)}", expected="one element"))
        gs = gs.reshape(())
        if not (torch.isfinite(gs) and gs > 0):
            raise InvalidInput(message("wrong global_scale", got=gs.item(), expected="positive and finite"))
    weight = torch.empty((n, k // 2), dtype=torch.uint8, device=w.device)
    scale = torch.empty((n, k // GROUP), dtype=torch.float8_e4m3fn, device=w.device)
    for rows in _row_chunks(n, k):
        blocks = w[rows].float().view(-1, k // GROUP, GROUP)
        exact = blocks.abs().amax(-1) / (E2M1_MAX * gs)
        exact = torch.where(exact == 0, 1.0, exact).clamp(E4M3_TINY, E4M3_MAX)
        scale[rows] = exact.to(torch.float8_e4m3fn)
        step = scale[rows].float() * gs
        # The sign is taken from w itself: the quotient may have become minus zero.
        codes = e2m1_encode(blocks.abs() / step.unsqueeze(-1)) | ((blocks < 0).to(torch.uint8) << 3)
        weight[rows] = pack_codes(codes.flatten(1))
    return weight, scale, gs.clone()


def dequantize(
    weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Dense weight of a checkpoint's tensors.

    code * block scale is formed exactly. The global scale multiplies it in float32, and the product is rounded once to
    `dtype`; with float64 nothing is rounded at all. Negative, zero and subnormal scales are taken as they are.

    Parameters
    ----------
    weight
        [N, K/2] uint8.
    weight_scale
        [N, K/16] float8_e4m3fn or its uint8 view.
    weight_scale_2
        float32 of one element, or [N].
    dtype
        Of the result; a floating one.

    Returns
    -------
    [N, K] in `dtype`, on weight's device.

    Raises
    ------
    InvalidInput
        Shapes or dtypes that do not belong together.
    """
    if not dtype.is_floating_point:
        raise InvalidInput(message("wrong dtype", got=dtype, expected="a floating dtype such as torch.bfloat16"))
    n, k = weight.shape[0], 2 * weight.shape[-1]
    scale = e4m3_bytes(weight_scale)
    if weight.ndim != 2 or weight.dtype != torch.uint8 or tuple(scale.shape) != (n, k // GROUP) or k % GROUP:
        raise InvalidInput(
            message(
                "weight and weight_scale do not belong together",
                got=f"{weight.dtype} {tuple(weight.shape)} and {tuple(scale.shape)}",
                expected="uint8 [N, K/2] and [N, K/16]",
            )
        )
    if weight_scale_2.numel() not in (1, n):
        raise InvalidInput(
            message("wrong shape of weight_scale_2", got=tuple(weight_scale_2.shape), expected=f"one element or [{n}]")
        )
    work = torch.float64 if dtype == torch.float64 else torch.float32
    gs = weight_scale_2.to(torch.float32).to(work).reshape(-1, 1, 1)
    pairs = PAIRS.to(weight.device)
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    for rows in _row_chunks(n, k):
        values = pairs.index_select(0, weight[rows].flatten().int()).view(-1, k // GROUP, GROUP).to(work)
        values *= scale_values(scale[rows], work).unsqueeze(-1)
        values *= gs[rows] if gs.shape[0] > 1 else gs
        out[rows] = values.flatten(1)
    return out


def _row_chunks(n: int, k: int) -> Iterator[slice]:
    step = max(1, CHUNK_WEIGHTS // max(1, k))
    for start in range(0, n, step):
        yield slice(start, min(n, start + step))
