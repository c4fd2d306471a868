// A tile of `marlin` and its kin: prologue, main loop, and the sums of its warps and CTAs.
//
// Weights are the A operand of mma.sync and tokens its n dimension ("swap-AB"), so a warp decodes what it loads straight
// into the registers that the tensor core reads. A CTA is ROW_GROUPS x K_GROUPS warps. Warp (r, k) owns SUBTILES x 16 rows
// and every K_GROUPS-th chunk of CHUNK k64 blocks. Its codes and scales arrive in a ring of its own, so the main loop
// has no barrier between warps but one: the ROW_GROUPS warps of a K group share a ring of x.
// Partial sums of the K groups meet in shared memory, those of SPLIT CTAs in the cluster's shared memory or, where there
// are no clusters, in global memory; always in the same order.
//
// What a kernel says of its tile is a struct Work:
//   tile, rank, tokens                which of the row tiles and of the CTAs along K; rows of x, at most TOKENS
//   k(w)                              K
//   weights(w, weights, subtile, block, lane), x(w, x, block, thread)      where these lie
//   below_2_31(w)                     any number below 2^31, as long as the compiler cannot know that
//   wait(w)                           for what all but the weights depend on; a gathering kernel's rows are there then
//   edge(w, row, &scale, &bias)       of a row of the tile
//   keep(w)                           what its stores need, in shared memory of its own
//   meeting(w, &partial, &counter)    floats [SPLIT, TOKENS, ROWS] and a zero: only without a cluster
//   store(w, edge, token, row, sums)  the end of four neighbouring rows of one token; if PAIRED, with those 8 rows behind
#pragma once
#include "marlin.cuh"

