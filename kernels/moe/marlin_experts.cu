// Products of experts' weights with the rows of x that belong to them, for few rows per expert: marlin_tile.cuh, whose
// tiles are up to TOKENS rows of one expert here. PRODUCT says which:
//
//   FIRST    between[pair] = act(w13 x[pair / top_k] * scale + bias), one rounding; rows of w13 are gate and up by turns
//   SECOND   results[pair] = (w2 between[pair] * scale + bias) * the router's weight, float32
//   GROUPED  out[row] = w x[row] * scale, one rounding
//
// Which rows a tile has says a list (route.cu) or, for few rows, what the list would be made of: at most 64 ids, or in
// GROUPED the offsets. Then no kernel comes before, and GROUPED also writes the zeros in rows of no expert.
// Tiles without rows return at once. Ends are as in marlin.cu.
//
// Programmatic dependent launch: a kernel lets the next one start after its own wait. So what `SECOND` reads before it
// waits for FIRST, ids, router and list, was complete when FIRST started.

#define GATHER 1
#define OWN_BYTES (TOKENS * 12 + 16)
#include "marlin_tile.cuh"
#include "pairs.cuh"
#if PRODUCT == 0
#include "activation.cuh"
#elif PRODUCT == 2
#include "groups.cuh"
#endif

enum Product { FIRST, SECOND, GROUPED };
#if PRODUCT == 0
constexpr bool GLU = GATED;
#else
constexpr bool GLU = false;
struct Constants {
    float limit, alpha, beta;
};
#endif

struct Args {
    const u8* weight;            // [E, Np/64, Kp/64, 2304]
    const u16* x;                // FIRST, GROUPED: [rows, K], rows x_stride elements apart; SECOND: between [pairs, K]
    void* out;                   // u16 [pairs, inter], float [pairs, N], u16 [rows, N]
    const float* global_scale;   // [E, scales]
    const void* bias;            // [E, N]: see bias_kind
    const u16* pre_quant_scale;  // [K]
    const u16* next_scale;       // FIRST: [inter] or [E, inter], multiplies the rounded result, or null
    const float* router;         // [pairs]: multiplies the sum with bias, or null
    const int4* tiles;           // from route.cu: expert or -1, first row, rows; null: ids, or offsets
    const int* pairs;            // [pairs], in the order of experts; null: rows of a tile follow one another
    float* partial;              // [tiles, row tiles, SPLIT, TOKENS, rows of a tile]: only without a cluster
    u32* counters;               // [tiles, row tiles], zero
    Ids ids;                     // GROUPED: ids.ids are offsets [ids.experts + 1], int32 of any values
    u64 expert_bytes, x_stride;
    u32 count, top_k;            // pairs, for ids; GROUPED: rows of out, for offsets
    u32 n, k;                    // outputs (GLU: inter) and inputs of an expert
    u32 row_tiles, scales;       // 1, or 2: for the two halves of the outputs, gate and up
    u32 bias_kind;               // 0: none, 1: x's type, 2: float
    u32 next_stride;             // inter or 0
    Constants constants;
};

constexpr u32 SOURCE_OFFSET = OWN_OFFSET;  // u32 [TOKENS]: where a tile's rows of x begin, in 16 bytes
constexpr u32 PAIR_OFFSET = SOURCE_OFFSET + TOKENS * 4, ROUTER_OFFSET = PAIR_OFFSET + TOKENS * 4;
constexpr u32 FOUND_OFFSET = ROUTER_OFFSET + TOKENS * 4;  // expert, rows, first row

