"""Instructions of products of experts; see `gemm._cutedsl_wgmma.ptx`."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu as nvgpu
from cutlass.cutlass_dsl import T, dsl_user_op

from ...gemm._cutedsl_wgmma.ptx import asm, several, unpack

__all__ = [
    "add_one",
    "copy_out_if",
    "copy_piece",
    "load_factor",
    "load_four",
    "load_int",
    "load_pair",
    "load_shared",
    "load_tile",
    "load_two",
    "load_vector",
    "load_x",
    "map_address",
    "quotient",
    "scaled",
    "store_four",
    "store_half",
    "store_shared",
    "store_summands",
]


# ---- lists in global memory ----


@dsl_user_op
def load_int(address: Int64, *, loc=None, ip=None):
    """An int32 that earlier kernels wrote."""
    return Int32(asm(T.i32(), [Int64(address)], "ld.global.b32 $0, [$1];", "=r,l", effects=True, loc=loc, ip=ip))


@dsl_user_op
def load_tile(address: Int64, *, loc=None, ip=None):
    """The first three of four int32."""
    text = "{.reg .b32 unused; ld.global.v4.b32 {$0, $1, $2, unused}, [$3];}"
    found = asm(several("i32", 3), [Int64(address)], text, "=r,=r,=r,l", effects=True, loc=loc, ip=ip)
    return unpack(found, Int32, 3, loc, ip)


@dsl_user_op
def load_pair(address: Int64, condition: Int32, *, loc=None, ip=None):
    """An int32, or 0 where the condition does not hold."""
    text = "{.reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1];}"
    args = [Int64(address), Int32(condition)]
    return Int32(asm(T.i32(), args, text, "=&r,l,r", effects=True, loc=loc, ip=ip))


@dsl_user_op
def load_factor(address: Int64, condition: Int32, *, loc=None, ip=None):
    """A float32, or 1 where the condition does not hold."""
    text = "{.reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f3F800000; @p ld.global.f32 $0, [$1];}"
    args = [Int64(address), Int32(condition)]
    return Float32(asm(T.f32(), args, text, "=&f,l,r", effects=True, loc=loc, ip=ip))


@dsl_user_op
def load_vector(address: Int64, condition: Int32, float16: cutlass.Constexpr[bool], *, loc=None, ip=None):
    """A 16-bit value twice, or two ones where the condition does not hold."""
    one = "0x3C00" if float16 else "0x3F80"
    text = (
        f"{{.reg .pred p; .reg .b16 h; setp.ne.b32 p, $2, 0; mov.b16 h, {one};"
        "@p ld.global.b16 h, [$1]; mov.b32 $0, {h, h};}"
    )
    args = [Int64(address), Int32(condition)]
    return Int32(asm(T.i32(), args, text, "=&r,l,r", effects=True, loc=loc, ip=ip))


# ---- tiles in turn ----


@dsl_user_op
def add_one(address: Int64, condition: Int32, *, loc=None, ip=None):
    """What an int32 of global memory was before one was added; 0, and nothing is added, without the condition."""
    text = "{.reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1;}"
    args = [Int64(address), Int32(condition)]
    return Int32(asm(T.i32(), args, text, "=&r,l,r", effects=True, loc=loc, ip=ip))


@dsl_user_op
def store_four(smem: Int32, a: Int32, b: Int32, c: Int32, d: Int32, *, loc=None, ip=None):
    """Four int32 to shared memory."""
    values = [Int32(smem), Int32(a), Int32(b), Int32(c), Int32(d)]
    asm(None, values, "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_four(smem: Int32, *, loc=None, ip=None):
    """Four int32 of shared memory."""
    text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    found = asm(several("i32", 4), [Int32(smem)], text, "=r,=r,=r,=r,r", effects=True, loc=loc, ip=ip)
    return unpack(found, Int32, 4, loc, ip)


# ---- x ----


@dsl_user_op
def map_address(x_copy: Any, *, loc=None, ip=None):
    """Where the tensor map of a copy lies."""
    kind = ir.Type.parse("!cute.ptr<i64, generic, align<64>>")
    executable = nvgpu.atom_make_exec_tma(x_copy._trait.value, loc=loc, ip=ip)
    pointer = nvgpu.get_tma_desc_addr(kind, executable, loc=loc, ip=ip)
    return Int64(pointer.toint(loc=loc, ip=ip))


@dsl_user_op
def load_x(smem: Int32, tensor_map: Int64, column: Int32, row: Int32, bar: Int32, *, loc=None, ip=None):
    """Copy a box by TMA and count its bytes at a barrier; what lies outside the matrix becomes zero."""
    text = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3}], [$4];"
    )
    values = [Int32(smem), Int64(tensor_map), Int32(column), Int32(row), Int32(bar)]
    asm(None, values, text, "r,l,r,r,r", effects=True, loc=loc, ip=ip)


@dsl_user_op
def copy_piece(
    smem: Int32,
    x: Int64,
    place: Int32,
    size: Int32,
    condition: Int32,
    smem_offset: cutlass.Constexpr[int],
    x_offset: cutlass.Constexpr[int],
    *,
    loc=None,
    ip=None,
):
    """Copy sixteen bytes from `place` times 16 bytes behind x; with a size of 0 zeros instead. Both may be offset."""
    text = (
        "{.reg .pred p; .reg .b64 at; setp.ne.b32 p, $4, 0; mad.wide.u32 at, $2, 16, $1;"
        f"@p cp.async.cg.shared.global [$0 + {smem_offset}], [at + {x_offset}], 16, $3;}}"
    )
    values = [Int32(smem), Int64(x), Int32(place), Int32(size), Int32(condition)]
    asm(None, values, text, "r,l,r,r,r", effects=True, loc=loc, ip=ip)


@dsl_user_op
def quotient(a: Int32, b: Int32, *, loc=None, ip=None):
    """Of integers that are not negative."""
    return Int32(asm(T.i32(), [Int32(a), Int32(b)], "div.u32 $0, $1, $2;", "=r,r,r", effects=False, loc=loc, ip=ip))


# ---- the way out ----


@dsl_user_op
def store_shared(smem: Int32, value: Any, *, loc=None, ip=None):
    """An int32 or a float32 to shared memory."""
    kind = "f" if isinstance(value, Float32) else "r"
    asm(None, [Int32(smem), value], "st.shared.b32 [$0], $1;", f"r,{kind}", effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_shared(smem: Int32, *, loc=None, ip=None):
    """An int32 of shared memory."""
    return Int32(asm(T.i32(), [Int32(smem)], "ld.shared.b32 $0, [$1];", "=r,r", effects=True, loc=loc, ip=ip))


@dsl_user_op
def load_two(smem: Int32, *, loc=None, ip=None):
    """Two float32 of shared memory."""
    text = "ld.shared.v2.f32 {$0, $1}, [$2];"
    found = asm(several("f32", 2), [Int32(smem)], text, "=f,=f,r", effects=True, loc=loc, ip=ip)
    return unpack(found, Float32, 2, loc, ip)


@dsl_user_op
def scaled(word: Int32, vector: Int32, float16: cutlass.Constexpr[bool], *, loc=None, ip=None):
    """Two 16-bit values times two others, rounded."""
    text = f"mul.rn.{'f16x2' if float16 else 'bf16x2'} $0, $1, $2;"
    return Int32(asm(T.i32(), [Int32(word), Int32(vector)], text, "=r,r,r", effects=False, loc=loc, ip=ip))


@dsl_user_op
def store_half(smem: Int32, a: Int32, b: Int32, *, loc=None, ip=None):
    """Two 8 x 8 matrices of pairs, rows and columns exchanged."""
    text = "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0], {$1, $2};"
    asm(None, [Int32(smem), Int32(a), Int32(b)], text, "r,r,r", effects=True, loc=loc, ip=ip)


@dsl_user_op
def copy_out_if(smem: Int32, address: Int64, condition: Int32, *, loc=None, ip=None):
    """Sixteen bytes from shared to global memory; neither is touched where the condition does not hold.

    The zeros keep ptxas from holding four registers for each such copy from the kernel's beginning on.
    """
    text = (
        "{.reg .pred p; .reg .b32 a, b, c, d; setp.ne.b32 p, $2, 0; mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0;"
        "mov.b32 d, 0; @p ld.shared.v4.b32 {a, b, c, d}, [$0]; @p st.global.v4.b32 [$1], {a, b, c, d};}"
    )
    asm(None, [Int32(smem), Int64(address), Int32(condition)], text, "r,l,r", effects=True, loc=loc, ip=ip)


@dsl_user_op
def store_summands(
    listed: Int32,
    out: Int64,
    stride: Int32,
    first: Int32,
    second: Int32,
    a: Float32,
    b: Float32,
    c: Float32,
    d: Float32,
    *,
    loc=None,
    ip=None,
):
    """Two tokens' values of a row, and of the row 8 further on, to the rows of their pairs, `stride` bytes apart.

    `first` and `second` are the tokens' conditions; their pairs are listed in shared memory.
    """
    text = (
        "{.reg .pred p, q; .reg .b32 pa, pb; .reg .b64 at; setp.ne.b32 p, $3, 0; setp.ne.b32 q, $4, 0;"
        "ld.shared.v2.b32 {pa, pb}, [$0];"
        "mul.wide.u32 at, pa, $2; add.s64 at, at, $1; @p st.global.f32 [at], $5; @p st.global.f32 [at + 32], $7;"
        "mul.wide.u32 at, pb, $2; add.s64 at, at, $1; @q st.global.f32 [at], $6; @q st.global.f32 [at + 32], $8;}"
    )
    values = [Int32(listed), Int64(out), Int32(stride), Int32(first), Int32(second)]
    values += [Float32(a), Float32(b), Float32(c), Float32(d)]
    asm(None, values, text, "r,l,r,r,r,f,f,f,f", effects=True, loc=loc, ip=ip)
