"""Dense layers read from checkpoints, one at a time: exact values, and errors that name the tensor."""

import nvfp4
import pytest
import torch
from nvfp4.dispatch.checkpoint import Shard, load_experts, load_linear, open_checkpoint
from nvfp4.errors import InvalidInput, Unsupported
from nvfp4.kernels.weights.codec import swap_nibbles
from nvfp4.kernels.weights.weight import is_aligned
from nvfp4.testing.checkpoints import as_compressed_tensors as as_ct
from nvfp4.testing.checkpoints import dense, modelopt

from .layers import ATTN, MLP, same, value

pytestmark = pytest.mark.filterwarnings("ignore:.*named and scaled as by")  # configs here are ModelOpt's


@pytest.mark.parametrize("files", [1, 3])
def test_bytes_are_those_of_the_file_in_memory_of_their_own(write, files):
    tensors = modelopt(f"{MLP}.down_proj", 48, 64, bias=True, pqs=True)
    checkpoint = open_checkpoint(write(tensors, files=files))
    got = load_linear(checkpoint, f"{MLP}.down_proj")
    assert same(tensors, f"{MLP}.down_proj", got)
    assert torch.equal(got.bias, tensors[f"{MLP}.down_proj.bias"])
    assert torch.equal(got.pre_quant_scale, tensors[f"{MLP}.down_proj.pre_quant_scale"])
    for tensor in (got.weight, got.weight_scale, got.weight_scale_2, got.bias, got.pre_quant_scale):
        assert is_aligned(tensor) and tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("spelling", ["model.", "model.language_model.", "language_model.model."])
def test_a_layer_has_several_spellings(write, spelling):
    name = f"{spelling}layers.0.mlp.down_proj"
    checkpoint = open_checkpoint(write(modelopt(name, 16, 32)))
    assert checkpoint.linear("model.layers.0.mlp.down_proj").name == name


def test_a_multiplier_keeps_its_bits_and_a_divisor_is_turned_over_once(write):
    candidates = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    factor = candidates[1 / (1 / candidates) != candidates][0]  # one that two reciprocals would change
    tensors = modelopt(f"{MLP}.down_proj", 16, 32, factor=float(factor))
    got = load_linear(open_checkpoint(write(tensors)), f"{MLP}.down_proj")
    assert torch.equal(got.weight_scale_2, factor.reshape(1))
    divisor = 1 / factor
    ct = as_ct(tensors) | {f"{MLP}.down_proj.weight_global_scale": divisor.reshape(1)}
    got = load_linear(open_checkpoint(write(ct, folder="ct")), f"{MLP}.down_proj")
    assert torch.equal(got.weight_scale_2, (1 / divisor).reshape(1))
    assert torch.equal(got.weight, tensors[f"{MLP}.down_proj.weight"])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_global_scales_of_one_element_have_any_shape(write, shape, dtype):
    tensors = modelopt(f"{MLP}.down_proj", 16, 32)
    tensors[f"{MLP}.down_proj.weight_scale_2"] = torch.full(shape, 2.0**-10, dtype=dtype)
    got = load_linear(open_checkpoint(write(tensors)), f"{MLP}.down_proj")
    assert torch.equal(got.weight_scale_2, torch.tensor([2.0**-10]))


def test_block_scales_may_have_a_dimension_too_many(write):
    name = f"{MLP}.down_proj"
    tensors = modelopt(name, 16, 64)
    flat = tensors[f"{name}.weight_scale"]
    checkpoint = open_checkpoint(write(tensors | {f"{name}.weight_scale": flat[None]}))
    assert same(tensors, name, load_linear(checkpoint, name))
    part = load_linear(checkpoint, name, shard=Shard(rank=1, size=2, how="row"))
    assert torch.equal(value(part), dense(tensors, name)[:, 32:])
    layer = nvfp4.nn.Linear(64, 16, False)
    layer.load_state_dict({tensor.name.rsplit(".")[-1]: checkpoint.files.read(tensor.name)
                           for tensor in checkpoint.linear(name).tensors.values()})  # fmt: skip
    assert torch.equal(layer.weight_scale.view(torch.uint8), flat.view(torch.uint8))


@pytest.mark.parametrize("scale", ["absent", 0.0, float("nan"), float("inf"), 1e30])
def test_input_scales_do_not_matter(write, scale):
    name = f"{MLP}.down_proj"
    tensors = modelopt(name, 16, 32)
    more = {} if scale == "absent" else {f"{name}.input_scale": torch.tensor(scale)}
    assert same(tensors, name, load_linear(open_checkpoint(write(tensors | more)), name))


