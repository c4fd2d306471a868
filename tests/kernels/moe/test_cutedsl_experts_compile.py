"""Products of experts compiled without a GPU: no spills, wgmmas that overlap, registers and parameters as predicted."""

import random
import re
import struct
from dataclasses import replace
from functools import cache

import pytest
from nvfp4.kernels.cuda import program_cache
from nvfp4.kernels.cuda.cubin import parameter_bytes
from nvfp4.kernels.moe import _cutedsl_config as configs
from nvfp4.kernels.moe._cutedsl_experts.launch import FIELDS, ProductLaunch
from nvfp4.kernels.problem import Problem
from nvfp4.testing.conformance import H200
from nvfp4.testing.sass import disassemble, wgmmas_in_flight

pytest.importorskip("cutlass")
pytest.importorskip("triton")  # brings nvdisasm

pytestmark = pytest.mark.slow

# The activation that takes most registers; none; and rows of out that are not aligned.
SITU = Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="situ")
RELU2 = Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="relu2", dtype="float16")
ODD = Problem(op="grouped_gemm", n=1001, k=208, experts=8)


@pytest.fixture(autouse=True, scope="module")
def kernel_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(program_cache, "_open", {})
        yield


@cache
def valid():
    """The space's configs, one for every way to compute; depth of the ring at random."""
    found = {}
    space = list(configs.space(H200, SITU))
    random.Random(0).shuffle(space)
    for c in space:
        way = (c.rows, c.tokens, c.pieces, c.block_k, c.warpgroups, c.schedule, c.blocks_per_sm)
        if way not in found and any(configs.is_valid(H200, SITU, c, m) for m in (16, 512, 2048, 8192)):
            found[way] = c
    return list(found.values())


def check(problem, config, index, *, gathered=False):
    size, shape = configs.sizes(problem)[index], configs.shapes(problem, config)[index]
    shape = replace(shape, gathered=gathered)
    launch = ProductLaunch(H200, shape, rows=size.rows, k=size.k, n=size.n, band=8, pdl=True)
    compiled = launch.compiled
    assert compiled.stack_bytes == 0, "registers are spilled"
    assert compiled.registers <= shape.launch_registers
    assert shape.smem_bytes + 1024 <= H200.smem_bytes // shape.blocks_per_sm
    if shape.consumer_registers:
        # setmaxnreg can only hand out what the block was launched with; asking for more waits for ever.
        handed_out = shape.producer_registers + shape.consumer_registers * shape.warpgroups
        assert handed_out <= compiled.registers * (shape.warpgroups + 1)
    sass = disassemble(compiled.cubin)
    assert not wgmmas_in_flight(sass).overwrites
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert len(re.findall(r"\bHGMMA\b", sass)) == shape.steps * shape.own_blocks * shape.pieces
    # One wait for each that the schedule asks for and one behind each loop: more mean that ptxas serialised wgmma.
    waits, _ = shape.waits
    expected = shape.pieces * (sum(wait is not None for wait in waits) + 1)
    assert len(re.findall(r"DEPBAR\.LE gsb0", sass)) == expected
    # One fence between the proxies for each stage that is waited for, and none where TMA writes x.
    fences = len(re.findall(r"FENCE\.VIEW\.ASYNC", sass)) - 1  # and that behind the barriers' making
    assert fences == (shape.pieces + shape.prefetch if gathered else 0)
    copies = re.findall(r"LDGSTS\.E\.BYPASS\.128", sass)
    assert len(copies) == (shape.tokens // 16 * shape.k_blocks if gathered else 0)
    if gathered and shape.consumer_registers:
        producer = re.search(r"USETMAXREG\.DEALLOC.*?(?=USETMAXREG)", sass, re.DOTALL)
        assert max(int(number) for number in re.findall(r"\bR(\d+)\b", producer[0])) < shape.producer_registers
    return compiled


@pytest.mark.parametrize(("m", "index"), [(16, 0), (512, 1), (1024, 0), (4096, 0), (4096, 1)])
def test_defaults(m, index):
    """The first product, with its activation, and the second."""
    compiled = check(SITU, configs.best(H200, SITU, m), index)
    assert parameter_bytes(compiled.cubin) == tuple(map(struct.calcsize, FIELDS))


@pytest.mark.parametrize(("problem", "m"), [(RELU2, 512), (ODD, 2048)], ids=str)
def test_float16_and_rows_of_out_that_are_not_aligned(problem, m):
    check(problem, configs.best(H200, problem, m), 0)


@pytest.mark.parametrize("m", [16, 512, 1024, 4096])
def test_defaults_that_gather(m):
    check(SITU, configs.best(H200, SITU, m), 0, gathered=True)


@pytest.mark.parametrize("index", range(6))
def test_a_sample_of_the_space(index):
    found = valid()
    check(SITU, found[index * len(found) // 6], index % 2, gathered=index % 4 == 2)
