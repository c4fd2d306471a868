// out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias) for few tokens M, W in the fragment layout.
//
// Weights are the A operand of mma.sync and tokens its n dimension ("swap-AB"), so a warp decodes what it loads straight
// into the registers that the tensor core reads. A CTA is ROW_GROUPS x K_GROUPS warps. Warp (r, k) owns SUBTILES x 16 rows
// and every K_GROUPS-th chunk of CHUNK k64 blocks. Its codes and scales arrive in a ring of its own, so the main loop
// has no barrier between warps but one: the ROW_GROUPS warps of a K group share a ring of x.
// Partial sums of the K groups meet in shared memory, those of SPLIT CTAs in the cluster's shared memory or, where there
// are no clusters, in global memory; always in the same order.
//
// Ends: rows past N and tokens past M are computed from the last valid ones and not stored; x past K is zero.

#include "fragment.cuh"

// What the config decides; the launcher defines all of it. marlin.py's is_valid states the same limits.
struct Config {
    static constexpr int tokens = TOKENS;            // a tile's, a multiple of 8
    static constexpr int subtiles = SUBTILES;        // of 16 rows, a warp's
    static constexpr int row_groups = ROW_GROUPS;    // warps along the rows
    static constexpr int k_groups = K_GROUPS;        // warps along K
    static constexpr int chunk = CHUNK;              // k64 blocks a stage
    static constexpr int stages = STAGES;            // of a warp's ring
    static constexpr int split = SPLIT;              // CTAs along K
    static constexpr bool through_cluster = CLUSTER; // how these meet
    static constexpr bool bulk = BULK;               // bulk copies, else 16 bytes a thread
    static constexpr bool k_tail = K_TAIL;           // K is no multiple of 64
    static constexpr bool scaled = PRE_QUANT_SCALE;  // x is multiplied by a vector over K
};
using C = Config;

#if NIBBLES
#if HALF
using Type = NibFp16;
#else
using Type = NibBf16;
#endif
#elif HALF
using Type = Fp16;
#else
using Type = Bf16;
#endif

struct Args {
    const u8* weight;            // [Np/64, Kp/64, 2304]
    const u16* x;                // [M, K], rows x_stride elements apart
    u16* out;                    // [M, N]
    const float* global_scale;   // [1] or [N]
    const void* bias;            // [N]: see bias_kind
    const u16* pre_quant_scale;  // [K]
    float* partial;              // [token tiles, row tiles, SPLIT, TOKENS, rows of a tile]: only without a cluster
    u32* counters;               // [token tiles, row tiles], zero
    u64 x_stride;
    u32 m, n, k;
    u32 scale_stride;            // 0 or 1
    u32 bias_kind;               // 0: none, 1: x's type, 2: float
};

constexpr int WARPS = C::row_groups * C::k_groups, THREADS = WARPS * 32;
constexpr int WARP_ROWS = C::subtiles * 16, ROWS = C::row_groups * WARP_ROWS;
constexpr int TOKEN_TILES = C::tokens / 8;
constexpr bool SHARED_X = C::row_groups > 1;  // else x comes with a warp's weights, on the same barrier
// A warp reads `GROUP` subtiles that lie in one block as one run.
constexpr int GROUP = C::subtiles % 4 == 0 ? 4 : C::subtiles == 3 ? 1 : C::subtiles;

