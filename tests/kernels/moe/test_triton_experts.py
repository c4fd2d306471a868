"""triton_grouped and triton_moe in the interpreter (TRITON_INTERPRET=1), and compiled without a GPU otherwise."""

import os
import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from nvfp4.kernels import reference
from nvfp4.kernels.moe import activations, triton_grouped, triton_moe
from nvfp4.kernels.moe._triton_activation_device import activate
from nvfp4.kernels.moe._triton_experts import TritonExpertsConfig, smem_bytes
from nvfp4.kernels.moe.routing import most_tiles
from nvfp4.kernels.problem import Device, Problem
from nvfp4.kernels.weights.codec import pack_codes
from nvfp4.testing.conformance import H200
from nvfp4.testing.experts import GroupedCase, MoeCase

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: kernels are interpreted, not compiled")

CPU = torch.device("cpu")
SMALL = TritonExpertsConfig(block_m=16, block_n=64, stages=2)
MOE = Problem(op="moe", n=48, k=32, experts=3, top_k=2, activation="swiglu")


def run(kernel, case, config=SMALL):
    out = torch.full(case.shape, float("nan"), dtype=case.x.dtype)
    case.launch(kernel.build(H200, case.problem, config), out)
    return out


@triton.jit
def apply(g_ptr, u_ptr, out_ptr, limit, alpha, beta, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, activate(tl.load(g_ptr + at), tl.load(u_ptr + at), limit, alpha, beta, ACTIVATION))


@interpreted
@pytest.mark.parametrize("given", [{}, {"limit": 1.5}, {"limit": 0.0}], ids=str)
@pytest.mark.parametrize("name", [entry.name for entry in activations.ACTIVATIONS])
def test_activation(name, given):
    if "limit" not in activations.activation(name).defaults and given:
        pytest.skip(f"{name} has no limit")
    g = torch.cat([torch.linspace(-12, 12, 1000), 10.0 ** -torch.arange(1, 23), torch.tensor([float("nan"), 0.0])])
    u = torch.where(g.abs() < 0.1, 0.05, g.roll(313).nan_to_num())
    values = activations.constants(name, **given)
    out = torch.empty_like(g)
    apply[(1,)](g, u, out, *values, ACTIVATION=name, SIZE=1024)
    right = activations.activate(name, g.double(), u.double() if activations.activation(name).gated else None, values)
    torch.testing.assert_close(out.double(), right, rtol=3e-6, atol=1e-6, equal_nan=True)
    small = (g.abs() < 0.1) & (right.abs() > 1e-30)  # right relative to themselves too
    assert small.sum() > 15
    assert (out[small].double() / right[small] - 1).abs().max() < 3e-6


@interpreted
@pytest.mark.parametrize("seed", range(1, 64, 6))
def test_options_of_moe(seed):
    names = [entry.name for entry in activations.ACTIVATIONS]
    dtype = "float16" if seed % 4 == 1 else "bfloat16"
    top_k = 1 if seed & 32 else 2
    problem = replace(MOE, activation=names[seed % len(names)], dtype=dtype, top_k=top_k)
    case = MoeCase.random(problem, 5, seed, CPU)
    case.compare(run(triton_moe.KERNEL, case))


@interpreted
@pytest.mark.parametrize(("n", "k"), [(272, 32), (32, 272)])
def test_more_columns_than_one_step(n, k):
    case = MoeCase.random(replace(MOE, n=n, k=k, experts=2), 3, 17, CPU)
    case.compare(run(triton_moe.KERNEL, case))


@interpreted
@pytest.mark.parametrize("config", [SMALL, TritonExpertsConfig(block_m=32, block_n=128, stages=2)], ids=str)
def test_an_expert_with_several_tiles(config):
    case = MoeCase.random(replace(MOE, k=16, n=16), 40, 2, CPU)
    everything = replace(case, ids=torch.ones_like(case.ids), options={})
    everything.compare(run(triton_moe.KERNEL, everything, config))


