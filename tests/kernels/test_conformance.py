"""Every registered kernel against the exact reference, as far as this process can run it.

CPU kernels run here; Triton kernels when TRITON_INTERPRET=1 (then CPU kernels do not, as the interpreter's process is
for Triton only); everything else on a GPU, in tests/gpu.
"""

import os
from functools import cache

import pytest
import torch
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.layouts import layout, to_layout
from nvfp4.testing import conformance, exact_experts

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = conformance.H200 if INTERPRET else describe("cpu")
CPU = torch.device("cpu")
DTYPES = ("bfloat16", "float16")
MS_TURN = (5, 33, 64)
EXPERTS_MS_TURN = (5, 33, 16)


@cache
def skip_reason(kernel) -> str:
    if kernel.conformance_skip:
        return kernel.conformance_skip
    if INTERPRET:
        return "" if "triton" in kernel.packages else "TRITON_INTERPRET=1: only Triton kernels run in this process"
    if "triton" in kernel.packages:
        return "Triton kernels need TRITON_INTERPRET=1 here, or a GPU (tests/gpu)"
    verdict = kernel.supports(DEVICE, conformance.problems(kernel.op)[-1])
    return verdict.reason


ALL = [kernel for op in registry.OPS for kernel in registry.kernels(op)]
HERE = [kernel for kernel in ALL if not skip_reason(kernel)]
NOT_HERE = [kernel for kernel in ALL if skip_reason(kernel)]


@pytest.fixture(autouse=True)
def one_thread():
    """Cases are tiny: on busy cores the barriers between threads cost more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def name(value) -> str:
    return value.name if hasattr(value, "name") else value.label


def cases():
    """(kernel, problem, Ms, index): all Ms natively; in the slow interpreter small problems, and one or two Ms in turn.

    Layers of experts are several products, and of every token some, so they get one M less, and none above 33.
    """
    for kernel in HERE:
        most = None if not INTERPRET else 100 * 80 if kernel.op == "gemm" else 80 * 48
        for index, problem in enumerate(conformance.problems(kernel.op, max_weights=most)):
            ms = conformance.MS
            if INTERPRET:
                experts = (EXPERTS_MS_TURN[index % 3],)
                ms = (MS_TURN[index % 3], conformance.MS[index % 6]) if kernel.op == "gemm" else experts
            yield pytest.param(kernel, problem, ms, index, id=f"{kernel.name}-{problem.label}")


@pytest.mark.parametrize("kernel", NOT_HERE, ids=name)
def test_not_run_here(kernel):
    pytest.skip(f"{kernel.name}: {skip_reason(kernel)}")


@pytest.mark.parametrize(("kernel", "problem", "ms", "index"), list(cases()))
def test_against_the_reference(kernel, problem, ms, index):
    verdict = kernel.supports(DEVICE, problem)
    if not verdict:
        pytest.skip(f"{kernel.name}: {verdict.reason}")
    ran = 0
    for m in ms:
        seed = 64 * index + m  # its low bits choose the features of the input
        sampled = 3 if not INTERPRET else 1 if not ran else 0
        for config in conformance.candidates(kernel, DEVICE, problem, m, sampled=sampled, seed=seed):
            conformance.check(kernel, DEVICE, CPU, problem, config, m, seed=seed + ran, repeat=not INTERPRET)
            ran += 1
    if not ran:
        pytest.skip(f"{kernel.name}: no valid config for M in {list(ms)}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [kernel for kernel in HERE if kernel.op == "gemm"], ids=name)
def test_every_product_is_exact(kernel, dtype):
    sizes = [k for k in (16, 64, 256) if kernel.supports(DEVICE, Problem(n=127, k=k, dtype=dtype))]
    assert sizes, f"{kernel.name} supports no K up to 256"
    less = {"rotations": 1, "global_scales": (3e-5,)} if INTERPRET else {}
    conformance.check_exact(kernel, DEVICE, CPU, dtype, k=sizes[0], **less)


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize("kernel", [kernel for kernel in HERE if kernel.op == "gemm"], ids=name)
def test_sums_may_be_larger_than_float16(kernel, m):
    """4096 products of 1 and 6 * 448: the raw sum is 11,010,048, times the global scale of 1e-5 it is 110.1."""
    problem = Problem(n=16, k=4096, dtype="float16")
    x = torch.ones(m, problem.k, dtype=torch.float16)
    weight = torch.full((problem.n, problem.k // 2), 0x77, dtype=torch.uint8)
    scale = torch.full((problem.n, problem.k // 16), 0x7E, dtype=torch.uint8)
    packed = to_layout(weight, scale, torch.tensor([1e-5]), layout_id=kernel.layout(DEVICE, problem))
    configs = conformance.candidates(kernel, DEVICE, problem, m, sampled=1 if INTERPRET else 5, seed=m)
    if not configs:
        pytest.skip(f"{kernel.name}: no valid config for M = {m}")
    for config in configs:
        out = torch.full((m, problem.n), float("nan"), dtype=torch.float16)
        kernel.build(DEVICE, problem, config)(x, packed.data, packed.scale, packed.global_scale, None, None, out)
        assert torch.equal(out, torch.full_like(out, 110.125)), config  # float16 numbers are 1/16 apart here


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [kernel for kernel in HERE if kernel.op == "grouped_gemm"], ids=name)
def test_every_product_of_experts_is_exact(kernel, dtype):
    exact_experts.check_exact_grouped(kernel, DEVICE, CPU, dtype, k=16 if INTERPRET else 96)


@pytest.mark.parametrize("kernel", [kernel for kernel in HERE if kernel.op == "grouped_gemm"], ids=name)
def test_rows_before_the_first_expert_and_behind_the_last_are_zero(kernel):
    """Weights of ones: 32 products of 1, times an expert's factor."""
    problem = Problem(op="grouped_gemm", n=20, k=32, experts=3)
    weight = torch.full((3, 20, 16), 0x22, dtype=torch.uint8)
    scale = torch.full((3, 20, 2), 0x38, dtype=torch.uint8)
    packed = layout(kernel.layout(DEVICE, problem)).pack(weight, scale, torch.tensor([[2.0], [5.0], [3.0]]))
    offsets = torch.tensor([2, 3, 3, 5], dtype=torch.int32)
    out = torch.full((7, 20), float("nan"), dtype=torch.bfloat16)
    launcher = kernel.build(DEVICE, problem, kernel.default_config(DEVICE, problem, 7))
    launcher(torch.ones(7, 32).bfloat16(), packed.data, packed.scale, packed.global_scale, offsets, out)
    assert out.tolist() == [[value] * 20 for value in (0, 0, 64, 96, 96, 0, 0)]


@pytest.mark.parametrize("m", [16] if INTERPRET else [1, 16, 64])
@pytest.mark.parametrize("kernel", [kernel for kernel in HERE if kernel.op == "moe"], ids=name)
def test_sums_of_experts_may_be_larger_than_float16(kernel, m):
    exact_experts.check_float16_range(kernel, DEVICE, CPU, m)
