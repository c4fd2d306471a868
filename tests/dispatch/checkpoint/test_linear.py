"""Dense layers read from checkpoints: exact values, fused layers, shards, and errors that name the tensor."""

import json
import warnings

import nvfp4
import pytest
import torch
from nvfp4.dispatch.checkpoint import Shard, load_experts, load_linear, open_checkpoint
from nvfp4.errors import InvalidInput, Unsupported
from nvfp4.kernels.weights.codec import dequantize, swap_nibbles
from nvfp4.kernels.weights.weight import is_aligned
from nvfp4.testing.checkpoints import as_compressed_tensors as as_ct
from nvfp4.testing.checkpoints import dense, modelopt

pytestmark = pytest.mark.filterwarnings("ignore:.*named and scaled as by")  # configs here are ModelOpt's

MLP = "model.layers.0.mlp"
ATTN = "model.layers.0.self_attn"


def same(tensors, name, got):
    """Whether the bytes are those that were written."""
    return (
        torch.equal(got.weight, tensors[f"{name}.weight"])
        and torch.equal(got.weight_scale.view(torch.uint8), tensors[f"{name}.weight_scale"].view(torch.uint8))
        and torch.equal(got.weight_scale_2, tensors[f"{name}.weight_scale_2"].reshape(1))
    )


def value(got):
    return dequantize(got.weight, got.weight_scale, got.weight_scale_2, torch.float64)


@pytest.fixture
def qkv():
    """Three parts with three global scales: the last two rows of a table of FORMATS' field cases."""
    return {
        **modelopt(f"{ATTN}.q_proj", 64, 32, 1, factor=1e-3),
        **modelopt(f"{ATTN}.k_proj", 32, 32, 2, factor=2e-3),
        **modelopt(f"{ATTN}.v_proj", 32, 32, 3, factor=5e-4),
    }


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


@pytest.mark.parametrize("convert", [dict, as_ct])
def test_fused_parts_keep_their_global_scales(write, qkv, convert):
    checkpoint = open_checkpoint(write(convert(qkv)))
    names = [f"{ATTN}.{part}_proj" for part in "qkv"]
    got = load_linear(checkpoint, names)
    alone = [load_linear(checkpoint, name) for name in names]
    assert got.weight_scale_2.shape == (128,)
    assert torch.equal(value(got), torch.cat([value(one) for one in alone]))
    rows = value(got)[:64], value(got)[64:96], value(got)[96:]
    if convert is dict:
        for found, name in zip(rows, names, strict=True):
            assert torch.equal(found, dense(qkv, name))


def test_equal_global_scales_stay_one(write):
    tensors = modelopt(f"{MLP}.gate_proj", 16, 32, 1, factor=1e-3) | modelopt(f"{MLP}.up_proj", 16, 32, 2, factor=1e-3)
    got = load_linear(open_checkpoint(write(tensors)), [f"{MLP}.gate_proj", f"{MLP}.up_proj"])
    assert torch.equal(got.weight_scale_2, torch.tensor([1e-3]))


def test_keys_may_serve_as_values(write, qkv):
    tensors = {name: tensor for name, tensor in qkv.items() if "v_proj" not in name}
    got = load_linear(open_checkpoint(write(tensors)), [f"{ATTN}.{part}_proj" for part in "qkk"])
    assert torch.equal(value(got)[96:], dense(qkv, f"{ATTN}.k_proj"))


def test_one_scale_of_a_layer_that_is_stored_fused_is_for_all_its_rows(write):
    name = f"{ATTN}.qkv_proj"
    tensors = modelopt(name, 128, 32, factor=3e-3)
    checkpoint = open_checkpoint(write(tensors))
    assert torch.equal(value(load_linear(checkpoint, name)), dense(tensors, name))
    two = load_linear(checkpoint, name, parts=(64, 32, 32), shard=Shard(rank=1, size=2, how="column"))
    rows = [*range(32, 64), *range(80, 96), *range(112, 128)]
    assert torch.equal(value(two), dense(tensors, name)[rows])


