"""A linear layer with its x and its right result, and memory that is not clean."""

import nvfp4
import torch
from nvfp4.kernels import reference
from nvfp4.testing import assert_gemm_close


class Case:
    def __init__(self, m, n, k, dtype=torch.bfloat16, device="cuda"):
        torch.manual_seed(m + 3 * n + 7 * k)
        self.weight, self.scale, self.gs = nvfp4.quantize(torch.randn(n, k, device=device))
        self.packed = nvfp4.pack(self.weight, self.scale, self.gs, dtype=dtype)
        self.x = torch.randn(m, k, device=device).to(dtype)
        self.n, self.k, self.dtype = n, k, dtype

    def check(self, got, x=None, gs=None, bias=None, pqs=None):
        x = self.x if x is None else x
        gs = self.gs if gs is None else gs
        ref = reference.gemm(x, self.weight, self.scale, gs, bias, pqs, round_output=False)
        assert_gemm_close(got.reshape(-1, self.n), ref.reshape(-1, self.n), k=self.k, dtype=self.dtype)


def poison():
    """Fill what the allocator will hand out next with NaN."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (64, 1024, 1 << 16, 1 << 20, 1 << 24)]
    blocks += [torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda") for size in (512, 1 << 18, 1 << 22)]
    torch.cuda.synchronize()
    del blocks
