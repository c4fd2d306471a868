"""Device code of `triton_fused`; see `_triton_decode` for how weights are read.

The dots need x by planes too: plane i holds x[m, 16 * word + i] over the words of a step. `permute_x` writes x in that
order once per call (and applies pre_quant_scale on the way), so that the main loop copies planes as they are.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    PDL: tl.constexpr,  # let the kernel behind start now
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    STEP: tl.constexpr = 16 * WORDS
    if PDL:
        gdc_launch_dependents()
    step = tl.program_id(1)  # the grid's second axis holds 65535: enough for K, not for every M
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inner = tl.arange(0, STEP)[None, :]
    k = step * STEP + inner
    mask = (token < M) & (k < K)
    x = tl.load(x_ptr + token.to(tl.int64) * x_stride + k, mask=mask, other=0.0).to(tl.float32)
    pqs = tl.load(pre_quant_scale_ptr + k, mask=(k < K) & (has_pqs != 0), other=1.0).to(tl.float32)
    planes = tl.permute(tl.reshape(rounded(x * pqs, DTYPE), (TOKENS, WORDS, 16)), (0, 2, 1))
    at = out_ptr + (token.to(tl.int64) * tl.num_programs(1) + step) * STEP + inner
    tl.store(at, tl.reshape(planes, (TOKENS, STEP)))


@triton.jit
def quad_product(acc, x_ptrs, quad, scale, DTYPE: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr):
    """acc [BN, BM] += four planes of weights, side by side along k, times x [4 * WORDS, BM].

    Joining only renames registers: each k16 step of the tensor core reads one plane (or half of one with 32 words).
    """
    w0, w1, w2, w3 = quad_planes(quad, scale, DTYPE)
    w = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BN, WORDS, 4))  # [row, word, plane]
    x = tl.load(x_ptrs)
    if INTERPRET:
        x = x.to(tl.float32)  # the interpreter multiplies bfloat16 bit patterns
    return tl.dot(tl.reshape(tl.permute(w, (0, 2, 1)), (BN, 4 * WORDS)), x, acc)


@triton.jit
def fused_gemm(
    x_ptr,  # [padded M, steps, 16, WORDS] bfloat16 or float16, by `permute_x`
    weight_ptr,  # [N, K/2] uint8
    scale_ptr,  # [N, K/16] uint8, e4m3 bits
    global_scale_ptr,  # [1] or [N] float32
    bias_ptr,  # [N] like x; read when bias_kind is 1
    float_bias_ptr,  # [N] float32; read when bias_kind is 2
    out_ptr,  # [M, N] like x
    partial_ptr,  # [tiles, splits, BN * BM] float32
    counter_ptr,  # [tiles] int32, zero before and after
    M,
    N,
    K,
    scale_stride,  # 0: one global scale, 1: one per row
    bias_kind,  # 0: none
    group_size,  # row tiles that stay together while token tiles advance
    K_ALIGN: tl.constexpr,  # a power of two that divides K; from 64 up the scales travel by asynchronous copies
    BM: tl.constexpr,  # tokens per tile
    BN: tl.constexpr,  # weight rows per tile
    WORDS: tl.constexpr,  # words of 16 k per step
    STAGES: tl.constexpr,
    PDL: tl.constexpr,  # started while `permute_x` still runs
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    STEP: tl.constexpr = 16 * WORDS
    QUAD: tl.constexpr = 4 * WORDS
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

    rows = (row_tile * BN + tl.arange(0, BN))[:, None]
    tokens = (token_tile * BM + tl.arange(0, BM))[None, :]
    word = tl.arange(0, WORDS)[None, :]
    row_base = rows.to(tl.int64) * words_per_row
    w_ptrs = weight_ptr.to(tl.pointer_type(tl.int64)) + row_base
    s_ptrs = scale_ptr + row_base
    x_ptrs = x_ptr + tokens.to(tl.int64) * steps * STEP + tl.arange(0, QUAD)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    if PDL:
        gdc_wait()
    for step in tl.range(begin, end, num_stages=STAGES):
        at = step * WORDS + word
        mask = (rows < N) & (at < words_per_row)
        w = tl.load(w_ptrs + at, mask=mask, other=0)
        scale = block_scale(tl.load(s_ptrs + at, mask=mask, other=0), DTYPE)
        x_now = x_ptrs + step * STEP
        acc = quad_product(acc, x_now, w.to(tl.int16), scale, DTYPE, BN, WORDS)
        acc = quad_product(acc, x_now + QUAD, (w >> 16).to(tl.int16), scale, DTYPE, BN, WORDS)
        acc = quad_product(acc, x_now + 2 * QUAD, (w >> 32).to(tl.int16), scale, DTYPE, BN, WORDS)
        acc = quad_product(acc, x_now + 3 * QUAD, (w >> 48).to(tl.int16), scale, DTYPE, BN, WORDS)

    offsets = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    acc, last = reduce_splits(acc, offsets, partial_ptr, counter_ptr, tile, split, tl.num_programs(1), BM * BN)
    if last:
        store_tile(
            acc, tokens, rows, out_ptr, global_scale_ptr, scale_stride, bias_ptr, float_bias_ptr, bias_kind, M, N
        )