// Shared memory, in bytes: per warp its ring, later its partial sums; per K group its ring of x; then the receive buffer.
constexpr int STAGE_BYTES = C::chunk * C::subtiles * SUBTILE_BYTES;
constexpr int X_PITCH = C::chunk * 128 + 16;  // an odd number of 16-byte units: ldmatrix meets no bank twice
constexpr int X_ROWS = C::tokens + (C::scaled ? 1 : 0);
constexpr int X_STAGES = C::stages + (SHARED_X ? 1 : 0);
constexpr int X_STAGE_BYTES = X_ROWS * X_PITCH;
constexpr int PARTIAL_PITCH = WARP_ROWS + 4;  // floats, per token
constexpr int PARTIAL_BYTES = C::tokens * PARTIAL_PITCH * 4;
constexpr int RING_BYTES = C::stages * STAGE_BYTES > PARTIAL_BYTES ? C::stages * STAGE_BYTES : PARTIAL_BYTES;
constexpr int X_OFFSET = WARPS * RING_BYTES;
constexpr int RECEIVE_OFFSET = X_OFFSET + C::k_groups * X_STAGES * X_STAGE_BYTES;
constexpr int RECEIVE_BYTES = C::split > 1 && C::through_cluster ? C::tokens * ROWS * 4 : 0;
constexpr int EDGE_OFFSET = RECEIVE_OFFSET + RECEIVE_BYTES;  // global scale and bias of the tile's rows
constexpr int BARRIER_OFFSET = EDGE_OFFSET + 2 * ROWS * 4;
constexpr int BARRIERS = WARPS * C::stages + (SHARED_X ? 2 * C::k_groups * X_STAGES : 0) + 1;
constexpr int SMEM_BYTES = BARRIER_OFFSET + BARRIERS * 8;
static_assert(SMEM_BYTES == EXPECTED_SMEM_BYTES, "marlin.py predicts another size of shared memory");
static_assert(RING_BYTES % 16 == 0 && X_STAGE_BYTES % 16 == 0, "copies write 16 bytes at a time");
static_assert(C::chunk <= 4 && (C::chunk & (C::chunk - 1)) == 0, "a warp's lanes cover whole rows of x");
static_assert(!(C::split > 1 && C::through_cluster) || ROWS % (4 * C::split) == 0, "ranks own whole float4s");
static_assert(!C::bulk || SM90, "bulk copies need sm_90");

// Where the copy of subtile i, block b of a stage lands: runs are contiguous.
DEVICE constexpr u32 slot_offset(int b, int i) {
    return C::subtiles > 4 ? ((i / 4 * C::chunk + b) * 4 + i % 4) * SUBTILE_BYTES : (b * C::subtiles + i) * SUBTILE_BYTES;
}

struct Weights {
    const u8* run[C::subtiles / GROUP];  // of the next stage, per group of subtiles
    u32 lane;

    DEVICE void init(Weights& w, const Args& a, u32 first_subtile, u32 first_block, u32 lane) {
        const u32 last = (a.n + 63) / 64 * 4 - GROUP, k_blocks = (a.k + 63) / 64;
#pragma unroll
        for (int g = 0; g < C::subtiles / GROUP; g++) {
            const u32 s = min(first_subtile + g * GROUP, last);
            w.run[g] = a.weight + ((u64)(s / 4) * k_blocks + first_block) * BLOCK_BYTES + s % 4 * SUBTILE_BYTES;
        }
        w.lane = lane;
    }

    // All lanes call, for one stage after the other.
    DEVICE void load(Weights& w, u32 slot, u32 bar) {
        if constexpr (C::bulk) {
            if (elect_one()) {
                barrier_arrive_expect(bar, STAGE_BYTES);
#pragma unroll
                for (int g = 0; g < C::subtiles / GROUP; g++) {
                    if constexpr (GROUP == 4) {
                        copy_bulk(slot + slot_offset(0, g * 4), w.run[g], C::chunk * BLOCK_BYTES, bar);
                    } else {
#pragma unroll
                        for (int b = 0; b < C::chunk; b++)
                            copy_bulk(slot + slot_offset(b, g * GROUP), w.run[g] + b * BLOCK_BYTES,
                                      GROUP * SUBTILE_BYTES, bar);
                    }
                }
            }
        } else {
#pragma unroll
            for (int g = 0; g < C::subtiles / GROUP; g++)
#pragma unroll
                for (int b = 0; b < C::chunk; b++) {
                    const u32 dst = slot + slot_offset(b, g * GROUP);
                    const u8* src = w.run[g] + b * BLOCK_BYTES;
#pragma unroll
                    for (u32 at = 0; at < GROUP * SUBTILE_BYTES; at += 512)
                        if (at + 512 <= GROUP * SUBTILE_BYTES || at + w.lane * 16 < GROUP * SUBTILE_BYTES)
                            copy_async_16(dst + at + w.lane * 16, src + at + w.lane * 16);
                }
        }
#pragma unroll
        for (int g = 0; g < C::subtiles / GROUP; g++) w.run[g] += C::k_groups * C::chunk * BLOCK_BYTES;
    }
};

