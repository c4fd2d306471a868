"""`marlin` without a GPU: what its space holds, and that compiled kernels need what the arithmetic says."""

import random
import re

import pytest
from nvfp4.kernels.cuda import program_cache
from nvfp4.kernels.gemm._marlin_model import (
    blocks_per_sm,
    predicted_us,
    register_cap,
    registers,
    smem_bytes,
    token_tile,
)
from nvfp4.kernels.gemm.marlin import KERNEL, MarlinConfig, _compiled
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing.conformance import H200
from nvfp4.testing.sass import disassemble

DEVICES = {
    "sm_80": Device(kind="cuda", name="A100", capability=(8, 0), units=108, smem_bytes=166912, memory_bytes=40 << 30),
    "sm_89": Device(kind="cuda", name="L40S", capability=(8, 9), units=142, smem_bytes=101376, memory_bytes=48 << 30),
    "sm_90": H200,
    "sm_100": Device(
        kind="cuda", name="B200", capability=(10, 0), units=148, smem_bytes=232448, memory_bytes=180 << 30
    ),
    "sm_120": Device(kind="cuda", name="RTX", capability=(12, 0), units=170, smem_bytes=101376, memory_bytes=32 << 30),
}
SIZES = [(1, 16), (96, 176), (1000, 48), (4096, 4096), (151936, 2560)]


@pytest.fixture(autouse=True, scope="module")
def kernel_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(program_cache, "_open", {})
        yield


def valid_configs(device, problem, m):
    return [c for c in KERNEL.space(device, problem) if KERNEL.is_valid(device, problem, c, m)]


@pytest.mark.parametrize("arch", DEVICES)
def test_the_default_is_valid_for_every_m_up_to_64_and_none_beyond(arch):
    device = DEVICES[arch]
    for n, k in SIZES:
        problem = Problem(n=n, k=k)
        for m in (1, 8, 9, 17, 25, 64):
            config = KERNEL.default_config(device, problem, m)
            assert config in KERNEL.space(device, problem)
            assert KERNEL.is_valid(device, problem, config, m), (n, k, m)
        assert not KERNEL.is_valid(device, problem, config, 65)


def test_the_space_is_enumerable():
    for n, k in ((96, 176), (4096, 4096), (151936, 2560)):
        problem = Problem(n=n, k=k)
        count = len({c for m in (8, 16, 24, 32, 64) for c in valid_configs(H200, problem, m)})
        assert 0 < count < 2700, (n, k, count)


def test_no_config_is_valid_that_the_device_cannot_hold():
    problem, ada = Problem(n=8192, k=8192), DEVICES["sm_89"]
    for m in (8, 64):
        for c in valid_configs(ada, problem, m):
            assert smem_bytes(c, scaled=True) <= 101376
            assert c.copy == "async" and c.meet == "memory"  # neither bulk copies nor clusters before sm_90
    for c in valid_configs(H200, problem, 8):
        assert blocks_per_sm(H200, problem, c) * (smem_bytes(c, scaled=True) + 1024) <= 233472
        assert c.threads * blocks_per_sm(H200, problem, c) <= 2048


def test_k_is_not_split_further_than_fills_the_device():
    """Such defaults were 1.4 to 1.7 times their neighbours' trend on an H200 (2026-11): six waves of clusters of 8."""
    config = MarlinConfig(tokens=8, subtiles=8, row_groups=3, k_groups=2, chunk=1, stages=2, split=8)
    for n, k in ((37888, 5120), (37984, 6144), (36864, 7168), (35072, 8192)):
        problem = Problem(n=n, k=k)
        assert "half of 8" in KERNEL.is_valid(H200, problem, config, 1).reason
        assert KERNEL.default_config(H200, problem, 1).split <= 2
    assert any(c.split == 8 for c in valid_configs(H200, Problem(n=512, k=2048), 8))  # where it takes so many


def test_one_config_can_serve_17_to_32_tokens():
    """With tiles of 24 and of 32 for their own M only, a plan took a slower kernel for all of 17 to 32."""
    problem = Problem(n=4096, k=4096)
    config = KERNEL.default_config(H200, problem, 32)
    assert config.tokens == 32 and KERNEL.default_config(H200, problem, 17).tokens == 24
    assert all(KERNEL.is_valid(H200, problem, config, m) for m in (17, 24, 25, 32))
    assert not any(KERNEL.is_valid(H200, problem, config, m) for m in (8, 16, 33))


def test_refusals_say_why():
    config = MarlinConfig(tokens=8, subtiles=2, row_groups=1, k_groups=8, chunk=1, stages=2, split=2)
    problem = Problem(n=4096, k=4096)
    assert KERNEL.is_valid(H200, problem, config, 8)
    assert "M = 9" in KERNEL.is_valid(H200, problem, config, 9).reason
    assert "sm_90" in KERNEL.is_valid(DEVICES["sm_80"], problem, config, 8).reason
    assert "too few chunks" in KERNEL.is_valid(H200, Problem(n=4096, k=512), config, 8).reason
    assert "multiple of 16" in KERNEL.supports(H200, Problem(n=64, k=24)).reason
    assert "sm_75" in KERNEL.supports(Device(kind="cuda", name="T4", capability=(7, 5)), problem).reason