// One warp: the tile-th tile of at most 64 pairs. A tile begins with every TOKENS-th pair of an expert; they are numbered
// in the order in which they begin. Leaves the tile's pairs, its expert (-1: none) and their count in shared memory.
DEVICE void find(const Ids& ids, u32 count, u32 tile, u32 base, u32 lane) {
    const u32 all = 0xffffffffu, below = (1u << lane) - 1;
    int expert[2];
    u32 before[2], begins[2];  // pairs of the same expert that come first
#pragma unroll
    for (int h = 0; h < 2; h++) expert[h] = lane + h * 32 < count ? local_expert(ids, lane + h * 32) : -1;
#pragma unroll
    for (int h = 0; h < 2; h++) before[h] = __popc(__match_any_sync(all, expert[h]) & below);
    if (count > 32)
#pragma unroll
        for (int i = 0; i < 32; i++) before[1] += __shfl_sync(all, expert[0], i) == expert[1];
#pragma unroll
    for (int h = 0; h < 2; h++) begins[h] = __ballot_sync(all, expert[h] >= 0 && before[h] % C::tokens == 0);
    const u32 first = __popc(begins[0]);
    const u32 half = tile >= first, wanted = tile - (half ? first : 0);
    const u32 beginning = half ? begins[1] : begins[0];
    const bool here = beginning >> lane & 1 && __popc(beginning & below) == wanted;
    const u32 found = __ballot_sync(all, here), from = found ? __ffs(found) - 1 : 0;
    const int mine = __shfl_sync(all, half ? expert[1] : expert[0], from);
    const u32 skip = __shfl_sync(all, half ? before[1] : before[0], from);
    u32 rows = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const bool in = expert[h] == mine && before[h] - skip < C::tokens;
        if (in && found) store_shared_u32(base + PAIR_OFFSET + (before[h] - skip) * 4, lane + h * 32);
        rows += __popc(__ballot_sync(all, in));
    }
    if (lane == 0) {
        store_shared_u32(base + FOUND_OFFSET, found ? mine : -1);
        store_shared_u32(base + FOUND_OFFSET + 4, rows);
    }
}

#if PRODUCT == 2
// Tiles of the warps' experts, u32 [2, WARPS]: where nothing else is written before the main loop ends.
constexpr u32 SUMS_OFFSET = EDGE_OFFSET;
static_assert(WARPS <= ROWS, "room for them");

// All threads: the tile-th of those that `tile_groups` of route.cu would list: expert (-1: none), first row and rows.
// Each thread takes experts that follow one another, so that one scan, of the tiles per thread, orders them all.
DEVICE int4 find_group(const int* offsets, u32 experts, u32 m, u32 tile, u32 base) {
    constexpr u32 EACH = 4;  // experts of a thread at a time
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 sums = base + SUMS_OFFSET, all = 0;  // tiles of the experts that were looked at
    for (u32 start = 0; start < experts && all <= tile; start += THREADS * EACH) {
        const u32 e = start + threadIdx.x * EACH;
        u32 at[EACH + 1], tiles[EACH], own = 0;
#pragma unroll
        for (u32 i = 0; i <= EACH; i++) at[i] = group_offset(offsets, min(e + i, experts), m);
#pragma unroll
        for (u32 i = 0; i < EACH; i++) own += tiles[i] = (max(at[i + 1], at[i]) - at[i] + C::tokens - 1) / C::tokens;
        u32 end = own;
#pragma unroll
        for (u32 d = 1; d < 32; d *= 2) {
            const u32 before = __shfl_up_sync(0xffffffffu, end, d);
            if (lane >= d) end += before;
        }
        if (lane == 31) store_shared_u32(sums + warp * 4, end);
        __syncthreads();
        u32 wanted = tile - all - (end - own);  // of this thread's tiles
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            const u32 sum = load_shared_u32(sums + w * 4);
            all += sum;
            if (w < warp) wanted -= sum;
        }
        // The next turn's sums lie elsewhere: one barrier a turn is enough.
        sums = 2 * (base + SUMS_OFFSET) + WARPS * 4 - sums;
        if (wanted < own)
#pragma unroll
            for (u32 i = 0; i < EACH; i++) {
                if (wanted < tiles[i]) {
                    const u32 skip = wanted * C::tokens;
                    store_shared_u32(base + FOUND_OFFSET, e + i);
                    store_shared_u32(base + FOUND_OFFSET + 4, min(at[i + 1] - at[i] - skip, (u32)C::tokens));
                    store_shared_u32(base + FOUND_OFFSET + 8, at[i] + skip);
                }
                wanted -= tiles[i];  // below zero, which is more than any tiles, once it was found
            }
    }
    if (all <= tile) return make_int4(-1, 0, 0, 0);
    __syncthreads();
    return make_int4(load_shared_u32(base + FOUND_OFFSET), load_shared_u32(base + FOUND_OFFSET + 8),
                     load_shared_u32(base + FOUND_OFFSET + 4), 0);
}
#endif