@interpreted
def test_many_tokens_go_in_parts(monkeypatch):
    case = MoeCase.random(replace(MOE, k=16, n=16), 11, 2, CPU)
    whole = run(triton_moe.KERNEL, case)
    monkeypatch.setattr(triton_moe, "SUM_BYTES", 4 * 2 * (4 * 16 + 2 * 256))
    parts = run(triton_moe.KERNEL, case)
    assert torch.equal(parts.view(torch.int16), whole.view(torch.int16))
    case.compare(parts)


@interpreted
def test_token_by_token_gives_the_same_bits():
    case = MoeCase.random(replace(MOE, k=32, n=16), 6, 0, CPU, nan=False)
    whole = run(triton_moe.KERNEL, case)
    rows = range(6)
    one = [run(triton_moe.KERNEL, replace(case, x=case.x[i : i + 1], ids=case.ids[i : i + 1],
                                          router=case.router[i : i + 1])) for i in rows]  # fmt: skip
    assert torch.equal(torch.cat(one), whole)


@interpreted
def test_nothing_but_left_out_pairs():
    case = MoeCase.random(MOE, 4, 0, CPU, nan=False)
    assert not run(triton_moe.KERNEL, replace(case, ids=torch.full_like(case.ids, -1))).any()


@interpreted
@pytest.mark.parametrize("ends", [[0, 0, 0, 0], [2, 5, 5, 20], [0, 20, 20, 20], [20, 20, 20, 20]], ids=str)
def test_rows_of_no_expert_are_zero(ends):
    case = GroupedCase.random(Problem(op="grouped_gemm", n=20, k=32, experts=3), 20, 1, CPU)
    case = replace(case, offsets=torch.tensor(ends, dtype=torch.int32), x=case.x.nan_to_num())
    out = run(triton_grouped.KERNEL, case)
    assert not out[: ends[0]].any() and not out[ends[3] :].any()
    right = reference.grouped_gemm(case.x, case.weight, case.scale, case.global_scale, case.offsets)
    torch.testing.assert_close(out, right, rtol=2**-7, atol=1e-4)


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_product_is_exact(dtype):
    """Each code with each finite block scale of one sign, picked out by one-hot rows of x."""
    problem = Problem(op="grouped_gemm", n=127, k=16, experts=2, dtype=dtype)
    codes = (torch.arange(16) + torch.arange(127).unsqueeze(1)) % 16
    weight = torch.stack([pack_codes(codes.to(torch.uint8)), pack_codes(codes.flip(1).to(torch.uint8))])
    scale = torch.arange(127, dtype=torch.uint8).view(1, 127, 1).expand(2, -1, -1).contiguous()
    x = torch.eye(16, dtype=getattr(torch, dtype)).repeat(2, 1)
    args = (x, weight, scale, torch.tensor([[3e-5], [1.0]]), torch.tensor([0, 16, 32], dtype=torch.int32))
    out = torch.empty(32, 127, dtype=x.dtype)
    triton_grouped.KERNEL.build(H200, problem, SMALL)(*args, out)
    assert torch.equal(out, reference.grouped_gemm(*args))


