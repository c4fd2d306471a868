"""validate: each mistake has its own message. Layouts: what goes in comes out."""

import dataclasses

import pytest
import torch
from nvfp4.errors import InvalidInput
from nvfp4.kernels.weights import codec
from nvfp4.kernels.weights.layouts import layout, layout_ids, to_layout
from nvfp4.kernels.weights.swizzle import swizzle
from nvfp4.kernels.weights.weight import is_aligned, normalize_global_scale, validate

N, K = 6, 64


@pytest.fixture
def tensors():
    return codec.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(1)))


def refuses(match, weight, scale, gs, **options):
    with pytest.raises(InvalidInput, match=match):
        validate(weight, scale, gs, **options)


def test_right_tensors_pass_without_a_copy(tensors):
    weight, scale, gs = tensors
    for given in (scale, scale.view(torch.uint8)):
        got = validate(weight, given, gs)
        assert got[0] is weight
        assert got[1].dtype == torch.uint8
        assert got[1].data_ptr() == scale.data_ptr()
        assert torch.equal(got[2], gs.reshape(1))


def test_weight_dtype(tensors):
    weight, scale, gs = tensors
    refuses("dtype of weight; got torch.bfloat16.*ignore list", torch.zeros(N, K, dtype=torch.bfloat16), scale, gs)
    refuses("dtype of weight; got torch.int8", weight.view(torch.int8), scale, gs)


def test_scale_dtype(tensors):
    weight, scale, gs = tensors
    refuses("dtype of weight_scale; got torch.float32", weight, scale.float(), gs)
    refuses("dtype of weight_scale; got torch.float8_e5m2", weight, scale.view(torch.float8_e5m2), gs)


def test_dimensions(tensors):
    weight, scale, gs = tensors
    refuses(r"weight must be \[N, K/2\]", weight[None], scale, gs)
    refuses(r"weight must be \[N, K/2\]", weight[0], scale, gs)
    refuses(r"weight_scale must be \[N, K/16\].*swizzled", weight, swizzle(scale), gs)