DEVICE float widened(const void* p, u64 at, u32 kind) {
    return kind == 1 ? Type::widen(load_global_16((const u16*)p + at)) : load_global_float((const float*)p + at);
}

struct Experts {
    static constexpr bool PAIRED = GLU;

    const Args& a;
    u32 tile, rank, tokens, base, expert, first;
    float router;

    DEVICE u32 k(const Experts& w) { return w.a.k; }
    DEVICE u32 below_2_31(const Experts& w) { return w.a.k; }
    DEVICE void weights(const Experts& w, Weights& weights, u32 subtile, u32 block, u32 lane) {
        const u32 n = GLU ? (w.a.n + 31) / 32 * 64 : w.a.n;
        Weights::init(weights, w.a.weight + w.expert * w.a.expert_bytes, n, w.a.k, subtile, block, lane);
    }
    DEVICE void x(const Experts& w, X& x, u32 block, u32 thread) {
        X::gather(x, w.a.x, w.base + SOURCE_OFFSET, w.a.pre_quant_scale, w.tokens, w.a.k, block, thread);
    }
    DEVICE void wait(Experts& w) {
        if (PRODUCT == SECOND) {
            wait_for_previous_kernel();
            launch_dependents();
        }
        w.router = 1.f;
        if (threadIdx.x < w.tokens) {
            const u32 at = w.base + threadIdx.x * 4;
            u32 row = w.first + threadIdx.x;  // or pair
            if (PRODUCT != GROUPED) {
                if (!w.a.tiles)
                    row = load_shared_u32(at + PAIR_OFFSET);
                else if (w.a.pairs)
                    row = w.a.pairs[row];
            }
            store_shared_u32(at + PAIR_OFFSET, row);
            store_shared_u32(at + SOURCE_OFFSET, (PRODUCT == FIRST ? row / w.a.top_k : row) * (u32)(w.a.x_stride / 8));
            if (w.a.router) w.router = load_global_float(w.a.router + row);
        }
    }
    // Row r of a GLU tile is gate or up of the result that `result` says.
    DEVICE u32 result(u32 row) { return GLU ? row / 16 * 8 + row % 8 : row; }
    DEVICE void edge(const Experts& w, u32 row, float& scale, float& bias) {
        const u32 at = min(result(row), w.a.n - 1), half = GLU ? row / 8 % 2 : w.a.scales == 2 && at >= w.a.n / 2;
        scale = load_global_float(w.a.global_scale + (u64)w.expert * w.a.scales + (w.a.scales == 2 ? half : 0));
        bias = 0.f;
        if (w.a.bias_kind)
            bias = widened(w.a.bias, ((u64)w.expert * (GLU ? 2 : 1) + (GLU ? half : 0)) * w.a.n + at, w.a.bias_kind);
    }
    DEVICE void keep(const Experts& w) {
        if (threadIdx.x < w.tokens) store_shared_float(w.base + ROUTER_OFFSET + threadIdx.x * 4, w.router);
    }
    DEVICE void meeting(const Experts& w, float*& partial, u32*& counter) {
        const u32 index = blockIdx.x / C::split;
        partial = w.a.partial + (u64)index * (C::split * C::tokens * ROWS);
        counter = w.a.counters + index;
    }

