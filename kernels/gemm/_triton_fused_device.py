"""Device code of `triton_fused`; see `_triton_decode` for how weights are read.

The dots need x by planes too: plane i holds x[m, 16 * word + i] over the words of a step. `permute_x` writes x in that
order once per call (and applies pre_quant_scale on the way), so that the main loop copies planes as they are.
"""

import triton
import triton.language as tl

from ._triton_decode import INTERPRET, block_scale, quad_planes, reduce_splits, rounded, store_tile


@triton.jit
def permute_x(
    x_ptr,  # [M, K] bfloat16 or float16, rows x_stride apart
    pre_quant_scale_ptr,  # [K] like x; unread when has_pqs is 0
    out_ptr,  # [padded M, steps, 16, WORDS] like x; tokens from M and k from K are zero
    M,
    K,
    x_stride,
    has_pqs,  # 0 or 1
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens per block
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    STEP: tl.constexpr = 16 * WORDS
    step = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inner = tl.arange(0, STEP)[None, :]
    k = step * STEP + inner
    mask = (token < M) & (k < K)
    x = tl.load(x_ptr + token.to(tl.int64) * x_stride + k, mask=mask, other=0.0).to(tl.float32)
    pqs = tl.load(pre_quant_scale_ptr + k, mask=(k < K) & (has_pqs != 0), other=1.0).to(tl.float32)
    planes = tl.permute(tl.reshape(rounded(x * pqs, DTYPE), (TOKENS, WORDS, 16)), (0, 2, 1))
    at = out_ptr + (token.to(tl.int64) * tl.num_programs(0) + step) * STEP + inner
    tl.store(at, tl.reshape(planes, (TOKENS, STEP)))


@triton.jit
def plane_product(acc, x_ptrs, w, SWAP: tl.constexpr):
    """acc += x . w over one plane; swapped, the weights are the dot's first operand and acc is [BN, BM]."""
    x = tl.load(x_ptrs)
    if INTERPRET:
        x = x.to(tl.float32)  # the interpreter multiplies bfloat16 bit patterns
    if SWAP:
        acc = tl.dot(w, x, acc)
    else:
        acc = tl.dot(x, w, acc)
    return acc


@triton.jit
def quad_product(acc, x_ptrs, quad, scale, DTYPE: tl.constexpr, WORDS: tl.constexpr, SWAP: tl.constexpr):
    """Four planes."""
    w0, w1, w2, w3 = quad_planes(quad, scale, DTYPE)
    acc = plane_product(acc, x_ptrs, w0, SWAP)
    acc = plane_product(acc, x_ptrs + WORDS, w1, SWAP)
    acc = plane_product(acc, x_ptrs + 2 * WORDS, w2, SWAP)
    return plane_product(acc, x_ptrs + 3 * WORDS, w3, SWAP)


@triton.jit
def fused_gemm(
    x_ptr,  # [padded M, steps, 16, WORDS] bfloat16 or float16, by `permute_x`
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
    group_size,  # row tiles that stay together while token tiles advance
    K_ALIGN: tl.constexpr,  # a power of two that divides K; from 64 up the scales travel by asynchronous copies
    SWAP: tl.constexpr,
    BM: tl.constexpr,  # tokens per tile
    BN: tl.constexpr,  # weight rows per tile
    WORDS: tl.constexpr,  # words of 16 k per step
    STAGES: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    STEP: tl.constexpr = 16 * WORDS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row_tiles = tl.cdiv(N, BN)
    token_tiles = tl.cdiv(M, BM)
    group = tile // (group_size * token_tiles)
    first = group * group_size
    height = tl.minimum(row_tiles - first, group_size)
    row_tile = first + (tile % (group_size * token_tiles)) % height
    token_tile = (tile % (group_size * token_tiles)) // height

    words_per_row = (K // K_ALIGN) * (K_ALIGN // 16)
    steps = tl.cdiv(words_per_row, WORDS)
    steps_here = tl.cdiv(steps, tl.num_programs(1))
    begin = split * steps_here
    end = tl.minimum(begin + steps_here, steps)

    word = tl.arange(0, WORDS)
    if SWAP:  # weights [BN, WORDS], x [WORDS, BM], acc [BN, BM]
        rows = (row_tile * BN + tl.arange(0, BN))[:, None]
        tokens = (token_tile * BM + tl.arange(0, BM))[None, :]
        w_word, x_word = word[None, :], word[:, None]
        acc = tl.zeros((BN, BM), tl.float32)
        offsets = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    else:  # weights [WORDS, BN], x [BM, WORDS], acc [BM, BN]
        rows = (row_tile * BN + tl.arange(0, BN))[None, :]
        tokens = (token_tile * BM + tl.arange(0, BM))[:, None]
        w_word, x_word = word[:, None], word[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        offsets = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    row_base = rows.to(tl.int64) * words_per_row
    w_ptrs = weight_ptr.to(tl.pointer_type(tl.int64)) + row_base
    s_ptrs = scale_ptr + row_base
    x_ptrs = x_ptr + tokens.to(tl.int64) * steps * STEP + x_word
    for step in tl.range(begin, end, num_stages=STAGES):
        at = step * WORDS + w_word
        mask = (rows < N) & (at < words_per_row)
        w = tl.load(w_ptrs + at, mask=mask, other=0)
        scale = block_scale(tl.load(s_ptrs + at, mask=mask, other=0), DTYPE)
        x_at = x_ptrs + step * STEP
        acc = quad_product(acc, x_at, w.to(tl.int16), scale, DTYPE, WORDS, SWAP)
        acc = quad_product(acc, x_at + 4 * WORDS, (w >> 16).to(tl.int16), scale, DTYPE, WORDS, SWAP)
        acc = quad_product(acc, x_at + 8 * WORDS, (w >> 32).to(tl.int16), scale, DTYPE, WORDS, SWAP)
        acc = quad_product(acc, x_at + 12 * WORDS, (w >> 48).to(tl.int16), scale, DTYPE, WORDS, SWAP)

    acc, last = reduce_splits(acc, offsets, partial_ptr, counter_ptr, tile, split, tl.num_programs(1), BM * BN)
    if last:
        store_tile(acc, tokens, rows, out_ptr, global_scale_ptr, scale_stride, bias_ptr, float_bias_ptr, bias_kind, M, N)
