"""Experts' blobs by torch operations on a GPU, where the packing kernel cannot run, and back: the bytes of a CPU."""

import pytest
import torch
from nvfp4.kernels.weights.experts import pack_experts
from nvfp4.kernels.weights.fragment_bytes import fill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def experts(count, n, k, low, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (count, n, k // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(low, 0x7F, (count, n, k // 16), generator=g).to(torch.int8).view(torch.uint8)
    return weight, scale.clamp(max=0xFE), torch.rand(count, 1, generator=g) + 0.5


@pytest.mark.parametrize("low", [-126, 1], ids=["any scales", "positive scales"])
@pytest.mark.parametrize("glu", ["", "-glu"])
@pytest.mark.parametrize("encoding", ["bf16", "fp16", "nib"])
@pytest.mark.parametrize(("count", "n", "k"), [(3, 96, 80), (8, 352, 512), (2, 64, 64), (40, 32, 1056)])
def test_the_bytes_are_those_of_a_cpu(count, n, k, encoding, glu, low):
    tensors = experts(count, n, k, low)
    there = pack_experts(*tensors, layout_id=f"fragment1-{encoding}{glu}")
    data = torch.empty(there.data.shape, dtype=torch.uint8, device="cuda")
    fill(encoding, tensors[0].cuda(), tensors[1].cuda(), data, gated=bool(glu))
    assert torch.equal(data.cpu(), there.data)
    here = pack_experts(*(t.cuda() for t in tensors), layout_id=there.layout)
    for got, right in zip(here.to_checkpoint(), there.to_checkpoint(), strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("glu", ["", "-glu"])
@pytest.mark.parametrize("low", [-126, 1], ids=["any scales", "positive scales"])
def test_both_ways_take_less_memory_than_the_weight(glu, low):
    weight, scale, factor = (t.cuda() for t in experts(64, 512, 1024, low))
    size = weight.nbytes + scale.nbytes
    packed = pack_experts(weight, scale, factor, layout_id=f"fragment1-bf16{glu}")
    data = torch.empty_like(packed.data)

    def peak(call):
        call()  # makes tables
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before

    assert peak(lambda: fill("bf16", weight, scale, data, gated=bool(glu))) < size
    assert torch.equal(data, packed.data)
    assert peak(packed.to_checkpoint) < 2 * size
