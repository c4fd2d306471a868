"""`marlin_moe` and `marlin_grouped` without a GPU: their spaces, and that compiled kernels need what was predicted."""

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from nvfp4.dispatch.segments import decide
from nvfp4.kernels import registry
from nvfp4.kernels.cuda import program_cache
from nvfp4.kernels.gemm._marlin_model import register_cap
from nvfp4.kernels.moe import _marlin_product, marlin_grouped, marlin_moe
from nvfp4.kernels.moe._marlin_experts import (
    SHAPES,
    TOKENS,
    blocks_per_sm,
    expected_tiles,
    fits,
    registers,
    sizes,
    smem_bytes,
    tile,
)
from nvfp4.kernels.moe._marlin_product import FIRST, SECOND, Product, _compiled
from nvfp4.kernels.moe.activations import ACTIVATIONS
from nvfp4.kernels.problem import Device, Problem
from nvfp4.kernels.untuned import untuned_layout
from nvfp4.testing.conformance import H200, problems

DEVICES = {
    "sm_80": Device(kind="cuda", name="A100", capability=(8, 0), units=108, smem_bytes=166912, memory_bytes=40 << 30),
    "sm_89": Device(kind="cuda", name="L40S", capability=(8, 9), units=142, smem_bytes=101376, memory_bytes=48 << 30),
    "sm_90": H200,
    "sm_100": Device(
        kind="cuda", name="B200", capability=(10, 0), units=148, smem_bytes=232448, memory_bytes=180 << 30
    ),
    "sm_120": Device(kind="cuda", name="RTX", capability=(12, 0), units=170, smem_bytes=101376, memory_bytes=32 << 30),
}
QWEN = Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="swiglu")
DEEPSEEK = replace(QWEN, n=2048, k=7168, experts=256)
NEMOTRON = Problem(op="moe", n=2688, k=1024, experts=512, top_k=22, activation="relu2")
GROUPED = Problem(op="grouped_gemm", n=1536, k=2048, experts=128)
NUMBERS = {entry.name: number for number, entry in enumerate(ACTIVATIONS)}
RESULTS = Path(__file__).parents[3] / "bench" / "results"
KERNELS = {"moe": marlin_moe.KERNEL, "grouped_gemm": marlin_grouped.KERNEL}


@pytest.fixture(autouse=True, scope="module")
def kernel_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(program_cache, "_open", {})
        yield


def valid_configs(device, problem, m):
    kernel = KERNELS[problem.op]
    return [c for c in kernel.space(device, problem) if kernel.is_valid(device, problem, c, m)]


@pytest.mark.parametrize("arch", DEVICES)
def test_the_default_is_valid_for_every_m(arch):
    device = DEVICES[arch]
    small = [*problems("moe"), *problems("grouped_gemm")]
    for problem in (QWEN, DEEPSEEK, NEMOTRON, GROUPED, *small):
        kernel = KERNELS[problem.op]
        for m in (1, 2, 8, 33, 64, 300, 4096, 1 << 20):
            config = kernel.default_config(device, problem, m)
            assert config in kernel.space(device, problem)
            assert kernel.is_valid(device, problem, config, m), (problem.label, m)


@pytest.mark.parametrize("arch", DEVICES)
def test_untuned_devices_run_them_at_every_m(arch):
    """A default serves from one anchor to the next, the last one without end: it must be valid all that way."""
    device = DEVICES[arch]
    many = (replace(QWEN, experts=1000, top_k=1), replace(QWEN, experts=1, top_k=1), replace(GROUPED, experts=700))
    for problem in (QWEN, NEMOTRON, GROUPED, *many, *problems("moe"), *problems("grouped_gemm")):
        kernel = KERNELS[problem.op]
        layout = kernel.layout(device, problem)
        assert untuned_layout(device, problem, [kernel]) == layout
        broken = {other.name: "not here" for other in registry.kernels(problem.op) if other is not kernel}
        segments = decide(device, problem, layout, None, broken).segments
        assert segments[0].m_lo == 1 and segments[-1].m_hi is None