def test_scale_shape(tensors):
    weight, scale, gs = tensors
    refuses("does not fit weight", weight, torch.cat([scale.view(torch.uint8)] * 2, 1), gs)  # left whole by sharding
    refuses("does not fit weight", weight, scale[:-1], gs)
    refuses("does not fit weight", weight[:, :8].contiguous(), scale, gs)
    refuses("group size 32", weight, scale[:, : K // 32].contiguous(), gs)


def test_k_and_n(tensors):
    weight, scale, gs = tensors
    refuses("multiple of 16; got .*K = 56", weight[:, :28].contiguous(), scale, gs)
    refuses("empty", weight[:0], scale[:0], gs)
    refuses("empty", weight[:, :0], scale[:, :0], gs)


def test_contiguity(tensors):
    weight, scale, gs = tensors
    refuses("weight is not contiguous", torch.cat([weight, weight], 1)[:, : K // 2], scale, gs)
    wide = torch.cat([scale.view(torch.uint8)] * 2, 1)
    refuses("weight_scale is not contiguous", weight, wide[:, : K // 16], gs)
    refuses("weight is not contiguous", weight.t().contiguous().t(), scale, gs)


def test_devices(tensors):
    weight, scale, gs = tensors
    refuses("different devices; got cpu, meta, cpu", weight, scale.to("meta"), gs)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_scales(tensors, byte):
    weight, scale, gs = tensors
    scale.view(torch.uint8)[4, 2] = byte
    refuses(f"byte 0x{byte:02X} at row 4, group 2", weight, scale, gs)
    validate(weight, scale, gs, values=False)
    repaired = to_layout(weight, scale, gs, repair_nan=True)
    assert repaired.scale is not None
    right = scale.view(torch.uint8).clone()
    right[4, 2] = 0x7E
    assert torch.equal(repaired.scale, right)
    assert scale.view(torch.uint8)[4, 2] == byte  # the caller's tensor is left alone


def test_negative_zero_and_subnormal_scales_pass(tensors):
    weight, scale, gs = tensors
    scale.view(torch.uint8)[0] = torch.tensor([0x00, 0x80, 0x01, 0xFE], dtype=torch.uint8)
    validate(weight, scale, gs)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), -0.0])
def test_wrong_global_scale(tensors, bad):
    weight, scale, _ = tensors
    refuses("wrong global scale", weight, scale, torch.tensor(bad))
    rows = torch.ones(N)
    rows[3] = bad
    refuses("at row 3", weight, scale, rows)
    validate(weight, scale, rows, values=False)


def test_global_scale_beyond_float32(tensors):
    weight, scale, _ = tensors
    for bad in (1e300, 1e-300):
        refuses("wrong global scale", weight, scale, torch.tensor(bad, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (N,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_accepted_global_scales(shape, dtype):
    got = normalize_global_scale(torch.full(shape, 0.75, dtype=dtype), N)
    assert (got.dtype, got.is_contiguous(), got.unique().tolist()) == (torch.float32, True, [0.75])
    assert got.shape == ((N,) if shape == (N,) else (1,))


def test_global_scale_of_strided_rows_becomes_contiguous():
    wide = torch.rand(N, 2)
    got = normalize_global_scale(wide[:, 0], N)
    assert got.is_contiguous()
    assert torch.equal(got, wide[:, 0])


@pytest.mark.parametrize("shape", [(2,), (N, 1), (1, 1, 1), (0,), (N + 1,)])
def test_refused_global_scale_shapes(tensors, shape):
    refuses("shape of weight_scale_2", *tensors[:2], torch.ones(shape))


def test_refused_global_scale_dtypes(tensors):
    refuses("dtype of weight_scale_2", *tensors[:2], torch.ones((), dtype=torch.int32))


def test_global_scale_keeps_its_bits(tensors):
    """The multiplier is stored once: no double reciprocal, no flush of subnormals."""
    bits = torch.randint(1, 0x7F800000, (100_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    bits[:2] = torch.tensor([1, 0x007FFFFF])  # the smallest and the largest subnormal
    scales = bits.view(torch.float32)
    assert torch.equal(normalize_global_scale(scales, bits.numel()).view(torch.int32), bits)


class TestLayouts:
    def test_checkpoint_is_known_and_unknown_ids_are_named(self):
        assert "checkpoint" in layout_ids()
        with pytest.raises(InvalidInput, match=r"unknown weight layout; got 'nonsense'.*checkpoint"):
            layout("nonsense")

    def test_checkpoint_round_trip_copies_nothing(self, tensors):
        weight = to_layout(*tensors)
        assert (weight.layout, weight.out_features, weight.in_features) == ("checkpoint", N, K)
        assert weight.nbytes == N * K // 2 + N * K // 16 + 4
        back = weight.to_checkpoint()
        assert back[0].data_ptr() == tensors[0].data_ptr()
        assert back[1].dtype == torch.float8_e4m3fn
        assert torch.equal(codec.dequantize(*back), codec.dequantize(*tensors))

    def test_weights_are_frozen(self, tensors):
        with pytest.raises(dataclasses.FrozenInstanceError):
            to_layout(*tensors).layout = "other"

    @pytest.mark.parametrize("offset", [1, 3, 8, 16])
    def test_views_at_odd_offsets_become_aligned(self, tensors, offset):
        weight, scale, _ = tensors

        def view(tensor):
            buffer = torch.zeros(offset + tensor.nbytes, dtype=torch.uint8)
            buffer[offset:] = tensor.view(torch.uint8).flatten()
            return buffer[offset:].view(tensor.shape)

        rows = torch.cat([torch.zeros(1), torch.rand(N) + 0.1])[1:]  # 4 bytes off
        packed = to_layout(view(weight), view(scale), rows)
        tensors = (packed.data, packed.scale, packed.global_scale)
        for got, right in zip(tensors, (weight, scale.view(torch.uint8), rows), strict=True):
            assert got.data_ptr() % 16 == 0 and is_aligned(got)
            assert torch.equal(got, right)

    @pytest.mark.parametrize(("n", "groups"), [(1, 1), (100, 6), (129, 5)])
    def test_swizzled_scales(self, n, groups):
        weight, scale, gs = codec.quantize(torch.randn(n, groups * 16))
        packed = to_layout(weight, swizzle(scale), gs, scale_layout="swizzled")
        assert torch.equal(packed.scale, scale.view(torch.uint8))

    def test_unknown_scale_layout(self, tensors):
        with pytest.raises(InvalidInput, match="scale_layout"):
            to_layout(*tensors, scale_layout="8x4")

    def test_every_layout_decodes_to_the_same_weight(self, tensors):
        right = codec.dequantize(*tensors)
        for layout_id in layout_ids():
            if not layout_id.endswith("-glu"):  # those pair gate and up rows
                got = to_layout(*tensors, layout_id=layout_id).to_checkpoint()
                assert torch.equal(codec.dequantize(*got), right), layout_id


def test_meta_tensors_have_nothing_to_check(tensors):
    with pytest.raises(InvalidInput, match=r"no values.*meta"):
        validate(*(tensor.to("meta") for tensor in tensors))


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"weight_scale_2": None}, "weight_scale_2 is missing; got None; expected a tensor"),
        ({"weight_scale_2": 0.5}, "weight_scale_2 is no tensor; got float 0.5; expected a tensor"),
        ({"weight_scale": None}, "weight_scale is missing; got None; expected a tensor"),
    ],
)
def test_what_was_forgotten_is_named(missing, words):
    weight, scale, gs = codec.quantize(torch.randn(4, 32))
    arguments = {"weight": weight, "weight_scale": scale, "weight_scale_2": gs} | missing
    with pytest.raises(InvalidInput) as error:
        validate(**arguments)
    assert str(error.value) == words


def test_a_weight_prints_in_one_line():
    weight, scale, gs = codec.quantize(torch.randn(4, 32))
    assert repr(to_layout(weight, scale, gs)) == "Weight(4 x 32, layout 'checkpoint', 1 global scale, cpu)"