    DEVICE u64 out_row(const Experts& w, u32 token) { return load_shared_u32(w.base + PAIR_OFFSET + token * 4); }
    DEVICE float4 routed(const Experts& w, u32 token, float4 v) {
        const float r = load_shared_float(w.base + ROUTER_OFFSET + token * 4);
        return make_float4(v.x * r, v.y * r, v.z * r, v.w * r);
    }

    // SECOND and GROUPED.
    DEVICE void store(const Experts& w, u32 edge, u32 token, u32 row, float4 sum) {
        float4 v = Edge::finish(Edge::load(edge, row), sum);
        const u32 column = w.tile * ROWS + row;
        const u64 at = out_row(w, token) * w.a.n + column;
        if constexpr (PRODUCT == FIRST) {
            end_first(w, token, column, routed(w, token, v), v);
        } else if constexpr (PRODUCT == SECOND) {
            if (column < w.a.n) *(float4*)((float*)w.a.out + at) = routed(w, token, v);
        } else {
            store_outputs((u16*)w.a.out + at, column, w.a.n, v);
        }
    }
    DEVICE void store(const Experts& w, u32 edge, u32 token, u32 row, float4 gate, float4 up) {
        const float4 g = routed(w, token, Edge::finish(Edge::load(edge, row), gate));
        end_first(w, token, result(w.tile * ROWS + row), g,
                  routed(w, token, Edge::finish(Edge::load(edge, row + 8), up)));
    }
    DEVICE void end_first(const Experts& w, u32 token, u32 column, float4 g, float4 u) {
#if PRODUCT == 0
        if (column >= w.a.n) return;
        const Constants& c = w.a.constants;
        uint2 v = make_uint2(Type::pack(activate(g.x, u.x, c), activate(g.y, u.y, c)),
                             Type::pack(activate(g.z, u.z, c), activate(g.w, u.w, c)));
        if (w.a.next_scale) {
            const uint2 s = *(const uint2*)(w.a.next_scale + (u64)w.expert * w.a.next_stride + column);
            v = make_uint2(Type::times(v.x, s.x), Type::times(v.y, s.y));
        }
        *(uint2*)((u16*)w.a.out + out_row(w, token) * w.a.n + column) = v;
#endif
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) experts(const __grid_constant__ Args a) {
    const u32 index = blockIdx.x / C::split, rank = blockIdx.x % C::split, base = shared_address(smem);
    const u32 token_tile = index / a.row_tiles, tile = index % a.row_tiles;
    if (PRODUCT != SECOND) {
        wait_for_previous_kernel();
        launch_dependents();
    }
    int expert;
    u32 first = 0, rows;
    if (a.tiles) {
        const int4 found = load_global_int4(a.tiles + token_tile);
        expert = found.x, first = found.y, rows = found.z;
    } else {
#if PRODUCT == 2
        const int* offsets = (const int*)a.ids.ids;
        const u32 begin = group_offset(offsets, 0, a.count), end = group_offset(offsets, a.ids.experts, a.count);
        const int4 found = find_group(offsets, a.ids.experts, a.count, token_tile, base);
        expert = found.x, first = found.y, rows = found.z;
        zero_other_rows((u16*)a.out, a.count, a.n, begin, end, (u64)blockIdx.x * THREADS + threadIdx.x,
                        (u64)gridDim.x * THREADS);
#else
        if (threadIdx.x < 32) find(a.ids, a.count, token_tile, base, threadIdx.x);
        __syncthreads();
        expert = load_shared_u32(base + FOUND_OFFSET), rows = load_shared_u32(base + FOUND_OFFSET + 4);
#endif
    }
    if (expert < 0) {
        // A grid that is complete means to the next one that those before it are, too.
        if (PRODUCT == SECOND) wait_for_previous_kernel();
        return;
    }
    Experts work = {a, tile, rank, rows, base, (u32)expert, first, 1.f};
    multiply(work);
}
