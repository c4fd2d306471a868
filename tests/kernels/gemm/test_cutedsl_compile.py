"""`cutedsl_wgmma` compiled without a GPU: no spills, wgmmas that overlap, registers and parameters as predicted."""

import random
import re
import struct
from functools import cache

import pytest
from nvfp4.kernels.cuda import program_cache
from nvfp4.kernels.cuda.cubin import parameter_bytes
from nvfp4.kernels.gemm.cutedsl_wgmma import CuteDslWgmma, fits
from nvfp4.kernels.problem import Problem
from nvfp4.testing.conformance import H200
from nvfp4.testing.sass import disassemble, wgmmas_in_flight

pytest.importorskip("cutlass")
pytest.importorskip("triton")  # brings nvdisasm

pytestmark = pytest.mark.slow

KERNEL = CuteDslWgmma()
WIDE = Problem(n=28672, k=8192)
HALF = Problem(n=4096, k=4096, dtype="float16")
ODD = Problem(n=1001, k=208)


@pytest.fixture(autouse=True, scope="module")
def kernel_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(program_cache, "_open", {})
        yield


@cache
def valid_shapes():
    """The space's shapes, one for every way to compute; depth of the ring and multicast at random."""
    found = {}
    configs = list(KERNEL.space(H200, WIDE))
    random.Random(0).shuffle(configs)
    for config in configs:
        shape = config.shape(WIDE)
        way = (shape.rows, shape.tokens, shape.block_k, shape.warpgroups, shape.schedule, shape.blocks_per_sm)
        if way not in found and any(KERNEL.is_valid(H200, WIDE, config, m) for m in (16, 32, 64, 96, 256)):
            found[way] = config
    return list(found.values())


def check(problem, config):
    launch = KERNEL.build(H200, problem, config)
    shape, compiled = launch.shape, launch.compiled
    assert compiled.stack_bytes == 0, "registers are spilled"
    assert compiled.registers <= shape.launch_registers
    assert shape.smem_bytes + 1024 <= H200.smem_bytes // shape.blocks_per_sm
    if shape.consumer_registers:
        # setmaxnreg can only hand out what the block was launched with; asking for more waits for ever.
        handed_out = 24 + shape.consumer_registers * shape.warpgroups
        assert handed_out <= compiled.registers * (shape.warpgroups + 1)
    sass = disassemble(compiled.cubin)
    assert not wgmmas_in_flight(sass).overwrites
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert len(re.findall(r"\bHGMMA\b", sass)) == shape.steps * shape.own_blocks
    # One wait for each that the schedule asks for and one behind the loop: more mean that ptxas serialised wgmma.
    waits, _ = shape.waits
    assert len(re.findall(r"DEPBAR\.LE gsb0", sass)) == sum(wait is not None for wait in waits) + 1


def test_parameters_are_those_of_the_launch():
    from nvfp4.kernels.gemm._cutedsl_wgmma.launch import FIELDS

    launch = KERNEL.build(H200, WIDE, KERNEL.default_config(H200, WIDE, 128))
    assert parameter_bytes(launch.compiled.cubin) == tuple(map(struct.calcsize, FIELDS))


@pytest.mark.parametrize("m", [16, 48, 128, 256, 1024])
def test_defaults(m):
    check(WIDE, KERNEL.default_config(H200, WIDE, m))


@pytest.mark.parametrize(("problem", "m"), [(HALF, 512), (ODD, 64)], ids=str)
def test_float16_and_rows_of_out_that_are_not_aligned(problem, m):
    check(problem, KERNEL.default_config(H200, problem, m))


@pytest.mark.parametrize("index", range(8))
def test_a_sample_of_the_space(index):
    configs = valid_shapes()
    check(WIDE, configs[index * len(configs) // 8])


def test_equal_shapes_are_compiled_once(monkeypatch):
    from nvfp4.kernels import cutedsl

    config = KERNEL.default_config(H200, WIDE, 128)
    first = KERNEL.build(H200, WIDE, config).compiled
    monkeypatch.setattr(cutedsl, "_compile", lambda *_: pytest.fail("compiled again"))
    assert KERNEL.build(H200, Problem(n=4096, k=64), config).compiled == first
    assert fits(H200, config.shape(WIDE))