# n, k, m, then what an H200 took (microseconds, 2026-11) for two configs: subtiles, row_groups, k_groups, chunk,
# stages, split, meet.
MEASURED = [
    (4096, 4096, 8, {6.07: (4, 1, 4, 2, 2, 2, "cluster"), 8.58: (1, 6, 1, 1, 2, 8, "memory")}),
    (28672, 4096, 16, {24.03: (4, 4, 1, 2, 2, 2, "cluster"), 35.42: (3, 6, 1, 1, 2, 8, "cluster")}),
    (8192, 8192, 1, {12.3: (2, 1, 4, 2, 2, 1, "memory"), 18.58: (1, 4, 1, 2, 3, 8, "memory")}),
    (1024, 1024, 1, {2.49: (1, 1, 16, 1, 2, 1, "memory"), 4.46: (1, 6, 1, 1, 3, 4, "memory")}),
]


@pytest.mark.parametrize(("n", "k", "m", "times"), MEASURED)
def test_the_prediction_ranks_what_was_measured(n, k, m, times):
    fields = ("subtiles", "row_groups", "k_groups", "chunk", "stages", "split", "meet")
    configs = {us: MarlinConfig(tokens=token_tile(m), **dict(zip(fields, c, strict=True))) for us, c in times.items()}
    predicted = {us: predicted_us(H200, Problem(n=n, k=k), c, m) for us, c in configs.items()}
    fast, slow = sorted(times)
    assert predicted[fast] < predicted[slow]
    assert predicted[fast] == pytest.approx(fast, rel=0.6)


PLAIN, SCALED = False, True  # without pre_quant_scale and with it, which needs more registers and shared memory
WAYS = (("bfloat16", PLAIN), ("float16", SCALED), ("bfloat16", SCALED), ("float16", PLAIN))


def check(device, problem, config, scaled):
    """Shared memory is compared in the source, by a static assertion: what compiles has the size that was predicted."""
    launch = _compiled(device, problem, config, scaled=scaled)
    code = launch.compiled
    assert code.spill_bytes == 0 and code.stack_bytes == 0, (config, "registers are spilled")
    assert code.registers <= register_cap(config, blocks_per_sm(device, problem, config)), config
    assert code.static_smem_bytes == 0
    assert launch.smem_bytes == smem_bytes(config, scaled=scaled) <= device.smem_bytes


@pytest.mark.parametrize("arch", DEVICES)
def test_defaults_compile_without_spills(arch):
    """Each in one of the ways to compile it, on Hopper in two; in which alternates over architectures."""
    turn = list(DEVICES).index(arch)
    for i, (n, k, m) in enumerate(((4096, 4096, 1), (4096, 4096, 16), (4096, 4096, 64), (96, 176, 1))):
        for way in range(2 if arch == "sm_90" else 1):
            dtype, scaled = WAYS[(turn + i + way) % len(WAYS)]
            problem = Problem(n=n, k=k, dtype=dtype)
            check(DEVICES[arch], problem, KERNEL.default_config(DEVICES[arch], problem, m), scaled)


@pytest.mark.parametrize("arch", DEVICES)
def test_the_tightest_and_other_configs_compile_without_spills(arch):
    """Those predicted to need nearly all registers there are, and some of the rest: for every M on two of the others
    and on Hopper, whose copies and clusters are its own.
    """
    device, rng, ms = DEVICES[arch], random.Random(arch), (8, 24, 64)
    turn = list(DEVICES).index(arch)
    problem = Problem(n=rng.choice((4096, 28672)), k=8192)
    for i, m in enumerate(ms):
        if arch != "sm_90" and (turn + i) % 3 == 0:
            continue
        configs = valid_configs(device, problem, m)
        left = {c: register_cap(c, blocks_per_sm(device, problem, c)) - registers(c) for c in configs}
        check(device, problem, min(left, key=left.__getitem__), SCALED)
        if arch == "sm_90" or (turn + i) % 3 == 1:
            check(device, problem, rng.choice(configs), PLAIN)


def test_where_it_exists_the_hardware_converts_the_codes():
    pytest.importorskip("triton")  # brings nvdisasm
    problem = Problem(n=4096, k=4096)
    found = {}
    for arch in ("sm_90", "sm_120"):
        config = KERNEL.default_config(DEVICES[arch], problem, 8)
        launch = _compiled(DEVICES[arch], problem, config, scaled=PLAIN)
        sass = disassemble(launch.compiled.cubin)
        found[arch] = len(re.findall(r"E2M1", sass))
        assert re.search(r"HMMA\.16816", sass)
    assert found["sm_90"] == 0 and found["sm_120"] >= 4


def test_bulk_copies_come_after_the_loads_that_they_overwrite():
    """In the main loop a stage is only refilled after a vote on the registers that were loaded from it (`refill`)."""
    pytest.importorskip("triton")  # brings nvdisasm
    problem = Problem(n=28672, k=4096)
    config = MarlinConfig(
        tokens=16, subtiles=1, row_groups=1, k_groups=4, chunk=1, stages=2, split=1, meet="memory"
    )  # few registers, small stages: without the vote this one gave wrong sums on an H200
    launch = _compiled(H200, problem, config, scaled=PLAIN)
    lines = disassemble(launch.compiled.cubin).splitlines()
    last_copy = max(i for i, line in enumerate(lines) if "UBLKCP" in line)
    codes = max(i for i, line in enumerate(lines[:last_copy]) if "LDS.128" in line)
    vote = max(i for i, line in enumerate(lines[:last_copy]) if "VOTE" in line)
    assert codes < vote < last_copy


def test_token_tiles():
    assert [token_tile(m) for m in (1, 8, 9, 16, 17, 25, 33, 64)] == [8, 8, 16, 16, 24, 32, 64, 64]