@pytest.mark.parametrize("problem", [QWEN, DEEPSEEK, NEMOTRON, GROUPED], ids=lambda problem: problem.label)
def test_the_space_is_enumerable(problem):
    for m in (1, 8, 64, 512, 8192):
        assert 0 < len(valid_configs(H200, problem, m)) <= 2000, m


def test_tiles_are_as_high_as_an_expert_has_rows():
    assert expected_tiles(replace(QWEN, experts=1, top_k=1), 100, 8) == (13.0, 100 / 13)
    count, rows = expected_tiles(QWEN, 1, 8)
    assert 7.5 < count < 8 and rows == pytest.approx(8 / count)  # eight ids, seldom the same one twice
    count, rows = expected_tiles(QWEN, 64, 1 << 30)
    assert count == pytest.approx(128 * (1 - (127 / 128) ** 512), rel=0.01)  # experts with any row
    tokens = {m: marlin_moe.KERNEL.default_config(H200, QWEN, m).tokens for m in (1, 8, 4096)}
    assert tokens == {1: 8, 8: 8, 4096: 64}


def test_refusals_say_why():
    kernel = marlin_moe.KERNEL
    config = kernel.default_config(H200, QWEN, 8)
    assert "about 256" in kernel.is_valid(H200, QWEN, config, 4096).reason
    assert "about 1" in kernel.is_valid(H200, QWEN, replace(config, tokens=64), 8).reason
    assert (
        "too few chunks" in kernel.is_valid(H200, QWEN, replace(config, second="4x1x8x1x2", second_split=2), 1).reason
    )
    assert "fill the device" in kernel.is_valid(H200, QWEN, replace(config, first_split=2), 64).reason
    assert "multiple of 16" in kernel.supports(H200, replace(QWEN, n=24)).reason
    assert "sm_75" in kernel.supports(Device(kind="cuda", name="T4", capability=(7, 5)), QWEN).reason
    assert kernel.layout(H200, QWEN) == "fragment1-bf16"
    assert kernel.layout(DEVICES["sm_120"], QWEN) == "fragment1-nib"


def test_no_config_is_valid_that_the_device_cannot_hold():
    ada = DEVICES["sm_89"]
    for m in (1, 300):
        for config in valid_configs(ada, GROUPED, m):
            c = tile(ada, config.tokens, config.shape, config.split)
            assert smem_bytes(c, scaled=True) <= 101376
            assert c.copy == "async" and c.meet == "memory"  # neither bulk copies nor clusters before sm_90
            assert blocks_per_sm(ada, c) * c.threads <= 1536


def test_what_takes_longer_is_predicted_to():
    predicted = marlin_moe.KERNEL.predicted_us
    configs = {m: marlin_moe.KERNEL.default_config(H200, QWEN, m) for m in (1, 8, 64)}
    times = [predicted(H200, QWEN, config, m) for m, config in configs.items()]
    assert times == sorted(times)
    assert all(predicted(H200, DEEPSEEK, marlin_moe.KERNEL.default_config(H200, DEEPSEEK, 8), 8) > t for t in times)


def test_what_is_predicted_to_be_fastest_is_near_the_fastest_that_was_measured():
    """Two layers from 1 to 512 tokens, 5 to 47 configs each, on an H200."""
    measured = json.loads((RESULTS / "2026-12-01-h200-marlin-moe-screens.json").read_text())
    kernel, behind = marlin_moe.KERNEL, []
    for layer in measured["problems"]:
        problem = Problem(op="moe", **{name: layer[name] for name in ("n", "k", "experts", "top_k", "activation")})
        for m, by_config in layer["us"].items():
            times = {}
            for text, by_routing in by_config.items():
                tokens, first, second = text.split()
                pairs = [(shape, int(split)) for shape, split in (part.split("/") for part in (first, second))]
                config = marlin_moe.MarlinMoeConfig(
                    tokens=int(tokens),
                    first=pairs[0][0],
                    first_split=pairs[0][1],
                    second=pairs[1][0],
                    second_split=pairs[1][1],
                )
                times[config] = statistics.geometric_mean(by_routing)
            if len(times) >= 5:
                chosen = min(times, key=lambda config: kernel.predicted_us(H200, problem, config, int(m)))
                behind.append(times[chosen] / min(times.values()))
    assert len(behind) > 20
    assert max(behind) < 1.1
    assert statistics.geometric_mean(behind) < 1.02


