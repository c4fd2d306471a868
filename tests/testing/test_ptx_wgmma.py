"""Hopper's instructions on NumPy: a box of TMA times a fragment in registers, and the mistakes that show."""

import re

import numpy as np
import pytest
from nvfp4.testing import ptx

# One warp: a TMA copy of [16 rows, 64 columns] to shared memory, one wgmma on its first 16 columns, all sums stored.
# Lane 4 g + q holds of the first operand rows g and g + 8, columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9, all of them 1 here.
KERNEL = """
.visible .entry kernel(
    .param .align 64 .b8 map[128], .param .u32 row, .param .u64 target
)
{
    .reg .pred %p<3>; .reg .b32 %r<24>; .reg .b64 %rd<8>;
    mov.u32 %r0, %tid.x;
    mov.b64 %rd0, map;
    cvta.param.u64 %rd1, %rd0;
    ld.param.b32 %r1, [row];
    mov.b32 %r2, 0;
    elect.sync %r3|%p0, -1;
    @%p0 mbarrier.init.shared.b64 [%r2+2048], 1;
    bar.warp.sync -1;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2+2048], 2048;
    mov.b32 %r4, 2048;
    @%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r2, %r1}], [%r4];
    {
    .reg .pred P1;
    LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [%r4], 0, 10000000;
    @P1 bra.uni DONE;
    bra.uni LAB_WAIT;
    DONE:
    }
    mov.b32 %r5, 0x3F803F80;
    mov.b64 %rd2, 0x4000004000010000;
    mov.b32 %r8, 0; mov.b32 %r9, 0; mov.b32 %r10, 0; mov.b32 %r11, 0;
    mov.b32 %r12, 0; mov.b32 %r13, 0; mov.b32 %r14, 0; mov.b32 %r15, 0;
    setp.ne.b32 %p1, %r4, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r8, %r9, %r10, %r11, %r12, %r13, %r14, %r15}, {%r5, %r5, %r5, %r5}, %rd2, %p1, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    SECOND
    wgmma.wait_group.sync.aligned 0;
    ld.param.b64 %rd3, [target];
    mul.wide.u32 %rd4, %r0, 32;
    add.s64 %rd3, %rd3, %rd4;
    st.global.v4.b32 [%rd3], {%r8, %r9, %r10, %r11};
    st.global.v4.b32 [%rd3+16], {%r12, %r13, %r14, %r15};
    ret;
}
"""  # noqa: E501 - instructions are not broken
AGAIN = "@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r2, %r1}], [%r4];"  # noqa: E501


def run(x, row, second="", change=lambda text: text, columns=None):
    memory = ptx.GlobalMemory()
    source = memory.add((x.view(np.uint32) >> 16).astype(np.uint16))  # bfloat16
    target = memory.add(np.zeros(256, np.float32))
    ptx.run(
        change(KERNEL.replace("SECOND", second)),
        [ptx.tensor_map(source, x.shape[0], columns or x.shape[1], x.shape[1], 16), row, target],
        memory,
        grid=(1, 1, 1),
        threads=32,
        smem_bytes=2048 + 8,
    )
    sums = memory.read(target, np.float32, 256).reshape(8, 4, 2, 2, 2)  # g, q, eight tokens, row half, token of a pair
    return sums.transpose(2, 1, 4, 3, 0).reshape(16, 16)  # [token, row]


def test_rows_from_any_position_times_ones():
    x = np.arange(40 * 64).reshape(40, 64).astype(np.float32) % 97
    sums = run(x, 13)
    assert np.array_equal(sums, np.repeat(x[13:29, :16].sum(1)[:, None], 16, 1))


def test_zeros_outside_of_the_matrix():
    x = 1 + np.arange(20 * 64).reshape(20, 64).astype(np.float32) % 97
    assert np.array_equal(run(x, 12)[:, 0], np.r_[x[12:, :16].sum(1), np.zeros(8)])
    assert np.array_equal(run(x, 0, columns=8)[:, 0], x[:16, :8].sum(1))  # columns that the map does not have


