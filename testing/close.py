"""The rules that decide whether the result of a GEMM, or of a layer of experts, is close enough."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InvalidInput, message
from ..kernels.reference import round_once

__all__ = ["assert_gemm_close", "assert_moe_close", "moe_tolerance", "relative_error", "relative_tolerance"]

ULP = 2.0**-23  # of float32 at 1
MOE_GAIN = 4  # how much an activation enlarges relative errors, with room
FLIPS = 5  # of rounded values beyond their mean number, in its square roots: few values may weigh much
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
    _check_form(got, ref, dtype)
    if got.numel() == 0:
        return
    got, ref = got.reshape(-1, got.shape[-1]), ref.reshape(-1, ref.shape[-1])
    magnitude = _typical_magnitude(ref, k) if magnitude is None else magnitude.double().reshape(ref.shape)
    tolerance = relative_tolerance(ref, k=k, dtype=dtype, magnitude=magnitude)
    _compare(got, ref, tolerance, (k + 16) * ULP * magnitude, f"k={k}, {dtype}")


def moe_tolerance(ref: Tensor, *, hidden: int, inter: int, top_k: int, dtype: torch.dtype) -> float:
    """The largest relative error (Frobenius) that a right kernel shows; `assert_moe_close` derives it."""
    norm = float(torch.linalg.vector_norm(ref))
    if norm == 0:
        return 0.0
    rounding = relative_error(round_once(ref, dtype), ref)
    first = MOE_GAIN * 2 * ULP * (math.sqrt(hidden) + hidden / 32 + 4)
    values = int((ref != 0).any(dim=1).sum()) * inter  # tokens without an expert have none
    unit, terms = _unit(dtype), inter * top_k
    flips = values * first / unit
    flips += FLIPS * (math.sqrt(flips) + 1)
    return math.sqrt(rounding**2 + flips / values * unit**2) + 2 * ULP * (math.sqrt(terms) + inter / 32 + top_k + 4)


def assert_moe_close(got: Tensor, ref: Tensor, *, hidden: int, inter: int, top_k: int, dtype: torch.dtype) -> None:
    """Raise AssertionError unless `got` is `ref` up to float32 accumulation and the roundings that moe has.

    The bound on the relative error (Frobenius norm) is

        sqrt(e_round^2 + flips / values * unit^2) + 2 * 2^-23 * (sqrt(inter * top_k) + inter/32 + top_k + 4)

    - e_round and the last term are those of `assert_gemm_close`, for the second product.
    - The first product errs by e = 2 * 2^-23 * (sqrt(hidden) + hidden/32 + 4) in the same way; e_first is four times
      as much, for the activation enlarges relative errors, by up to 2 where it squares or multiplies.
    - The activation's result is rounded to `dtype`. An error e_first before it puts one value in unit / e_first of
      them on the other side of a rounding boundary, and then changes it by a whole unit 2^-7 (bfloat16) or 2^-10,
      which is independent of the last rounding. Of values = T * inter these are n = values * e_first / unit, give or
      take: flips = n + 5 * (sqrt(n) + 1), for some values weigh more than others. T are the tokens that have an expert;
      all experts of one may be equal.

    A further rounding to bfloat16 (of the pre-activation, of an expert's result) brings the error to 2.3e-3 or more
    and fails for `hidden` below about 4096 and more than about 1000 values.

    Each element must also satisfy |got - ref| <= half a unit of `dtype` at ref + (unit + (inter * top_k + 16) *
    2^-23) * magnitude: the worst case, in which every value between the products moved by a unit. The magnitude is
    estimated from the norms of ref's rows and columns.

    Parameters
    ----------
    got
        [T, hidden] in `dtype`.
    ref
        [T, hidden] float64, not rounded: `reference.moe(..., round_output=False)`.
    hidden, inter, top_k
        Of the problem.
    dtype
        Of x and of the result.
    """
    _check_form(got, ref, dtype)
    if got.numel() == 0:
        return
    tolerance = moe_tolerance(ref, hidden=hidden, inter=inter, top_k=top_k, dtype=dtype)
    terms = inter * top_k
    slack = (_unit(dtype) + (terms + 16) * ULP) * _typical_magnitude(ref, terms)
    _compare(got, ref, tolerance, slack, f"hidden={hidden}, inter={inter}, top_k={top_k}, {dtype}")


def _unit(dtype: torch.dtype) -> float:
    """The widest distance between two neighbours, relative to them."""
    return 2.0 ** (1 - DIGITS[dtype])


def _check_form(got: Tensor, ref: Tensor, dtype: torch.dtype) -> None:
    if ref.dtype != torch.float64:
        raise InvalidInput(
            message(
                "ref is rounded", got=ref.dtype, expected="float64", do="call the reference with round_output=False"
            )
        )
    assert got.shape == ref.shape, f"shape: got {tuple(got.shape)}, expected {tuple(ref.shape)}"
    assert got.dtype == dtype, f"dtype: got {got.dtype}, expected {dtype}"


def _compare(got: Tensor, ref: Tensor, tolerance: float, slack: Tensor, what: str) -> None:
    """Both bounds: `tolerance` on the whole, half a unit and `slack` on each element."""
    half_unit = (ref.abs() * 2.0 ** -DIGITS[got.dtype]).clamp_min(SMALLEST[got.dtype])
    allowed = half_unit + slack
    excess = (got.double() - ref).abs() / allowed
    excess = torch.where(torch.isnan(excess), math.inf, excess)
    worst = int(excess.argmax())
    row, column = divmod(worst, ref.shape[1])
    at = (
        f"worst at [{row}, {column}]: got {float(got[row, column])!r}, expected {float(ref[row, column])!r}, "
        f"{float(excess[row, column]):.3g} times its bound"
    )
    error = relative_error(got, ref)
    assert error <= tolerance, f"relative error {error:.4g} above {tolerance:.4g} ({what}); {at}"
    wrong = int((excess > 1).sum())
    assert wrong == 0, f"{wrong} of {got.numel()} elements out of bounds ({what}); {at}"


def _typical_magnitude(ref: Tensor, k: int) -> Tensor:
    """sqrt(k) times the size that ref's row and column norms predict for each element.

    A row of average elements counts among ref's: one row alone says nothing of its columns, and where its terms cancel
    the element is small and its error is not.
    """
    squares = ref.square()
    total = float(squares.sum()) or 1.0
    rows = len(ref)
    columns = (squares.sum(0, keepdim=True) + total / ref.numel()) * (rows / (rows + 1))
    return (k * squares.sum(1, keepdim=True) * columns / total).sqrt()
