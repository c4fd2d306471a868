"""Running PTX on NumPy: what programs compute, and that it shows the mistakes that a GPU may hide."""

import numpy as np
import pytest
from nvfp4.testing import ptx

HEAD = """
.visible .entry kernel(
    .param .u64 source, .param .u64 target
)
{
    .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<5>;
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd0, %r0, 16;
    ld.param.b64 %rd1, [source];
    add.s64 %rd1, %rd1, %rd0;
    ld.param.b64 %rd2, [target];
    add.s64 %rd2, %rd2, %rd0;
    shl.b32 %r1, %r0, 4;
"""
# Every thread copies sixteen bytes to shared memory and hands on those that its neighbour, 32 threads away, has copied.
COPY = "cp.async.cg.shared.global [%r1], [%rd1], 16;"
COMMIT = "cp.async.commit_group;"
WAIT = "cp.async.wait_group 0;"
BARRIER = "bar.sync 0;"
EXCHANGE = """
    xor.b32 %r1, %r1, 512;
    ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1];
    st.global.v4.b32 [%rd2], {%r2, %r3, %r4, %r5};
    ret;
}
"""


def run(*parts, threads=64, source=None, seed=0, ordered=True):
    memory = ptx.GlobalMemory()
    source = np.arange(4 * threads, dtype=np.float32) if source is None else source
    target = memory.add(np.zeros(4 * threads, np.float32))
    ptx.run(
        HEAD + "\n".join(parts),
        [memory.add(source), target],
        memory,
        grid=(1, 1, 1),
        threads=threads,
        smem_bytes=16 * threads,
        seed=seed,
        ordered=ordered,
    )
    return memory.read(target, np.float32, 4 * threads)


SWAPPED = np.concatenate([np.arange(128, 256), np.arange(128)]).astype(np.float32)


def test_copies_arrive():
    assert np.array_equal(run(COPY, COMMIT, WAIT, BARRIER, EXCHANGE), SWAPPED)


UNORDERED = [
    (COPY, COMMIT, BARRIER),
    (COPY, WAIT, COMMIT, BARRIER),
    (COPY, COMMIT, WAIT),
    (COPY, COMMIT, BARRIER, WAIT),
]


@pytest.mark.parametrize("parts", UNORDERED)
def test_a_missing_wait_or_barrier_shows_as_nan(parts):
    assert any(np.isnan(run(*parts, EXCHANGE, seed=seed, ordered=False)).any() for seed in range(4))


@pytest.mark.parametrize("parts", UNORDERED)
@pytest.mark.parametrize("seed", range(3))
def test_a_missing_wait_or_barrier_raises_whatever_the_timing(parts, seed):
    with pytest.raises(AssertionError, match=r"may be (writing|reading)"):
        run(*parts, EXCHANGE, seed=seed)


ZERO, ADD = "st.shared.b32 [0], 0;", "atom.shared.add.u32 %r6, [0], 1;"
TOTAL = """
    ld.shared.b32 %r2, [0];
    st.global.v4.b32 [%rd2], {%r2, %r2, %r2, %r2};
    ret;
}
"""
FIRST = "setp.eq.u32 %p0, %r0, 0; @%p0 " + ZERO


def test_additions_to_shared_memory_need_no_order_among_themselves():
    assert (run(FIRST, BARRIER, ADD, BARRIER, TOTAL).view(np.int32) == 64).all()


@pytest.mark.parametrize("parts", [(FIRST, ADD, BARRIER), (FIRST, BARRIER, ADD)])
@pytest.mark.parametrize("seed", range(4))
def test_they_do_with_reads_and_writes(parts, seed):
    with pytest.raises(AssertionError, match=r"may be (reading|writing|adding to)"):
        run(*parts, TOTAL, seed=seed)


def test_reads_outside_of_a_buffer_raise():
    with pytest.raises(AssertionError, match=r"cp.async.*outside of all buffers"):
        run(COPY, COMMIT, WAIT, BARRIER, EXCHANGE, source=np.zeros(255, np.float32))


def test_a_copy_of_no_bytes_reads_nothing_and_leaves_zeros():
    copy = COPY.replace("16;", "16, 0;")
    assert not run(copy, COMMIT, WAIT, BARRIER, EXCHANGE, source=np.zeros(1, np.float32)).any()


