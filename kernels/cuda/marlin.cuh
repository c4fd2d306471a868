// What `marlin` and its kin for experts move and where: the config, the plan of shared memory, the copies of weights and x.
#pragma once
#include "fragment.cuh"

#ifndef GATHER
#define GATHER 0
#endif
#ifndef OWN_BYTES
#define OWN_BYTES 0  // of shared memory that a kernel needs besides
#endif

// What the config decides; the launcher defines all of it. The kernel's is_valid states the same limits.
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
    static constexpr bool gather = GATHER;           // rows of x lie anywhere, else at equal distances
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
constexpr int OWN_OFFSET = BARRIER_OFFSET + BARRIERS * 8;
constexpr int SMEM_BYTES = OWN_OFFSET + OWN_BYTES;
static_assert(SMEM_BYTES == EXPECTED_SMEM_BYTES, "the launcher predicts another size of shared memory");
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

    // weight is [Np/64, Kp/64, 2304] of n rows and k columns.
    DEVICE void init(Weights& w, const u8* weight, u32 n, u32 k, u32 first_subtile, u32 first_block, u32 lane) {
        const u32 last = (n + 63) / 64 * 4 - GROUP, k_blocks = (k + 63) / 64;
#pragma unroll
        for (int g = 0; g < C::subtiles / GROUP; g++) {
            const u32 s = min(first_subtile + g * GROUP, last);
            w.run[g] = weight + ((u64)(s / 4) * k_blocks + first_block) * BLOCK_BYTES + s % 4 * SUBTILE_BYTES;
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

    const u16 *source, *scale;  // this thread's first piece of the next stage; if rows lie anywhere, of a row at offset 0
    u64 row_step;
    int rows, k_left;           // tokens from its first on; elements from its piece to K, negative when there are none
    u32 target;
    u32 offset[COPIES];         // of its rows, in pieces

    // Rows are x_stride elements apart; vector is [k] or unread.
    DEVICE void init(X& x, const u16* base, u64 x_stride, const u16* vector, u32 token, u32 tokens, u32 k_size,
                     u32 first_block, u32 thread) {
        const u32 row = thread / PIECES, column = thread % PIECES * 8, k = first_block * 64 + column;
        x.source = base + (token + row) * x_stride + k;
        x.scale = vector + k;
        x.row_step = x_stride * STEP;
        x.rows = (int)tokens - (int)row;
        x.k_left = (int)(k_size - k);
        x.target = pin(row * X_PITCH + column * 2);
    }

    // The same where u32 [tokens] in shared memory has the rows' distances from base, in pieces.
    DEVICE void gather(X& x, const u16* base, u32 offsets, const u16* vector, u32 tokens, u32 k_size, u32 first_block,
                       u32 thread) {
        init(x, base, 0, vector, 0, tokens, k_size, first_block, thread);
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            x.offset[i] = i * STEP < x.rows ? load_shared_u32(offsets + (thread / PIECES + i * STEP) * 4) : 0;
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
            if constexpr (C::gather) source = x.source + (u64)x.offset[i] * 8;
            if (i * STEP < x.rows) copy(x, slot + x.target + i * (STEP * X_PITCH), source);
            if constexpr (!C::gather) source += x.row_step;
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
