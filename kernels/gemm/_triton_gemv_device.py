"""Device code of `triton_gemv`; see `_triton_decode` for how weights are read."""

import triton
import triton.language as tl

from ._triton_decode import block_scale, quad_planes, reduce_splits, store_tile, x_planes


@triton.jit
def add_quad(total, x_quad, w0, w1, w2, w3, DTYPE: tl.constexpr):
    """total += x . w over four planes, element by element in float32."""
    x0, x1, x2, x3 = x_planes(x_quad, DTYPE)
    total += x0.to(tl.float32) * w0.to(tl.float32)
    total += x1.to(tl.float32) * w1.to(tl.float32)
    total += x2.to(tl.float32) * w2.to(tl.float32)
    return total + x3.to(tl.float32) * w3.to(tl.float32)


@triton.jit
def gemv(
    x_ptr,  # [M, K] bfloat16 or float16, rows x_stride apart
    weight_ptr,  # [N, K/2] uint8
    scale_ptr,  # [N, K/16] uint8, e4m3 bits
    global_scale_ptr,  # [1] or [N] float32
    bias_ptr,  # [N] like x; read when bias_kind is 1
    float_bias_ptr,  # [N] float32; read when bias_kind is 2
    out_ptr,  # [M, N] like x
    partial_ptr,  # [tiles, splits, BM * BN] float32
    counter_ptr,  # [tiles] int32, zero before and after
    M,
    N,
    K,
    scale_stride,  # 0: one global scale, 1: one per row
    bias_kind,  # 0: none
    x_stride,
    K_ALIGN: tl.constexpr,  # a power of two that divides K
    BM: tl.constexpr,  # tokens per tile
    BN: tl.constexpr,  # weight rows per tile
    WORDS: tl.constexpr,  # words of 16 k per step
    STAGES: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    words_per_row = (K // K_ALIGN) * (K_ALIGN // 16)
    steps = tl.cdiv(tl.cdiv(words_per_row, WORDS), tl.num_programs(1))
    begin = split * steps * WORDS
    end = tl.minimum(begin + steps * WORDS, words_per_row)

    word = tl.arange(0, WORDS)[None, :]
    rows = (row_tile * BN + tl.arange(0, BN))[:, None]
    token = tl.arange(0, BM)[None, :]
    row_base = rows.to(tl.int64) * words_per_row
    w_ptrs = weight_ptr.to(tl.pointer_type(tl.int64)) + row_base
    s_ptrs = scale_ptr + row_base
    x_quads = x_ptr.to(tl.pointer_type(tl.int64))
    acc = tl.zeros((BN, BM), tl.float32)
    sums = tl.zeros((BN, WORDS), tl.float32)
    for k in tl.range(begin, end, WORDS, num_stages=STAGES):
        inside = k + word < end
        mask = (rows < N) & inside
        w = tl.load(w_ptrs + (k + word), mask=mask, other=0)
        scale = block_scale(tl.load(s_ptrs + (k + word), mask=mask, other=0), DTYPE)
        a0, a1, a2, a3 = quad_planes(w.to(tl.int16), scale, DTYPE)
        b0, b1, b2, b3 = quad_planes((w >> 16).to(tl.int16), scale, DTYPE)
        c0, c1, c2, c3 = quad_planes((w >> 32).to(tl.int16), scale, DTYPE)
        d0, d1, d2, d3 = quad_planes((w >> 48).to(tl.int16), scale, DTYPE)
        for m in tl.static_range(BM):
            x_at = x_quads + m * (x_stride // 4) + (k + word) * 4
            wanted = inside & (m < M)
            part = sums if BM == 1 else tl.zeros((BN, WORDS), tl.float32)
            part = add_quad(part, tl.load(x_at, mask=wanted, other=0), a0, a1, a2, a3, DTYPE)
            part = add_quad(part, tl.load(x_at + 1, mask=wanted, other=0), b0, b1, b2, b3, DTYPE)
            part = add_quad(part, tl.load(x_at + 2, mask=wanted, other=0), c0, c1, c2, c3, DTYPE)
            part = add_quad(part, tl.load(x_at + 3, mask=wanted, other=0), d0, d1, d2, d3, DTYPE)
            if BM == 1:
                sums = part  # one token has room to add over words at the very end
            else:
                acc += tl.where(token == m, tl.sum(part, axis=1)[:, None], 0.0)

    if BM == 1:
        acc = tl.sum(sums, axis=1)[:, None]
    offsets = tl.arange(0, BN)[:, None] * BM + token
    acc, last = reduce_splits(acc, offsets, partial_ptr, counter_ptr, row_tile, split, tl.num_programs(1), BM * BN)
    if last:
        store_tile(acc, token, rows, out_ptr, global_scale_ptr, scale_stride, bias_ptr, float_bias_ptr, bias_kind, M, N)
