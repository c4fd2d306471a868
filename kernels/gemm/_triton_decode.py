"""Device functions that the Triton candidates share: decoding weights, splitting x, finishing a tile.

Weights are read as 64-bit words: one word is 16 codes of one row, and exactly one block scale belongs to it. Code i of
a word is at bits 4i..4i+3, k = 16 * word + i. So a tile of words [BN, W] yields 16 planes [BN, W], plane i with k = i
mod 16, and the tile's product is the sum of 16 products over W. No value ever moves between lanes: the compiler loads
words and scales straight into the layout of the dot's operand.

A decoded element is code * scale * 2^-7, exact in bfloat16 and in float16 (6 significant bits, 2^-17 .. 21); the
epilogue undoes the 2^7 in float32. Raw code bits placed at a float's exponent and mantissa read as code * 2^-126
(bfloat16) or code * 2^-14 (float16), 0.5 being subnormal; the scale carries the rest.
"""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


def _plane_asm(nibble: int, dtype: str) -> str:
    """PTX for two 16-bit quads of codes in $1 and two scales in $2: the nibble-th code of each, times its scale."""
    mask, place, suffix = ("0x01C001C0", 6, "bf16x2") if dtype == "bf16" else ("0x0E000E00", 9, "f16x2")
    sign_shift, shift = 12 - 4 * nibble, place - 4 * nibble
    lines = ["{", ".reg .b32 sign, rest, top;", "mov.b32 top, 0x80008000;"]
    lines.append(f"shl.b32 sign, $1, {sign_shift};" if sign_shift else "mov.b32 sign, $1;")
    lines.append(f"shl.b32 rest, $1, {shift};" if shift > 0 else f"shr.b32 rest, $1, {-shift};")
    lines.append(f"and.b32 rest, rest, {mask};")
    lines.append("lop3.b32 rest, sign, top, rest, 0xEA;")  # (sign & top) | rest
    lines.append(f"fma.rn.{suffix} $0, rest, $2, top;")  # adds -0: sm_80 has no packed bfloat16 multiply
    return "\n".join([*lines, "}"])


BF16_0, BF16_1, BF16_2, BF16_3 = (tl.constexpr(_plane_asm(i, "bf16")) for i in range(4))
FP16_0, FP16_1, FP16_2, FP16_3 = (tl.constexpr(_plane_asm(i, "fp16")) for i in range(4))


@triton.jit
def e4m3_as_fp16(byte):
    """uint8 e4m3 -> float16 holding scale * 2^-8: sign and magnitude bits moved in place, subnormals included."""
    bits = byte.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def block_scale(byte, DTYPE: tl.constexpr):
    """uint8 e4m3 -> what a raw plane is multiplied by: scale * 2^119 in bfloat16, scale * 2^7 in float16."""
    half = e4m3_as_fp16(byte)
    if INTERPRET:
        scale = half.to(tl.float32) * 2.0  # the interpreter's planes are code values: scale * 2^-7 is left to multiply
    elif DTYPE == tl.bfloat16:
        scale = (half.to(tl.float32) * 1.7014118346046923e38).to(tl.bfloat16)  # 2^127
    else:
        scale = half * 32768.0
    return scale