def test_a_scale_per_part_is_never_cut(write):
    name = f"{ATTN}.qkv_proj"
    tensors = modelopt(name, 128, 32)
    tensors[f"{name}.weight_scale_2"] = torch.tensor([1e-3, 2e-3, 5e-4])
    checkpoint = open_checkpoint(write(tensors))
    expected = dense(tensors, name, factor=1.0)
    expected[:64] *= torch.tensor(1e-3).double()
    expected[64:96] *= torch.tensor(2e-3).double()
    expected[96:] *= torch.tensor(5e-4).double()
    assert torch.equal(value(load_linear(checkpoint, name, parts=(64, 32, 32))), expected)
    for rank in (0, 1):
        got = load_linear(checkpoint, name, parts=(64, 32, 32), shard=Shard(rank=rank, size=2, how="column"))
        rows = [*range(32 * rank, 32 * rank + 32), *(64 + 16 * rank + i for i in range(16))]
        rows += [96 + 16 * rank + i for i in range(16)]
        assert torch.equal(value(got), expected[rows])


@pytest.mark.parametrize("leaf", ["up_proj", "gate_up_proj"])
def test_a_scale_per_row_goes_with_its_row(write, leaf):
    name = f"{MLP}.{leaf}"
    tensors = modelopt(name, 64, 32)
    tensors[f"{name}.weight_scale_2"] = torch.rand(64) + 0.1
    checkpoint = open_checkpoint(write(tensors))
    whole = dense(tensors, name)
    assert torch.equal(value(load_linear(checkpoint, name)), whole)
    halves = [[*range(32)], [*range(32, 64)]]
    if leaf == "gate_up_proj":
        halves = [[*range(16), *range(32, 48)], [*range(16, 32), *range(48, 64)]]
    for rank in range(2):
        rows = load_linear(checkpoint, name, shard=Shard(rank=rank, size=2, how="column"))
        assert torch.equal(value(rows), whole[halves[rank]])
        columns = load_linear(checkpoint, name, shard=Shard(rank=rank, size=2, how="row"))
        assert torch.equal(value(columns), whole[:, 16 * rank : 16 * rank + 16])


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3)])
def test_a_scale_per_part_needs_as_many_parts(write, shape):
    name = f"{ATTN}.qkv_proj"
    tensors = modelopt(name, 128, 32)
    tensors[f"{name}.weight_scale_2"] = torch.tensor([1e-3, 2e-3, 5e-4]).reshape(shape)
    checkpoint = open_checkpoint(write(tensors))
    with pytest.raises(InvalidInput, match=r"rows must be told apart.*pass parts=, 3 numbers of 128 rows"):
        load_linear(checkpoint, name)
    for parts in ((128,), (64, 64), (32,) * 4, (64, 64, 0)):
        with pytest.raises(InvalidInput, match=r"wrong parts; got .*; expected 128 rows in 3 parts, one per global"):
            load_linear(checkpoint, name, parts=parts)
    got = load_linear(checkpoint, name, parts=(64, 32, 32))
    rows = torch.tensor([1e-3] * 64 + [2e-3] * 32 + [5e-4] * 32)
    assert torch.equal(got.weight_scale_2, rows)
    ct = {
        f"{name}.weight_packed": tensors[f"{name}.weight"],
        f"{name}.weight_scale": tensors[f"{name}.weight_scale"],
        f"{name}.weight_global_scale": torch.tensor([1000.0, 500.0, 2000.0]).reshape(shape),
    }
    got = load_linear(open_checkpoint(write(ct, folder="ct")), name, parts=(64, 32, 32))
    assert torch.equal(got.weight_scale_2, 1 / torch.tensor([1000.0] * 64 + [500.0] * 32 + [2000.0] * 32))


def test_rows_of_a_layer_that_is_stored_fused_must_be_told_apart(write):
    name = f"{ATTN}.qkv_proj"
    checkpoint = open_checkpoint(write(modelopt(name, 128, 32)))
    with pytest.raises(InvalidInput, match=r"qkv_proj is stored fused.*rows of .*q_proj.*pass parts="):
        load_linear(checkpoint, name, shard=Shard(rank=0, size=2, how="column"))
    with pytest.raises(InvalidInput, match=r"wrong parts; got \(64, 32\); expected 128 rows$"):
        load_linear(checkpoint, name, parts=(64, 32))
    for alone in (Shard(rank=0, size=1, how="column"), Shard(rank=1, size=2, how="row")):
        assert load_linear(checkpoint, name, shard=alone).weight.shape[0] == 128