def test_what_a_wgmma_may_still_read_is_not_overwritten():
    x = np.ones((40, 64), np.float32)
    with pytest.raises(AssertionError, match="may still read"):
        run(x, 0, second=AGAIN)


def test_a_copy_that_nobody_waits_for_raises():
    x = np.ones((40, 64), np.float32)
    with pytest.raises(AssertionError, match="may be writing"):
        run(x, 0, change=lambda text: re.sub(r"\{\s+\.reg \.pred P1;.*?\}", "", text, flags=re.DOTALL))


def test_bytes_that_do_not_come_are_waited_for():
    x = np.ones((40, 64), np.float32)
    with pytest.raises(AssertionError, match="all warps wait"):
        run(x, 0, change=lambda text: text.replace("[%r2+2048], 2048", "[%r2+2048], 4096"))


ONES = "shl.b32 %r16, %r0, 2; st.shared.b32 [%r16], %r5; bar.warp.sync -1;"  # the first token's row
FENCE = "fence.proxy.async.shared::cta;"


def test_a_fence_lets_wgmma_read_what_stores_wrote():
    before = "wgmma.fence.sync.aligned;"
    x = np.full((40, 64), 2, np.float32)
    sums = run(x, 0, change=lambda text: text.replace(before, ONES + FENCE + before))
    assert np.array_equal(sums[:, 0], [16] + [32] * 15)
    for wrong in (ONES, FENCE + ONES):
        with pytest.raises(AssertionError, match="no fence between the proxies"):
            run(x, 0, change=lambda text, wrong=wrong: text.replace(before, wrong + before))


def test_a_copy_by_threads_spares_what_a_wgmma_may_still_read():
    x = np.ones((40, 64), np.float32)
    copy = "ld.param.b64 %rd5, [target]; shl.b32 %r16, %r0, 4; cp.async.cg.shared.global [%r16], [%rd5], 16;"
    with pytest.raises(AssertionError, match="may still read"):
        run(x, 0, second=copy)


# Two warps; the first one's value reaches the second one through shared memory and a barrier of 64 threads.
MEET = """
.visible .entry kernel(
    .param .u64 target
)
{
    .reg .pred %p<2>; .reg .b32 %r<5>; .reg .b64 %rd<3>;
    mov.u32 %r0, %tid.x;
    shl.b32 %r1, %r0, 2;
    setp.lt.u32 %p0, %r0, 32;
    @%p0 bra $FIRST;
    bar.sync 3, 64;
    ld.shared.b32 %r2, [%r1+-128];
    ld.param.b64 %rd0, [target];
    mul.wide.u32 %rd1, %r0, 4;
    add.s64 %rd0, %rd0, %rd1;
    st.global.b32 [%rd0+-128], %r2;
    ret;
$FIRST:
    st.shared.b32 [%r1], %r0;
    bar.arrive 3, 64;
    ret;
}
"""


@pytest.mark.parametrize("seed", range(4))
def test_one_warp_arrives_and_another_waits(seed):
    memory = ptx.GlobalMemory()
    target = memory.add(np.zeros(32, np.uint32))
    ptx.run(MEET, [target], memory, grid=(1, 1, 1), threads=64, smem_bytes=256, seed=seed)
    assert np.array_equal(memory.read(target, np.uint32, 32), np.arange(32))


def test_a_barrier_that_is_missing_raises():
    memory = ptx.GlobalMemory()
    target = memory.add(np.zeros(32, np.uint32))
    with pytest.raises(AssertionError, match="may be"):
        for seed in range(8):
            ptx.run(
                MEET.replace("bar.sync 3, 64;", ""),
                [target],
                memory,
                grid=(1, 1, 1),
                threads=64,
                smem_bytes=256,
                seed=seed,
            )