def test_tiles_are_enough_for_every_division():
    g = torch.Generator().manual_seed(0)
    for rows in (1, 5, 16, 33, 200):
        for groups in (1, 3, 40):
            most = 0
            for _ in range(50):
                cuts = torch.randint(0, rows + 1, (groups - 1,), generator=g).tolist()
                ends = [0, *sorted(cuts), rows]
                most = max(most, sum(-(-(b - a) // 16) for a, b in pairwise(ends)))
            assert most <= most_tiles(rows, groups, 16) <= rows
    assert most_tiles(40, 3, 16) == 5  # 1 + 1 + 38 rows, for instance


KIB = 1024
DEVICES = {
    "sm_80": Device(kind="cuda", name="A100", capability=(8, 0), units=108, smem_bytes=163 * KIB),
    "sm_89": Device(kind="cuda", name="L40S", capability=(8, 9), units=142, smem_bytes=99 * KIB),
    "sm_90": Device(kind="cuda", name="H200", capability=(9, 0), units=132, smem_bytes=227 * KIB),
    "sm_100": Device(kind="cuda", name="B200", capability=(10, 0), units=148, smem_bytes=227 * KIB),
    "sm_120": Device(kind="cuda", name="RTX PRO 6000", capability=(12, 0), units=188, smem_bytes=99 * KIB),
}
QWEN = Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="swiglu")
NEMOTRON = Problem(op="moe", n=1856, k=2688, experts=128, top_k=6, activation="relu2", dtype="float16")
ODD = Problem(op="moe", n=80, k=2576, experts=512, top_k=10, activation="situ")
GROUPED = Problem(op="grouped_gemm", n=1536, k=2048, experts=128)
KERNELS = {"moe": triton_moe.KERNEL, "grouped_gemm": triton_grouped.KERNEL}


def resources(launch, folder):
    """Registers, stack and shared memory of a compiled kernel, by the cuobjdump that Triton brings."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(launch.compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return {"registers": int(registers), "stack": int(stack), "smem": launch.compiled.metadata.shared}


COMPILED = [  # with a gate, but for sm_80, whose mma.sync is that of sm_89 and sm_120 too
    ("sm_80", NEMOTRON, 1024),
    ("sm_80", GROUPED, 16),
    ("sm_89", QWEN, 16),
    ("sm_89", GROUPED, 16),
    ("sm_90", QWEN, 1024),
    ("sm_90", ODD, 1024),
    ("sm_90", GROUPED, 1024),
    ("sm_100", QWEN, 1024),
    ("sm_100", GROUPED, 1024),
    ("sm_120", QWEN, 1024),
    ("sm_120", GROUPED, 16),
    ("sm_120", ODD, 1),
]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "problem", "m"), COMPILED, ids=lambda value: getattr(value, "label", str(value)))
def test_defaults_compile_within_their_prediction(arch, problem, m, tmp_path):
    device, kernel = DEVICES[arch], KERNELS[problem.op]
    config = kernel.default_config(device, problem, m)
    assert kernel.is_valid(device, problem, config, m)
    launch = kernel.build(device, problem, config)
    products = [launch.product] if problem.op == "grouped_gemm" else [launch.first, launch.second]
    for product in products:
        used = resources(product, tmp_path)
        assert used["smem"] <= smem_bytes(config, problem) <= device.smem_bytes
        # Where words come by single bytes of scales, registers may run out; on Hopper none do.
        assert used["stack"] <= (0 if arch == "sm_90" else 512 if problem is ODD else 64)


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("problem", [QWEN, NEMOTRON, ODD, GROUPED], ids=lambda problem: problem.label)
def test_the_default_is_valid_for_every_m(arch, problem):
    device, kernel = DEVICES[arch], KERNELS[problem.op]
    for m in (1, 2, 7, 8, 16, 64, 300, 1024, 8192, 131072):
        config = kernel.default_config(device, problem, m)
        assert config in kernel.space(device, problem) and kernel.is_valid(device, problem, config, m)
    assert kernel.is_valid(device, problem, kernel.default_config(device, problem, 1), 1 << 20)


def test_what_is_refused():
    old = Device(kind="cuda", name="V100", capability=(7, 0), smem_bytes=96 * KIB)
    assert "needs sm_80 or newer" in triton_moe.KERNEL.supports(old, QWEN).reason
    assert "needs a CUDA device" in triton_moe.KERNEL.supports(Device(kind="cpu", name="CPU"), QWEN).reason
    thin = replace(QWEN, n=72)
    assert triton_moe.KERNEL.supports(H200, thin).reason == "inter = 72 is not a multiple of 16"
    wide = TritonExpertsConfig(block_m=64, block_n=64, stages=3)
    assert "only 8 rows" in triton_moe.KERNEL.is_valid(H200, QWEN, wide, 1).reason
    assert "shared memory" in triton_moe.KERNEL.is_valid(DEVICES["sm_120"], QWEN, wide, 512).reason