def test_the_halves_of_a_stored_gate_up_are_divided_separately(write):
    name = f"{MLP}.gate_up_proj"
    tensors = modelopt(name, 64, 32)
    got = load_linear(open_checkpoint(write(tensors)), name, shard=Shard(rank=1, size=2, how="column"))
    assert torch.equal(value(got), dense(tensors, name)[[*range(16, 32), *range(48, 64)]])


@pytest.mark.parametrize("size", [2, 4])
def test_columns_are_divided_on_groups_and_the_products_add_up(write, size):
    name = f"{MLP}.down_proj"
    tensors = modelopt(name, 24, 128, bias=True, pqs=True)
    checkpoint = open_checkpoint(write(tensors))
    parts = [load_linear(checkpoint, name, shard=Shard(rank=rank, size=size, how="row")) for rank in range(size)]
    assert torch.equal(torch.cat([value(part) for part in parts], 1), dense(tensors, name))
    assert torch.equal(torch.cat([part.pre_quant_scale for part in parts]), tensors[f"{name}.pre_quant_scale"])
    # the sum over ranks must have the bias once
    assert parts[0].bias is not None and all(part.bias is None for part in parts[1:])


def test_rows_are_divided_and_the_input_scale_is_not(write):
    name = f"{MLP}.up_proj"
    tensors = modelopt(name, 48, 64, bias=True, pqs=True)
    checkpoint = open_checkpoint(write(tensors))
    parts = [load_linear(checkpoint, name, shard=Shard(rank=rank, size=3, how="column")) for rank in range(3)]
    assert torch.equal(torch.cat([value(part) for part in parts]), dense(tensors, name))
    assert torch.equal(torch.cat([part.bias for part in parts]), tensors[f"{name}.bias"])
    assert all(torch.equal(part.pre_quant_scale, tensors[f"{name}.pre_quant_scale"]) for part in parts)


def test_parts_may_be_divided_differently(write, qkv):
    shards = [Shard(rank=3, size=4, how="column"), *[Shard(rank=1, size=2, how="column")] * 2]
    got = load_linear(open_checkpoint(write(qkv)), [f"{ATTN}.{part}_proj" for part in "qkv"], shard=shards)
    expected = [dense(qkv, f"{ATTN}.q_proj")[48:], *(dense(qkv, f"{ATTN}.{part}_proj")[16:] for part in "kv")]
    assert torch.equal(value(got), torch.cat(expected))


def test_shards_of_a_fused_layer_have_the_same_columns(write):
    tensors = modelopt(f"{MLP}.gate_proj", 16, 64, 1) | modelopt(f"{MLP}.up_proj", 16, 64, 2)
    names, checkpoint = [f"{MLP}.gate_proj", f"{MLP}.up_proj"], open_checkpoint(write(tensors))
    first, second = (Shard(rank=rank, size=2, how="row") for rank in range(2))
    got = load_linear(checkpoint, names, shard=[second, second])
    assert torch.equal(value(got), torch.cat([dense(tensors, name) for name in names])[:, 32:])
    for other in (first, Shard(rank=0, size=1, how="row"), Shard(rank=0, size=2, how="column")):
        with pytest.raises(InvalidInput, match=r"shards do not fit; got .*; expected the same columns of each"):
            load_linear(checkpoint, names, shard=[second, other])
    with pytest.raises(InvalidInput, match=r"wrong number of shards; got 1; expected 2"):
        load_linear(checkpoint, names, shard=[second])
    with pytest.raises(InvalidInput, match=r"no layer is named"):
        load_linear(checkpoint, [])


def test_a_group_is_never_cut(write):
    name = f"{MLP}.down_proj"
    tensors = modelopt(name, 8, 1856)
    checkpoint = open_checkpoint(write(tensors))
    with pytest.raises(InvalidInput, match=r"mlp\.down_proj cannot be divided over 8 ranks; got 1856, or 232 a rank"):
        load_linear(checkpoint, name, shard=Shard(rank=0, size=8, how="row"))
    parts = [load_linear(checkpoint, name, shard=Shard(rank=r, size=8, how="row", uneven=True)) for r in range(8)]
    assert [2 * part.weight.shape[1] for part in parts] == [240] * 4 + [224] * 4
    assert torch.equal(torch.cat([value(part) for part in parts], 1), dense(tensors, name))


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