def test_odd_addresses_and_addresses_outside_of_shared_memory_raise():
    with pytest.raises(AssertionError, match="multiple of 16"):
        run("add.s32 %r1, %r1, 4;", COPY, COMMIT, WAIT, BARRIER, EXCHANGE)
    with pytest.raises(AssertionError, match="outside of shared memory"):
        run("add.s32 %r1, %r1, 1024;", COPY, COMMIT, WAIT, BARRIER, EXCHANGE)


def test_unknown_instructions_and_unwritten_registers_raise():
    with pytest.raises(AssertionError, match=r"sin\.approx\.f32 .*knows"):
        run("sin.approx.f32 %r2, %r1;", EXCHANGE)
    with pytest.raises(AssertionError, match="%r7 was never written"):
        run("add.s32 %r2, %r1, %r7;", EXCHANGE)


@pytest.mark.parametrize(
    "code",
    [
        "cvt.rz.f32.s32 %r2, %r1;",
        "cvt.f32.f64 %r2, %rd1;",
        "cvt.rni.s32.f32 %r2, %r1;",
        "cvt.sat.u8.s32 %r2, %r1;",
        "cvt.rn.relu.bf16x2.f32 %r2, %r1, %r1;",
        "mul.hi.u64 %rd3, %rd1, %rd1;",
        "mad.wide.u64 %rd3, %rd1, %rd1, %rd1;",
    ],
)
def test_what_it_would_compute_otherwise_raises(code):
    with pytest.raises(AssertionError, match=code.split()[0]):
        run(code, EXCHANGE)


def test_branches_loops_and_guards():
    """Lane i goes round i times, lanes above 16 not at all; inline registers are their block's own."""
    body = """
        mov.b32 %r2, 0; mov.b32 %r3, 0;
        setp.gt.u32 %p0, %r0, 16;
        @%p0 bra $behind;
    $again:
        setp.ge.s32 %p1, %r3, %r0;
        @%p1 bra $behind;
        {.reg .b32 %unused<2>; .reg .b32 a, b; mov.b32 a, 3; add.s32 %r2, %r2, a;}
        add.s32 %r3, %r3, 1;
        bra $again;
    $behind:
        @!%p0 add.s32 %r2, %r2, 1000;
        mov.b32 %r4, 7;
        st.global.v4.b32 [%rd2], {%r2, %r3, %r4, %r4};
        ret;
    }
    """
    got = run(body, threads=32).view(np.uint32).reshape(32, 4)
    lanes = np.arange(32)
    assert np.array_equal(got[:, 0], np.where(lanes <= 16, 1000 + 3 * lanes, 0))
    assert (got[:, 2] == 7).all()


