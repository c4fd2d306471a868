"""Every kernel of experts on this machine's GPU: exact products, sums beyond float16, sizes beyond 32 bits.

Default configs at numbers of tokens from one to a long prompt.
"""

from dataclasses import replace

import pytest
import torch
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.moe.activations import constants
from nvfp4.kernels.moe.arguments import MoeArguments
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.layouts import first_layout, layout
from nvfp4.testing import exact_experts
from nvfp4.testing.experts import MoeCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
MANY = {"n": 1536, "k": 3584, "experts": 896, "top_k": 1, "activation": "swiglu"}
LONG = {"n": 64, "k": 4096, "experts": 16, "top_k": 8, "activation": "swiglu"}
TOKENS = 131200


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


def skip_on_small_gpus():
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GiB of GPU memory")


def stacked(layout_id, experts, n, k):
    """Weights of zeros but for the first and the last expert, which are equal: data, block scales, global scales."""
    codes = torch.randint(0, 256, (1, n, k // 2), dtype=torch.uint8, device=GPU)
    scale = torch.full((1, n, k // 16), 0x38, dtype=torch.uint8, device=GPU)
    one = layout(layout_id).pack(codes, scale, torch.ones(1, 1, device=GPU))
    stacks = []
    for part in (one.data, one.scale):
        stacks.append(None if part is None else torch.zeros((experts, *part.shape[1:]), dtype=part.dtype, device=GPU))
        if part is not None:
            stacks[-1][0] = stacks[-1][-1] = part[0]
    return (*stacks, torch.full((experts, 1), 1 / (3 * k**0.5), device=GPU))


@pytest.mark.parametrize("m", [4, 40, 3000])
@pytest.mark.parametrize("kernel", kernels("moe", **MANY))
def test_weights_beyond_32_bits(kernel, m):
    """The last expert lies above 2^32 bytes in w13, 2^31 in w2; a copy of the first, it gives the same bits."""
    skip_on_small_gpus()
    problem, device = Problem(op="moe", **MANY), describe("cuda")
    skip_unless_valid(kernel, problem, m)
    layout_id = kernel.layout(device, problem)
    first = stacked(first_layout(layout_id, problem), problem.experts, 2 * problem.n, problem.k)
    second = stacked(layout_id, problem.experts, problem.k, problem.n)
    x, found = torch.randn(m, problem.k, device=GPU).bfloat16(), []
    launcher = kernel.build(device, problem, kernel.default_config(device, problem, m))
    for expert in (0, problem.experts - 1):
        ids = torch.full((m, 1), expert, dtype=torch.int32, device=GPU)
        arguments = MoeArguments(
            x=x,
            **dict(zip(("w13", "w13_scale", "w13_scale_2"), first, strict=True)),
            **dict(zip(("w2", "w2_scale", "w2_scale_2"), second, strict=True)),
            topk_ids=ids,
            topk_weights=torch.ones(m, 1, device=GPU),
            constants=constants("swiglu"),
        )
        found.append(torch.empty_like(x))
        launcher(arguments, found[-1])
    assert found[0].float().std() > 0.01
    assert torch.equal(*found)


@pytest.mark.parametrize("kernel", kernels("moe", **LONG))
def test_rows_beyond_32_bits(kernel):
    """T * top_k * hidden > 2^31: the last rows are those that they should be."""
    skip_on_small_gpus()
    problem, device = Problem(op="moe", **LONG), describe("cuda")
    skip_unless_valid(kernel, problem, TOKENS)
    case = MoeCase.random(problem, 512, 0, GPU, nan=False, layout_id=kernel.layout(device, problem))
    rows = torch.arange(TOKENS, device=GPU) % 512
    many = replace(case, x=case.x[rows], ids=case.ids[rows], router=case.router[rows])
    out = torch.empty_like(many.x)
    launcher = kernel.build(device, problem, kernel.default_config(device, problem, TOKENS))
    launcher(many.arguments, out)
    tail = replace(many, x=many.x[-64:], ids=many.ids[-64:], router=many.router[-64:])
    tail.compare(out[-64:])
