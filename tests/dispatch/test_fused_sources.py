"""`nvfp4.nn.FusedMoE` made of experts that were read, of a checkpoint, and of dense weights."""

import nvfp4
import pytest
import torch
from nvfp4.dispatch.checkpoint import Shard, load_experts
from nvfp4.errors import InvalidInput
from nvfp4.kernels import reference
from nvfp4.testing.checkpoints import as_compressed_tensors

from .fused_experts import EXPERTS, HIDDEN, INTER, NAME, assert_right, checkpoint, expected, same_bytes, tensors

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


def test_what_load_experts_read_is_taken_over(call, tmp_path):
    found = tensors(bias=True, pqs=True)
    read = load_experts(checkpoint(tmp_path, found), NAME)
    made = nvfp4.nn.FusedMoE.from_experts(read)
    assert made.w13.data_ptr() == read.w13.data_ptr()
    assert_right(made(*call), expected(call, found))
    assert all(same_bytes(made.state_dict()[name], tensor) for name, tensor in found.items())
    with pytest.raises(InvalidInput, match="relu2 does not suit these experts; got experts with a gate"):
        nvfp4.nn.FusedMoE.from_experts(read, activation="relu2")


@pytest.mark.parametrize("ct", [False, True])
def test_experts_are_read_from_a_checkpoint_with_their_bytes(call, tmp_path, ct):
    found = tensors(names=("w1", "w3", "w2"), bias=True, pqs=True)
    stored = as_compressed_tensors(found) if ct else found
    source = checkpoint(tmp_path, stored)
    made = nvfp4.nn.FusedMoE.from_checkpoint(source, NAME)
    assert made.names == ("w1", "w3", "w2") and made.num_experts == EXPERTS
    state = made.state_dict()
    assert set(state) == set(stored) and all(same_bytes(state[name], tensor) for name, tensor in stored.items())
    assert_right(made(*call), expected(call, found, ("w1", "w3", "w2")))
    rank = nvfp4.nn.FusedMoE.from_checkpoint(source, NAME, experts=range(1, 3))
    assert rank.num_experts == EXPERTS and torch.equal(rank.w13, made.w13[1:3])


def test_shards_of_the_inner_size_add_up(call, tmp_path):
    found = tensors()
    source = checkpoint(tmp_path, found)
    shards = [nvfp4.nn.FusedMoE.from_checkpoint(source, NAME, shard=Shard(rank=r, size=2, how="row")) for r in range(2)]
    assert [part.inter for part in shards] == [INTER // 2] * 2
    assert_right(sum(part(*call).double() for part in shards), expected(call, found))


def test_what_a_checkpoint_lacks_is_named(tmp_path):
    found = tensors()
    del found["2.up_proj.weight"], found["2.up_proj.weight_scale"], found["2.up_proj.weight_scale_2"]
    with pytest.raises(InvalidInput, match=rf"{NAME}\.2 is incomplete; got no up"):
        nvfp4.nn.FusedMoE.from_checkpoint(checkpoint(tmp_path, found), NAME)


def test_experts_that_a_config_only_counts_need_no_memory(tmp_path):
    found = checkpoint(tmp_path, tensors(), config={"num_experts": 2**30})
    with pytest.raises(InvalidInput, match=rf"{NAME}\.{EXPERTS} is incomplete; got nothing of it"):
        nvfp4.nn.FusedMoE.from_checkpoint(found, NAME)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_dense_experts_are_quantised_with_gate_and_up_apart(call, dialect):
    g = torch.Generator().manual_seed(3)
    w13 = torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=g).bfloat16()
    w13[:, INTER:] *= 8
    w2 = torch.randn(EXPERTS, HIDDEN, INTER, generator=g).bfloat16()
    biases = {
        "w13_bias": torch.randn(EXPERTS, 2 * INTER).bfloat16(),
        "w2_bias": torch.randn(EXPERTS, HIDDEN).bfloat16(),
    }
    made = nvfp4.nn.FusedMoE.from_dense(w13, w2, dialect=dialect, **biases)
    weight, scale, factor = nvfp4.quantize(w13[1, INTER:])
    assert torch.equal(made.w13[1, INTER:], weight)
    assert torch.equal(made.w13_scale[1, INTER:].view(torch.uint8), scale.view(torch.uint8))
    torch.testing.assert_close(made.packed[0].global_scale[1, 1], factor, rtol=1e-6, atol=0)
    ref = reference.moe(
        call[0], made.w13, made.w13_scale, made.packed[0].global_scale, made.w2, made.w2_scale,
        made.packed[1].global_scale, *call[1:], activation="swiglu", round_output=False, **biases,
    )  # fmt: skip
    assert_right(made(*call), ref)
    shapes = nvfp4.nn.FusedMoE.from_dense(w13.to("meta"), w2.to("meta"))
    assert shapes.w13.is_meta and shapes.w13.shape == made.w13.shape
    with pytest.raises(InvalidInput, match="wrong shapes of dense experts for activation relu2"):
        nvfp4.nn.FusedMoE.from_dense(w13, w2, activation="relu2")
