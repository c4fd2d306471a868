"""Codes, scales, quantise and dequantise, against tables and a NumPy quantiser written from the format's definition."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4.errors import InvalidInput
from nvfp4.kernels.weights import codec

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e4m3(byte):
    """Value of a byte from its fields: s eeee mmm, bias 7; 0x7F and 0xFF are NaN."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


POSITIVE_E4M3 = np.array([e4m3(byte) for byte in range(0x7F)])


def nearest(values, table):
    """Index of the nearest entry of an ascending table, ties to the even index."""
    distance = np.abs(values[..., None].astype(np.float64) - np.asarray(table, np.float64))
    low = distance.argmin(-1)
    high = len(table) - 1 - distance[..., ::-1].argmin(-1)
    return np.where(low % 2 == 0, low, high).astype(np.uint8)


def numpy_quantize(w, gs=None):
    """ModelOpt's rule in NumPy float32."""
    f32 = np.float32
    if gs is None:
        gs = np.abs(w).max() / f32(2688)
    blocks = w.reshape(w.shape[0], -1, 16)
    exact = np.abs(blocks).max(-1) / (f32(6) * f32(gs))
    exact[exact == 0] = 1
    scale = nearest(np.clip(exact, f32(2**-9), f32(448)), POSITIVE_E4M3)
    step = POSITIVE_E4M3[scale].astype(f32) * f32(gs)
    codes = nearest(np.minimum(np.abs(blocks) / step[..., None], f32(100)), E2M1) + 8 * (blocks < 0).astype(np.uint8)
    codes = codes.reshape(w.shape)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale, f32(gs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_code(dtype):
    got = codec.e2m1_decode(torch.arange(16, dtype=torch.uint8), dtype)
    assert got.tolist() == E2M1 + [-v for v in E2M1]
    assert torch.signbit(got).tolist() == [False] * 8 + [True] * 8  # code 8 is minus zero


def test_every_scale_byte():
    got = codec.scale_values(torch.arange(256, dtype=torch.uint8))
    right = torch.tensor([e4m3(byte) for byte in range(256)])
    assert torch.equal(got.nan_to_num(-1e9), right.nan_to_num(-1e9))
    assert torch.signbit(got[0x80])


def test_encode_inverts_decode():
    codes = torch.tensor([c for c in range(16) if c != 8], dtype=torch.uint8)  # minus zero is not below zero
    assert torch.equal(codec.e2m1_encode(codec.e2m1_decode(codes)), codes)


def test_encode_around_every_midpoint():
    for code, (low, high) in enumerate(itertools.pairwise(E2M1)):
        middle = torch.tensor((low + high) / 2)
        for sign, bit in ((1, 0), (-1, 8)):
            below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(9.0))
            got = codec.e2m1_encode(sign * torch.stack([below, middle, above])).tolist()
            assert got == [bit + code, bit + code + code % 2, bit + code + 1]
    assert codec.e2m1_encode(torch.tensor([7.0, 1e30, float("inf"), -float("inf")])).tolist() == [7, 7, 7, 15]


codes_of = st.tuples(st.integers(0, 4), st.integers(0, 40)).flatmap(
    lambda shape: st.lists(st.integers(0, 15), min_size=shape[0] * 2 * shape[1], max_size=shape[0] * 2 * shape[1]).map(
        lambda values: torch.tensor(values, dtype=torch.uint8).view(shape[0], 2 * shape[1])
    )
)


@given(codes=codes_of)
def test_pack_and_unpack_are_inverse(codes):
    packed = codec.pack_codes(codes)
    assert packed.shape == (codes.shape[0], codes.shape[1] // 2)
    assert torch.equal(codec.unpack_codes(packed), codes)
    assert torch.equal(codec.swap_nibbles(codec.swap_nibbles(packed)), packed)


def test_the_even_k_is_the_low_nibble():
    packed = codec.pack_codes(torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0xF3]]
    assert codec.swap_nibbles(packed).tolist() == [[0x12, 0x3F]]


def test_odd_codes_are_refused():
    with pytest.raises(InvalidInput, match="even last size"):
        codec.pack_codes(torch.zeros(2, 3, dtype=torch.uint8))


