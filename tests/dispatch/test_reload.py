"""Weights that are replaced while a model lives: in place, in the same memory, or by another weight there."""

import nvfp4
import pytest
import torch
from nvfp4.kernels import reference

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


def other(c):
    """Another checkpoint of the same shape."""
    weight, scale, gs = nvfp4.quantize(torch.randn(c.n, c.k) * 3)
    return weight, scale.view(torch.uint8), gs


@pytest.mark.parametrize("as_weight", [False, True])
def test_a_checkpoint_copied_into_the_same_storage_counts_at_once(exact, case, as_weight):
    c = case()
    tensors = (c.weight.clone(), c.scale.clone(), c.gs.clone())
    packed = nvfp4.pack(*tensors)

    def call():
        return nvfp4.gemm(c.x, packed) if as_weight else nvfp4.gemm(c.x, *tensors)

    for _ in range(3):
        assert torch.equal(call(), c.ref)
    fresh = other(c)
    for mine, theirs in zip((packed.data, packed.scale, packed.global_scale.view(c.gs.shape)), fresh, strict=True):
        mine.copy_(theirs)
    if not as_weight:
        for mine, theirs in zip(tensors, fresh, strict=True):
            mine.copy_(theirs)
    assert torch.equal(call(), reference.gemm(c.x, *fresh))


def test_packing_again_after_a_reload_is_like_a_fresh_load(exact, case):
    c = case()
    weight, scale, gs = c.weight.clone(), c.scale.clone(), c.gs.clone()
    assert torch.equal(nvfp4.gemm(c.x, nvfp4.pack(weight, scale, gs)), c.ref)
    fresh = other(c)
    for mine, theirs in zip((weight, scale, gs), fresh, strict=True):
        mine.copy_(theirs)
    again = nvfp4.pack(weight, scale, gs)
    assert torch.equal(nvfp4.gemm(c.x, again), nvfp4.gemm(c.x, nvfp4.pack(*fresh)))
    assert torch.equal(nvfp4.gemm(c.x, again), reference.gemm(c.x, *fresh))


def test_a_module_moved_to_other_memory_is_followed(exact, case):
    c = case()
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(c.weight.clone(), requires_grad=False)
    for _ in range(3):
        assert torch.equal(nvfp4.gemm(c.x, layer.weight, c.scale, c.gs), c.ref)
    fresh = other(c)
    layer.weight.data = fresh[0]
    assert torch.equal(nvfp4.gemm(c.x, layer.weight, fresh[1], fresh[2]), reference.gemm(c.x, *fresh))