def test_kv_cache_scales_are_not_of_the_layer(write):
    name = f"{ATTN}.k_proj"
    tensors = modelopt(name, 16, 32)
    more = {f"{name}.k_scale": torch.tensor(7.0), f"{name}.k_bias": torch.ones(16)}
    checkpoint = open_checkpoint(write(tensors | more))
    assert same(tensors, name, load_linear(checkpoint, name))
    assert set(checkpoint.kv_scales) == set(more)


@pytest.mark.parametrize("convert", [dict, as_ct])
@pytest.mark.parametrize("gone", ["weight", "weight_scale", "weight_scale_2"])
def test_what_is_missing_is_named(write, convert, gone):
    name = f"{MLP}.down_proj"
    tensors = convert(modelopt(name, 16, 32))
    ct = {"weight": "weight_packed", "weight_scale_2": "weight_global_scale"}
    lost = f"{name}.{ct.get(gone, gone) if convert is as_ct else gone}"
    del tensors[lost]
    checkpoint = open_checkpoint(write(tensors | modelopt(f"{MLP}.up_proj", 16, 32)))
    with pytest.raises(InvalidInput, match=rf"missing .*{lost}"):
        load_linear(checkpoint, name)
    with pytest.raises(InvalidInput, match=rf"missing .*{lost}"):
        checkpoint.check()
    assert load_linear(checkpoint, f"{MLP}.up_proj").weight.shape == (16, 16)  # others are not hindered


def test_two_dialects_in_one_layer_are_refused(write):
    name = f"{MLP}.down_proj"
    tensors = modelopt(name, 16, 32) | as_ct(modelopt(name, 16, 32))
    del tensors[f"{name}.weight"], tensors[f"{name}.weight_global_scale"]
    with pytest.raises(InvalidInput, match=r"down_proj: tensors of two dialects; got weight_packed, weight_scale_2"):
        load_linear(open_checkpoint(write(tensors)), name)


@pytest.mark.parametrize(
    ("leaf", "tensor", "words"),
    [
        ("weight", torch.zeros(16, 8, dtype=torch.uint8), r"weight_scale"),
        ("weight", torch.zeros(16, 12, dtype=torch.uint8), r"K = 24; expected K a multiple of 16"),
        ("weight", torch.zeros(16, 32).bfloat16(), r"wrong weight; got BF16 \(16, 32\).*ignore list"),
        ("weight_scale", torch.zeros(8, 2).to(torch.float8_e4m3fn), r"got F8_E4M3 \(8, 2\); expected .*\(16, 2\)"),
        ("weight_scale", torch.zeros(16, 4).to(torch.float8_e4m3fn), r"got F8_E4M3 \(16, 4\); expected .*\(16, 2\)"),
        ("weight_scale", torch.zeros(16, 1).to(torch.float8_e4m3fn), r"group size 32"),
        ("weight_scale", torch.zeros(512, dtype=torch.uint8), r"got U8 \(512,\).*swizzled"),
        ("weight_scale", torch.zeros(16, 2), r"got F32 \(16, 2\)"),
        ("weight_scale_2", torch.zeros(3), r"wrong weight_scale_2; got F32 \(3,\)"),
        ("weight_scale_2", torch.zeros((), dtype=torch.int32), r"wrong weight_scale_2; got I32"),
        ("bias", torch.zeros(15), r"wrong bias; got F32 \(15,\); expected 16"),
        ("pre_quant_scale", torch.zeros(16), r"wrong pre_quant_scale; got F32 \(16,\); expected 32"),
        ("weight_zero_point", torch.zeros(16), r"unknown .*down_proj\.weight_zero_point"),
    ],
)
def test_what_does_not_fit_is_named(write, leaf, tensor, words):
    name = f"{MLP}.down_proj"
    checkpoint = open_checkpoint(write(modelopt(name, 16, 32) | {f"{name}.{leaf}": tensor}))
    with pytest.raises(InvalidInput, match=rf"model\.layers\.0\.mlp\.down_proj: .*{words}"):
        load_linear(checkpoint, name)