def check(device, kind, problem, size, c, *, scaled):
    """Shared memory is compared in the source, by a static assertion: what compiles has the size that was predicted."""
    number = NUMBERS.get(problem.activation, 0)
    launch = _compiled(device, problem, size, c, scaled=scaled, pdl=False, PRODUCT=kind, ACTIVATION=number)
    code = launch.compiled
    assert code.spill_bytes == 0 and code.stack_bytes == 0, (c, kind, "registers are spilled")
    assert code.registers <= register_cap(c, blocks_per_sm(device, c)), (c, kind)
    assert code.static_smem_bytes == 0
    assert launch.smem_bytes == smem_bytes(c, scaled=scaled) <= device.smem_bytes


@pytest.mark.parametrize("arch", DEVICES)
def test_defaults_compile_without_spills(arch):
    """Both products; the first without a `pre_quant_scale` or with one, on Hopper both."""
    device, turn = DEVICES[arch], list(DEVICES).index(arch)
    for i, (problem, m) in enumerate(((QWEN, 1), (replace(QWEN, dtype="float16"), 64), (NEMOTRON, 300))):
        config = marlin_moe.KERNEL.default_config(device, problem, m)
        (first, second), (first_tile, second_tile) = sizes(problem), marlin_moe.tiles(device, config)
        for scaled in (False, True) if arch == "sm_90" else (bool((turn + i) % 2),):
            check(device, FIRST, problem, first, first_tile, scaled=scaled)
        check(device, SECOND, problem, second, second_tile, scaled=False)


@pytest.mark.parametrize("arch", DEVICES)
def test_defaults_of_grouped_compile_without_spills(arch):
    """With and without a list of tiles: one kernel."""
    device = DEVICES[arch]
    for problem, m in ((GROUPED, 8), (replace(GROUPED, dtype="float16"), 512), (GROUPED, 4096)):
        (size,), config = sizes(problem), marlin_grouped.KERNEL.default_config(device, problem, m)
        c = tile(device, config.tokens, config.shape, config.split)
        check(device, _marlin_product.GROUPED, problem, size, c, scaled=False)


@pytest.mark.parametrize("asked", ["", "1"])
def test_who_may_start_before_the_kernel_ahead_ends(asked, monkeypatch):
    """After a kernel of our own, always; after others, without a list, only where that is asked for."""
    monkeypatch.setenv("NVFP4_PDL", asked)
    monkeypatch.setattr(_marlin_product, "_compiled", lambda *_, pdl, **__: pdl)
    for kind, problem in ((FIRST, QWEN), (SECOND, QWEN), (_marlin_product.GROUPED, GROUPED)):
        size = sizes(problem)[0]
        for device, chained in ((H200, True), (DEVICES["sm_80"], False)):
            launches = Product(kind, device, problem, size, problem.n, tile(device, 8, "2x4x1x1x2", 1)).launches
            assert all(pdl == (bool(asked) if first else chained) for (first, _), pdl in launches.items())
            assert any(first for first, _ in launches) == (kind != SECOND)


@pytest.mark.parametrize("arch", DEVICES)
def test_the_tightest_shapes_compile_without_spills(arch):
    """Those predicted to need nearly all registers there are, with an activation of many instructions and a
    `pre_quant_scale`: for every number of tokens on Hopper, whose copies are its own, and on two of the others.
    """
    device, rng, turn = DEVICES[arch], random.Random(arch), list(DEVICES).index(arch)
    problem = replace(QWEN, activation=rng.choice(("situ", "geglu", "swigluoai")))
    size = sizes(problem)[0]
    for tokens in TOKENS if arch == "sm_90" else TOKENS[turn % 2 :: 2]:
        m = 16 * tokens  # an expert's rows are as many
        fitting = [c for shape in SHAPES for c in [tile(device, tokens, shape, 1)] if fits(device, problem, size, c, m)]
        tightest = min(fitting, key=lambda c: register_cap(c, blocks_per_sm(device, c)) - registers(c))
        check(device, FIRST, problem, size, tightest, scaled=True)