def test_swapped_nibbles_decode_to_another_weight():
    weight, scale, gs = codec.quantize(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)))
    right = codec.dequantize(weight, scale, gs)
    foreign = codec.swap_nibbles(weight)  # as a checkpoint with the other order has it
    assert not torch.equal(codec.dequantize(foreign, scale, gs), right)
    assert torch.equal(codec.dequantize(codec.swap_nibbles(foreign), scale, gs), right)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 9),
    groups=st.integers(1, 6),
    exponent=st.integers(-30, 30),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    own_scale=st.booleans(),
)
def test_quantize_equals_numpy_byte_for_byte(seed, n, groups, exponent, spread, own_scale):
    random = np.random.default_rng(seed)
    w = random.standard_normal((n, groups * 16)) * 2.0**exponent
    w *= np.repeat(np.exp2(random.standard_normal((n, groups)) * spread), 16, axis=1)
    w[random.random(w.shape) < 0.1] = 0.0
    w[0, 0] = 2.0**exponent
    w = w.astype(np.float32)
    gs = np.float32(np.abs(w).max() / 900) if own_scale else None  # 900: some blocks saturate
    right = numpy_quantize(w, gs)
    got = codec.quantize(torch.from_numpy(w), global_scale=None if gs is None else torch.tensor(gs))
    np.testing.assert_array_equal(got[0].numpy(), right[0])
    np.testing.assert_array_equal(got[1].view(torch.uint8).numpy(), right[1])
    assert got[2].item() == right[2]
    assert (got[0].dtype, got[1].dtype, got[2].dtype, got[2].shape) == (
        torch.uint8,
        torch.float8_e4m3fn,
        torch.float32,
        (),
    )


def test_quantize_in_chunks_is_the_same(monkeypatch):
    w = torch.randn(33, 64, generator=torch.Generator().manual_seed(9))
    whole = codec.quantize(w)
    dense = codec.dequantize(*whole)
    monkeypatch.setattr(codec, "CHUNK_WEIGHTS", 64 * 4)
    chunked = codec.quantize(w)
    assert all(
        torch.equal(codec.e4m3_bytes(a) if a.ndim else a, codec.e4m3_bytes(b) if b.ndim else b)
        for a, b in zip(whole, chunked, strict=True)
    )
    assert torch.equal(codec.dequantize(*chunked), dense)


@pytest.mark.parametrize("amax", [1e4, 1.0, 1e-4])
def test_round_trip_is_within_one_step(amax):
    w = torch.randn(16, 128, generator=torch.Generator().manual_seed(6))
    w *= amax / w.abs().amax()
    weight, scale, gs = codec.quantize(w)
    step = (scale.float() * gs).repeat_interleave(16, 1)
    assert ((codec.dequantize(weight, scale, gs) - w).abs() <= 1.04 * step).all()  # half of the gap from 4 to 6


def test_quantizing_a_decoded_weight_gives_it_back():
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(7))
    first = codec.quantize(w)
    again = codec.quantize(codec.dequantize(*first), global_scale=first[2])
    assert torch.equal(codec.dequantize(*again), codec.dequantize(*first))


def test_all_zero_weights():
    weight, scale, gs = codec.quantize(torch.zeros(2, 16))
    assert (weight.unique().tolist(), scale.float().unique().tolist(), gs.item()) == ([0], [1.0], 1.0)


def test_negative_values_that_round_to_zero_keep_their_sign():
    w = torch.zeros(1, 16)
    w[0, 0], w[0, 1], w[0, 2] = 6.0, -1e-3, -0.0
    codes = codec.unpack_codes(codec.quantize(w)[0])
    assert codes[0, :3].tolist() == [7, 8, 0]
    w[0, 0], w[0, 1] = 1e30, -1e-30  # the quotient is smaller than any float32
    codes = codec.unpack_codes(codec.quantize(w)[0])
    assert codes[0, :3].tolist() == [7, 8, 0]


def test_weights_near_the_smallest_float32():
    w = torch.full((1, 16), 1e-43)
    weight, scale, gs = codec.quantize(w)
    assert gs > 0
    assert torch.isfinite(codec.dequantize(weight, scale, gs)).all()


@pytest.mark.parametrize(
    "w",
    [
        None,
        [[1.0] * 16],
        torch.zeros(16),
        torch.zeros(2, 24),
        torch.zeros(0, 16),
        torch.zeros(2, 16, dtype=torch.int32),
        torch.full((1, 16), float("nan")),
        torch.full((1, 16), float("inf")),
        torch.full((1, 16), 1e300, dtype=torch.float64),
    ],
    ids=["None", "list", "1-d", "K=24", "N=0", "int", "nan", "inf", "beyond float32"],
)
def test_quantize_refuses(w):
    with pytest.raises(InvalidInput, match="cannot be quantised"):
        codec.quantize(w)


def test_quantize_refuses_a_tensor_without_values():
    with pytest.raises(InvalidInput, match="meta tensor"):
        codec.quantize(torch.ones(1, 16, device="meta"))


def test_what_quantize_returns_is_constant():
    w, gs = torch.ones(2, 16, requires_grad=True), torch.ones(1, requires_grad=True)
    made = (*codec.quantize(w), *codec.quantize(w, global_scale=gs))
    assert not any(tensor.requires_grad for tensor in made)


