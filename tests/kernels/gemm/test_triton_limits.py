"""Which architectures the Triton candidates run on, and what they choose there; nothing is compiled."""

import pytest
import torch
from nvfp4.kernels.problem import Device, Problem

pytest.importorskip("triton")

from nvfp4.kernels.gemm import (
    _triton_host,
    triton_fused,
    triton_fused_fragment,
    triton_gemv,
    two_pass,
    two_pass_fragment,
)
from nvfp4.kernels.weights.fragment import blob_shape

KIB = 1024
MODULES = (triton_fused, triton_fused_fragment, triton_gemv, two_pass, two_pass_fragment)
KERNELS = [module.KERNEL for module in MODULES]
SMEM_BYTES = {  # that a block can opt in to
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (12, 0): 101376,
    (12, 1): 101376,
}
PROBLEMS = [Problem(n=n, k=k) for n in (1, 352, 4096, 28672) for k in (16, 1056, 4096, 28672)]
MS = (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 128, 129, 1024, 1025, 8192)


def card(capability) -> Device:
    return Device(
        kind="cuda",
        name="card",
        capability=capability,
        units=48 if capability == (12, 1) else 132,
        smem_bytes=SMEM_BYTES.get(capability, 64 * KIB),
        memory_bytes=24 << 30,
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_older_cards_are_refused_with_the_reason(kernel, capability):
    verdict = kernel.supports(card(capability), PROBLEMS[-1])
    assert not verdict and "sm_80" in verdict.reason and f"sm_{capability[0]}{capability[1]}" in verdict.reason


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("capability", SMEM_BYTES)
def test_the_default_is_valid_wherever_a_config_is(kernel, capability):
    device = card(capability)
    for problem in PROBLEMS:
        assert kernel.supports(device, problem)
        space = list(kernel.space(device, problem))
        for m in MS:
            default = kernel.default_config(device, problem, m)
            assert default in kernel.space(device, problem)
            if any(kernel.is_valid(device, problem, config, m) for config in space):
                assert kernel.is_valid(device, problem, default, m), (problem.label, m, default)


def shared_bytes(config, k: int) -> int:
    """What the copies in flight take, counted from the tiles: words, scales and x."""
    if isinstance(config, triton_gemv.TritonGemvConfig):
        return (config.stages - 1) * triton_gemv.WORDS * 9 * config.block_n
    if isinstance(config, triton_fused.TritonFusedConfig):
        return (config.stages - 1) * triton_fused.WORDS * (9 * config.block_n + 32 * config.block_m)
    if isinstance(config, triton_fused_fragment.TritonFusedFragmentConfig):
        return (config.stages - 1) * (2304 * config.block_n // 64 + 128 * config.block_m) * config.block_k // 64
    return 0


def meta_weight(kernel, device: Device, problem: Problem):
    """Weight and scale in the kernel's layout, without values."""
    n, k = problem.n, problem.k
    shapes = ((n, k // 2), (n, k // 16)) if kernel.layout(device, problem) == "checkpoint" else (blob_shape(n, k), None)
    return [None if s is None else torch.empty(s, dtype=torch.uint8, device="meta") for s in shapes]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("smem_bytes", [16 * KIB, 24 * KIB, 48 * KIB, 101376])
def test_no_valid_config_needs_more_shared_memory_than_there_is(kernel, smem_bytes):
    device = Device(
        kind="cuda", name="small", capability=(12, 1), units=48, smem_bytes=smem_bytes, memory_bytes=1 << 34
    )
    for problem in PROBLEMS:
        for config in kernel.space(device, problem):
            if any(kernel.is_valid(device, problem, config, m) for m in MS):
                assert shared_bytes(config, problem.k) <= smem_bytes, config


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("row_stride", [1 << 10, (1 << 30) - 8, 1 << 30, 1 << 31])
@pytest.mark.parametrize("per_channel", [False, True])
def test_no_integer_of_a_launch_needs_more_than_32_bits(monkeypatch, kernel, row_stride, per_channel):
    """x may be the last tokens of prompts: [B, S, K][:, -1] has rows S * K apart."""
    launches = []

    class Recorder:
        def __init__(self, *args, **options):
            pass

        def launch(self, grid, *args):
            launches.append((grid, args))

    for module in (triton_fused, two_pass, two_pass_fragment, _triton_host):
        monkeypatch.setattr(module, "TritonLaunch", Recorder)
    monkeypatch.setattr(two_pass, "interpreting", lambda: True)  # no cuBLAS here
    n, k, m = 4096, 1024, 64 if kernel.name.startswith("two_pass") else 8
    device, problem = card((9, 0)), Problem(n=n, k=k)
    launcher = kernel.build(device, problem, kernel.default_config(device, problem, m))
    x = torch.empty_strided((m, k), (row_stride, 1), dtype=torch.bfloat16, device="meta")
    weight, scale = meta_weight(kernel, device, problem)
    gs = torch.empty(n, dtype=torch.float32, device="meta")
    pqs = torch.empty(k, dtype=torch.bfloat16, device="meta") if per_channel else None
    out = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
    launcher(x, weight, scale, gs, None, pqs, out)
    assert launches
    for grid, args in launches:
        assert grid[0] < 1 << 31 and max(grid[1:]) < 1 << 16
        assert all(argument < 1 << 31 for argument in args if isinstance(argument, int))
        strides = [a.stride(0) for a in args if isinstance(a, torch.Tensor) and a.shape == (m, k)]
        assert all(stride <= 1 << 30 for stride in strides)


@pytest.mark.parametrize("module", [triton_fused, triton_fused_fragment], ids=lambda module: module.KERNEL.name)
def test_a_million_tokens_fit_the_grid(monkeypatch, module):
    """Only a grid's first axis holds more than 65535 blocks."""
    grids = []

    class Recorder:
        def __init__(self, *args, **options):
            pass

        def launch(self, grid, *args):
            grids.append(grid)

    for host in (triton_fused, _triton_host):
        monkeypatch.setattr(host, "TritonLaunch", Recorder)
    kernel, device, problem, m = module.KERNEL, card((9, 0)), Problem(n=4096, k=1024), 1 << 20
    config = kernel.default_config(device, problem, m)
    assert kernel.is_valid(device, problem, config, m)
    x, out = (torch.empty(m, size, dtype=torch.bfloat16, device="meta") for size in (1024, 4096))
    weight, scale = meta_weight(kernel, device, problem)
    kernel.build(device, problem, config)(x, weight, scale, torch.ones(1, device="meta"), None, None, out)
    assert len(grids) == (2 if module is triton_fused else 1)  # the fragment kernel reads x as it is
    assert all(grid[0] < 1 << 31 and max(grid[1:]) < 1 << 16 for grid in grids)
