"""Device code of the two-pass kernels for experts: 16-bit weights of the experts that have rows, and their products.

Pass one runs the dequantisation of `two_pass` or of `two_pass_fragment` once per expert; a thread block of an expert
without rows returns at once. Its rows stay in the order of the layout, so gate and up lie in two halves or, from a -glu
blob, in turns of 8: the products look for them there.

In pass two a thread block has BM rows of x of one expert times BN rows of its weight. Tiles are found through offsets
on the device. GROUP tiles of rows stay together while weight rows advance, so that both are read from the L2.
"""

import triton
import triton.language as tl

from ..gemm._triton_decode import INTERPRET, rounded
from ..gemm._triton_dequant_device import dequantise
from ..gemm._triton_fragment_device import dequantise_fragment
from ._triton_activation_device import activate
from ._triton_grouped_device import load_bias
from ._triton_routing_device import find_tile

GROUP = tl.constexpr(8)


@triton.jit
def dequantise_experts(
    weight_ptr,  # [E, rows, K/2] uint8
    scale_ptr,  # [E, rows, K/16] uint8, e4m3 bits
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [experts of this chunk, rows, K] bfloat16 or float16: code * block scale, exact
    scales,  # of an expert: rows * K / 16
    first_expert,
    BLOCK: tl.constexpr,  # words of eight codes per program
):
    local = tl.program_id(1)
    expert = first_expert + local
    if tl.load(offsets_ptr + expert + 1) > tl.load(offsets_ptr + expert):
        at = expert.to(tl.int64) * scales
        out = local.to(tl.int64) * scales * 16
        dequantise(weight_ptr + at * 8, scale_ptr + at, out_ptr + out, scales.to(tl.int64) * 2, BLOCK)


