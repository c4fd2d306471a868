"""Device code of `two_pass`: weights to bfloat16 or float16 at the speed of memory, and the exact epilogue."""

import triton
import triton.language as tl

from ._triton_decode import code_value, e4m3_as_fp16, store_tile


@triton.jit
def code(word, scale, NIBBLE: tl.constexpr):
    """float32 code * scale of one of a word's eight codes."""
    return code_value((word >> (4 * NIBBLE)) & 15) * scale


@triton.jit
def dequantise(
    weight_ptr,  # [rows, K/2] uint8
    scale_ptr,  # [rows, K/16] uint8, e4m3 bits
    out_ptr,  # [rows, K] bfloat16 or float16: code * block scale, exact
    total,  # words of eight codes: rows * K / 8
    BLOCK: tl.constexpr,  # words per program
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = word < total
    w = tl.load(weight_ptr.to(tl.pointer_type(tl.int32)) + word, mask=mask, other=0)
    scale = e4m3_as_fp16(tl.load(scale_ptr + word // 2, mask=mask, other=0)).to(tl.float32) * 256.0
    even = tl.join(tl.join(code(w, scale, 0), code(w, scale, 4)), tl.join(code(w, scale, 2), code(w, scale, 6)))
    odd = tl.join(tl.join(code(w, scale, 1), code(w, scale, 5)), tl.join(code(w, scale, 3), code(w, scale, 7)))
    values = tl.reshape(tl.join(even, odd), (BLOCK, 8))  # joins add the fastest dimension: codes 0..7 in order
    tl.store(out_ptr + word[:, None] * 8 + tl.arange(0, 8)[None, :], values.to(DTYPE), mask=mask[:, None])


@triton.jit
def finish(
    acc_ptr,  # [M, rows] float32
    global_scale_ptr,  # [1] or [N] float32
    bias_ptr,  # [N] like out; read when bias_kind is 1
    float_bias_ptr,  # [N] float32; read when bias_kind is 2
    out_ptr,  # [M, N], columns first_row .. first_row + rows are written
    M,
    N,
    rows_here,
    first_row,
    scale_stride,  # 0: one global scale, 1: one per row
    bias_kind,  # 0: none
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    row_tiles = tl.cdiv(rows_here, BN)  # one axis for all tiles: the others end at 65535, which is 262140 tokens
    local = (tl.program_id(0) % row_tiles * BN + tl.arange(0, BN))[None, :]
    tokens = (tl.program_id(0) // row_tiles * BM + tl.arange(0, BM))[:, None]
    mask = (tokens < M) & (local < rows_here)
    acc = tl.load(acc_ptr + tokens.to(tl.int64) * rows_here + local, mask=mask, other=0.0) * 0.0078125  # 2^-7
    rows = tl.where(local < rows_here, first_row + local, N)
    store_tile(acc, tokens, rows, out_ptr, global_scale_ptr, scale_stride, bias_ptr, float_bias_ptr, bias_kind, M, N)
