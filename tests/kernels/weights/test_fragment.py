"""The fragment layouts, read back by what kernels do: the bit operations on words, in NumPy, then exact values."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4.errors import InvalidInput
from nvfp4.kernels.weights import fragment, fragment_bytes
from nvfp4.kernels.weights.codec import dequantize, pack_codes
from nvfp4.kernels.weights.fragment_tables import LOW_HALVES
from nvfp4.kernels.weights.layouts import layout, layout_ids, to_layout

ENCODINGS = ("bf16", "fp16", "nib")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FINITE = [byte for byte in range(256) if byte & 0x7F != 0x7F]


def rotl(q, s):
    return (q << np.uint32(s)) | (q >> np.uint32(32 - s))


def e4m3(byte):
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def bf16_value(bits):
    """Exact, subnormals too: the smallest results of the decode are among them."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def fp16_value(bits):
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def registers(q, encoding):
    """[..., 4 registers, 2 halves]: values of the eight weights of each word, by a kernel's bit operations."""
    u = np.uint32
    if encoding == "nib":
        codes = np.stack([np.stack([q >> u(8 * r) & u(15), q >> u(8 * r + 4) & u(15)], -1) for r in range(4)], -2)
        return E2M1[codes]
    if encoding == "bf16":
        m = u(0x81C081C0)
        r3 = (rotl(q, 30) & u(0x81808180)) | ((q << u(6)) & u(0x00400040))
        found = [q & m, (q << u(4)) & m, rotl(q, 26) & m, r3]
        value, factor = bf16_value, 2.0**126
    else:
        a, b = q << u(2), rotl(q, 29)
        found = [
            (q & u(0x8C008C00)) | (a & u(0x02000200)),
            (a & u(0x84008400)) | (b & u(0x0A000A00)),
            (q << u(6)) & u(0x8E008E00),
            rotl(q, 25) & u(0x8E008E00),
        ]
        value, factor = fp16_value, 2.0**14
    return np.stack([np.stack([value(r & u(0xFFFF)), value(r >> u(16))], -1) for r in found], -2) * factor


def scale_pairs(v, encoding):
    """{o: (row g, row g + 8)} of words of scale codes."""
    u = np.uint32
    if encoding == "bf16":
        words = ((v << u(4)) & u(0x0FF00FF0)) | u(0x70007000), ((v >> u(4)) & u(0x0FF00FF0)) | u(0x70007000)
        value, factor = bf16_value, 2.0**-119
    else:
        words = (v << u(7)) & u(0x7F807F80), (v >> u(1)) & u(0x7F807F80)
        value, factor = fp16_value, 2.0**-7
    return [(value(w & u(0xFFFF)) * factor, value(w >> u(16)) * factor) for w in words]