@pytest.mark.parametrize(
    ("code", "right"),
    [
        ("mov.b32 %r2, 0x3F803F00; mul.rn.bf16x2 %r2, %r2, %r2;", 0x3F803E80),
        ("mov.b32 %r2, 0x00400040; mov.b32 %r3, 0x40004000; mul.rn.bf16x2 %r2, %r2, %r3;", 0x00800080),  # subnormal
        ("mov.b32 %r2, 0x3C003800; mul.rn.f16x2 %r2, %r2, %r2;", 0x3C003400),
        ("mov.b32 %r3, 0f3F808000; mov.b32 %r4, 0f3F818000; cvt.rn.bf16x2.f32 %r2, %r3, %r4;", 0x3F803F82),  # to even
        ("mov.b32 %r3, -8; shr.s32 %r2, %r3, 1;", 0xFFFFFFFC),
        ("mov.b32 %r3, -8; shr.u32 %r2, %r3, 1;", 0x7FFFFFFC),
        ("mov.b32 %r3, 0x80000001; shf.l.wrap.b32 %r2, %r3, %r3, 4;", 0x00000018),
        ("mov.b32 %r3, -7; mov.b32 %r4, 2; div.s32 %r2, %r3, %r4;", 0xFFFFFFFD),
        ("mov.b32 %r3, 0xFFFFFFF9; div.u32 %r2, %r3, 2;", 0x7FFFFFFC),
        ("mov.b32 %r3, 0xFFFFFFFF; add.s32 %r2, %r3, 3;", 2),
        ("mov.b32 %r3, 0x80000001; mul.lo.s32 %r2, %r3, 3;", 0x80000003),
        ("mov.b32 %r3, 0x80000001; mul.hi.u32 %r2, %r3, 4;", 2),
        ("mov.b32 %r3, -5; min.s32 %r2, %r3, 3;", 0xFFFFFFFB),
        ("mov.b32 %r3, -5; min.u32 %r2, %r3, 3;", 3),
        ("mov.b32 %r3, 0x0F0F; mov.b32 %r4, 0x3333; mov.b32 %r5, 0x5555; lop3.b32 %r2, %r3, %r4, %r5, 0xF8;", 0x1F1F),
        ("mov.b32 %r3, 0x0F0F; mov.b32 %r4, 0x3333; mov.b32 %r5, 0x5555; lop3.b32 %r2, %r3, %r4, %r5, 0x96;", 0x6969),
        ("{.reg .b16 l, h; mov.b32 %r3, 0x12345678; mov.b32 {l, h}, %r3; mov.b32 %r2, {h, l};}", 0x56781234),
        ("mov.b64 %rd3, 0x1122334455667788; mov.b64 {%r3, %r2}, %rd3;", 0x11223344),
        ("{.reg .b8 b; .reg .b16 l, h; cvt.u8.u32 b, 0xF5; cvt.rn.f16x2.e2m1x2 %r2, b;}", 0xC6004200),
        ("mov.b32 %r3, 0x80000001; mad.lo.s32 %r2, %r3, 3, 4;", 0x80000007),
        ("mov.b32 %r3, 0x80000001; mad.hi.u32 %r2, %r3, 4, 5;", 7),
        ("mov.b32 %r3, -2; mad.hi.s32 %r2, %r3, 3, 5;", 4),
        ("mov.b32 %r3, 0x80000000; mov.b64 %rd3, 1; mad.wide.u32 %rd3, %r3, 6, %rd3; mov.b64 {%r3, %r2}, %rd3;", 3),
        ("mov.b32 %r3, -3; mov.b64 %rd3, 1; mad.wide.s32 %rd3, %r3, 6, %rd3; mov.b64 {%r2, %r3}, %rd3;", 0xFFFFFFEF),
        ("mov.b32 %r3, -3; mov.b64 %rd3, 1; mad.wide.s32 %rd3, %r3, 6, %rd3; mov.b64 {%r3, %r2}, %rd3;", 0xFFFFFFFF),
        ("mov.b32 %r3, -3; cvt.rn.f32.s32 %r2, %r3;", 0xC0400000),
        ("mov.b32 %r3, 0xFFFFFFFF; cvt.rn.f32.u32 %r2, %r3;", 0x4F800000),
        ("mov.b32 %r3, 0x01000003; cvt.rn.f32.s32 %r2, %r3;", 0x4B800002),  # to even
        ("{.reg .b16 h; mov.b16 h, 0xC200; cvt.f32.f16 %r2, h;}", 0xC0400000),
    ],
)
def test_arithmetic(code, right):
    got = run(code, "st.global.v4.b32 [%rd2], {%r2, %r2, %r2, %r2}; ret; }", threads=32).view(np.uint32)
    assert [hex(value) for value in set(got.tolist())] == [hex(right)]


def test_a_matrix_product_takes_fragments_as_the_instruction_does():
    """A[i, j] = 1 where j = i, so the sums are B; sums 0 and 1 of lane 4 g + q are row g, columns 2 q and 2 q + 1."""
    body = """
        shr.u32 %r2, %r0, 2; and.b32 %r3, %r0, 3; shl.b32 %r3, %r3, 1;
        {.reg .b32 a, b, one, zero; .reg .pred p, q; .reg .b32 low, high;
        setp.eq.b32 p, %r2, %r3; selp.b32 low, 0x00003F80, 0, p;
        add.s32 a, %r3, 1; setp.eq.b32 q, %r2, a; selp.b32 high, 0x3F800000, 0, q; or.b32 one, low, high;
        mov.b32 zero, 0; mov.b32 b, 0x40004000;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {%r4, %r5, %r6, %r7}, {one, zero, zero, one}, {b, zero}, {zero, zero, zero, zero};}
        st.global.v4.b32 [%rd2], {%r4, %r5, %r6, %r7};
        ret;
    }
    """
    got = run(body, threads=32).reshape(32, 4)
    assert (got[:, :2] == 2).all()  # rows 0 to 7 pick k 0 to 7, which are 2
    assert (got[:, 2:] == 0).all()  # rows 8 to 15 pick k 8 to 15, which are 0