@pytest.mark.parametrize(
    ("leaf", "at", "wrong", "words"),
    [
        ("weight_scale_2", (), float("nan"), "weight_scale_2 is wrong; got nan"),
        ("weight_scale_2", (), 0.0, "weight_scale_2 is wrong; got 0.0"),
        ("weight_scale_2", (), -1.0, "weight_scale_2 is wrong; got -1.0"),
        ("weight_scale_2", (), float("inf"), "weight_scale_2 is wrong; got inf"),
        ("weight_scale", (3, 1), float("nan"), r"weight_scale holds 1 NaN; got byte 0x7F at \[3, 1\]"),
        ("bias", (5,), float("nan"), r"bias is not finite; got nan at \[5\]"),
        ("pre_quant_scale", (7,), float("nan"), r"pre_quant_scale is wrong; got nan at \[7\]"),
        ("pre_quant_scale", (7,), 0.0, r"pre_quant_scale is wrong; got 0.0 at \[7\]"),
    ],
)
def test_values_that_cannot_be_are_named(write, leaf, at, wrong, words):
    name = f"{MLP}.down_proj"
    tensors = modelopt(name, 16, 32, bias=True, pqs=True)
    tensors[f"{name}.{leaf}"][at] = wrong
    with pytest.raises(InvalidInput, match=rf"model\.layers\.0\.mlp\.down_proj\.{words}"):
        load_linear(open_checkpoint(write(tensors)), name)


@pytest.mark.parametrize("divisor", [0.0, float("nan"), float("inf"), 1e-39])
def test_a_divisor_must_have_a_reciprocal(write, divisor):
    name = f"{MLP}.down_proj"
    tensors = as_ct(modelopt(name, 16, 32)) | {f"{name}.weight_global_scale": torch.tensor([divisor])}
    with pytest.raises(InvalidInput, match=r"weight_global_scale is wrong.*reciprocal"):
        load_linear(open_checkpoint(write(tensors)), name)


def test_nan_scales_can_be_repaired(write):
    name = f"{MLP}.down_proj"
    tensors = modelopt(name, 16, 32)
    tensors[f"{name}.weight_scale"].view(torch.uint8)[3, 1] = 0xFF
    got = load_linear(open_checkpoint(write(tensors)), name, repair_nan=True)
    assert float(got.weight_scale[3, 1]) == 448
    tensors[f"{name}.weight_scale"].view(torch.uint8)[3, 1] = 0x7E
    assert same(tensors, name, got)


def test_nibbles_are_swapped_only_when_asked(write):
    name = f"{MLP}.down_proj"
    tensors = modelopt(name, 16, 32)
    checkpoint = open_checkpoint(write(tensors | {f"{name}.weight": swap_nibbles(tensors[f"{name}.weight"])}))
    assert same(tensors, name, load_linear(checkpoint, name, swap_nibbles=True))
    assert not same(tensors, name, load_linear(checkpoint, name))


FP8 = {
    f"{ATTN}.o_proj.weight": torch.zeros(32, 32).to(torch.float8_e4m3fn),
    f"{ATTN}.o_proj.weight_scale": torch.ones(()),
}
MXFP4 = {
    f"{ATTN}.o_proj.weight": torch.zeros(32, 32, dtype=torch.uint8),
    f"{ATTN}.o_proj.weight_scale": torch.zeros(32, 2, dtype=torch.uint8),
}


@pytest.mark.parametrize(("tensors", "algo"), [(FP8, "FP8"), (MXFP4, "MXFP4")])
def test_another_kind_of_layer_is_named_and_hinders_no_other(write, tensors, algo):
    mixed = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {f"{MLP}.up_proj": {"quant_algo": "NVFP4"}, f"{ATTN}.o_proj": {"quant_algo": algo}},
    }
    checkpoint = open_checkpoint(write(tensors | modelopt(f"{MLP}.up_proj", 16, 32), hf=mixed))
    with pytest.raises(Unsupported, match=rf"self_attn\.o_proj is quantised as {algo}; expected NVFP4"):
        load_linear(checkpoint, f"{ATTN}.o_proj")
    assert load_linear(checkpoint, f"{MLP}.up_proj").weight.shape == (16, 16)


def test_low_rank_corrections_are_not_dropped(write):
    name = f"{MLP}.up_proj"
    tensors = modelopt(name, 16, 32) | {f"{name}.svdquant_lora_a": torch.zeros(4, 32)}
    with pytest.raises(Unsupported, match=r"up_proj is quantised as NVFP4_SVD"):
        load_linear(open_checkpoint(write(tensors)), name)


@pytest.mark.parametrize(
    "read",
    [
        lambda path: load_linear(path, f"{ATTN}.q_proj"),
        lambda path: load_experts(path, f"{MLP}.experts"),
        lambda path: nvfp4.nn.FusedMoE.from_checkpoint(path, f"{MLP}.experts"),
    ],
)
def test_a_path_instead_of_an_open_checkpoint_is_said(write, qkv, read):
    with pytest.raises(InvalidInput, match=r"no open checkpoint; got .*; pass what open_checkpoint\(folder\) returns"):
        read(write(qkv))
