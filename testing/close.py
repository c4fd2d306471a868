"""One rule that decides whether a GEMM's result is close enough."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InvalidInput, message
from ..kernels.reference import round_once

__all__ = ["assert_gemm_close", "relative_error", "relative_tolerance"]

ULP = 2.0**-23  # of float32 at 1
DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}  # significant bits
# Smallest steps that count. Subnormal results of bfloat16 and float32 may be flushed: hardware and libraries do.
SMALLEST = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25, torch.float32: 2.0**-126}


def relative_error(got: Tensor, ref: Tensor) -> float:
    """Frobenius norm of got - ref over that of ref, in float64.

    Infinite when `got` holds NaN or Inf or has another shape, and when only `ref` is zero.
    """
    if got.shape != ref.shape or not bool(torch.isfinite(got).all()):
        return math.inf
    exact = ref.double()
    error = float(torch.linalg.vector_norm(got.double() - exact))
    norm = float(torch.linalg.vector_norm(exact))
    return error / norm if norm > 0 else (math.inf if error > 0 else 0.0)


def relative_tolerance(ref: Tensor, *, k: int, dtype: torch.dtype, magnitude: Tensor | None = None) -> float:
    """The largest relative error (Frobenius) that a right kernel shows; `assert_gemm_close` derives it.

    Parameters are those of `assert_gemm_close`.
    """
    norm = float(torch.linalg.vector_norm(ref))
    if norm == 0:
        return 0.0
    rounding = relative_error(round_once(ref, dtype), ref)
    spread = 1.0 if magnitude is None else max(1.0, float(torch.linalg.vector_norm(magnitude)) / math.sqrt(k) / norm)
    return rounding + 2 * ULP * (math.sqrt(k) + k / 32 + 4) * spread


def assert_gemm_close(got: Tensor, ref: Tensor, *, k: int, dtype: torch.dtype, magnitude: Tensor | None = None) -> None:
    """Raise AssertionError unless `got` is `ref` up to float32 accumulation and one rounding to `dtype`.

    The bound on the relative error (Frobenius norm) is

        e_round + 2 * 2^-23 * (sqrt(k) + k/32 + 4)

    - e_round is the error of the correctly rounded reference itself: about 1.65e-3 for bfloat16 and 2.1e-4 for
      float16 on random data, and right also for few or special values.
    - k products summed in float32 with rounding to nearest err like a random walk, about 2^-24 * sqrt(k); tensor
      cores cut sums of 16 products off instead, which is biased: k/16 steps of half a unit 2^-23 on average. Global
      scale, bias and split sums add a few units.
    - An accumulation error e moves a rounded result by at most 2 e, for the distance to the nearest 16-bit value
      changes no faster than the value.

    A second rounding to bfloat16 anywhere (of scaled weights, of split sums, of the result before bias) brings
    2.3e-3, and fails.

    Each element must also satisfy |got - ref| <= half a unit of `dtype` at ref + 2 * (k + 16) * 2^-24 * magnitude,
    the worst case of float32 sums; this sees one wrong element in a million right ones.

    Parameters
    ----------
    got
        [M, N] in `dtype`.
    ref
        [M, N] float64, not rounded: `reference.gemm(..., round_output=False)`.
    k
        Terms per sum.
    dtype
        What the result was rounded to.
    magnitude
        [M, N] sum of |x| * |w| (plus |bias|). By default estimated from the norms of ref's rows and columns, as for
        random data; pass it where terms cancel or scales differ by much.
    """
    if ref.dtype != torch.float64:
        raise InvalidInput(
            message(
                "ref is rounded", got=ref.dtype, expected="float64", do="call reference.gemm(..., round_output=False)"
            )
        )
    assert got.shape == ref.shape, f"shape: got {tuple(got.shape)}, expected {tuple(ref.shape)}"
    assert got.dtype == dtype, f"dtype: got {got.dtype}, expected {dtype}"
    if got.numel() == 0:
        return
    got, ref = got.reshape(-1, got.shape[-1]), ref.reshape(-1, ref.shape[-1])
    magnitude = _typical_magnitude(ref, k) if magnitude is None else magnitude.double().reshape(ref.shape)
    half_unit = (ref.abs() * 2.0 ** -DIGITS[dtype]).clamp_min(SMALLEST[dtype])
    allowed = half_unit + (k + 16) * ULP * magnitude
    excess = (got.double() - ref).abs() / allowed
    excess = torch.where(torch.isnan(excess), math.inf, excess)
    worst = int(excess.argmax())
    row, column = divmod(worst, ref.shape[1])
    at = (
        f"worst at [{row}, {column}]: got {float(got[row, column])!r}, expected {float(ref[row, column])!r}, "
        f"{float(excess[row, column]):.3g} times its bound"
    )
    error = relative_error(got, ref)
    tolerance = relative_tolerance(ref, k=k, dtype=dtype, magnitude=magnitude)
    assert error <= tolerance, f"relative error {error:.4g} above {tolerance:.4g} (k={k}, {dtype}); {at}"
    wrong = int((excess > 1).sum())
    assert wrong == 0, f"{wrong} of {got.numel()} elements out of bounds (k={k}, {dtype}); {at}"


def _typical_magnitude(ref: Tensor, k: int) -> Tensor:
    """sqrt(k) times the size that ref's row and column norms predict for each element."""
    squares = ref.square()
    total = float(squares.sum()) or 1.0
    return (k * squares.sum(1, keepdim=True) * squares.sum(0, keepdim=True) / total).sqrt()