def decode(blob, encoding):
    """float64 [Np, Kp] of a blob: codes times block scales, read lane by lane as a kernel reads it.

    Code zero decodes to no zero in bfloat16, so the weights of a zero scale are right only if their codes are zero.
    """
    n64, k64, size = blob.shape
    assert size == 2304
    out = np.full((n64 * 64, k64 * 64), np.nan)
    for w in range(4):
        subtile = np.ascontiguousarray(blob[:, :, 576 * w : 576 * (w + 1)])
        codes = subtile[:, :, :512].copy().view("<u4").reshape(n64, k64, 32, 4)
        scales = subtile[:, :, 512:].copy().view("<u4").reshape(n64, k64, 8, 2)
        for lane in range(32):
            g, q = lane >> 2, lane & 3
            for j in range(4):
                values = registers(codes[:, :, lane, j], encoding)
                pair = scale_pairs(scales[:, :, g, j // 2], encoding)[j % 2]
                for h in range(2):
                    for e in range(2):
                        for p in range(2):
                            product = values[:, :, h + 2 * e, p] * pair[h]
                            out[16 * w + g + 8 * h :: 64, 16 * j + 2 * q + 8 * e + p :: 64] = product
    return out


def exact(weight, scale):
    one = torch.ones(1)
    return dequantize(weight, scale, one, torch.float64).numpy()


def random_weight(n, k, *, seed=0, low=0, high=256):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(low, high, (n, k // 16), dtype=torch.uint8, generator=generator)
    return weight, torch.where((scale & 0x7F) == 0x7F, scale - 1, scale)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_kernel_reads_every_code_with_every_scale_at_every_place(encoding):
    n, k = 256, 64 * 256
    row, column, group = torch.arange(n)[:, None], torch.arange(k)[None], torch.arange(k // 16)[None]
    codes = (row // 16 + row + column + column // 64) % 16
    which = (row + row // 64 + 3 * group) % len(FINITE)
    # Every code meets every scale; every place of a block has every code, and every place of a scale every scale.
    assert len((codes * 256 + which.repeat_interleave(16, 1)).unique()) == 16 * len(FINITE)
    places = (row % 64 * 64 + column % 64) * 256 + codes, (row % 64 * 4 + group % 4) * 256 + which
    assert [len(seen.unique()) for seen in places] == [64 * 64 * 16, 64 * 4 * len(FINITE)]
    weight, scale = pack_codes(codes.to(torch.uint8)), torch.tensor(FINITE, dtype=torch.uint8)[which]
    packed = to_layout(weight, scale, torch.ones(1), layout_id=f"fragment1-{encoding}")
    assert packed.data.shape == (4, 256, 2304) and packed.data.dtype == torch.uint8 and packed.scale is None
    np.testing.assert_array_equal(decode(packed.data.numpy(), encoding), exact(weight, scale))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (63, 48), (65, 80), (130, 1040)])
def test_a_kernel_reads_weights_of_any_size_with_any_scales(encoding, n, k):
    weight, scale = random_weight(n, k, seed=n)
    blob = to_layout(weight, scale, torch.ones(1), layout_id=f"fragment1-{encoding}").data.numpy()
    np.testing.assert_array_equal(decode(blob, encoding)[:n, :k], exact(weight, scale))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_where_a_byte_comes_from(encoding):
    # One weight is not zero: row 64 + 16 * 2 + 8 + 3, k = 64 + 16 * 3 + 8 + 2 * 1, code 9 (minus a half).
    weight = torch.zeros((192, 64), dtype=torch.uint8)
    weight[64 + 43, 61] = 0x09
    scale = torch.full((192, 8), 0x38, dtype=torch.uint8)  # 1
    scale[64 + 43, 7] = 0x01  # 2^-9
    data = to_layout(weight, scale, torch.ones(1), layout_id=f"fragment1-{encoding}").data
    subtile = data[1, 1, 2 * 576 : 3 * 576]
    lane, j = 4 * 3 + 1, 3  # register 1 + 2, low half: sign and mantissa
    word = {"bf16": 1 << 17 | 1, "fp16": 1 << 22 | 1 << 16, "nib": 9 << 24}[encoding]
    expected = torch.zeros(2, 3, 2, 4, 512, dtype=torch.uint8)[0, 0, 0, 0]
    expected[lane * 16 + 4 * j :][:4] = torch.tensor([word], dtype=torch.int32).view(torch.uint8)
    assert torch.equal(subtile[:512], expected)
    one, tiny = 0x5800 >> 7, 0x3400 >> 7  # 128 and 1/4 as float16
    scales = torch.full((64,), one, dtype=torch.uint8)
    scales[8 * 3 + 4 * 1 + 2 * 1 + 1] = tiny
    assert torch.equal(subtile[512:], scales)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_padding_is_zero(encoding):
    n, k = 65, 80
    weight = torch.full((n, k // 2), 0xFF, dtype=torch.uint8)
    scale = torch.full((n, k // 16), 0x7E, dtype=torch.uint8)
    data = to_layout(weight, scale, torch.ones(1), layout_id=f"fragment1-{encoding}").data
    assert data.shape == (2, 2, 2304)
    # A code has four ones, and the scale code of 448, 0xF6, six. Nothing else is set.
    ones = sum(int(byte).bit_count() for byte in data.flatten().tolist())
    assert ones == 4 * n * k + 6 * (n * k // 16)
    inside = decode(data.numpy(), encoding)[:n, :k]
    assert (inside == -6 * 448).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 140), st.integers(1, 20), st.integers(0, 1 << 30), st.booleans(), st.sampled_from(ENCODINGS))
def test_round_trip(n, groups, seed, per_row, encoding):
    k = 16 * groups
    weight, scale = random_weight(n, k, seed=seed)
    gs = torch.rand(n if per_row else 1) + 0.5
    packed = to_layout(weight, scale, gs, layout_id=f"fragment1-{encoding}")
    got, got_scale, got_gs = packed.to_checkpoint()
    assert torch.equal(got_gs, gs) and got_scale.dtype == torch.float8_e4m3fn
    right = dequantize(weight, scale, gs, torch.float64)
    assert torch.equal(dequantize(got, got_scale, got_gs, torch.float64), right)
    negative, zero = scale > 0x80, (scale & 0x7F) == 0
    assert torch.equal(got_scale.view(torch.uint8), torch.where(zero, 0, scale & 0x7F))
    flipped = torch.where(negative.repeat_interleave(8, 1), weight ^ 0x88, weight)
    assert torch.equal(got, torch.where(zero.repeat_interleave(8, 1), 0, flipped))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bytes_come_back_where_scales_are_positive(encoding):
    weight, scale = random_weight(200, 336, low=1, high=0x7F)
    got, got_scale, _ = to_layout(weight, scale, torch.ones(1), layout_id=f"fragment1-{encoding}").to_checkpoint()
    assert torch.equal(got, weight) and torch.equal(got_scale.view(torch.uint8), scale)


@pytest.mark.parametrize("low", [0, 1])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 256), (65, 80)])
def test_views_that_begin_anywhere(n, k, low):
    weight, scale = random_weight(n, k, low=low, high=0x7F)
    plain = to_layout(weight, scale, torch.ones(1), layout_id="fragment1-bf16")
    store = torch.zeros(weight.numel() + 3, dtype=torch.uint8)[3:].view(weight.shape).copy_(weight)
    scales = torch.zeros(scale.numel() + 5, dtype=torch.uint8)[5:].view(scale.shape).copy_(scale)
    gs = torch.ones(n + 1)[1:]
    packed = to_layout(store, scales, gs, layout_id="fragment1-bf16")
    assert torch.equal(packed.data, plain.data)
    assert packed.global_scale.data_ptr() % 16 == 0 and torch.equal(packed.global_scale, gs)


def test_arguments_are_only_read():
    weight, scale = random_weight(70, 144)
    before = weight.clone(), scale.clone()
    to_layout(weight, scale, torch.ones(1), layout_id="fragment1-fp16")
    assert torch.equal(weight, before[0]) and torch.equal(scale, before[1])


@pytest.mark.parametrize("low", [-126, 1])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (64, 8192), (4096, 64), (1000, 2000)])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_peak_memory(monkeypatch, n, k, low, elsewhere):
    """Beside its result, a conversion takes less than the weight; with the chunks of a GPU too."""
    if elsewhere:
        monkeypatch.setattr(fragment_bytes, "CHUNK_BYTES", {})
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale = torch.randint(low, 127, (n, k // 16), dtype=torch.int8).view(torch.uint8).clamp(max=0xFE)
    size = weight.nbytes + scale.nbytes
    packed = fragment.pack("bf16", weight, scale, torch.ones(1))  # the tables are made
    packed.to_checkpoint()
    assert peak_bytes(lambda: fragment.pack("bf16", weight, scale, torch.ones(1))) < size + packed.data.nbytes
    assert peak_bytes(packed.to_checkpoint) < size + size


def peak_bytes(call):
    """The most memory that torch held at once beyond what it had, by the profiler's record of every allocation."""
    with torch.profiler.profile(profile_memory=True) as profile:
        result = call()
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert peak >= (result.data.nbytes if hasattr(result, "data") else result[0].nbytes)
    return peak


@pytest.mark.parametrize("chunk", [1, 3 * 2048, 1 << 25])
def test_chunks_do_not_change_the_result(monkeypatch, chunk):
    weight, scale = random_weight(330, 592)
    expected = fragment.pack("fp16", weight, scale, torch.ones(1))
    monkeypatch.setattr(fragment_bytes, "CHUNK_BYTES", {"cpu": chunk})
    packed = fragment.pack("fp16", weight, scale, torch.ones(1))
    assert torch.equal(packed.data, expected.data)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(packed.to_checkpoint(), expected.to_checkpoint(), strict=True)
    )


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((8, 0), "bfloat16", "bf16"),
        ((9, 0), "bfloat16", "bf16"),
        ((9, 0), "float16", "fp16"),
        ((10, 0), "bfloat16", "nib"),
        ((10, 3), "float16", "nib"),
        ((12, 1), "float16", "nib"),
        ((0, 0), "float16", "fp16"),
    ],
)
def test_which_one_fits(capability, dtype, expected):
    found = fragment.fragment_id(capability, dtype)
    assert found == f"fragment1-{expected}" and dtype in layout(found).dtypes


def test_no_fragment_layout_for_other_dtypes():
    with pytest.raises(InvalidInput, match=r"no fragment layout.*'float32'.*bfloat16 or float16"):
        fragment.fragment_id((9, 0), "float32")


def test_sizes():
    assert [fragment.padded(n) for n in (1, 63, 64, 65, 4096)] == [64, 64, 64, 128, 4096]
    assert (fragment.BLOCK_BYTES, fragment.SUBTILE_BYTES, fragment.CODE_BYTES) == (2304, 576, 512)
    for layout_id in layout_ids():
        entry = layout(layout_id)
        if entry.gated:
            continue
        weight, scale = random_weight(65, 80)
        packed = to_layout(weight, scale, torch.ones(1), layout_id=layout_id)
        assert tuple(packed.data.shape) == entry.data_shape(65, 80)
        assert (packed.scale is None) == (entry.scale_shape is None)
        assert entry.bytes(65, 80) + 4 == packed.nbytes
    assert layout("fragment1-nib").bytes(65, 80) == 4 * 2304 and layout("checkpoint").bytes(65, 80) == 65 * 80 * 9 // 16


def test_the_page_has_the_tables_of_the_code():
    page = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text()
    for encoding, low_halves in LOW_HALVES.items():
        row = " | ".join(" ".join(str(bit) for bit in bits) for bits in low_halves)
        assert f"| {encoding} | {row} |" in page
    assert all(f"| `{layout_id}` |" in page for layout_id in layout_ids())
