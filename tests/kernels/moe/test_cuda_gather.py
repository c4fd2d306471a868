"""x by position: the PTX of `gather.cu` on NumPy, and what the compiled kernel needs."""

from dataclasses import replace

import pytest
import torch
from nvfp4.kernels.cuda.compile import compile_cuda
from nvfp4.kernels.moe import cuda_gather
from nvfp4.kernels.moe.cuda_gather import GATHER, CudaGather
from nvfp4.kernels.moe.cuda_routing import CudaRouting
from nvfp4.testing.conformance import H200
from nvfp4.testing.ptx_launch import simulated


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("k", "offset", "scaled"), [(1040, 0, False), (48, 1, True), (16, 24, True), (2080, 0, True)])
@pytest.mark.parametrize("blocks", [1, 2, cuda_gather.BLOCKS_PER_UNIT])
def test_rows_and_weights_by_position(dtype, k, offset, scaled, blocks, monkeypatch):
    """Also with so few blocks that a warp copies several segments."""
    monkeypatch.setattr(cuda_gather, "BLOCKS_PER_UNIT", blocks)
    g = torch.Generator().manual_seed(k)
    tokens, top_k, experts = 9, 3, 4
    wide = torch.randn(tokens, k + offset, generator=g).to(getattr(torch, dtype))
    x = wide[:, offset:] if offset == 1 else wide[:, :k]
    vector = (0.5 + torch.rand(k, generator=g)).to(x.dtype) if scaled else None
    router = torch.rand(tokens, top_k, generator=g)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=g).int()
    out, factors = torch.full((tokens * top_k, k), 7.0, dtype=x.dtype), torch.full((tokens * top_k,), 7.0)
    known = [wide, ids, router, out, factors, *([vector] if scaled else [])]
    with simulated(known, seed=k):
        routed = CudaRouting(H200, experts)(ids, None, 16)
        CudaGather(replace(H200, units=1), dtype, pdl=True)(x, vector, routed, router, out, factors)
    count = int(routed.offsets[-1])
    pairs = routed.pairs[:count].long()
    assert 0 < count < tokens * top_k
    right = x if vector is None else x * vector
    assert torch.equal(out[:count], right[pairs // top_k])
    assert torch.equal(factors[:count], router.flatten()[pairs])
    assert bool((out[count:] == 7).all()) and bool((factors[count:] == 7).all())


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_compiles_without_spills(capability, tmp_path, monkeypatch):
    monkeypatch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path))
    for half in (0, 1):
        code = compile_cuda(GATHER, capability, entry="gather", defines={"HALF": half})
        assert code.spill_bytes == code.stack_bytes == code.static_smem_bytes == 0
        assert code.registers * cuda_gather.THREADS * cuda_gather.BLOCKS_PER_UNIT <= 65536
