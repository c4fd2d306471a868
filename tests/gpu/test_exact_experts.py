"""Every kernel of experts on this machine's GPU: exact products, and sums beyond float16.

Default configs at numbers of tokens from one to a long prompt.
"""

import pytest
import torch
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Problem
from nvfp4.testing import exact_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")


def kernels(op, **sizes):
    if not torch.cuda.is_available():
        return []
    problem = Problem(op=op, **sizes)
    found = [kernel for kernel in registry.kernels(op) if kernel.supports(describe("cuda"), problem)]
    return [pytest.param(kernel, id=kernel.name) for kernel in found]


def skip_unless_valid(kernel, problem, m):
    device = describe("cuda")
    if not (verdict := kernel.is_valid(device, problem, kernel.default_config(device, problem, m), m)):
        pytest.skip(f"{kernel.name}: {verdict.reason}")


@pytest.mark.parametrize("padding", [0, 480])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("k", [16, 64, 208])
@pytest.mark.parametrize("kernel", kernels("grouped_gemm", n=127, k=16, experts=3))
def test_every_code_and_scale_is_exact(kernel, k, dtype, padding):
    skip_unless_valid(kernel, Problem(op="grouped_gemm", n=127, k=k, experts=3, dtype=dtype), 32 + padding)
    exact_experts.check_exact_grouped(kernel, describe("cuda"), GPU, dtype, k=k, padding=padding)


@pytest.mark.parametrize("m", [1, 16, 64, 512])
@pytest.mark.parametrize("kernel", kernels("moe", n=512, k=64, experts=2, top_k=1, activation="swiglu"))
def test_sums_may_be_larger_than_float16(kernel, m):
    problem = Problem(op="moe", n=512, k=64, experts=2, top_k=1, activation="swiglu", dtype="float16")
    skip_unless_valid(kernel, problem, m)
    exact_experts.check_float16_range(kernel, describe("cuda"), GPU, m)