// x of one stage: rows of CHUNK * 8 pieces of 16 bytes, shared out over the threads of a K group. Stages come in order.
struct X {
    static constexpr int PIECES = C::chunk * 8, STEP = C::row_groups * 32 / PIECES;
    static constexpr int COPIES = (C::tokens + STEP - 1) / STEP;
    static constexpr int ADVANCE = C::k_groups * C::chunk * 64;  // elements from stage to stage

    const u16 *source, *scale;  // this thread's first piece of the next stage
    u64 row_step;
    int rows, k_left;           // tokens from its first on; elements from its piece to K, negative when there are none
    u32 target;

    DEVICE void init(X& x, const Args& a, u32 token, u32 tokens, u32 first_block, u32 thread) {
        const u32 row = thread / PIECES, column = thread % PIECES * 8, k = first_block * 64 + column;
        x.source = a.x + (token + row) * a.x_stride + k;
        x.scale = a.pre_quant_scale + k;
        x.row_step = a.x_stride * STEP;
        x.rows = (int)tokens - (int)row;
        x.k_left = (int)(a.k - k);
        x.target = pin(row * X_PITCH + column * 2);
    }

    DEVICE void copy(const X& x, u32 target, const u16* source) {
        if constexpr (C::k_tail)
            copy_async_16_or_zero(target, source, x.k_left > 0 ? 16 : 0);
        else
            copy_async_16(target, source);
    }

    DEVICE void load(X& x, u32 slot, u32 bar) {
        const u16* source = x.source;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            if (i * STEP < x.rows) copy(x, slot + x.target + i * (STEP * X_PITCH), source);
            source += x.row_step;
        }
        if constexpr (C::scaled) {
            // The factors are one row more; its pieces are those of the threads that have row 0.
            if (x.target < X_PITCH) copy(x, slot + C::tokens * X_PITCH + x.target, x.scale);
            x.scale += ADVANCE;
        }
        copy_async_arrive(bar);
        x.source += ADVANCE;
        x.k_left -= ADVANCE;
    }
};

