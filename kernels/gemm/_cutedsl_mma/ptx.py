"""Instructions that CuTe DSL has no function for, or none that takes a computed address; more are in `_cutedsl_wgmma`.

Addresses are plain integers: 32 bits for shared memory, 64 for global memory. A condition is an Int32: zero means that
nothing happens.
"""

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import T, dsl_user_op

from .._cutedsl_wgmma.ptx import asm, several, unpack

# ---- into shared memory ----


@dsl_user_op
def copy_async(smem: Int32, source: Int64, size: Int32, condition: Int32, *, loc=None, ip=None):
    """Sixteen bytes, of which the first `size` (16 or 0) are read; the others become zeros."""
    text = "{.reg .pred p; setp.ne.b32 p, $3, 0;@p cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;}"
    values = [Int32(smem), Int64(source), Int32(size), Int32(condition)]
    asm(None, values, text, "r,l,r,r", effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_shared(smem: Int32, value: Int32, *, loc=None, ip=None):
    """Four bytes."""
    asm(None, [Int32(smem), Int32(value)], "st.shared.b32 [$0], $1;", "r,r", effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_shared_float(smem: Int32, value: Float32, *, loc=None, ip=None):
    """Four bytes."""
    asm(None, [Int32(smem), Float32(value)], "st.shared.f32 [$0], $1;", "r,f", effects=True, loc=loc, ip=ip)


# ---- out of shared memory ----


@dsl_user_op
def load_words(smem: Int32, count: cutlass.Constexpr[int], *, loc=None, ip=None):
    """Four or two words."""
    names = ", ".join(f"${i}" for i in range(count))
    text = f"ld.shared.v{count}.b32 {{{names}}}, [${count}];"
    found = asm(several("i32", count), [Int32(smem)], text, "=r," * count + "r", effects=True, loc=loc, ip=ip)
    return unpack(found, Int32, count, loc, ip)


@dsl_user_op
def load_shared(smem: Int32, *, loc=None, ip=None):
    """Four bytes."""
    return Int32(asm(T.i32(), [Int32(smem)], "ld.shared.b32 $0, [$1];", "=r,r", effects=True, loc=loc, ip=ip))


@dsl_user_op
def load_shared_float(smem: Int32, *, loc=None, ip=None):
    """Four bytes."""
    return Float32(asm(T.f32(), [Int32(smem)], "ld.shared.f32 $0, [$1];", "=f,r", effects=True, loc=loc, ip=ip))


@dsl_user_op
def load_matrices(smem: Int32, *, loc=None, ip=None):
    """Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    found = asm(several("i32", 4), [Int32(smem)], text, "=r,=r,=r,=r,r", effects=True, loc=loc, ip=ip)
    return unpack(found, Int32, 4, loc, ip)


# ---- registers of a warp ----


@dsl_user_op
def mma(sums, a, b, float16: cutlass.Constexpr[bool], *, loc=None, ip=None):
    """Four sums [16 rows, 8 tokens] plus four registers of rows [16, 16 k] times two of tokens [8, 16 k]."""
    kind = "f16" if float16 else "bf16"
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    values = [*(Int32(v) for v in (*a, *b)), *(Float32(v) for v in sums)]
    constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    found = asm(several("f32", 4), values, text, constraints, effects=False, loc=loc, ip=ip)
    return unpack(found, Float32, 4, loc, ip)


@dsl_user_op
def transpose(value: Int32, *, loc=None, ip=None):
    """An 8 x 8 matrix of 16-bit values, of which every lane holds two neighbours of row lane / 4."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return Int32(asm(T.i32(), [Int32(value)], text, "=r,r", effects=True, loc=loc, ip=ip))


# ---- global memory ----


@dsl_user_op
def add_partials(address: Int64, stride: cutlass.Constexpr[int], count: cutlass.Constexpr[int], *, loc=None, ip=None):
    """The sums of `count` vectors of four floats, `stride` bytes apart, in that order; past L1.

    One piece of code: of loads and additions apart, LLVM moves all loads to the front, and registers run out.
    """
    text = "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];"
    for i in range(1, count):
        text += f"{{.reg .f32 a, b, c, d; ld.global.cg.v4.f32 {{a, b, c, d}}, [$4 + {i * stride}];"
        text += "add.f32 $0, $0, a; add.f32 $1, $1, b; add.f32 $2, $2, c; add.f32 $3, $3, d;}"
    found = asm(several("f32", 4), [Int64(address)], text, "=&f,=&f,=&f,=&f,l", effects=True, loc=loc, ip=ip)
    return unpack(found, Float32, 4, loc, ip)


@dsl_user_op
def count_up(address: Int64, last: cutlass.Constexpr[int], *, loc=None, ip=None):
    """Add one to a counter, which `last` makes zero again; what it was.

    What others wrote before they added theirs can be read afterwards.
    """
    text = f"fence.acq_rel.gpu; atom.relaxed.gpu.global.inc.u32 $0, [$1], {last}; fence.acq_rel.gpu;"
    return Int32(asm(T.i32(), [Int64(address)], text, "=r,l", effects=True, loc=loc, ip=ip))


@dsl_user_op
def copy_out(smem: Int32, address: Int64, condition: Int32, size: cutlass.Constexpr[int], *, loc=None, ip=None):
    """2, 4, 8 or 16 bytes from shared to global memory."""
    kind, names = {
        2: ("b16", "h"),
        4: ("b32", "a"),
        8: ("v2.b32", "{a, b}"),
        16: ("v4.b32", "{a, b, c, d}"),
    }[size]
    text = (
        "{.reg .pred p; .reg .b16 h; .reg .b32 a, b, c, d; setp.ne.b32 p, $2, 0;"
        f"ld.shared.{kind} {names}, [$0]; @p st.global.{kind} [$1], {names};}}"
    )
    asm(None, [Int32(smem), Int64(address), Int32(condition)], text, "r,l,r", effects=True, loc=loc, ip=ip)
