"""cpu_grouped and cpu_moe beyond what every kernel must do: threads, chunks of tokens, limits, autograd."""

import pytest
import torch
from nvfp4.kernels.moe import cpu_grouped, cpu_moe
from nvfp4.kernels.moe._cpu_experts import CpuExpertsConfig
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing.experts import experts_case

CPU = Device(kind="cpu", name="test", units=4, l2_bytes=32 << 20)
HERE = torch.device("cpu")
MOE = Problem(op="moe", n=80, k=64, experts=4, top_k=2, activation="swiglu")
GROUPED = Problem(op="grouped_gemm", n=80, k=64, experts=4)
BOTH = pytest.mark.parametrize(
    ("kernel", "problem"), [(cpu_moe.KERNEL, MOE), (cpu_grouped.KERNEL, GROUPED)], ids=["moe", "grouped"]
)


def run(kernel, problem, config, case):
    out = torch.full(case.shape, float("nan"), dtype=case.x.dtype)
    case.launch(kernel.build(CPU, problem, config), out)
    return out


@BOTH
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_and_blocks_do_not_change_the_result(kernel, problem, threads):
    case = experts_case(problem, 21, 3, HERE)
    alone = run(kernel, problem, CpuExpertsConfig(block_rows=64, threads=0), case)
    case.compare(alone)
    case.compare(run(kernel, problem, CpuExpertsConfig(block_rows=16, threads=threads), case))


@BOTH
def test_more_threads_than_blocks_with_work(kernel, problem):
    case = experts_case(problem, 1, 0, HERE)
    case.compare(run(kernel, problem, CpuExpertsConfig(block_rows=64, threads=4), case))


def test_many_tokens_are_done_in_parts(monkeypatch):
    case = experts_case(MOE, 23, 7, HERE)
    config = cpu_moe.KERNEL.default_config(CPU, MOE, 23)
    whole = run(cpu_moe.KERNEL, MOE, config, case)
    monkeypatch.setattr(cpu_moe, "SUM_BYTES", 4 * MOE.k * MOE.top_k * 5)
    parts = run(cpu_moe.KERNEL, MOE, config, case)
    case.compare(parts)
    assert torch.equal(whole.isnan(), parts.isnan())


@BOTH
def test_what_is_refused(kernel, problem):
    gpu = Device(kind="cuda", name="GPU", capability=(9, 0))
    assert "runs on CPUs" in kernel.supports(gpu, problem).reason
    assert kernel.supports(CPU, problem)

    def refusal(block_rows, threads, device=CPU):
        return kernel.is_valid(device, problem, CpuExpertsConfig(block_rows=block_rows, threads=threads), 1).reason

    assert "twice N" in refusal(256, 0)
    assert "fewer blocks of 128 rows than 8 threads" in refusal(128, 8)
    assert "do not fit" in refusal(64, 4, Device(kind="cpu", name="small", units=4, l2_bytes=1 << 14))


def test_inner_sizes_that_are_no_multiple_of_16_are_refused():
    moe = Problem(op="moe", n=72, k=64, experts=4, top_k=2, activation="swiglu")
    assert cpu_moe.KERNEL.supports(CPU, moe).reason == "inter = 72 is not a multiple of 16"


@BOTH
def test_nothing_is_recorded_for_parameters(kernel, problem):
    case = experts_case(problem, 5, 8, HERE)
    given = [tensor for tensor in case.tensors() if tensor.is_floating_point()]
    for tensor in given:
        tensor.requires_grad_()
    out = run(kernel, problem, kernel.default_config(CPU, problem, 5), case)
    assert not out.requires_grad
