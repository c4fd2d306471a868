"""The host side of `cutedsl_wgmma`: what a launch is given. Compilation and the driver are replaced."""

import math

import pytest
import torch
from nvfp4.kernels.cuda.compile import Compiled
from nvfp4.kernels.gemm import cutedsl_wgmma
from nvfp4.kernels.gemm._cutedsl_wgmma import launch as module
from nvfp4.kernels.problem import Problem
from nvfp4.testing.conformance import H200

KERNEL = cutedsl_wgmma.CuteDslWgmma()


@pytest.fixture
def launched(monkeypatch):
    """Values of every launch, by name."""
    names = [
        "map",
        "m",
        "k",
        "weight",
        "out",
        "global_scale",
        "bias",
        "partials",
        "flags",
        "m",
        "n",
        "k_blocks",
        "scale_stride",
        "bias_kind",
        "band",
    ]
    seen = []
    facts = {"registers": 1, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 0}
    monkeypatch.setattr(
        module, "compile_cutedsl", lambda *_, **__: Compiled(cubin=b"", entry="kernel", arch="sm_90a", **facts)
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    monkeypatch.setattr(module.TensorMaps, "get", lambda self, *matrix: matrix)

    def launch(self, grid_x, grid_y, grid_z, stream, *values):
        assert (grid_y, grid_z, stream) == (1, 1, 77)
        seen.append({"blocks": grid_x, **dict(zip(names, values, strict=True))})

    monkeypatch.setattr(module.CudaLaunch, "launch", launch)
    return seen


def config_for(problem, m, **changes):
    from dataclasses import replace

    return replace(KERNEL.default_config(H200, problem, m), **changes)


def run(problem, config, m, *, x=None, scales=1, bias=None, pre_quant_scale=None):
    x = torch.ones((m, problem.k), dtype=torch.bfloat16) if x is None else x
    out = torch.empty((m, problem.n), dtype=torch.bfloat16)
    weight, scale = torch.zeros(2304, dtype=torch.uint8), torch.ones(scales)
    KERNEL.build(H200, problem, config)(x, weight, None, scale, bias, pre_quant_scale, out)
    return x, weight, scale, out


def test_arguments(launched):
    problem = Problem(n=4096, k=4176)
    bias = torch.zeros(4096)
    x, weight, scale, out = run(problem, config_for(problem, 1024, stream_k=False), 1000, bias=bias, scales=4096)
    (got,) = launched
    assert got["map"] == (x.data_ptr(), 1000, 4176, 4176)
    assert (got["m"], got["n"], got["k"], got["k_blocks"]) == (1000, 4096, 4176, 66)
    assert [got[name] for name in ("weight", "out", "global_scale", "bias")] == [
        tensor.data_ptr() for tensor in (weight, out, scale, bias)
    ]
    assert (got["scale_stride"], got["bias_kind"], got["partials"], got["flags"]) == (1, 2, 0, 0)


def test_no_bias_and_bias_of_the_dtype_of_x(launched):
    problem = Problem(n=64, k=64)
    run(problem, config_for(problem, 16), 16)
    run(problem, config_for(problem, 16), 16, bias=torch.zeros(64, dtype=torch.bfloat16))
    assert [(got["scale_stride"], got["bias_kind"]) for got in launched] == [(0, 0), (0, 1)]
    assert launched[0]["bias"] == 0 != launched[1]["bias"]


def test_strided_rows_and_one_row(launched):
    problem = Problem(n=64, k=64)
    wide = torch.ones((20, 128), dtype=torch.bfloat16)
    run(problem, config_for(problem, 16), 16, x=wide[:16, :64])
    run(problem, config_for(problem, 16), 1, x=wide.t()[:64, :1].t())  # one row has no stride
    assert [got["map"][1:] for got in launched] == [(16, 64, 128), (1, 64, 64)]


def test_pre_quant_scale_is_rounded_to_the_dtype_of_x(launched, monkeypatch):
    problem = Problem(n=64, k=64)
    scaled = []
    monkeypatch.setattr(module.TensorMaps, "get", lambda self, pointer, *_: scaled.append(pointer))
    x, *_ = run(problem, config_for(problem, 16), 16, pre_quant_scale=torch.full((64,), 1.5, dtype=torch.bfloat16))
    assert scaled and scaled[0] != x.data_ptr()
    assert bool((x == 1).all())


@pytest.mark.parametrize(
    ("n", "k", "m", "tiles", "k_tiles"), [(4096, 4096, 16, 64, 32), (128, 256, 16, 2, 2), (28672, 4096, 128, 224, 32)]
)
def test_a_workspace_only_where_tiles_are_shared(launched, monkeypatch, n, k, m, tiles, k_tiles):
    asked = []

    def zeroed_counters(device, count):
        asked.append(count)
        return torch.zeros(count, dtype=torch.int32)

    monkeypatch.setattr(module, "zeroed_counters", zeroed_counters)
    problem = Problem(n=n, k=k)
    config = config_for(problem, m, multicast=1)
    run(problem, config, m)
    (got,) = launched
    blocks = min(132 * config.blocks_per_sm, tiles * max(1, k_tiles // 2))
    assert got["blocks"] == blocks
    shared = tiles % blocks != 0
    assert bool(got["partials"]) == bool(got["flags"]) == shared == bool(asked)
    assert asked == ([blocks * config.warpgroups] if shared else [])


def test_clusters_share_row_tiles(launched):
    problem = Problem(n=1000, k=8192)
    config = config_for(problem, 128, stream_k=False)
    assert config.multicast == 2
    run(problem, config, 128)
    assert launched[0]["blocks"] == 2 * math.ceil(1000 / (2 * config.rows))