def test_lm_head_may_be_quantised_whatever_the_config_says(write):
    tensors = modelopt("lm_head", 64, 32)
    with pytest.warns(UserWarning, match=r"does not call these layers NVFP4, but their tensors are.*: lm_head"):
        checkpoint = open_checkpoint(write(tensors))
    assert same(tensors, "lm_head", load_linear(checkpoint, "lm_head"))


def test_a_dense_layer_that_the_config_calls_nvfp4_is_a_warning_and_no_weight(write):
    tensors = modelopt(f"{MLP}.up_proj", 16, 32) | {
        f"{MLP}.down_proj.weight": torch.zeros(32, 16, dtype=torch.bfloat16),
        "model.embed_tokens.weight": torch.zeros(64, 32, dtype=torch.bfloat16),
    }
    with pytest.warns(UserWarning, match=r"their weights are dense, so they are left dense: [\w.]*down_proj$"):
        checkpoint = open_checkpoint(write(tensors))
    with pytest.raises(
        InvalidInput, match=r"layers\.0\.mlp\.down_proj is not quantised; got .*BF16 \(32, 16\).*ignore"
    ):
        load_linear(checkpoint, f"{MLP}.down_proj")


def test_a_tied_lm_head_is_the_embedding(write):
    checkpoint = open_checkpoint(write(modelopt(f"{MLP}.up_proj", 16, 32), config={"tie_word_embeddings": True}))
    with pytest.raises(InvalidInput, match=r"no lm_head; got tie_word_embeddings.*use the embedding"):
        load_linear(checkpoint, "lm_head")


def test_names_of_another_dialect_than_the_config_count(write):
    tensors = modelopt(f"{MLP}.up_proj", 16, 32, factor=2.0**-9)
    with pytest.warns(UserWarning, match=r"is of modelopt, but the tensors are named and scaled as by compressed-tens"):
        checkpoint = open_checkpoint(write(as_ct(tensors)))
    assert torch.equal(value(load_linear(checkpoint, f"{MLP}.up_proj")), dense(tensors, f"{MLP}.up_proj"))


def test_another_group_size_in_the_config_is_a_warning(write):
    tensors = modelopt(f"{MLP}.up_proj", 16, 64)
    with pytest.warns(UserWarning, match=r"says group size 32, but the tensors have 16: .*up_proj"):
        checkpoint = open_checkpoint(write(tensors, hf={"quant_algo": "NVFP4", "group_size": 32}))
    assert same(tensors, f"{MLP}.up_proj", load_linear(checkpoint, f"{MLP}.up_proj"))


def test_without_a_config_the_tensors_decide(write):
    with pytest.warns(UserWarning, match="no quantisation config"):
        checkpoint = open_checkpoint(write(modelopt(f"{MLP}.up_proj", 16, 32), hf=None))
    assert load_linear(checkpoint, f"{MLP}.up_proj").weight.shape == (16, 16)


