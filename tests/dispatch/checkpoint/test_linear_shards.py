"""Dense layers divided over ranks: rows or columns, whole groups, nothing twice."""

import pytest
import torch
from nvfp4.dispatch.checkpoint import Shard, load_linear, open_checkpoint
from nvfp4.errors import InvalidInput
from nvfp4.testing.checkpoints import dense, modelopt

from .layers import ATTN, MLP, value


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


def test_the_halves_of_a_stored_gate_up_are_divided_separately(write):
    name = f"{MLP}.gate_up_proj"
    tensors = modelopt(name, 64, 32)
    got = load_linear(open_checkpoint(write(tensors)), name, shard=Shard(rank=1, size=2, how="column"))
    assert torch.equal(value(got), dense(tensors, name)[[*range(16, 32), *range(48, 64)]])


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
    for wrong in ("column", 1, [second, "column"]):
        with pytest.raises(InvalidInput, match=r"wrong shard; got .*; expected a Shard, or one for each layer"):
            load_linear(checkpoint, names, shard=wrong)
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
