"""Runs a few configs of `marlin` once each, small enough for compute-sanitizer.

    compute-sanitizer --report-api-errors no --tool memcheck python bench/sanitize.py
    compute-sanitizer --tool racecheck python bench/sanitize.py

(cuda-bindings asks the driver for every function it knows; those that an older driver lacks are the API errors.)
"""

from __future__ import annotations

import torch
from nvfp4.kernels.device import describe
from nvfp4.kernels.gemm._marlin_model import token_tile
from nvfp4.kernels.gemm.marlin import KERNEL, MarlinConfig
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.layouts import to_layout

# n, k, m, dtype, pre_quant_scale; then subtiles, row groups, K groups, chunk, stages, split, meet, copy.
CASES = [
    (200, 1104, 5, "bfloat16", False, (2, 1, 4, 1, 2, 1, "memory", "bulk")),
    (200, 1104, 5, "bfloat16", True, (1, 3, 2, 1, 3, 2, "cluster", "bulk")),
    (264, 2048, 17, "float16", False, (4, 2, 2, 2, 2, 4, "memory", "bulk")),
    (264, 2048, 17, "bfloat16", False, (3, 2, 2, 2, 2, 2, "cluster", "async")),
    (130, 80, 64, "bfloat16", False, (1, 4, 1, 1, 2, 1, "memory", "bulk")),
]


def main() -> None:
    """One launch per case."""
    device = describe(torch.device("cuda", 0))
    for n, k, m, dtype, scaled, fields in CASES:
        subtiles, row_groups, k_groups, chunk, stages, split, meet, copy = fields
        config = MarlinConfig(
            tokens=token_tile(m),
            subtiles=subtiles,
            row_groups=row_groups,
            k_groups=k_groups,
            chunk=chunk,
            stages=stages,
            split=split,
            meet=meet,
            copy=copy,
        )
        problem = Problem(n=n, k=k, dtype=dtype)
        weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scale = torch.randint(0x30, 0x41, (n, k // 16), dtype=torch.uint8, device="cuda")
        one = torch.ones(1, device="cuda")
        data = to_layout(weight, scale, one, layout_id=KERNEL.layout(device, problem)).data
        x = torch.randn(m, k, device="cuda").to(getattr(torch, dtype))
        factors = torch.ones(k, device="cuda", dtype=x.dtype) if scaled else None
        out = torch.empty(m, n, device="cuda", dtype=x.dtype)
        KERNEL.build(device, problem, config)(x, data, None, one, torch.randn(n, device="cuda"), factors, out)
        torch.cuda.synchronize()
        print(problem.label, m, config.to_json())


if __name__ == "__main__":
    main()
