"""The two-pass kernels for experts in the interpreter (TRITON_INTERPRET=1), and compiled without a GPU otherwise."""

import os
from dataclasses import replace

import pytest
import torch
from nvfp4.kernels.moe import (
    _two_pass_experts,
    two_pass_grouped,
    two_pass_grouped_fragment,
    two_pass_moe,
    two_pass_moe_fragment,
)
from nvfp4.kernels.moe._two_pass_experts import Chunks, TwoPassExpertsConfig, products, smem_bytes
from nvfp4.kernels.problem import Problem
from nvfp4.testing.conformance import H200
from nvfp4.testing.experts import GroupedCase, MoeCase

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: kernels are interpreted, not compiled")

CPU = torch.device("cpu")
CONFIG = TwoPassExpertsConfig(block_m=64, block_n=64, stages=2, chunk_mib=64)
GROUPED = Problem(op="grouped_gemm", n=40, k=80, experts=5)
MOE = Problem(op="moe", n=48, k=80, experts=5, top_k=2, activation="swiglu")
BIG = Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="swiglu")


@pytest.fixture(params=[False, True], ids=["at once", "in chunks"])
def chunks(request, monkeypatch):
    """With the latter a chunk holds two of five experts."""
    if request.param:
        monkeypatch.setattr(_two_pass_experts, "_expert_bytes", lambda problem: 32 << 20)
    return request.param


def run(kernel, case):
    case = replace(case, layout_id=kernel.layout(H200, case.problem))
    out = torch.full(case.shape, float("nan"), dtype=case.x.dtype)
    case.launch(kernel.build(H200, case.problem, CONFIG), out)
    return case, out


@interpreted
@pytest.mark.parametrize("kernel", [two_pass_grouped.KERNEL, two_pass_grouped_fragment.KERNEL], ids=lambda k: k.name)
@pytest.mark.parametrize("seed", [1, 2])
def test_grouped(kernel, seed, chunks):
    problem = replace(GROUPED, dtype="float16" if seed % 2 else "bfloat16")
    case, out = run(kernel, GroupedCase.random(problem, 37, seed, CPU))
    case.compare(out)


@interpreted
@pytest.mark.parametrize("kernel", [two_pass_moe.KERNEL, two_pass_moe_fragment.KERNEL], ids=lambda k: k.name)
@pytest.mark.parametrize(("seed", "chunks"), [(1, False), (10, True), (28, True), (55, False)], indirect=["chunks"])
def test_options_of_moe(kernel, seed, chunks):
    activation = ("swiglu", "relu2", "swigluoai", "situ", "geglu")[seed % 5]
    dtype, top_k = "bfloat16" if seed % 2 else "float16", 1 if seed & 32 else 2
    case, out = run(kernel, MoeCase.random(replace(MOE, activation=activation, dtype=dtype, top_k=top_k), 9, seed, CPU))
    case.compare(out)


@interpreted
@pytest.mark.parametrize("kernel", [two_pass_moe.KERNEL, two_pass_moe_fragment.KERNEL], ids=lambda k: k.name)
def test_many_tokens_in_parts_and_several_steps(kernel, monkeypatch):
    problem = replace(MOE, n=80, k=144, experts=2)
    monkeypatch.setattr(two_pass_moe, "SUM_BYTES", 8 * problem.top_k * (4 * problem.k + 2 * problem.n))
    case, out = run(kernel, MoeCase.random(problem, 19, 26, CPU))
    case.compare(out)


@interpreted
@pytest.mark.parametrize("kernel", [two_pass_grouped.KERNEL, two_pass_grouped_fragment.KERNEL], ids=lambda k: k.name)
def test_experts_without_rows_are_not_dequantised(kernel, monkeypatch):
    case = GroupedCase.random(GROUPED, 20, 3, CPU)
    case = replace(case, offsets=torch.tensor([0, 0, 12, 12, 20, 20]).int(), layout_id=kernel.layout(H200, GROUPED))
    launcher, seen = kernel.build(H200, GROUPED, CONFIG), []

    def multiply(grid, *arguments):
        seen.append(arguments[1].isnan().flatten(1).any(1).tolist())
        return product(grid, *arguments)

    product = launcher.product.launch
    monkeypatch.setattr(launcher.product, "launch", multiply)
    out = torch.empty(case.shape, dtype=case.x.dtype)
    case.launch(launcher, out)
    case.compare(out)
    assert seen == [[True, False, True, False, True]]