@triton.jit
def dequantise_expert_fragments(
    weight_ptr,  # [E, rows up to 64s / 64, K up to 64s / 64, 2304 bytes] uint8
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [experts of this chunk, rows, K] bfloat16 or float16: code * block scale, exact
    rows,
    K,
    blob_bytes,  # of an expert
    first_expert,
    ENCODING: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    local = tl.program_id(1)
    expert = first_expert + local
    if tl.load(offsets_ptr + expert + 1) > tl.load(offsets_ptr + expert):
        blob = weight_ptr + expert.to(tl.int64) * blob_bytes
        dequantise_fragment(blob, out_ptr + local.to(tl.int64) * rows * K, rows, K, ENCODING, BLOCKS, ROWS)


@triton.jit
def place(offsets_ptr, first_expert, experts_here, rows, row_tiles, PADDED: tl.constexpr, BM: tl.constexpr):
    """Of this program: expert of the chunk (-1 before, experts_here behind), its rows of x, and its row tile."""
    per_group = GROUP * row_tiles
    within = tl.program_id(0) % per_group
    tile = tl.program_id(0) // per_group * GROUP + within % GROUP
    local, first, last = find_tile(offsets_ptr + first_expert, tile, experts_here, rows, PADDED, BM)
    return local, first + tl.arange(0, BM), last, within // GROUP


@triton.jit
def dense_sums(
    x_ptr,
    x_row,  # [BM] int64 rows of x
    x_stride8,  # between them, in eights of elements
    weight_ptr,
    w_row,  # [BN] int64 rows of all dense weights together
    up_rows,  # from a gate's row to its up's
    K,
    busy,  # 0: add nothing
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """float32 [BM, BN] twice: x times those rows, and times the rows up_rows further on (zeros unless GATED)."""
    inner = tl.arange(0, BK)
    x_ptrs = x_ptr + x_row[:, None] * x_stride8 * 8 + inner[None, :]
    w_ptrs = weight_ptr + w_row[:, None] * K + inner[None, :]
    up = up_rows.to(tl.int64) * K
    g = tl.zeros((BM, BN), tl.float32)
    u = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(0, tl.cdiv(K, BK) * busy, num_stages=STAGES):
        k = step * BK
        mask = (k + inner < K)[None, :]
        x = tl.load(x_ptrs + k, mask=mask, other=0.0)
        w = tl.load(w_ptrs + k, mask=mask, other=0.0)
        if INTERPRET:  # the interpreter multiplies bfloat16 bit patterns
            x, w = x.to(tl.float32), w.to(tl.float32)
        g = tl.dot(x, tl.trans(w), g)
        if GATED:
            v = tl.load(w_ptrs + up + k, mask=mask, other=0.0)
            if INTERPRET:
                v = v.to(tl.float32)
            u = tl.dot(x, tl.trans(v), u)
    return g, u


@triton.jit
def dense_grouped(
    x_ptr,  # [M, K] bfloat16 or float16, rows 8 * x_stride8 apart
    weight_ptr,  # [experts of this chunk, N, K] like x
    global_scale_ptr,  # [E, parts] float32
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [M, N] like x
    M,
    N,
    K,
    x_stride8,
    experts,
    first_expert,
    experts_here,
    parts,  # 1, or 2: a global scale for each half of the rows
    PADDED: tl.constexpr,  # a power of two above experts of a chunk + 1
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    local, position, last, row_tile = place(
        offsets_ptr, first_expert, experts_here, M, tl.cdiv(N, BN), PADDED, BM
    )  # fmt: skip
    has_expert = (local >= 0) & (local < experts_here)
    # Rows of no expert get zeros: those before the first one with the first chunk, the others with the last.
    before = (local == -1) & (first_expert == 0)
    behind = (local == experts_here) & (first_expert + experts_here == experts)
    if has_expert | before | behind:
        mine = tl.where(has_expert, local, 0).to(tl.int64)
        rows = row_tile * BN + tl.arange(0, BN)
        near = tl.minimum(position, last - 1).to(tl.int64)
        acc, _ = dense_sums(
            x_ptr, near, x_stride8, weight_ptr, mine * N + tl.minimum(rows, N - 1), 0 * N, K, has_expert.to(tl.int32),
            False, BM, BN, BK, STAGES,
        )  # fmt: skip
        part = tl.where(2 * rows >= N, parts - 1, 0)
        factor = tl.load(global_scale_ptr + (first_expert + mine) * parts + part, mask=rows < N, other=0.0)
        value = rounded(acc * factor[None, :], out_ptr.dtype.element_ty)
        mask = (position < last)[:, None] & (rows < N)[None, :]
        tl.store(out_ptr + position.to(tl.int64)[:, None] * N + rows[None, :], value, mask=mask)


@triton.jit
def dense_first(
    x_ptr,  # [T, K] bfloat16 or float16, rows 8 * x_stride8 apart
    weight_ptr,  # [experts of this chunk, dense_rows, K] like x
    global_scale_ptr,  # [E, parts] float32
    bias_ptr,  # [E, F] like x; read when bias_kind is 1; F = 2 N: gate, then up; or N
    float_bias_ptr,  # [E, F] float32; read when bias_kind is 2
    vector_ptr,  # [N] or [E, N] like x, for the result; read when has_vector is 1
    router_ptr,  # [T, top_k] float32; read when on_input is 1
    offsets_ptr,  # [E + 1] int32
    pairs_ptr,  # [pairs] int32, by expert
    out_ptr,  # [pairs, N] like x, in the order of pairs_ptr; fewer than 2^31 elements
    pairs,
    top_k,
    N,
    K,
    dense_rows,
    x_stride8,
    first_expert,
    experts_here,
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
    IN_TURNS: tl.constexpr,  # 8 rows of gate, 8 of up, and so on
    PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    local, position, last, row_tile = place(
        offsets_ptr, first_expert, experts_here, pairs, tl.cdiv(N, BN), PADDED, BM
    )  # fmt: skip
    if (local >= 0) & (local < experts_here):
        expert = (first_expert + local).to(tl.int64)
        pair = tl.load(pairs_ptr + tl.minimum(position, last - 1))
        rows = row_tile * BN + tl.arange(0, BN)
        inside = rows < N
        near = tl.minimum(rows, N - 1)
        own_rows = N
        up_rows = N
        if GATED:
            own_rows = 2 * N
        if IN_TURNS:
            near = near // 8 * 16 + near % 8
            up_rows = 0 * N + 8
        g, u = dense_sums(
            x_ptr, (pair // top_k).to(tl.int64), x_stride8, weight_ptr, local.to(tl.int64) * dense_rows + near, up_rows,
            K, 1, GATED, BM, BN, BK, STAGES,
        )  # fmt: skip
        row = expert * own_rows + rows
        g = g * tl.load(global_scale_ptr + expert * parts)
        g += load_bias(bias_ptr, float_bias_ptr, bias_kind, row, inside)[None, :]
        if GATED:
            u = u * tl.load(global_scale_ptr + expert * parts + parts - 1)
            u += load_bias(bias_ptr, float_bias_ptr, bias_kind, row + N, inside)[None, :]
        router = tl.load(router_ptr + pair, mask=(pair >= 0) & (on_input != 0), other=1.0)[:, None]
        value = rounded(activate(g * router, u * router, limit, alpha, beta, ACTIVATION), out_ptr.dtype.element_ty)
        vector = tl.load(vector_ptr + expert * vector_stride + rows, mask=inside & (has_vector != 0), other=1.0)
        value = rounded(value.to(tl.float32) * vector.to(tl.float32)[None, :], out_ptr.dtype.element_ty)
        mask = (position < last)[:, None] & inside[None, :]
        tl.store(out_ptr + (position[:, None] * N + rows[None, :]), value, mask=mask)


@triton.jit
def dense_second(
    x_ptr,  # [pairs, K] bfloat16 or float16, in the order of pairs_ptr
    weight_ptr,  # [experts of this chunk, N, K] like x
    global_scale_ptr,  # [E] float32
    bias_ptr,  # [E, N] like x; read when bias_kind is 1
    float_bias_ptr,  # [E, N] float32; read when bias_kind is 2
    router_ptr,  # [pairs] float32; read when on_input is 0
    offsets_ptr,  # [E + 1] int32
    pairs_ptr,  # [pairs] int32, by expert
    out_ptr,  # [pairs, N] float32, fewer than 2^31 elements; rows of pairs that are left out stay as they are
    pairs,
    N,
    K,
    first_expert,
    experts_here,
    bias_kind,
    on_input,
    PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    local, position, last, row_tile = place(
        offsets_ptr, first_expert, experts_here, pairs, tl.cdiv(N, BN), PADDED, BM
    )  # fmt: skip
    if (local >= 0) & (local < experts_here):
        expert = (first_expert + local).to(tl.int64)
        near = tl.minimum(position, last - 1)
        pair = tl.load(pairs_ptr + near)
        rows = row_tile * BN + tl.arange(0, BN)
        inside = rows < N
        acc, _ = dense_sums(
            x_ptr, near.to(tl.int64), K // 8, weight_ptr, local.to(tl.int64) * N + tl.minimum(rows, N - 1), 0 * N, K, 1,
            False, BM, BN, BK, STAGES,
        )  # fmt: skip
        value = acc * tl.load(global_scale_ptr + expert)
        value += load_bias(bias_ptr, float_bias_ptr, bias_kind, expert * N + rows, inside)[None, :]
        value *= tl.load(router_ptr + pair, mask=(pair >= 0) & (on_input == 0), other=1.0)[:, None]
        mask = (position < last)[:, None] & inside[None, :]
        tl.store(out_ptr + (pair[:, None] * N + rows[None, :]), value, mask=mask)
