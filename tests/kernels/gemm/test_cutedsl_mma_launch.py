"""The host side of `cutedsl_mma`: what a launch is given. Compilation and the driver are replaced."""

import pytest
import torch
from nvfp4.kernels.cuda.compile import Compiled
from nvfp4.kernels.gemm import cutedsl_mma
from nvfp4.kernels.gemm._cutedsl_mma import launch as module
from nvfp4.kernels.problem import Device, Problem

KERNEL = cutedsl_mma.CuteDslMma()
ADA = Device(kind="cuda", name="card", capability=(8, 9), units=128, smem_bytes=101376)
NAMES = (
    "x",
    "weight",
    "out",
    "global_scale",
    "bias",
    "partials",
    "counters",
    "x_stride",
    "m",
    "n",
    "k",
    "scale_stride",
    "bias_kind",
)


@pytest.fixture
def launched(monkeypatch):
    """Values of every launch, by name."""
    seen = []
    facts = {"registers": 1, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 0}
    monkeypatch.setattr(
        module, "compile_cutedsl", lambda *_, **__: Compiled(cubin=b"", entry="kernel", arch="sm_89", **facts)
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)

    def launch(self, grid_x, grid_y, grid_z, stream, *values):
        assert (grid_z, stream) == (1, 77)
        seen.append({"grid": (grid_x, grid_y), **dict(zip(NAMES, values, strict=True))})

    monkeypatch.setattr(module.CudaLaunch, "launch", launch)
    return seen


def config_of(split=1, rows=128, tokens=64):
    return cutedsl_mma.CuteDslMmaConfig(rows=rows, tokens=tokens, warps=4, block_k=64, stages=3, split=split)


def run(problem, config, m, *, x=None, scales=1, bias=None, pre_quant_scale=None):
    dtype = getattr(torch, problem.dtype)
    x = torch.ones((m, problem.k), dtype=dtype) if x is None else x
    out = torch.empty((m, problem.n), dtype=dtype)
    weight, scale = torch.zeros(2304, dtype=torch.uint8), torch.ones(scales)
    KERNEL.build(ADA, problem, config)(x, weight, None, scale, bias, pre_quant_scale, out)
    return x, weight, scale, out


def test_arguments(launched):
    problem = Problem(n=1000, k=4176)
    bias = torch.zeros(1000)
    x, weight, scale, out = run(problem, config_of(), 100, bias=bias, scales=1000)
    (got,) = launched
    assert got["grid"] == (8 * 2, 1)
    assert [got[name] for name in NAMES[:5]] == [tensor.data_ptr() for tensor in (x, weight, out, scale, bias)]
    assert [got[name] for name in NAMES[5:]] == [0, 0, 4176, 100, 1000, 4176, 1, 2]


def test_no_bias_and_bias_of_the_dtype_of_x(launched):
    problem = Problem(n=64, k=64, dtype="float16")
    run(problem, config_of(rows=64), 40)
    run(problem, config_of(rows=64), 40, bias=torch.zeros(64, dtype=torch.float16))
    assert [(got["scale_stride"], got["bias_kind"]) for got in launched] == [(0, 0), (0, 1)]
    assert launched[0]["bias"] == 0 != launched[1]["bias"]


def test_strided_rows_and_one_row(launched):
    problem = Problem(n=64, k=64)
    wide = torch.ones((40, 128), dtype=torch.bfloat16)
    run(problem, config_of(rows=64), 40, x=wide[:, :64])
    run(problem, config_of(rows=64, tokens=32), 1, x=wide.t()[:64, :1].t())  # one row has no stride
    assert [got["x_stride"] for got in launched] == [128, 64]


def test_pre_quant_scale_is_multiplied_first_and_leaves_x_alone(launched):
    problem = Problem(n=64, k=64)
    x, *_ = run(problem, config_of(rows=64), 40, pre_quant_scale=torch.full((64,), 1.5, dtype=torch.bfloat16))
    assert launched[0]["x"] not in (0, x.data_ptr())
    assert bool((x == 1).all())


def test_a_workspace_and_a_counter_per_tile_where_blocks_share_it(launched, monkeypatch):
    asked = []

    def zeroed_counters(device, count):
        asked.append(count)
        return torch.zeros(count, dtype=torch.int32)

    monkeypatch.setattr(module, "zeroed_counters", zeroed_counters)
    problem = Problem(n=4096, k=4096)
    run(problem, config_of(), 64)
    run(problem, config_of(split=4), 65)
    assert [got["grid"] for got in launched] == [(32, 1), (64, 4)]
    assert [bool(got["partials"]) and bool(got["counters"]) for got in launched] == [False, True]
    assert asked == [64]
    assert KERNEL.build(ADA, problem, config_of(split=4)).grid(65) == (64, 64 * 4 * 128 * 64)


@pytest.mark.parametrize(
    ("value", "capability", "asks"), [("1", (9, 0), True), ("1", (8, 9), False), ("", (9, 0), False)]
)
def test_dependent_launch_is_asked_for_only_from_sm_90_on(launched, monkeypatch, value, capability, asks):
    monkeypatch.setenv("NVFP4_PDL", value)
    device = Device(kind="cuda", name="card", capability=capability, units=128, smem_bytes=101376)
    assert KERNEL.build(device, Problem(n=4096, k=4096), config_of())._launch.pdl is asks
