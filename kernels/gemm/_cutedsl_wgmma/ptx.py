"""Instructions that CuTe DSL has no function for, or none that takes a computed address.

Addresses are plain integers: 32 bits for shared memory, 64 for global memory. A condition is an Int32: zero means that
nothing happens. It guards the instruction itself, for a branch between the wgmmas of a stage makes ptxas wait after
each of them.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

EVICT_FIRST = 0x12F0000000000000  # L2 policy of weights, which are read once


def asm(result: Any, args: list[Any], text: str, constraints: str, *, effects: bool, loc: Any, ip: Any) -> Any:
    """Inline PTX; `effects`: it may neither be dropped nor moved."""
    values = [a.ir_value(loc=loc, ip=ip) for a in args]
    return llvm.inline_asm(
        result,
        values,
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def several(kind: str, count: int) -> Any:
    """The type of an asm block with that many results of one kind: "i32" or "f32"."""
    return ir.Type.parse(f"!llvm.struct<({','.join([kind] * count)})>")


def unpack(value: Any, kind: Any, count: int, loc: Any, ip: Any) -> tuple[Any, ...]:
    """Its results."""
    return tuple(
        kind(llvm.extractvalue(T.i32() if kind is Int32 else T.f32(), value, [i], loc=loc, ip=ip)) for i in range(count)
    )


# ---- the ring ----


@dsl_user_op
def bulk_load(smem: Int32, source: Int64, size: cutlass.Constexpr[int], bar: Int32, *, loc=None, ip=None):
    """Copy `size` bytes, a multiple of 16, to shared memory, and count them at a barrier."""
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    text = f"{copy} [$0], [$1], {size}, [$2], $3;"
    asm(
        None,
        [Int32(smem), Int64(source), Int32(bar), Int64(EVICT_FIRST)],
        text,
        "r,l,r,l",
        effects=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def arrive_if(bar: Int32, block: Int32, condition: Int32, cluster: cutlass.Constexpr[bool], *, loc=None, ip=None):
    """Arrive at a barrier of this block, or at the same one of another block of the cluster.

    PTX's default, release within the block, suffices at the other block too: what the barrier guards was read by
    wgmma, which has completed. With .release.cluster a kernel was 47 % slower (H200, prototype of this one).
    """
    if cluster:
        text = (
            "{.reg .pred p; .reg .b32 r; setp.ne.b32 p, $2, 0; mapa.shared::cluster.u32 r, $0, $1;"
            "@p mbarrier.arrive.shared::cluster.b64 _, [r];}"
        )
    else:
        text = "{.reg .pred p; setp.ne.b32 p, $2, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0];}"
    asm(None, [Int32(bar), Int32(block), Int32(condition)], text, "r,r,r", effects=True, loc=loc, ip=ip)


# ---- partial sums and their flags ----


@dsl_user_op
def store_partial(address: Int64, a: Float32, b: Float32, c: Float32, d: Float32, *, loc=None, ip=None):
    """Sixteen bytes, past L1."""
    values = [Int64(address), Float32(a), Float32(b), Float32(c), Float32(d)]
    asm(None, values, "st.global.cg.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f", effects=True, loc=loc, ip=ip)


@dsl_user_op
def load_partial(address: Int64, condition: Int32, *, loc=None, ip=None):
    """Sixteen bytes, past L1; zeros where the condition does not hold."""
    text = (
        "{.reg .pred p; setp.ne.b32 p, $5, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; mov.f32 $2, 0f00000000;"
        "mov.f32 $3, 0f00000000; @p ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];}"
    )
    found = asm(
        several("f32", 4),
        [Int64(address), Int32(condition)],
        text,
        "=&f,=&f,=&f,=&f,l,r",
        effects=True,
        loc=loc,
        ip=ip,
    )
    return unpack(found, Float32, 4, loc, ip)


@dsl_user_op
def raise_flag(address: Int64, *, loc=None, ip=None):
    """Set a flag to 1 after everything that this block has written so far."""
    text = "fence.acq_rel.gpu; st.relaxed.gpu.global.s32 [$0], 1;"
    asm(None, [Int64(address)], text, "l", effects=True, loc=loc, ip=ip)


@dsl_user_op
def clear_flag(address: Int64, *, loc=None, ip=None):
    """Set a flag to 0: the next launch finds it so."""
    asm(None, [Int64(address)], "st.relaxed.gpu.global.s32 [$0], 0;", "l", effects=True, loc=loc, ip=ip)


@dsl_user_op
def read_flag(address: Int64, *, loc=None, ip=None):
    """A flag; what was written before it was raised can be read afterwards."""
    return Int32(
        asm(T.i32(), [Int64(address)], "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", effects=True, loc=loc, ip=ip)
    )


# ---- the way out ----


@dsl_user_op
def load_float(address: Int64, *, loc=None, ip=None):
    """Four bytes of global memory."""
    return Float32(asm(T.f32(), [Int64(address)], "ld.global.f32 $0, [$1];", "=f,l", effects=True, loc=loc, ip=ip))


@dsl_user_op
def load_bias(address: Int64, kind: Int32, float16: cutlass.Constexpr[bool], *, loc=None, ip=None):
    """0 for kind 0, a value of x's dtype for kind 1, a float32 for kind 2."""
    widen = "cvt.f32.f16 $0, h;" if float16 else "mov.b32 $0, {z, h};"
    text = (
        "{.reg .pred a, b; .reg .b16 h, z; mov.b16 z, 0; mov.b16 h, 0; setp.eq.s32 a, $2, 1; setp.eq.s32 b, $2, 2;"
        f"@a ld.global.b16 h, [$1]; {widen} @b ld.global.f32 $0, [$1];}}"
    )
    return Float32(asm(T.f32(), [Int64(address), Int32(kind)], text, "=&f,l,r", effects=True, loc=loc, ip=ip))


