"""two_pass beyond what every kernel must do: grids of very many tokens."""

import pytest
import torch
from nvfp4.kernels.gemm import two_pass
from nvfp4.kernels.problem import Problem
from nvfp4.testing.conformance import H200

pytest.importorskip("triton")

GRID_LIMITS = ((1 << 31) - 1, 65535, 65535)  # of CUDA, in x, y and z


def test_grids_of_very_many_tokens_stay_within_cuda_s_limits(monkeypatch):
    grids = []

    class Recorder:
        def __init__(self, *args, **options):
            pass

        def launch(self, grid, *args):
            grids.append(grid)

    monkeypatch.setattr(two_pass, "TritonLaunch", Recorder)
    monkeypatch.setattr(two_pass, "interpreting", lambda: True)  # no cuBLAS here
    n, k, m = 272, 16, 300_000
    launcher = two_pass.KERNEL.build(H200, Problem(n=n, k=k), two_pass.TwoPassConfig(chunk_mib=0, block_words=512))
    weight, scale = torch.zeros(n, k // 2, dtype=torch.uint8), torch.zeros(n, k // 16, dtype=torch.uint8)
    x, out = torch.zeros(m, k, dtype=torch.bfloat16), torch.empty(1, dtype=torch.bfloat16).expand(m, n)
    launcher(x, weight, scale, torch.ones(n), None, None, out)
    assert len(grids) == 2
    assert all(0 < size <= limit for grid in grids for size, limit in zip(grid, GRID_LIMITS, strict=True))
    blocks = grids[1][0] * grids[1][1] * grids[1][2]
    assert blocks == -(-m // two_pass.FINISH_M) * -(-n // two_pass.FINISH_N)