def test_a_config_and_tensors_that_agree_are_no_warning(write):
    tensors = modelopt(f"{MLP}.up_proj", 16, 32) | {"lm_head.weight": torch.zeros(64, 32, dtype=torch.bfloat16)}
    tensors |= {"model.norm.weight": torch.ones(32), f"{MLP}.gate.weight": torch.ones(4, 32)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = open_checkpoint(write(tensors))
    assert set(checkpoint.dense) == {"lm_head.weight", "model.norm.weight", f"{MLP}.gate.weight"}


def test_prediction_layers_and_those_beyond_the_last_are_extra(write):
    checkpoint = open_checkpoint(write(modelopt(f"{MLP}.up_proj", 16, 32), config={"num_hidden_layers": 4}))
    assert [
        checkpoint.is_extra(name)
        for name in ("model.layers.3.mlp.up_proj", "model.layers.4.mlp.up_proj", "mtp.layers.0.mlp.up_proj", "lm_head")
    ] == [False, True, True, False]
    assert not checkpoint.is_extra("model.layers.².mlp.up_proj")  # a digit, but no number


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


def test_layers_that_are_fused_must_share_what_is_applied_to_x(write):
    gate, up = f"{MLP}.gate_proj", f"{MLP}.up_proj"
    tensors = modelopt(gate, 16, 32, 1, pqs=True) | modelopt(up, 16, 32, 2)
    with pytest.raises(InvalidInput, match=r"incomplete; got one for .*gate_proj\.pre_quant_scale, none for .*up_proj"):
        load_linear(open_checkpoint(write(tensors)), [gate, up])
    tensors[f"{up}.pre_quant_scale"] = tensors[f"{gate}.pre_quant_scale"] * 2
    with pytest.raises(InvalidInput, match=r"pre_quant_scale differs; got other values in .*up_proj"):
        load_linear(open_checkpoint(write(tensors)), [gate, up])
    tensors[f"{up}.pre_quant_scale"] = tensors[f"{gate}.pre_quant_scale"].clone()
    got = load_linear(open_checkpoint(write(tensors)), [gate, up])
    assert torch.equal(got.pre_quant_scale, tensors[f"{gate}.pre_quant_scale"])


def test_a_bias_of_some_parts_is_zero_for_the_others(write, qkv):
    tensors = qkv | {f"{ATTN}.k_proj.bias": torch.arange(32.0)}
    names = [f"{ATTN}.{part}_proj" for part in "qkv"]
    got = load_linear(open_checkpoint(write(tensors)), names)
    assert torch.equal(got.bias, torch.cat([torch.zeros(64), torch.arange(32.0), torch.zeros(32)]))
    tensors[f"{ATTN}.v_proj.bias"] = torch.zeros(32).bfloat16()
    with pytest.raises(InvalidInput, match=r"biases of different dtypes; got BF16, F32"):
        load_linear(open_checkpoint(write(tensors, folder="two")), names)


def test_layers_of_another_x_are_not_fused(write):
    tensors = modelopt(f"{MLP}.up_proj", 16, 32) | modelopt(f"{MLP}.down_proj", 32, 16)
    with pytest.raises(InvalidInput, match=r"do not read the same x; got .*up_proj: 32, .*down_proj: 16"):
        load_linear(open_checkpoint(write(tensors)), [f"{MLP}.up_proj", f"{MLP}.down_proj"])


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


def test_a_folder_without_tensors_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"no \*\.safetensors there"):
        open_checkpoint(tmp_path)
    with pytest.raises(InvalidInput, match=r"no such folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_file_that_is_cut_short_is_named(write):
    path = write(modelopt(f"{MLP}.up_proj", 16, 32))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match=r"model\.safetensors cannot be read.*cut short"):
        open_checkpoint(path)


def test_a_file_that_is_missing_is_named_with_its_tensors(write):
    path = write(modelopt(f"{MLP}.up_proj", 16, 32), files=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"no model-00002-of-00003\.safetensors.*up_proj\.weight_scale"):
        open_checkpoint(path)


def test_an_index_with_a_name_that_no_file_has_is_named(write):
    path = write(modelopt(f"{MLP}.up_proj", 16, 32), files=2)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], 300 * "x")
    file.write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match="is incomplete; got no xxx"):
        open_checkpoint(path)


def test_an_index_that_does_not_fit_names_the_tensors(write):
    path = write(modelopt(f"{MLP}.up_proj", 16, 32), files=2)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    moved = index["weight_map"].pop(f"{MLP}.up_proj.weight_scale")
    index["weight_map"]["model.nothing"] = moved
    file.write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match=r"where it says: model\.nothing; not in it: .*up_proj\.weight_scale"):
        open_checkpoint(path)


def test_a_tensor_in_two_files_without_an_index_is_named(write):
    path = write(modelopt(f"{MLP}.up_proj", 16, 32))
    (path / "a.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    (path / "model.safetensors").rename(path / "b.safetensors")
    with pytest.raises(InvalidInput, match=r"up_proj\.\w+ is in two files; got a\.safetensors and b\.safetensors"):
        open_checkpoint(path)


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
