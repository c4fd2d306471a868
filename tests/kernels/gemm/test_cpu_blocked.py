"""cpu_blocked beyond what every kernel must do: its configs, its use of threads, awkward storage."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from nvfp4.kernels import reference
from nvfp4.kernels.device import describe
from nvfp4.kernels.gemm.cpu_blocked import KERNEL, CpuBlockedConfig
from nvfp4.kernels.problem import Device, Problem
from nvfp4.kernels.weights import codec
from nvfp4.testing import assert_gemm_close
from nvfp4.testing.conformance import H200

CPU = Device(kind="cpu", name="test", units=2, l2_bytes=32 << 20)


def tensors(n, k, m, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight, scale, gs = codec.quantize(torch.randn(n, k, generator=g))
    return torch.randn(m, k, generator=g).to(dtype), weight, scale.view(torch.uint8), gs.reshape(1)


def run(launcher, x, weight, scale, gs, bias=None, pqs=None):
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=x.dtype)
    launcher(x, weight, scale, gs, bias, pqs, out)
    return out


@pytest.mark.parametrize("lookup", ["pair", "quad"])
@pytest.mark.parametrize("rows", [32, 64, 512])
@pytest.mark.parametrize("m", [1, 2, 19])
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_every_lookup_block_size_and_thread_count(lookup, rows, m, threads):
    x, weight, scale, gs = tensors(200, 112, m)
    launcher = KERNEL.build(
        CPU, Problem(n=200, k=112), CpuBlockedConfig(block_rows=rows, lookup=lookup, threads=threads)
    )
    ref = reference.gemm(x, weight, scale, gs, round_output=False)
    assert_gemm_close(run(launcher, x, weight, scale, gs), ref, k=112, dtype=x.dtype)


def test_half_does_not_overflow_before_the_global_scale():
    k = 4096
    weight = torch.full((4, k // 2), 0x77, dtype=torch.uint8)
    scale = torch.full((4, k // 16), 0x7E, dtype=torch.uint8)
    for m in (1, 16, 64):
        problem = Problem(n=4, k=k, dtype="float16")
        launcher = KERNEL.build(CPU, problem, KERNEL.default_config(CPU, problem, m))
        got = run(launcher, torch.ones(m, k).half(), weight, scale, torch.tensor([1e-5]))
        assert torch.equal(got, torch.full((m, 4), 110.1005, dtype=torch.float16))


@pytest.mark.parametrize("lookup", ["pair", "quad"])
def test_weights_at_odd_addresses(lookup):
    x, weight, scale, gs = tensors(24, 48, 3)
    buffer = torch.zeros(1 + weight.numel(), dtype=torch.uint8)
    buffer[1:] = weight.flatten()
    launcher = KERNEL.build(CPU, Problem(n=24, k=48), CpuBlockedConfig(block_rows=32, lookup=lookup, threads=0))
    assert torch.equal(run(launcher, x, buffer[1:].view(weight.shape), scale, gs), run(launcher, x, weight, scale, gs))


@pytest.mark.parametrize("lookup", ["pair", "quad"])
def test_rows_do_not_depend_on_how_many_there_are(lookup):
    x, weight, scale, gs = tensors(104, 256, 257)
    launcher = KERNEL.build(CPU, Problem(n=104, k=256), CpuBlockedConfig(block_rows=32, lookup=lookup, threads=0))
    ref = reference.gemm(x, weight, scale, gs, round_output=False)
    full = run(launcher, x, weight, scale, gs)
    for m in (1, 2, 3, 4, 5, 6, 15, 16, 17, 31, 64, 128, 256):
        got = run(launcher, x[:m], weight, scale, gs)
        assert_gemm_close(got, ref[:m], k=256, dtype=x.dtype)
        torch.testing.assert_close(got, full[:m], rtol=1e-2, atol=1e-3)


def test_parameters_are_constants():
    x, weight, scale, gs = tensors(24, 48, 3)
    launcher = KERNEL.build(CPU, Problem(n=24, k=48), CpuBlockedConfig(block_rows=32, lookup="pair", threads=0))
    bias, pqs = torch.ones(24, dtype=x.dtype), torch.ones(48, dtype=x.dtype)
    parameters = (gs.requires_grad_(), bias.requires_grad_(), pqs.requires_grad_())
    assert not run(launcher, x, weight, scale, *parameters).requires_grad


def test_rows_of_x_at_any_stride():
    x, weight, scale, gs = tensors(40, 64, 1)
    launcher = KERNEL.build(CPU, Problem(n=40, k=64), KERNEL.default_config(CPU, Problem(n=40, k=64), 1))
    right = run(launcher, x, weight, scale, gs)
    view = torch.as_strided(x.flatten().clone(), (1, 64), (10**9, 1))  # the stride of a single row means nothing
    assert torch.equal(run(launcher, view, weight, scale, gs), right)
    wide = torch.full((4, 67), float("nan"), dtype=x.dtype)
    wide[:, :64] = x
    assert torch.equal(run(launcher, wide[:, :64], weight, scale, gs)[:1].isfinite(), right.isfinite())


@pytest.mark.parametrize("threads", [0, 2])
def test_calls_from_several_threads_agree(threads):
    x, weight, scale, gs = tensors(256, 256, 4)
    problem = Problem(n=256, k=256)
    launcher = KERNEL.build(CPU, problem, CpuBlockedConfig(block_rows=64, lookup="pair", threads=threads))
    right = run(launcher, x, weight, scale, gs)
    start = threading.Barrier(4)

    def work(_):
        start.wait()
        return [run(launcher, x, weight, scale, gs) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        results = [r for results in pool.map(work, range(4)) for r in results]
    assert all(torch.equal(r, right) for r in results)


@pytest.mark.parametrize("threads", [0, 2])
def test_thread_settings_stay(threads):
    def seen_by_a_new_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    before = torch.get_num_threads(), seen_by_a_new_thread()
    x, weight, scale, gs = tensors(64, 64, 2)
    config = CpuBlockedConfig(block_rows=32, lookup="pair", threads=threads)
    run(KERNEL.build(CPU, Problem(n=64, k=64), config), x, weight, scale, gs)
    assert (torch.get_num_threads(), seen_by_a_new_thread()) == before


def test_own_threads_work_in_inference_mode_and_after_a_fork():
    x, weight, scale, gs = tensors(64, 64, 2)
    config = CpuBlockedConfig(block_rows=32, lookup="pair", threads=2)
    launcher = KERNEL.build(CPU, Problem(n=64, k=64), config)
    right = run(launcher, x, weight, scale, gs)
    with torch.inference_mode():
        assert torch.equal(run(launcher, x, weight, scale, gs), right)
    child = os.fork()
    if child == 0:  # the workers of the parent are not here
        os._exit(0 if torch.equal(run(launcher, x, weight, scale, gs), right) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_more_threads_than_blocks_are_refused():
    config = CpuBlockedConfig(block_rows=512, lookup="pair", threads=2)
    assert "fewer blocks" in KERNEL.is_valid(CPU, Problem(n=300, k=64), config, 1).reason


@pytest.mark.parametrize("n", [1, 8, 100, 4096, 151936])
@pytest.mark.parametrize("k", [16, 352, 4096, 28672])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20, 300 << 20])
def test_default_is_valid_and_the_space_is_small(n, k, cache_bytes):
    device = Device(kind="cpu", name="test", units=16, l2_bytes=cache_bytes)
    problem = Problem(n=n, k=k)
    space = KERNEL.space(device, problem)
    assert len(space) <= 60
    for m in (1, 16, 4096):
        default = KERNEL.default_config(device, problem, m)
        assert default in space
        assert KERNEL.is_valid(device, problem, default, m)


def test_supports_cpus_only():
    problem = Problem(n=64, k=64)
    assert KERNEL.supports(describe("cpu"), problem)
    assert "NVIDIA H200" in KERNEL.supports(H200, problem).reason
    assert "multiple of 16" in KERNEL.supports(CPU, Problem(n=64, k=40)).reason


def test_blocks_that_do_not_fit_are_refused():
    small = Device(kind="cpu", name="test", l2_bytes=1 << 20)
    verdict = KERNEL.is_valid(
        small, Problem(n=4096, k=4096), CpuBlockedConfig(block_rows=512, lookup="pair", threads=0), 1
    )
    assert "do not fit 1 MiB" in verdict.reason
    verdict = KERNEL.is_valid(CPU, Problem(n=8, k=64), CpuBlockedConfig(block_rows=512, lookup="pair", threads=0), 1)
    assert "twice N = 8" in verdict.reason
