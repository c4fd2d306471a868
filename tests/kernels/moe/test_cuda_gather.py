"""x by position: the PTX of `gather.cu` on NumPy, and what the compiled kernel needs."""

import pytest
import torch
from nvfp4.kernels.cuda.compile import compile_cuda
from nvfp4.kernels.moe.cuda_gather import GATHER, CudaGather
from nvfp4.kernels.moe.cuda_routing import CudaRouting
from nvfp4.testing.conformance import H200
from nvfp4.testing.ptx_launch import simulated


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("k", "offset", "scaled"), [(1040, 0, False), (48, 1, True), (16, 24, True)])
def test_rows_and_weights_by_position(dtype, k, offset, scaled):
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
        CudaGather(H200, dtype, pdl=True)(x, vector, routed, router, out, factors)
    count = int(routed.offsets[-1])
    pairs = routed.pairs[:count].long()
    assert 0 < count < tokens * top_k
    right = x if vector is None else x * vector
    assert torch.equal(out[:count], right[pairs // top_k])
    assert torch.equal(factors[:count], router.flatten()[pairs])
    assert bool((out[count:] == 7).all()) and bool((factors[count:] == 7).all())


def test_compiles_without_spills(tmp_path, monkeypatch):
    monkeypatch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path))
    for half in (0, 1):
        code = compile_cuda(GATHER, (9, 0), entry="gather", defines={"HALF": half})
        assert code.spill_bytes == code.stack_bytes == code.static_smem_bytes == 0
        assert code.registers <= 40