def test_quantize_takes_eight_bit_floats():
    w = torch.tensor([[1.0, -448.0, 0.5, 2.0] * 4])
    for wide, narrow in zip(codec.quantize(w), codec.quantize(w.to(torch.float8_e4m3fn)), strict=True):
        assert torch.equal(wide.float(), narrow.float())


@pytest.mark.parametrize("gs", [0.0, -1.0, float("nan"), float("inf"), torch.ones(4), torch.ones(0)])
def test_quantize_refuses_a_wrong_global_scale(gs):
    with pytest.raises(InvalidInput, match="global_scale"):
        codec.quantize(torch.ones(1, 16), global_scale=gs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gs", [1.0, 2.0**-20, 3e-5])
def test_every_code_times_every_scale(dtype, gs):
    """16 codes x 256 bytes: exact up to the one rounding; with a global scale of 1 no rounding happens at all."""
    weight = codec.pack_codes(torch.arange(16, dtype=torch.uint8).expand(256, 16))
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    got = codec.dequantize(weight, scale.view(torch.float8_e4m3fn), torch.tensor(gs), dtype).double()
    product = np.outer([e4m3(b) for b in range(256)], E2M1 + [-v for v in E2M1])
    exact = product * float(np.float32(gs))
    finite = ~np.isnan(product[:, 0])
    if gs == 1.0 or dtype == torch.float64:
        right = exact
    elif dtype == torch.float32:
        right = exact.astype(np.float32).astype(np.float64)
    else:
        right = torch.from_numpy(exact.astype(np.float32)).to(dtype).double().numpy()
    np.testing.assert_array_equal(got.numpy()[finite], right[finite])
    assert np.isnan(got.numpy()[~finite]).all()
    assert torch.equal(
        codec.dequantize(weight[:0x7F], scale[:0x7F], torch.tensor(gs), dtype).double(), got[:0x7F]
    )  # the uint8 view


def test_one_global_scale_per_row():
    """Fused shards keep their own scales: q, k, v; gate and up with the ratio that a real checkpoint has."""
    for scales in [(1e-3, 2e-3, 5e-4), (3.85e-05, 4.83e-05), (4e-4, 4e-5), (1.0, 1.25), (1.0, 10.0), (1.0, 0.1)]:
        shards = [codec.quantize(torch.randn(7, 32), global_scale=gs) for gs in scales]
        weight, scale = (torch.cat([codec.e4m3_bytes(s[i]) for s in shards]) for i in (0, 1))
        rows = torch.cat([s[2].expand(7) for s in shards])
        apart = torch.cat([codec.dequantize(*s) for s in shards])
        assert torch.equal(codec.dequantize(weight, scale, rows), apart)
        assert not torch.equal(codec.dequantize(weight, scale, shards[0][2]), apart)


def test_subnormal_global_scale():
    gs = torch.tensor(1e-40)
    weight = torch.full((1, 8), 0x77, dtype=torch.uint8)
    got = codec.dequantize(weight, torch.full((1, 1), 448.0).to(torch.float8_e4m3fn), gs)
    assert torch.equal(got, torch.full((1, 16), float(gs.double() * 2688)))
    assert got[0, 0] > 0


@pytest.mark.parametrize(
    ("weight", "scale", "gs"),
    [
        ((4, 16), (4, 4), ()),
        ((4, 16), (4, 1), ()),
        ((4, 16), (3, 2), ()),
        ((4, 4), (4, 0), ()),
        ((4, 16), (4, 2), (3,)),
    ],
)
def test_dequantize_refuses_shapes_that_do_not_fit(weight, scale, gs):
    with pytest.raises(InvalidInput):
        codec.dequantize(torch.zeros(weight, dtype=torch.uint8), torch.zeros(scale, dtype=torch.uint8), torch.ones(gs))


@pytest.mark.parametrize("weight", [torch.zeros(4, 16, dtype=torch.int8), torch.zeros(4, 2, 16, dtype=torch.uint8)])
def test_dequantize_refuses_what_holds_no_codes(weight):
    with pytest.raises(InvalidInput, match=r"do not belong together; got torch.u?int8 .*expected uint8 \[N, K/2\]"):
        codec.dequantize(weight, torch.zeros(4, 2, dtype=torch.uint8), torch.ones(()))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
def test_dequantize_refuses_dtypes_that_cannot_hold_the_values(dtype):
    with pytest.raises(InvalidInput, match=r"wrong dtype.*floating"):
        codec.dequantize(*codec.quantize(torch.ones(1, 16)), dtype)
