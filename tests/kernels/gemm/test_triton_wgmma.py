"""Machine code for Hopper, without a GPU: no register or buffer is written that a wgmma in flight still reads."""

import re

import pytest
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.triton_launch import interpreting
from nvfp4.testing.conformance import H200
from nvfp4.testing.sass import disassemble, wgmmas_in_flight

pytest.importorskip("triton")

from nvfp4.kernels.gemm import triton_fused, triton_fused_fragment
from nvfp4.kernels.gemm.triton_fused import TritonFusedConfig
from nvfp4.kernels.gemm.triton_fused_fragment import MS, TritonFusedFragmentConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(interpreting(), reason="TRITON_INTERPRET=1: kernels are interpreted, not compiled"),
]

WIDE = Problem(n=4096, k=4096)
ODD = Problem(n=352, k=1056, dtype="float16")


def in_flight(kernel, problem, config):
    return wgmmas_in_flight(disassemble(kernel.build(H200, problem, config)._launch.program.compiled.cubin))


def check_fragment(problem, config):
    """A step's wgmmas are done before its buffers are refilled and before the next step decodes."""
    found = in_flight(triton_fused_fragment.KERNEL, problem, config)
    assert found.wgmmas == config.block_k // 16
    assert found.overwrites == ()
    assert (found.at_copy, found.at_loop_end, found.unsynchronised_copies) == (0, 0, 0)


@pytest.mark.parametrize("m", [1, 32, 64, 128])
@pytest.mark.parametrize("problem", [WIDE, ODD], ids=lambda problem: problem.label)
def test_fragment_defaults(problem, m):
    check_fragment(problem, triton_fused_fragment.KERNEL.default_config(H200, problem, m))


WRONG_ONCE = [  # block_m, block_n, block_k, stages: results were wrong on an H200 before there was a wait
    (64, 64, 128, 3),
    (64, 128, 64, 4),
    (128, 64, 128, 3),
    (128, 128, 64, 4),
    (128, 128, 128, 3),
    (128, 128, 128, 4),
]


def fragment_config(block_m, block_n, block_k, stages):
    return TritonFusedFragmentConfig(block_m=block_m, block_n=block_n, block_k=block_k, split=1, stages=stages)


@pytest.mark.parametrize("tile", WRONG_ONCE, ids=str)
def test_fragment_configs_that_were_wrong(tile):
    check_fragment(WIDE, fragment_config(*tile))


@pytest.mark.parametrize("index", range(0, 66, 11))
def test_a_sample_of_the_fragment_space(index):
    kernel, wide = triton_fused_fragment.KERNEL, Problem(n=1024, k=8192)
    valid = [c for c in kernel.space(H200, wide) if kernel.is_valid(H200, wide, c, MS[c.block_m][0])]
    check_fragment(wide, [c for c in valid if c.split == 1][index])


@pytest.mark.parametrize("tile", [(64, 64, 128, 2), (128, 128, 128, 4)], ids=str)
def test_without_the_wait_the_next_step_overwrites_what_is_in_flight(monkeypatch, tile):
    """Once this fails Triton and ptxas are right by themselves, and `waited` can go."""
    monkeypatch.setattr(triton_fused_fragment, "HOPPER", None)
    found = in_flight(triton_fused_fragment.KERNEL, WIDE, fragment_config(*tile))
    assert found.overwrites and found.at_loop_end


@pytest.mark.parametrize("problem", [WIDE, ODD], ids=lambda problem: problem.label)
@pytest.mark.parametrize(
    ("block_m", "block_n", "stages"), [(16, 64, 3), (16, 128, 2), (32, 64, 2), (32, 128, 3), (64, 64, 3), (64, 128, 2)]
)
def test_fused_leaves_one_dot_in_flight_and_touches_nothing_of_it(problem, block_m, block_n, stages):
    """Its buffers of x are one more than copies are on their way, so a refill is never of the one in flight."""
    config = TritonFusedConfig(
        block_m=block_m, block_n=block_n, split=1, stages=stages, max_registers=triton_fused.CAPS.get(block_m, 0)
    )
    found = in_flight(triton_fused.KERNEL, problem, config)
    assert found.wgmmas == 16 and found.overwrites == ()
    assert max(found.at_copy, found.at_loop_end) <= 4
    ttgir = triton_fused.KERNEL.build(H200, problem, config)._launch.compiled.asm["ttgir"]
    assert (
        re.findall(rf"local_alloc : \(\) -> !ttg.memdesc<(\d+)x64x{block_m}x(?:bf16|f16)", ttgir) == [str(stages)] * 4
    )
