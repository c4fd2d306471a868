"""Device code of `triton_fused`; see `_triton_decode` for how weights are read."""

import triton
import triton.language as tl

from ._triton_decode import block_scale, quad_planes, reduce_splits, store_tile, x_planes


@triton.jit
def product(acc, x, w, SWAP: tl.constexpr):
    """acc += x . w over one plane; swapped, the weights are the dot's first operand and acc is [BN, BM]."""
    if SWAP:
        acc = tl.dot(w, x, acc)
    else:
        acc = tl.dot(x, w, acc)
    return acc


@triton.jit
def quad_product(acc, x_quad, w_quad, scale, DTYPE: tl.constexpr, SWAP: tl.constexpr):
    """Four planes: codes 4j..4j+3 of every word."""
    x0, x1, x2, x3 = x_planes(x_quad, DTYPE)
    w0, w1, w2, w3 = quad_planes(w_quad, scale, DTYPE)
    acc = product(acc, x0, w0, SWAP)
    acc = product(acc, x1, w1, SWAP)
    acc = product(acc, x2, w2, SWAP)
    return product(acc, x3, w3, SWAP)


@triton.jit
def fused_gemm(
    x_ptr,  # [M, K] bfloat16 or float16, rows x_stride apart
    weight_ptr,  # [N, K/2] uint8
    scale_ptr,  # [N, K/16] uint8, e4m3 bits
    global_scale_ptr,  # [1] or [N] float32
    bias_ptr,  # [N]; unread without a bias
    out_ptr,  # [M, N] like x
    partial_ptr,  # [tiles, splits, BM * BN] float32
    counter_ptr,  # [tiles] int32, zero before and after
    M,
    N,
    K,
    x_stride,
    scale_stride,  # 0: one global scale, 1: one per row
    has_bias,  # 0 or 1
    group_size,  # row tiles that stay together while token tiles advance
    K_ALIGN: tl.constexpr,  # a power of two that divides K; from 64 up the scales travel by asynchronous copies
    SWAP: tl.constexpr,
    BM: tl.constexpr,  # tokens per tile
    BN: tl.constexpr,  # weight rows per tile
    WORDS: tl.constexpr,  # words of 16 k per step
    STAGES: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
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
    steps = tl.cdiv(tl.cdiv(words_per_row, WORDS), tl.num_programs(1))
    begin = split * steps * WORDS
    end = tl.minimum(begin + steps * WORDS, words_per_row)

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
    x_ptrs = x_ptr.to(tl.pointer_type(tl.int64)) + tokens.to(tl.int64) * (x_stride // 4)
    for k in tl.range(begin, end, WORDS, num_stages=STAGES):
        w_mask = (rows < N) & (k + w_word < end)
        x_mask = (tokens < M) & (k + x_word < end)
        w = tl.load(w_ptrs + (k + w_word), mask=w_mask, other=0)
        s = tl.load(s_ptrs + (k + w_word), mask=w_mask, other=0)
        x_at = x_ptrs + (k + x_word) * 4
        x0 = tl.load(x_at, mask=x_mask, other=0)
        x1 = tl.load(x_at + 1, mask=x_mask, other=0)
        x2 = tl.load(x_at + 2, mask=x_mask, other=0)
        x3 = tl.load(x_at + 3, mask=x_mask, other=0)
        scale = block_scale(s, DTYPE)
        acc = quad_product(acc, x0, w.to(tl.int16), scale, DTYPE, SWAP)
        acc = quad_product(acc, x1, (w >> 16).to(tl.int16), scale, DTYPE, SWAP)
        acc = quad_product(acc, x2, (w >> 32).to(tl.int16), scale, DTYPE, SWAP)
        acc = quad_product(acc, x3, (w >> 48).to(tl.int16), scale, DTYPE, SWAP)

    acc, last = reduce_splits(acc, offsets, partial_ptr, counter_ptr, tile, split, tl.num_programs(1), BM * BN)
    if last:
        store_tile(acc, tokens, rows, out_ptr, global_scale_ptr, scale_stride, bias_ptr, has_bias, M, N)