DEVICE void add(float4& sum, float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// Calls body(token, row) for every fourth row of every token, shared out over the threads.
template <int ROWS_EACH, class Body>
DEVICE void for_each_float4(u32 tokens, const Body& body) {
    for (u32 i = threadIdx.x; i < tokens * (ROWS_EACH / 4); i += THREADS) body(i / (ROWS_EACH / 4), i % (ROWS_EACH / 4) * 4);
}

// Four neighbouring rows (outputs) of one token.
DEVICE void store(const Args& a, u32 edge, u32 token, u32 tile_row, u32 row, float4 v) {
    const float4 scale = load_shared_float4(edge + row * 4), bias = load_shared_float4(edge + (ROWS + row) * 4);
    auto finish = [](float sum, float s, float b) { return sum * Type::UNDO * s + b; };  // in this order: s may be huge
    const uint2 packed = make_uint2(Type::pack(finish(v.x, scale.x, bias.x), finish(v.y, scale.y, bias.y)),
                                    Type::pack(finish(v.z, scale.z, bias.z), finish(v.w, scale.w, bias.w)));
    const u32 column = tile_row + row;
    u16* out = a.out + (u64)token * a.n + column;
    if (a.n % 4 == 0) {
        if (column < a.n) *(uint2*)out = packed;
    } else {
        if (column < a.n) out[0] = (u16)packed.x;
        if (column + 1 < a.n) out[1] = (u16)(packed.x >> 16);
        if (column + 2 < a.n) out[2] = (u16)packed.y;
        if (column + 3 < a.n) out[3] = (u16)(packed.y >> 16);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) marlin(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) u8 smem[];
    const u32 warp = uniform_warp(), lane = threadIdx.x & 31;
    const u32 row_group = warp % C::row_groups, k_group = warp / C::row_groups;
    const u32 tile = blockIdx.x / C::split, rank = blockIdx.x % C::split;
    const u32 first_token = blockIdx.y * C::tokens, tokens = min(a.m - first_token, (u32)C::tokens);

    const u32 base = shared_address(smem), ring = base + warp * RING_BYTES;
    const u32 x_ring = base + X_OFFSET + k_group * (X_STAGES * X_STAGE_BYTES);
    const u32 receive = base + RECEIVE_OFFSET, edge = base + EDGE_OFFSET;
    const u32 full = base + BARRIER_OFFSET + warp * (C::stages * 8);
    const u32 x_full = base + BARRIER_OFFSET + (WARPS * C::stages + k_group * X_STAGES) * 8;
    const u32 x_free = x_full + C::k_groups * X_STAGES * 8;
    const u32 received = base + BARRIER_OFFSET + (BARRIERS - 1) * 8;

    // This CTA's chunks, and this warp's among them.
    const u32 chunks = (a.k + 63) / 64 / C::chunk;
    const u32 begin = chunks * rank / C::split, end = chunks * (rank + 1) / C::split;
    const u32 mine = (end - begin + C::k_groups - 1 - k_group) / C::k_groups;
    const u32 first_block = (begin + k_group) * C::chunk;

    Weights weights;
    Weights::init(weights, a, (tile * C::row_groups + row_group) * C::subtiles, first_block, lane);
    X x;
    X::init(x, a, first_token, tokens, first_block, row_group * 32 + lane);

    if (elect_one()) {
#pragma unroll
        for (int s = 0; s < C::stages; s++)
            barrier_init(full + s * 8, (C::bulk ? 1 : 0) + (!SHARED_X || !C::bulk ? 32 : 0));
        if (SHARED_X && row_group == 0) {
#pragma unroll
            for (int s = 0; s < X_STAGES; s++)
                barrier_init(x_full + s * 8, C::row_groups * 32), barrier_init(x_free + s * 8, C::row_groups);
        }
        if (RECEIVE_BYTES && warp == 0) {
            barrier_init(received, 1);
            barrier_arrive_expect(received, tokens * ROWS * 4);
        }
        barrier_init_fence();
    }
    __syncwarp();
    // Weights do not depend on the kernel before this one; all else may.
#pragma unroll
    for (int s = 0; s < C::stages; s++)
        if (s < mine) {
            Weights::load(weights, ring + s * STAGE_BYTES, full + s * 8);
            if (!C::bulk && SHARED_X) copy_async_arrive(full + s * 8);
        }
    if (RECEIVE_BYTES) cluster_arrive_relaxed();
    launch_dependents();
    wait_for_previous_kernel();
    __syncwarp();
    if (SHARED_X) __syncthreads();  // the barriers of x are another warp's work
#pragma unroll
    for (int s = 0; s < C::stages; s++)
        if (s < mine) X::load(x, x_ring + s * X_STAGE_BYTES, (SHARED_X ? x_full : full) + s * 8);

    // Scale and bias of the tile's rows: asked for now, used at the end.
    constexpr int EDGES = (ROWS + THREADS - 1) / THREADS;
    float edge_scale[EDGES], edge_bias[EDGES];
#pragma unroll
    for (int i = 0; i < EDGES; i++) {
        const u32 row = min(tile * ROWS + threadIdx.x + i * THREADS, a.n - 1);
        edge_scale[i] = load_global_float(a.global_scale + row * a.scale_stride);
        edge_bias[i] = 0.f;
        if (a.bias_kind == 1) edge_bias[i] = Type::widen(load_global_16((const u16*)a.bias + row));
        if (a.bias_kind == 2) edge_bias[i] = load_global_float((const float*)a.bias + row);
    }

    float sums[C::subtiles][TOKEN_TILES][4] = {};
    u32 x_row[TOKEN_TILES];  // for ldmatrix; tokens past M read the last one
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; t++) x_row[t] = pin(min(t * 8 + (lane & 7), tokens - 1) * X_PITCH + (lane >> 3) * 16);
    const u32 scale_row = C::tokens * X_PITCH + (lane >> 3) * 16;

    const u32 never = pin(a.m & 0x80000000u);  // zero, unknown to the compiler
    u32 slot = 0, parity = 0, x_slot = 0, x_parity = 0;
    for (u32 i = 0; i < mine; i++) {
        const u32 stage = ring + slot * STAGE_BYTES, bar = full + slot * 8;
        const u32 x_stage = x_ring + x_slot * X_STAGE_BYTES;
        barrier_wait(bar, parity);
        if (SHARED_X) barrier_wait(x_full + x_slot * 8, x_parity);

        // The stage is in registers: ask for the one that takes its place. `loaded` combines what was loaded last: a bulk
        // copy is quicker than a load that waits in a long queue, so it is not issued before the loads have returned.
        // (H200, 2026-11: without this wait, wrong sums where many small stages were in flight.)
        auto refill = [&](u32 loaded) {
            const bool returned = __all_sync(0xffffffffu, (loaded & never) == 0);
            __syncwarp();
            if (SHARED_X && elect_one()) barrier_arrive(x_free + x_slot * 8);
            if (i + C::stages < mine && returned) {
                Weights::load(weights, stage, bar);
                if (!C::bulk && SHARED_X) copy_async_arrive(bar);
                if (!SHARED_X) {
                    X::load(x, x_stage, bar);
                } else {
                    // The ring of x has one stage more, so that this waits for what all warps did one step ago.
                    const u32 x_next = x_slot ? x_slot - 1 : X_STAGES - 1;
                    if (i > 0) barrier_wait(x_free + x_next * 8, x_slot ? x_parity : x_parity ^ 1);
                    X::load(x, x_ring + x_next * X_STAGE_BYTES, x_full + x_next * 8);
                }
            }
        };

#pragma unroll
        for (int b = 0; b < C::chunk; b++) {
            // B registers of this k64 block; with many tokens, half a block at a time.
            constexpr int HALVES = TOKEN_TILES > 4 ? 2 : 1, STEPS = 4 / HALVES;
            u32 fragments[TOKEN_TILES][2 * STEPS];
            auto load_fragments = [&](int half) {
#pragma unroll
                for (int h = 0; h < 2 / HALVES; h++) {
                    const u32 at = x_stage + b * 128 + (half + h) * 64;
#pragma unroll
                    for (int t = 0; t < TOKEN_TILES; t++) ldmatrix_x4(at + x_row[t], fragments[t] + h * 4);
                    if constexpr (C::scaled) {
                        u32 s[4];  // one row for all tokens: every lane gets the factors of its own k
                        ldmatrix_x4(at + scale_row, s);
#pragma unroll
                        for (int t = 0; t < TOKEN_TILES; t++)
#pragma unroll
                            for (int r = 0; r < 4; r++)
                                fragments[t][h * 4 + r] = Type::times(fragments[t][h * 4 + r], s[r]);
                    }
                }
            };
            load_fragments(0);
            uint4 codes[C::subtiles];
            uint2 scales[C::subtiles];
#pragma unroll
            for (int s = 0; s < C::subtiles; s++) {
                codes[s] = load_shared_128(stage + slot_offset(b, s) + lane * 16);
                scales[s] = load_shared_64(stage + slot_offset(b, s) + CODE_BYTES + (lane >> 2) * 8);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (HALVES == 2 && j == 2) load_fragments(1);
                if (b == C::chunk - 1 && j == (HALVES == 2 ? 2 : 0)) {
                    u32 loaded = 0;
#pragma unroll
                    for (int s = 0; s < C::subtiles; s++) loaded |= codes[s].w | scales[s].y;
                    refill(loaded);
                }
#pragma unroll
                for (int s = 0; s < C::subtiles; s++) {
                    const u32 word = j == 0 ? codes[s].x : j == 1 ? codes[s].y : j == 2 ? codes[s].z : codes[s].w;
                    const u32 scale = j < 2 ? scales[s].x : scales[s].y;
                    u32 weight[4];
                    decode<Type>(word, j % 2 ? Type::scale_odd(scale) : Type::scale_even(scale), weight);
#pragma unroll
                    for (int t = 0; t < TOKEN_TILES; t++)
                        Type::mma(sums[s][t], weight, fragments[t][j % STEPS * 2], fragments[t][j % STEPS * 2 + 1]);
                }
            }
        }
        if (++slot == C::stages) slot = 0, parity ^= 1;
        if (++x_slot == X_STAGES) x_slot = 0, x_parity ^= 1;
    }

    // ---- the warps' sums, [token][row], in their own rings, which are empty now
    __syncwarp();
#pragma unroll
    for (int s = 0; s < C::subtiles; s++)
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; t++) {
            const u32 p = ring + ((t * 8 + (lane & 3) * 2) * PARTIAL_PITCH + s * 16 + (lane >> 2)) * 4;
            store_shared_float(p, sums[s][t][0]);
            store_shared_float(p + PARTIAL_PITCH * 4, sums[s][t][1]);
            store_shared_float(p + 32, sums[s][t][2]);
            store_shared_float(p + PARTIAL_PITCH * 4 + 32, sums[s][t][3]);
        }
