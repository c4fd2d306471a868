"""`cutedsl_mma` compiled without a GPU for all its targets: no spills, registers and parameters as predicted."""

import re
import struct
import subprocess
from pathlib import Path

import pytest
from nvfp4.kernels.cuda import program_cache
from nvfp4.kernels.cuda.compile import ARCHITECTURES
from nvfp4.kernels.cuda.cubin import parameter_bytes
from nvfp4.kernels.gemm.cutedsl_mma import CuteDslMma, fits
from nvfp4.kernels.problem import Device, Problem

pytest.importorskip("cutlass")
triton = pytest.importorskip("triton")  # brings nvdisasm

pytestmark = pytest.mark.slow

KERNEL = CuteDslMma()
SMEM_BYTES = {
    (8, 0): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}
WIDE = Problem(n=28672, k=8192)
HALF = Problem(n=4096, k=4096, dtype="float16")
ODD = Problem(n=4001, k=4112)
NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


def card(capability):
    return Device(kind="cuda", name="card", capability=capability, units=128, smem_bytes=SMEM_BYTES[capability])


@pytest.fixture(autouse=True, scope="module")
def kernel_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(program_cache, "_open", {})
        yield


def check(capability, problem, config, tmp_path):
    device = card(capability)
    launch = KERNEL.build(device, problem, config)
    shape, compiled = launch.shape, launch.compiled
    assert compiled.arch == ARCHITECTURES[capability]
    assert compiled.stack_bytes == 0, "registers are spilled"
    assert compiled.registers <= shape.launch_registers
    assert shape.blocks_per_sm * (shape.smem_bytes + 1024) <= device.smem_bytes + 1024
    (tmp_path / "cubin").write_bytes(compiled.cubin)
    sass = subprocess.run([NVDISASM, "-c", tmp_path / "cubin"], check=True, capture_output=True, text=True).stdout
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert len(re.findall(r"\bHMMA\b", sass)) == shape.steps * shape.subtiles * shape.octets
    assert len(re.findall(r"\bLDSM\b", sass)) == (shape.steps + 1) * shape.octets // 2
    converts = len(re.findall(r"\bF2FP\.F16\.E2M1", sass))
    assert bool(converts) == (capability >= (10, 0)), "the hardware converts codes where it can"


def ways(capability):
    """One config for every tile, depth of a stage and split."""
    device, found = card(capability), {}
    for config in KERNEL.space(device, WIDE):
        way = (config.rows, config.tokens, config.warps, config.block_k, config.split)
        if fits(device, config.shape(device, WIDE)):
            found[way] = config
    return list(found.values())


@pytest.mark.parametrize(
    ("capability", "problem", "m"),
    [
        *((capability, WIDE, 128) for capability in SMEM_BYTES),
        *((capability, ODD, 512) for capability in ((8, 9), (9, 0), (12, 0))),
    ],
    ids=str,
)
def test_defaults(capability, problem, m, tmp_path):
    check(capability, problem, KERNEL.default_config(card(capability), problem, m), tmp_path)


@pytest.mark.parametrize("capability", SMEM_BYTES, ids=str)
def test_a_sample_of_the_space(capability, tmp_path):
    """Another part of it, and another problem, for every architecture."""
    configs, place = ways(capability), list(SMEM_BYTES).index(capability)
    check(capability, (WIDE, ODD, HALF)[place % 3], configs[place * len(configs) // len(SMEM_BYTES)], tmp_path)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)], ids=str)  # little shared memory, much, much and e2m1
def test_the_largest_tiles(capability, tmp_path):
    device = card(capability)
    largest = max(ways(capability), key=lambda config: config.shape(device, WIDE).needed_registers)
    check(capability, WIDE, largest, tmp_path)


def test_parameters_are_those_of_the_launch():
    from nvfp4.kernels.gemm._cutedsl_mma.launch import FIELDS

    launch = KERNEL.build(card((8, 0)), WIDE, KERNEL.default_config(card((8, 0)), WIDE, 128))
    assert parameter_bytes(launch.compiled.cubin) == tuple(map(struct.calcsize, FIELDS))


def test_equal_shapes_are_compiled_once(monkeypatch):
    from nvfp4.kernels import cutedsl

    device, config = card((8, 0)), KERNEL.default_config(card((8, 0)), WIDE, 128)
    first = KERNEL.build(device, WIDE, config).compiled
    monkeypatch.setattr(cutedsl, "_compile", lambda *_: pytest.fail("compiled again"))
    assert KERNEL.build(device, Problem(n=4096, k=256), config).compiled == first
