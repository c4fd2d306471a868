"""Packing experts on a GPU: the bytes that a CPU makes, within the weight's own memory."""

import pytest
import torch
from nvfp4.kernels.weights.experts import pack_experts

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
@pytest.mark.parametrize(
    "layout", [f"fragment1-{name}{glu}" for name in ("bf16", "fp16", "nib") for glu in ("", "-glu")]
)
@pytest.mark.parametrize(("count", "n", "k"), [(3, 96, 80), (8, 352, 512), (2, 64, 64), (40, 32, 1056)])
def test_the_bytes_are_those_of_a_cpu(count, n, k, layout, low):
    tensors = experts(count, n, k, low)
    here = pack_experts(*(t.cuda() for t in tensors), layout_id=layout)
    there = pack_experts(*tensors, layout_id=layout)
    assert torch.equal(here.data.cpu(), there.data)
    for got, right in zip(here.to_checkpoint(), there.to_checkpoint(), strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("layout", ["fragment1-bf16", "fragment1-bf16-glu"])
@pytest.mark.parametrize("low", [-126, 1], ids=["any scales", "positive scales"])
def test_it_takes_less_memory_than_the_weight(layout, low):
    tensors = [t.cuda() for t in experts(64, 512, 1024, low)]
    size = sum(t.nbytes for t in tensors)
    packed = pack_experts(*tensors, layout_id=layout)  # tables are made

    def peak(call):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before

    assert peak(lambda: pack_experts(*tensors, layout_id=layout)) < packed.data.nbytes + size
    assert peak(packed.to_checkpoint) < 2 * size