@dsl_user_op
def pack(low: Float32, high: Float32, float16: cutlass.Constexpr[bool], *, loc=None, ip=None):
    """Two values rounded to nearest, ties to even."""
    text = f"cvt.rn.{'f16x2' if float16 else 'bf16x2'}.f32 $0, $2, $1;"
    return Int32(asm(T.i32(), [Float32(low), Float32(high)], text, "=r,f,f", effects=False, loc=loc, ip=ip))


@dsl_user_op
def store_transposed(smem: Int32, a: Int32, b: Int32, c: Int32, d: Int32, *, loc=None, ip=None):
    """Four 8 x 8 matrices of accumulator pairs, rows and columns exchanged."""
    text = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};"
    values = [Int32(smem), Int32(a), Int32(b), Int32(c), Int32(d)]
    asm(None, values, text, "r,r,r,r,r", effects=True, loc=loc, ip=ip)


@dsl_user_op
def copy_out(smem: Int32, address: Int64, condition: Int32, *, loc=None, ip=None):
    """Sixteen bytes from shared to global memory."""
    text = (
        "{.reg .pred p; .reg .b32 a, b, c, d; setp.ne.b32 p, $2, 0; ld.shared.v4.b32 {a, b, c, d}, [$0];"
        "@p st.global.v4.b32 [$1], {a, b, c, d};}"
    )
    asm(None, [Int32(smem), Int64(address), Int32(condition)], text, "r,l,r", effects=True, loc=loc, ip=ip)


@dsl_user_op
def copy_out_some(smem: Int32, address: Int64, count: Int32, *, loc=None, ip=None):
    """The first `count` (none if negative, at most 8) of eight 16-bit values from shared to global memory."""
    parts = ["{.reg .pred p; .reg .b32 a, b, c, d; .reg .b16 h<8>; ld.shared.v4.b32 {a, b, c, d}, [$0];"]
    parts += [f"mov.b32 {{h{2 * i}, h{2 * i + 1}}}, {word};" for i, word in enumerate("abcd")]
    parts += [f"setp.gt.s32 p, $2, {i}; @p st.global.b16 [$1 + {2 * i}], h{i};" for i in range(8)]
    asm(
        None,
        [Int32(smem), Int64(address), Int32(count)],
        "".join(parts) + "}",
        "r,l,r",
        effects=True,
        loc=loc,
        ip=ip,
    )
