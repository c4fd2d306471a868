"""assert_gemm_close passes right results and fails each of the mistakes that have been seen."""

import math

import pytest
import torch
from nvfp4.errors import InvalidInput
from nvfp4.kernels import reference
from nvfp4.kernels.weights import codec
from nvfp4.testing import assert_gemm_close, relative_error

N, K, M = 96, 512, 9
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=DTYPES, ids=str)
def case(request):
    generator = torch.Generator().manual_seed(5)
    w = torch.randn(N, K, generator=generator) / K**0.5
    x = torch.randn(M, K, generator=generator).to(request.param)
    pqs = (torch.rand(K, generator=generator) + 0.5).to(request.param)
    return x, *codec.quantize(w), pqs


def float32_gemm(x, weight, scale, gs, pqs):
    """An ordinary right implementation: float32 sums, one rounding."""
    w = codec.dequantize(weight, scale, torch.ones(()))
    return ((reference.scale_input(x, pqs).float() @ w.t()) * gs).to(x.dtype)


def exact(x, weight, scale, gs, pqs):
    return reference.gemm(x, weight, scale, gs, None, pqs, round_output=False)


def test_right_result_passes(case):
    x, *rest = case
    assert_gemm_close(float32_gemm(x, *rest), exact(x, *rest), k=K, dtype=x.dtype)


@pytest.mark.parametrize("m", [1, 2, M])
def test_few_elements_pass(case, m):
    x, weight, scale, gs, pqs = case
    for n in range(1, 8):
        args = (x[:m], weight[:n], scale[:n], gs, pqs)
        assert_gemm_close(float32_gemm(*args), exact(*args), k=K, dtype=x.dtype)


def fails(case, got):
    x, *rest = case
    with pytest.raises(AssertionError):
        assert_gemm_close(got, exact(x, *rest), k=K, dtype=x.dtype)


def test_wrong_global_scale_of_one_half_fails(case):
    x, weight, scale, gs, pqs = case
    rows = gs.expand(N).clone()
    rows[N // 2 :] *= 1.25
    fails(case, float32_gemm(x, weight, scale, rows, pqs))


def test_dropped_pre_quant_scale_fails(case):
    x, weight, scale, gs, _ = case
    fails(case, float32_gemm(x, weight, scale, gs, None))


def test_swapped_nibbles_fail(case):
    x, weight, scale, gs, pqs = case
    fails(case, float32_gemm(x, codec.swap_nibbles(weight), scale, gs, pqs))


@pytest.mark.parametrize("row", [0, M - 1])
def test_zero_row_fails(case, row):
    got = float32_gemm(*case)
    got[row] = 0
    fails(case, got)


def test_one_wrong_element_fails(case):
    got = float32_gemm(*case)
    got[3, 7] = got[3, 7] * 1.25 + 0.1
    with pytest.raises(AssertionError, match=r"\[3, 7\]"):
        assert_gemm_close(got, exact(*case), k=K, dtype=got.dtype)


def test_weights_rounded_after_scaling_fail(case):
    x, weight, scale, gs, pqs = case
    w = codec.dequantize(weight, scale, gs, x.dtype)
    fails(case, (reference.scale_input(x, pqs).float() @ w.float().t()).to(x.dtype))


def test_two_roundings_of_the_result_fail(case):
    x, weight, scale, gs, pqs = case
    rounded = float32_gemm(x, weight, scale, gs, pqs)
    again = torch.tensor(1.1)  # as if part of the scale were applied after rounding
    ref = exact(x, weight, scale, gs, pqs) * again.double()
    with pytest.raises(AssertionError):
        assert_gemm_close((rounded.float() * again).to(x.dtype), ref, k=K, dtype=x.dtype)


def test_nan_fails(case):
    got = float32_gemm(*case)
    got[1, 1] = math.nan
    fails(case, got)


def test_reference_must_not_be_rounded(case):
    got = float32_gemm(*case)
    with pytest.raises(InvalidInput, match="round_output=False"):
        assert_gemm_close(got, got, k=K, dtype=got.dtype)


def test_cancelling_terms_pass_with_their_magnitude():
    generator = torch.Generator().manual_seed(1)
    half = torch.randn(4, K, generator=generator).bfloat16()
    x = torch.cat([half, -half], 1)
    w = torch.randn(N, K, generator=generator)
    w = torch.cat([w, w * (1 + 1e-3 * torch.randn(N, K, generator=generator))], 1).double()
    ref = x.double() @ w.t()
    got = (ref + 1e-6 * ref.abs().amax()).float()
    magnitude = x.double().abs() @ w.abs().t()
    assert_gemm_close(got.bfloat16(), ref, k=2 * K, dtype=torch.bfloat16, magnitude=magnitude)


class TestRelativeError:
    def test_known_value(self):
        assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_not_finite_is_infinite(self, bad):
        assert relative_error(torch.tensor([bad, 1.0]), torch.tensor([bad, 1.0])) == math.inf

    def test_other_shape_is_infinite(self):
        assert relative_error(torch.zeros(2), torch.zeros(3)) == math.inf

    def test_zero_reference(self):
        assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
        assert relative_error(torch.tensor([0.0, 1e-30]), torch.zeros(2)) == math.inf