@triton.jit
def code_value(nibble):
    """int32 code 0..15 -> float32 value."""
    bits = (((nibble & 7) << 9) | ((nibble & 8) << 12)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def quad_planes(quad, scale, DTYPE: tl.constexpr):
    """int16 quads of codes and their scales -> four planes of decoded weights (float32 under the interpreter)."""
    if INTERPRET:
        wide = quad.to(tl.int32)
        p0 = code_value(wide & 15) * scale
        p1 = code_value((wide >> 4) & 15) * scale
        p2 = code_value((wide >> 8) & 15) * scale
        p3 = code_value((wide >> 12) & 15) * scale
    elif DTYPE == tl.bfloat16:
        p0 = tl.inline_asm_elementwise(BF16_0, "=r,r,r", [quad, scale], dtype=tl.bfloat16, is_pure=True, pack=2)
        p1 = tl.inline_asm_elementwise(BF16_1, "=r,r,r", [quad, scale], dtype=tl.bfloat16, is_pure=True, pack=2)
        p2 = tl.inline_asm_elementwise(BF16_2, "=r,r,r", [quad, scale], dtype=tl.bfloat16, is_pure=True, pack=2)
        p3 = tl.inline_asm_elementwise(BF16_3, "=r,r,r", [quad, scale], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        p0 = tl.inline_asm_elementwise(FP16_0, "=r,r,r", [quad, scale], dtype=tl.float16, is_pure=True, pack=2)
        p1 = tl.inline_asm_elementwise(FP16_1, "=r,r,r", [quad, scale], dtype=tl.float16, is_pure=True, pack=2)
        p2 = tl.inline_asm_elementwise(FP16_2, "=r,r,r", [quad, scale], dtype=tl.float16, is_pure=True, pack=2)
        p3 = tl.inline_asm_elementwise(FP16_3, "=r,r,r", [quad, scale], dtype=tl.float16, is_pure=True, pack=2)
    return p0, p1, p2, p3


@triton.jit
def x_planes(quad, DTYPE: tl.constexpr):
    """int64 holding four consecutive x -> four planes (float32 under the interpreter, whose bfloat16 dot is wrong)."""
    x0 = quad.to(tl.int16).to(DTYPE, bitcast=True)
    x1 = (quad >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    x2 = (quad >> 32).to(tl.int16).to(DTYPE, bitcast=True)
    x3 = (quad >> 48).to(tl.int16).to(DTYPE, bitcast=True)
    if INTERPRET:
        x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """float32 -> DTYPE, to nearest even; the interpreter truncates to bfloat16, so it rounds by hand."""
    if INTERPRET and DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        value = tl.where(value == value, kept.to(tl.float32, bitcast=True), value)
    return value.to(DTYPE)


@triton.jit
def store_tile(acc, tokens, rows, out_ptr, scale_ptr, scale_stride, bias_ptr, float_bias_ptr, bias_kind, M, N):
    """out[token, row] = acc * 2^7 * global scale + bias, in float32, rounded once. tokens and rows broadcast to acc.

    scale_stride is 0 for one global scale and 1 for one per row. bias_kind 1 reads bias_ptr, 2 reads float_bias_ptr, 0
    neither.
    """
    inside = rows < N
    scale = tl.load(scale_ptr + rows * scale_stride, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + rows, mask=inside & (bias_kind == 1), other=0.0).to(tl.float32)
    bias += tl.load(float_bias_ptr + rows, mask=inside & (bias_kind == 2), other=0.0)
    value = acc * 128.0 * scale + bias
    offsets = tokens.to(tl.int64) * N + rows
    tl.store(out_ptr + offsets, rounded(value, out_ptr.dtype.element_ty), mask=(tokens < M) & inside)


@triton.jit
def reduce_splits(acc, offsets, partial_ptr, counter_ptr, tile, split, splits, SIZE: tl.constexpr):
    """Deterministic split-K: every split stores its partial; the last to arrive sums all of them in split order.

    Returns the sum and whether this program is the last, which also leaves the counter zero. `offsets` covers the tile
    [0, SIZE) in acc's shape. With one split nothing is stored.
    """
    last = True
    if splits > 1:
        base = partial_ptr + tile.to(tl.int64) * splits * SIZE
        tl.store(base + split * SIZE + offsets, acc)
        tl.debug_barrier()  # all of this program's stores come before the counter's release
        last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == splits - 1
        if last:
            acc = tl.load(base + offsets, cache_modifier=".cg")
            for i in range(1, splits):
                acc += tl.load(base + i * SIZE + offsets, cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)
    return acc, last
