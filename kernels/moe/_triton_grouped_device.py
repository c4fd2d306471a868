"""Device code of `triton_grouped` and `triton_moe`: products of each expert's weight with its own rows.

Weights are read and multiplied as `triton_fused` does, and x comes by planes, as its `permute_x` writes it: see
`_triton_decode` and `_triton_fused_device`. A thread block has one tile: some rows of one expert's weight times up to
BM rows of x, found through offsets on the device, so the grid depends on numbers that the host knows.
"""

import triton
import triton.language as tl

from ..gemm._triton_decode import block_scale, rounded
from ..gemm._triton_fused_device import quad_product
from ._triton_activation_device import activate
from ._triton_routing_device import find_tile, local_expert


@triton.jit
def word_product(
    acc, x_ptrs, w_ptrs, s_ptrs, mask, DTYPE: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """acc [BN, BM] += one step of 16 * WORDS k."""
    QUAD: tl.constexpr = 4 * WORDS
    w = tl.load(w_ptrs, mask=mask, other=0)
    scale = block_scale(tl.load(s_ptrs, mask=mask, other=0), DTYPE)
    acc = quad_product(acc, x_ptrs, w.to(tl.int16), scale, DTYPE, BN, WORDS)
    acc = quad_product(acc, x_ptrs + QUAD, (w >> 16).to(tl.int16), scale, DTYPE, BN, WORDS)
    acc = quad_product(acc, x_ptrs + 2 * QUAD, (w >> 32).to(tl.int16), scale, DTYPE, BN, WORDS)
    return quad_product(acc, x_ptrs + 3 * QUAD, (w >> 48).to(tl.int16), scale, DTYPE, BN, WORDS)


@triton.jit
def expert_sums(
    x_ptr,  # [rows, steps, 16, WORDS], by planes
    x_row,  # [1, BM] which of its rows
    weight_ptr,
    scale_ptr,
    row,  # [BN, 1] int64 rows of all experts' weights together
    inside,  # [BN, 1] which of them count
    up_rows,  # from a gate's row to its up's
    K,
    busy,  # 0: add nothing
    K_ALIGN: tl.constexpr,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """float32 [BN, BM] twice: x times those rows, and times the rows up_rows further on (zeros unless GATED)."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    STEP: tl.constexpr = 16 * WORDS
    words_per_row = (K // K_ALIGN) * (K_ALIGN // 16)
    steps = tl.cdiv(words_per_row, WORDS)
    word = tl.arange(0, WORDS)[None, :]
    w_ptrs = weight_ptr.to(tl.pointer_type(tl.int64)) + row * words_per_row
    s_ptrs = scale_ptr + row * words_per_row
    up = up_rows.to(tl.int64) * words_per_row
    x_ptrs = x_ptr + x_row.to(tl.int64) * steps * STEP + tl.arange(0, 4 * WORDS)[:, None]
    g = tl.zeros((BN, BM), tl.float32)
    u = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(0, steps * busy, num_stages=STAGES):
        at = step * WORDS + word
        mask = inside & (at < words_per_row)
        x_now = x_ptrs + step * STEP
        g = word_product(g, x_now, w_ptrs + at, s_ptrs + at, mask, DTYPE, BN, WORDS)
        if GATED:
            u = word_product(u, x_now, w_ptrs + (up + at), s_ptrs + (up + at), mask, DTYPE, BN, WORDS)
    return g, u


@triton.jit
def load_bias(bias_ptr, float_bias_ptr, bias_kind, at, inside):
    """float32 of the bias that is there: bias_kind 1 reads bias_ptr, 2 reads float_bias_ptr, 0 neither."""
    bias = tl.load(bias_ptr + at, mask=inside & (bias_kind == 1), other=0.0).to(tl.float32)
    return bias + tl.load(float_bias_ptr + at, mask=inside & (bias_kind == 2), other=0.0)


@triton.jit
def grouped(
    x_ptr,  # [M, steps, 16, WORDS] bfloat16 or float16, by planes
    weight_ptr,  # [E, N, K/2] uint8
    scale_ptr,  # [E, N, K/16] uint8, e4m3 bits
    global_scale_ptr,  # [E, parts] float32
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [M, N] like x
    M,
    N,
    K,
    experts,
    parts,  # 1, or 2: a global scale for each half of the rows
    K_ALIGN: tl.constexpr,  # a power of two that divides K; from 64 up the scales travel by asynchronous copies
    PADDED: tl.constexpr,  # a power of two above experts + 1
    BM: tl.constexpr,  # rows of x per tile
    BN: tl.constexpr,  # weight rows per tile
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_tiles = tl.cdiv(N, BN)
    expert, first, last = find_tile(offsets_ptr, tl.program_id(0) // row_tiles, experts, M, PADDED, BM)
    if expert <= experts:
        has_expert = (expert >= 0) & (expert < experts)
        mine = tl.where(has_expert, expert, 0).to(tl.int64)  # rows of no expert get zeros
        position = (first + tl.arange(0, BM))[None, :]
        rows = (tl.program_id(0) % row_tiles * BN + tl.arange(0, BN))[:, None]
        inside = rows < N
        acc, _ = expert_sums(
            x_ptr, tl.minimum(position, last - 1), weight_ptr, scale_ptr, mine * N + rows, inside, N, K,
            has_expert.to(tl.int32), K_ALIGN, False, BM, BN, WORDS, STAGES,
        )  # fmt: skip
        part = tl.where(2 * rows >= N, parts - 1, 0)
        factor = tl.load(global_scale_ptr + mine * parts + part, mask=inside, other=0.0)
        value = rounded(acc * 128.0 * factor, out_ptr.dtype.element_ty)
        tl.store(out_ptr + position.to(tl.int64) * N + rows, value, mask=(position < last) & inside)


@triton.jit
def first_product(
    x_ptr,  # [T, steps, 16, WORDS] bfloat16 or float16, by planes
    weight_ptr,  # [E, F, K/2] uint8; F = 2 N: gate, then up; or N
    scale_ptr,  # [E, F, K/16] uint8, e4m3 bits
    global_scale_ptr,  # [E, parts] float32
    bias_ptr,  # [E, F] like x; read when bias_kind is 1
    float_bias_ptr,  # [E, F] float32; read when bias_kind is 2
    vector_ptr,  # [N] or [E, N] like x, for the result; read when has_vector is 1
    router_ptr,  # [T, top_k] float32; read when on_input is 1
    offsets_ptr,  # [E + 1] int32
    pairs_ptr,  # [pairs] int32, by expert
    out_ptr,  # [pairs, steps of N, 16, WORDS] like x, by planes; in the order of pairs_ptr
    pairs,
    top_k,
    N,
    K,
    experts,
    parts,  # 1, or 2: gate, up
    bias_kind,
    has_vector,
    vector_stride,  # 0: one vector for all experts
    on_input,
    limit,
    alpha,
    beta,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    K_ALIGN: tl.constexpr,
    PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,  # divides 16 * WORDS
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    STEP: tl.constexpr = 16 * WORDS
    out_steps = tl.cdiv(N, STEP)
    row_tiles = out_steps * (STEP // BN)  # with those that only write the zeros behind N
    expert, first, last = find_tile(offsets_ptr, tl.program_id(0) // row_tiles, experts, pairs, PADDED, BM)
    if (expert >= 0) & (expert < experts):
        mine = expert.to(tl.int64)
        position = (first + tl.arange(0, BM))[None, :]
        pair = tl.load(pairs_ptr + tl.minimum(position, last - 1))
        rows = (tl.program_id(0) % row_tiles * BN + tl.arange(0, BN))[:, None]
        inside = rows < N
        own_rows = N
        if GATED:
            own_rows = 2 * N
        row = mine * own_rows + rows
        g, u = expert_sums(
            x_ptr, pair // top_k, weight_ptr, scale_ptr, row, inside, N, K, 1, K_ALIGN, GATED, BM, BN, WORDS, STAGES
        )
        g = g * 128.0 * tl.load(global_scale_ptr + mine * parts)
        g += load_bias(bias_ptr, float_bias_ptr, bias_kind, row, inside)
        if GATED:
            u = u * 128.0 * tl.load(global_scale_ptr + mine * parts + parts - 1)
            u += load_bias(bias_ptr, float_bias_ptr, bias_kind, row + N, inside)
        router = tl.load(router_ptr + pair, mask=(pair >= 0) & (on_input != 0), other=1.0)
        value = rounded(activate(g * router, u * router, limit, alpha, beta, ACTIVATION), DTYPE)
        vector = tl.load(vector_ptr + mine * vector_stride + rows, mask=inside & (has_vector != 0), other=1.0)
        value = rounded(value.to(tl.float32) * vector.to(tl.float32), DTYPE)
        at = rows // STEP * STEP + rows % 16 * WORDS + rows % STEP // 16
        value = tl.where(inside, value, 0.0).to(DTYPE)
        tl.store(out_ptr + position.to(tl.int64) * out_steps * STEP + at, value, mask=position < last)


@triton.jit
def second_product(
    x_ptr,  # [pairs, steps, 16, WORDS] bfloat16 or float16, by planes; in the order of pairs_ptr
    weight_ptr,  # [E, N, K/2] uint8
    scale_ptr,  # [E, N, K/16] uint8, e4m3 bits
    global_scale_ptr,  # [E] float32
    bias_ptr,  # [E, N] like x; read when bias_kind is 1
    float_bias_ptr,  # [E, N] float32; read when bias_kind is 2
    router_ptr,  # [pairs] float32; read when on_input is 0
    offsets_ptr,  # [E + 1] int32
    pairs_ptr,  # [pairs] int32, by expert
    out_ptr,  # [pairs, N] float32; rows of pairs that are left out stay as they are
    pairs,
    N,
    K,
    experts,
    bias_kind,
    on_input,
    K_ALIGN: tl.constexpr,
    PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_tiles = tl.cdiv(N, BN)
    expert, first, last = find_tile(offsets_ptr, tl.program_id(0) // row_tiles, experts, pairs, PADDED, BM)
    if (expert >= 0) & (expert < experts):
        mine = expert.to(tl.int64)
        position = (first + tl.arange(0, BM))[None, :]
        near = tl.minimum(position, last - 1)
        pair = tl.load(pairs_ptr + near)
        rows = (tl.program_id(0) % row_tiles * BN + tl.arange(0, BN))[:, None]
        inside = rows < N
        row = mine * N + rows
        acc, _ = expert_sums(
            x_ptr, near, weight_ptr, scale_ptr, row, inside, N, K, 1, K_ALIGN, False, BM, BN, WORDS, STAGES
        )
        value = acc * 128.0 * tl.load(global_scale_ptr + mine)
        value += load_bias(bias_ptr, float_bias_ptr, bias_kind, row, inside)
        value *= tl.load(router_ptr + pair, mask=(pair >= 0) & (on_input == 0), other=1.0)
        tl.store(out_ptr + pair.to(tl.int64) * N + rows, value, mask=(position < last) & inside)


@triton.jit
def sum_experts(
    results_ptr,  # [T, top_k, N] float32
    ids_ptr,  # [T, top_k] int32 or int64, as int32 words
    map_ptr,  # [map_size] the same; unread when map_words is 0
    out_ptr,  # [T, N]
    N,
    top_k,
    experts,
    id_words,
    map_words,
    map_size,
    BLOCK: tl.constexpr,
):
    """Each token's results, added in the order of its slots; what was left out is not read."""
    tiles = tl.cdiv(N, BLOCK)
    token = tl.program_id(0) // tiles
    column = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(top_k):
        pair = token * top_k + slot
        expert = local_expert(ids_ptr, map_ptr, pair, slot < top_k, experts, id_words, map_words, map_size)
        total += tl.load(results_ptr + pair.to(tl.int64) * N + column, mask=(column < N) & (expert >= 0), other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * N + column, rounded(total, out_ptr.dtype.element_ty), mask=column < N)
