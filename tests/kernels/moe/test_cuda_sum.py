"""The sum over a token's experts in CUDA C++: its PTX on NumPy, and compiled for every architecture."""

from dataclasses import replace

import pytest
import torch
from nvfp4.kernels.cuda.compile import compile_cuda
from nvfp4.kernels.moe import cuda_sum
from nvfp4.kernels.moe.cuda_sum import SUM, CudaSum
from nvfp4.kernels.moe.routing import local_experts
from nvfp4.testing.conformance import H200
from nvfp4.testing.ptx_launch import simulated


def in_order(results, ids, expert_map, experts, dtype):
    """float32, slot after slot; what a left-out slot holds is not looked at."""
    local = local_experts(ids, experts, expert_map)
    out = torch.zeros(ids.shape[0], results.shape[1])
    for token, row in enumerate(local.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0:
                out[token] += results[token * ids.shape[1] + slot]
    return out.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "top_k", "n"), [(5, 3, 528), (2, 1, 16), (1, 40, 512), (3, 70, 1040)])
@pytest.mark.parametrize("blocks", [1, 2, cuda_sum.BLOCKS_PER_UNIT])
def test_adds_in_the_order_of_slots(dtype, tokens, top_k, n, blocks, monkeypatch):
    """Also with so few blocks that each sums for several tokens."""
    monkeypatch.setattr(cuda_sum, "BLOCKS_PER_UNIT", blocks)
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 8, (tokens, top_k), generator=g, dtype=torch.int32)
    expert_map = torch.tensor([0, 1, -1, 2, 3, 9], dtype=torch.int32) if tokens == 5 else None
    results = torch.randn(tokens * top_k, n, generator=g)
    results[(local_experts(ids, 6, expert_map) < 0).flatten()] = torch.nan
    out = torch.full((tokens, n), torch.nan, dtype=dtype)
    with simulated([results, ids, out, *([] if expert_map is None else [expert_map])]):
        device = replace(H200, units=1)
        CudaSum(device, str(dtype).removeprefix("torch."), pdl=True)(results, ids, expert_map, 6, out)
    assert torch.equal(out, in_order(results, ids, expert_map, 6, dtype))


def test_weights_of_the_router():
    """Powers of two, so that the sums are exact; of a slot that is left out any weight is ignored."""
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(-1, 5, (4, 37), generator=g)
    results = torch.randn(4 * 37, 528, generator=g)
    router = 2.0 ** torch.randint(-3, 3, (4, 37), generator=g)
    router[ids < 0] = torch.nan
    out = torch.zeros(4, 528, dtype=torch.float16)
    with simulated([results, ids, out, router]):
        CudaSum(replace(H200, units=1), "float16", pdl=False)(results, ids, None, 5, out, router)
    assert torch.equal(out, in_order(results * router.view(-1, 1), ids, None, 5, torch.float16))


def test_nan_and_infinity_come_through():
    ids, out = torch.tensor([[0, 1]]), torch.zeros(1, 16, dtype=torch.bfloat16)
    results = torch.ones(2, 16)
    results[0, 3], results[1, 5], results[0, 7], results[1, 7] = torch.nan, torch.inf, torch.inf, -torch.inf
    with simulated([results, ids, out]):
        CudaSum(H200, "bfloat16", pdl=False)(results, ids, None, 2, out)
    assert out[0].isnan().nonzero().flatten().tolist() == [3, 7]
    assert out[0, 5] == torch.inf and out[0, 0] == 2


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_compiles_without_spills(capability, tmp_path, monkeypatch):
    monkeypatch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path))
    code = compile_cuda(SUM, capability, entry="sum", defines={"HALF": 1})
    assert code.spill_bytes == code.stack_bytes == code.static_smem_bytes == 0
    assert code.registers * cuda_sum.THREADS * cuda_sum.BLOCKS_PER_UNIT <= 65536