@interpreted
def test_wrong_offsets_touch_no_other_memory():
    case = GroupedCase.random(GROUPED, 20, 2, CPU)
    for offsets in ([0, 900, 3, -7, 20, 40], [5, 4, 3, 2, 1, 0], [-9, -9, 99, 99, 99, 99]):
        wrong = replace(case, offsets=torch.tensor(offsets).int())
        buffer = torch.full((24, GROUPED.n), 7.0, dtype=case.x.dtype)
        wrong.launch(two_pass_grouped.KERNEL.build(H200, GROUPED, CONFIG), buffer[2:22])
        assert (buffer[:2] == 7).all() and (buffer[22:] == 7).all()


def test_what_is_valid():
    kernel, config = two_pass_moe.KERNEL, replace(CONFIG, chunk_mib=1024)
    assert kernel.is_valid(H200, BIG, config, 256)
    assert "16 rows and more per expert, not 2040" in kernel.is_valid(H200, BIG, config, 255).reason
    assert (
        "128 rows by 2 x 256 spill"
        in kernel.is_valid(H200, BIG, replace(config, block_m=128, block_n=256), 4096).reason
    )
    small = replace(BIG, experts=8)
    assert "fit chunks of 64 MiB" in kernel.is_valid(H200, small, replace(config, chunk_mib=256), 4096).reason
    assert (
        "eighth of the device's memory"
        in kernel.is_valid(replace(H200, memory_bytes=4 << 30), BIG, config, 4096).reason
    )
    card = replace(H200, capability=(12, 0), smem_bytes=101376)
    tiles = replace(config, block_m=64, block_n=64, stages=4)  # 4 steps of 64 columns: x, gate and up, 2 bytes each
    assert (
        "needs 100352 bytes of shared memory"
        in kernel.is_valid(replace(card, smem_bytes=100351), BIG, tiles, 4096).reason
    )
    for config in kernel.space(card, BIG):
        if kernel.is_valid(card, BIG, config, 4096):
            assert config.stages * 64 * 2 * (config.block_m + 2 * config.block_n) <= 101376
    assert "needs sm_80" in kernel.supports(replace(H200, capability=(7, 5)), BIG).reason
    assert kernel.is_valid(H200, BIG, kernel.default_config(H200, BIG, 4096), 4096)


def test_chunks_stay_within_their_size_but_hold_an_expert():
    for problem, mib in ((BIG, 64), (BIG, 1024), (replace(BIG, n=8192, k=8192), 64)):
        chunks = Chunks(H200, problem, replace(CONFIG, chunk_mib=mib))
        dense = max(2 * rows * k for rows, k in products(problem))
        assert (
            chunks.experts == 1
            or chunks.experts * dense <= mib << 20 < (chunks.experts + 1) * dense
            or (chunks.experts == problem.experts)
        )


@compiled
@pytest.mark.parametrize(
    ("capability", "smem", "activations"),
    [
        ((8, 0), 166912, ("relu2",)),
        ((8, 9), 101376, ("swiglu",)),
        ((9, 0), 232448, ("swiglu", "relu2")),
        ((10, 0), 232448, ("relu2",)),
        ((12, 0), 101376, ("swiglu",)),
    ],
)
def test_shared_memory_is_what_is_promised_and_loops_do_not_spill(capability, smem, activations):
    from nvfp4.kernels.moe._triton_dense_device import dense_first, dense_second

    device = replace(H200, capability=capability, smem_bytes=smem)
    for activation in activations:
        problem = replace(BIG, activation=activation)
        config = two_pass_moe.KERNEL.default_config(device, problem, 4096)
        chunks = Chunks(device, problem, config)
        gated = problem.gated
        for launch in (
            chunks.product(dense_first, ACTIVATION=activation, GATED=gated, IN_TURNS=gated),
            chunks.product(dense_second, FLOAT_OUT=True),
        ):
            assert launch.program.smem_bytes <= smem_bytes(config, problem)
            assert launch.program.compiled.spill_bytes == 0