#pragma unroll
    for (int i = 0; i < EDGES; i++)
        if (threadIdx.x + i * THREADS < ROWS) {
            store_shared_float(edge + (threadIdx.x + i * THREADS) * 4, edge_scale[i]);
            store_shared_float(edge + (ROWS + threadIdx.x + i * THREADS) * 4, edge_bias[i]);
        }
    __syncthreads();

    // ---- over the K groups, then over the CTAs
    auto sum_of_groups = [&](u32 token, u32 row) {
        const u32 p = base + row / WARP_ROWS * RING_BYTES + (token * PARTIAL_PITCH + row % WARP_ROWS) * 4;
        float4 sum = load_shared_float4(p);
#pragma unroll
        for (int k = 1; k < C::k_groups; k++) add(sum, load_shared_float4(p + k * C::row_groups * RING_BYTES));
        return sum;
    };
    if constexpr (C::split == 1) {
        for_each_float4<ROWS>(tokens, [&](u32 token, u32 row) {
            store(a, edge, first_token + token, tile * ROWS, row, sum_of_groups(token, row));
        });
    } else if constexpr (C::through_cluster) {
        // Every rank owns a share of the rows and receives that of all ranks, its own too.
        constexpr int SHARE = ROWS / C::split;
        cluster_wait();
        for_each_float4<ROWS>(tokens, [&](u32 token, u32 row) {
            const u32 owner = row / SHARE, at = receive + ((rank * tokens + token) * SHARE + row % SHARE) * 4;
            store_async_float4(cluster_address(at, owner), sum_of_groups(token, row), cluster_address(received, owner));
        });
        barrier_wait_cluster(received, 0);
        for_each_float4<SHARE>(tokens, [&](u32 token, u32 row) {
            const u32 p = receive + (token * SHARE + row) * 4;
            float4 sum = load_shared_float4(p);
#pragma unroll
            for (int r = 1; r < C::split; r++) add(sum, load_shared_float4(p + r * tokens * SHARE * 4));
            store(a, edge, first_token + token, tile * ROWS, rank * SHARE + row, sum);
        });
    } else {
        // The last CTA of a tile to arrive adds up, in the order of the ranks, and leaves the counter zero.
        const u32 index = blockIdx.y * (gridDim.x / C::split) + tile;
        float* partial = a.partial + (u64)index * (C::split * C::tokens * ROWS);
        for_each_float4<ROWS>(tokens, [&](u32 token, u32 row) {
            *(float4*)(partial + (rank * C::tokens + token) * ROWS + row) = sum_of_groups(token, row);
        });
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            store_shared_u32(received, atomicAdd(a.counters + index, 1u));
        }
        __syncthreads();
        if (load_shared_u32(received) != C::split - 1) return;
        __threadfence();
        if (threadIdx.x == 0) a.counters[index] = 0;
        for_each_float4<ROWS>(tokens, [&](u32 token, u32 row) {
            float4 sum = load_global_float4(partial + token * ROWS + row);
#pragma unroll
            for (int r = 1; r < C::split; r++) add(sum, load_global_float4(partial + (r * C::tokens + token) * ROWS + row));
            store(a, edge, first_token + token, tile * ROWS, row, sum);
        });
    }
}
