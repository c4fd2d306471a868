"""The reference against sums written out by hand, and its single rounding against exact fractions."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvfp4.kernels import reference
from nvfp4.kernels.weights import codec

DTYPES = (torch.bfloat16, torch.float16)


def by_hand(x, weight, scale, gs, bias=None, pqs=None):
    """Exact sums as fractions."""
    codes = codec.unpack_codes(weight).tolist()
    scales = scale.float().tolist()
    gs = gs.reshape(-1).expand(len(codes)).tolist()
    x = x if pqs is None else (x * pqs)
    rows = []
    for row in x.float().tolist():
        rows.append([])
        for n, code in enumerate(codes):
            total = Fraction(0)
            for k, value in enumerate(row):
                total += Fraction(value) * Fraction(codec.E2M1_VALUES[code[k]]) * Fraction(scales[n][k // 16])
            total = total * Fraction(gs[n]) + (Fraction(bias[n].item()) if bias is not None else 0)
            rows[-1].append(total)
    return rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extras", [False, True])
def test_equals_exact_sums(dtype, extras):
    generator = torch.Generator().manual_seed(2)
    n, k, m = 5, 48, 3
    weight, scale, gs = codec.quantize(torch.randn(n, k, generator=generator))
    x = torch.randn(m, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator) if extras else None
    pqs = (torch.rand(k, generator=generator) + 0.5).to(dtype) if extras else None
    gs = gs * torch.tensor([1, 10, 0.1, 1e-3, 3]) if extras else gs
    got = reference.gemm(x, weight, scale, gs, bias, pqs, round_output=False)
    for got_row, right_row in zip(got.tolist(), by_hand(x, weight, scale, gs, bias, pqs), strict=True):
        for value, right in zip(got_row, right_row, strict=True):
            assert abs(Fraction(value) - right) <= abs(right) * Fraction(2) ** -48
    assert torch.equal(reference.gemm(x, weight, scale, gs, bias, pqs), reference.round_once(got, dtype))


def test_blocks_give_the_same_result(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    weight, scale, gs = codec.quantize(torch.randn(37, 64, generator=generator))
    x = torch.randn(2, 3, 64, generator=generator).bfloat16()
    gs = gs * torch.rand(37, generator=generator)
    whole = reference.gemm(x, weight, scale, gs)
    monkeypatch.setattr(reference, "BLOCK_BYTES", 64 * 8 * 5)
    assert whole.shape == (2, 3, 37)
    assert torch.equal(reference.gemm(x, weight, scale, gs), whole)


def test_scales_linearly_with_the_global_scale():
    weight, scale, _ = codec.quantize(torch.randn(8, 32, generator=torch.Generator().manual_seed(4)))
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    one = reference.gemm(x, weight, scale, torch.tensor(1.0), round_output=False)
    for gs in (2.0**-7, 3.85e-5):
        gs = torch.tensor(gs)
        got = reference.gemm(x, weight, scale, gs, round_output=False)
        assert torch.equal(got, one * gs.double())


def test_half_does_not_overflow_before_the_global_scale():
    k = 4096
    weight = torch.full((4, k // 2), 0x77, dtype=torch.uint8)  # every code 6
    scale = torch.full((4, k // 16), 448.0).to(torch.float8_e4m3fn)
    got = reference.gemm(torch.ones(2, k).half(), weight, scale, torch.tensor(1e-5))
    assert torch.equal(got, torch.full((2, 4), 110.1005, dtype=torch.float16))


def midpoints(dtype):
    """A value of a 16-bit dtype, the next one, and the exact middle."""
    return st.integers(0, 0x7BFE if dtype == torch.float16 else 0x7F7E).map(
        lambda bits: tuple(torch.tensor([bits, bits + 1], dtype=torch.int16).view(dtype).double().tolist())
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_one_rounding_to_nearest_even(dtype, data):
    low, high = data.draw(midpoints(dtype))
    sign = data.draw(st.sampled_from([1.0, -1.0]))
    middle = (low + high) / 2
    above, below = middle * (1 + 2.0**-50), middle * (1 - 2.0**-50)
    got = reference.round_once(torch.tensor([below, middle, above], dtype=torch.float64) * sign, dtype).double() * sign
    even = low if torch.tensor(low, dtype=dtype).view(torch.int16).item() % 2 == 0 else high
    assert got.tolist() == [low, even, high]


def test_rounding_keeps_nan_inf_and_zero_signs():
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e300, -1e-300], dtype=torch.float64)
    got = reference.round_once(values, torch.bfloat16)
    assert got[0].isnan()
    assert got[1:].tolist() == [float("inf"), -float("inf"), 0.0, float("inf"), 0.0]
    assert torch.signbit(got[3])
