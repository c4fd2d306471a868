"""Layers of several parts, stored one by one or fused: their global scales, and what they must share."""

import pytest
import torch
from nvfp4.dispatch.checkpoint import Shard, load_linear, open_checkpoint
from nvfp4.errors import InvalidInput
from nvfp4.testing.checkpoints import as_compressed_tensors as as_ct
from nvfp4.testing.checkpoints import dense, modelopt

from .layers import ATTN, MLP, value

pytestmark = pytest.mark.filterwarnings("ignore:.*named and scaled as by")  # configs here are ModelOpt's


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
    for parts in ((64.0, 32, 32), ("64", "32", "32"), 128):
        with pytest.raises(InvalidInput, match=r"wrong parts; got .*; expected 128 rows$"):
            load_linear(checkpoint, name, parts=parts)
    for alone in (Shard(rank=0, size=1, how="column"), Shard(rank=1, size=2, how="row")):
        assert load_linear(checkpoint, name, shard=alone).weight.shape[0] == 128


def test_parts_of_a_layer_whose_name_tells_none(write):
    name = f"{ATTN}.query_key_value"
    checkpoint = open_checkpoint(write(modelopt(name, 128, 32)))
    whole = load_linear(checkpoint, name)
    got = load_linear(checkpoint, name, parts=(64, 32, 32), shard=Shard(rank=1, size=2, how="column"))
    rows = [*range(32, 64), *range(80, 96), *range(112, 128)]
    assert torch.equal(got.weight, whole.weight[rows]) and torch.equal(value(got), value(whole)[rows])
    with pytest.raises(InvalidInput, match=r"query_key_value: wrong parts; got \(64, 32\); expected 128 rows$"):
        load_linear(checkpoint, name, parts=(64, 32))


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