DEVICE void add(float4& sum, float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// Calls body(token, row) for every fourth row of every token, shared out over the threads.
template <int ROWS_EACH, class Body>
DEVICE void for_each_float4(u32 tokens, const Body& body) {
    for (u32 i = threadIdx.x; i < tokens * (ROWS_EACH / 4); i += THREADS) body(i / (ROWS_EACH / 4), i % (ROWS_EACH / 4) * 4);
}

// Scale and bias of four rows, from shared memory.
struct Edge {
    float4 scale, bias;

    DEVICE Edge load(u32 edge, u32 row) {
        return {load_shared_float4(edge + row * 4), load_shared_float4(edge + (ROWS + row) * 4)};
    }
    DEVICE float4 finish(const Edge& e, float4 v) {  // in this order: the scale may be huge
        return make_float4(v.x * Type::UNDO * e.scale.x + e.bias.x, v.y * Type::UNDO * e.scale.y + e.bias.y,
                           v.z * Type::UNDO * e.scale.z + e.bias.z, v.w * Type::UNDO * e.scale.w + e.bias.w);
    }
};

// Four outputs, rounded; columns past n are left out.
DEVICE void store_outputs(u16* out, u32 column, u32 n, float4 v) {
    const uint2 packed = make_uint2(Type::pack(v.x, v.y), Type::pack(v.z, v.w));
    if (n % 4 == 0) {
        if (column < n) *(uint2*)out = packed;
    } else {
        if (column < n) out[0] = (u16)packed.x;
        if (column + 1 < n) out[1] = (u16)(packed.x >> 16);
        if (column + 2 < n) out[2] = (u16)packed.y;
        if (column + 3 < n) out[3] = (u16)(packed.y >> 16);
    }
}

// Stores ROWS_EACH rows from `first` on; sum(token, row) counts from there.
template <int ROWS_EACH, class Work, class Sum>
DEVICE void store_rows(const Work& work, u32 edge, u32 first, const Sum& sum) {
    if constexpr (Work::PAIRED) {
        for (u32 i = threadIdx.x; i < work.tokens * (ROWS_EACH / 8); i += THREADS) {
            const u32 token = i / (ROWS_EACH / 8), four = i % (ROWS_EACH / 8), row = four / 2 * 16 + four % 2 * 4;
            Work::store(work, edge, token, first + row, sum(token, row), sum(token, row + 8));
        }
    } else {
        for_each_float4<ROWS_EACH>(work.tokens, [&](u32 token, u32 row) {
            Work::store(work, edge, token, first + row, sum(token, row));
        });
    }
}

extern __shared__ __align__(128) u8 smem[];

template <class Work>
DEVICE void multiply(Work& work) {
    const u32 warp = uniform_warp(), lane = threadIdx.x & 31;
    const u32 row_group = warp % C::row_groups, k_group = warp / C::row_groups;
    const u32 rank = work.rank, tokens = work.tokens;

    const u32 base = shared_address(smem), ring = base + warp * RING_BYTES;
    const u32 x_ring = base + X_OFFSET + k_group * (X_STAGES * X_STAGE_BYTES);
    const u32 receive = base + RECEIVE_OFFSET, edge = base + EDGE_OFFSET;
    const u32 full = base + BARRIER_OFFSET + warp * (C::stages * 8);
    const u32 x_full = base + BARRIER_OFFSET + (WARPS * C::stages + k_group * X_STAGES) * 8;
    const u32 x_free = x_full + C::k_groups * X_STAGES * 8;
    const u32 received = base + BARRIER_OFFSET + (BARRIERS - 1) * 8;

    // This CTA's chunks, and this warp's among them.
    const u32 chunks = (Work::k(work) + 63) / 64 / C::chunk;
    const u32 begin = chunks * rank / C::split, end = chunks * (rank + 1) / C::split;
    const u32 mine = (end - begin + C::k_groups - 1 - k_group) / C::k_groups;
    const u32 first_block = (begin + k_group) * C::chunk;

    Weights weights;
    Work::weights(work, weights, (work.tile * C::row_groups + row_group) * C::subtiles, first_block, lane);
    X x;
    if (!C::gather) Work::x(work, x, first_block, row_group * 32 + lane);

    if (elect_one()) {
#pragma unroll
        for (int s = 0; s < C::stages; s++)
            barrier_init(full + s * 8, (C::bulk ? 1 : 0) + (!SHARED_X || !C::bulk ? 32 : 0));
        if (SHARED_X && row_group == 0) {
#pragma unroll
            for (int s = 0; s < X_STAGES; s++)
                barrier_init(x_full + s * 8, C::row_groups * 32), barrier_init(x_free + s * 8, C::row_groups * 32);
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
    Work::wait(work);
    __syncwarp();
    if (SHARED_X || C::gather) __syncthreads();  // the barriers of x, and the list of rows, are another warp's work
    if (C::gather) Work::x(work, x, first_block, row_group * 32 + lane);
#pragma unroll
    for (int s = 0; s < C::stages; s++)
        if (s < mine) X::load(x, x_ring + s * X_STAGE_BYTES, (SHARED_X ? x_full : full) + s * 8);

    // Scale and bias of the tile's rows: asked for now, used at the end.
    constexpr int EDGES = (ROWS + THREADS - 1) / THREADS;
    float edge_scale[EDGES], edge_bias[EDGES];
#pragma unroll
    for (int i = 0; i < EDGES; i++)
        Work::edge(work, work.tile * ROWS + threadIdx.x + i * THREADS, edge_scale[i], edge_bias[i]);

    float sums[C::subtiles][TOKEN_TILES][4] = {};
    u32 x_row[TOKEN_TILES];  // for ldmatrix; tokens past M read the last one
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; t++) x_row[t] = pin(min(t * 8 + (lane & 7), tokens - 1) * X_PITCH + (lane >> 3) * 16);
    const u32 scale_row = C::tokens * X_PITCH + (lane >> 3) * 16;

    const u32 never = pin(Work::below_2_31(work) & 0x80000000u);  // zero, unknown to the compiler
    u32 slot = 0, parity = 0, x_slot = 0, x_parity = 0;
    for (u32 i = 0; i < mine; i++) {
        const u32 stage = ring + slot * STAGE_BYTES, bar = full + slot * 8;
        const u32 x_stage = x_ring + x_slot * X_STAGE_BYTES;
        barrier_wait(bar, parity);
        if (SHARED_X) barrier_wait(x_full + x_slot * 8, x_parity);

        // The stage is in registers: ask for the one that takes its place. `loaded` combines what was loaded last: a bulk
        // copy is quicker than a load that waits in a long queue, so it is not issued before the loads have returned.
        // (H200, 2026-11: without this wait, wrong sums where many small stages were in flight.)
        // Every lane says that it has read x: one for its warp would do, but racecheck does not follow that, and it is no
        // faster.
        auto refill = [&](u32 loaded) {
            const bool returned = __all_sync(0xffffffffu, (loaded & never) == 0);
            __syncwarp();
            if (SHARED_X) barrier_arrive(x_free + x_slot * 8);
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
    Work::keep(work);
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
        store_rows<ROWS>(work, edge, 0, sum_of_groups);
    } else if constexpr (C::through_cluster) {
        // Every rank owns a share of the rows and receives that of all ranks, its own too.
        constexpr int SHARE = ROWS / C::split;
        cluster_wait();
        for_each_float4<ROWS>(tokens, [&](u32 token, u32 row) {
            const u32 owner = row / SHARE, at = receive + ((rank * tokens + token) * SHARE + row % SHARE) * 4;
            store_async_float4(cluster_address(at, owner), sum_of_groups(token, row), cluster_address(received, owner));
        });
        barrier_wait_cluster(received, 0);
        store_rows<SHARE>(work, edge, rank * SHARE, [&](u32 token, u32 row) {
            const u32 p = receive + (token * SHARE + row) * 4;
            float4 sum = load_shared_float4(p);
#pragma unroll
            for (int r = 1; r < C::split; r++) add(sum, load_shared_float4(p + r * tokens * SHARE * 4));
            return sum;
        });
    } else {
        // The last CTA of a tile to arrive adds up, in the order of the ranks, and leaves the counter zero.
        float* partial;
        u32* counter;
        Work::meeting(work, partial, counter);
        for_each_float4<ROWS>(tokens, [&](u32 token, u32 row) {
            *(float4*)(partial + (rank * C::tokens + token) * ROWS + row) = sum_of_groups(token, row);
        });
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            store_shared_u32(received, atomicAdd(counter, 1u));
        }
        __syncthreads();
        if (load_shared_u32(received) != C::split - 1) return;
        __threadfence();
        if (threadIdx.x == 0) *counter = 0;
        store_rows<ROWS>(work, edge, 0, [&](u32 token, u32 row) {
            float4 sum = load_global_float4(partial + token * ROWS + row);
#pragma unroll
            for (int r = 1; r < C::split; r++) add(sum, load_global_float4(partial + (r * C::tokens + token) * ROWS + row));
            return sum;
        });
    }
}
