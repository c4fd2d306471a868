// Pairs of token and slot in the order of their experts, and the tiles of rows that follow: no two runs differ.
// `tile_groups` makes the same tiles from given offsets.
//
// A counting sort. Each block has a share of the pairs that lie together, and each of its warps a share of that; the
// warps count theirs per expert, the counts are summed, and they go through their shares again and place each pair
// behind those of the blocks, warps and lanes before it (lanes with the same expert find each other by a match). If
// there are several blocks, `count` tells them how many pairs the others have.

#include "groups.cuh"
#include "pairs.cuh"

constexpr u32 MAX_WARPS = 32;
constexpr int AHEAD = 4;  // ids a thread asks for at a time; the first of its share it keeps
constexpr u32 COUNT_THREADS = 256;

struct Tiles {
    int4* list;     // [most] expert or -1 (none), its first row or position in `pairs`, rows, 0; expert by expert
    int* count;     // of those with an expert; and two zeros behind it
    u32 most, rows; // in the list; of a tile at most
};

struct RouteArgs {
    Ids ids;
    int* offsets;  // [experts + 1]
    int* pairs;    // [count], written up to the last offset
    u32* counts;   // [blocks, experts]; unread when there is one block
    Tiles tiles;
    u32 count, share;  // of all blocks; of a block
};

struct GroupArgs {
    const int* offsets;  // [experts + 1], any values
    u16* out;            // [m, n]: rows of no expert become zero
    Tiles tiles;
    u32 experts, m, n;
};

extern __shared__ u32 smem[];

// What all threads know of an expert, behind the sums of the scan.
DEVICE u32* first_row() { return smem + 2 * MAX_WARPS; }

struct Sums {
    u32 rows, tiles;
};

DEVICE Sums scan_warp(Sums v, u32 lane) {  // inclusive
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 rows = __shfl_up_sync(0xffffffffu, v.rows, d), tiles = __shfl_up_sync(0xffffffffu, v.tiles, d);
        if (lane >= d) v.rows += rows, v.tiles += tiles;
    }
    return v;
}

// The sums of all threads before this one; all of the block's are added to `total`.
DEVICE Sums scan_block(Sums v, Sums& total) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Sums own = scan_warp(v, lane);
    if (lane == 31) smem[warp] = own.rows, smem[MAX_WARPS + warp] = own.tiles;
    __syncthreads();
    Sums all = {0, 0};
    if (lane < blockDim.x / 32) all = {smem[lane], smem[MAX_WARPS + lane]};
    const Sums warps = scan_warp(all, lane);
    const Sums before = {total.rows + __shfl_sync(0xffffffffu, warps.rows - all.rows, warp) + own.rows - v.rows,
                         total.tiles + __shfl_sync(0xffffffffu, warps.tiles - all.tiles, warp) + own.tiles - v.tiles};
    total.rows += __shfl_sync(0xffffffffu, warps.rows, 31), total.tiles += __shfl_sync(0xffffffffu, warps.tiles, 31);
    __syncthreads();
    return before;
}

DEVICE u32 tiles_of(const Tiles& a, u32 rows) { return (rows + a.rows - 1) / a.rows; }

// first [experts], rows [experts], tile [experts] lie in shared memory; a warp writes the tiles of one expert at a time.
// This is one of several blocks that do so.
DEVICE void write_tiles(const Tiles& a, const u32* first, const u32* rows, const u32* tile, u32 experts, u32 all,
                        u32 block, u32 blocks) {
    const u32 thread = block * blockDim.x + threadIdx.x, threads = blocks * blockDim.x, lane = threadIdx.x % 32;
    for (u32 e = thread / 32; e < experts; e += threads / 32)
        for (u32 i = lane; i < tiles_of(a, rows[e]); i += 32)
            if (tile[e] + i < a.most)  // offsets that descend may ask for more
                a.list[tile[e] + i] = make_int4(e, first[e] + i * a.rows, min(rows[e] - i * a.rows, a.rows), 0);
    for (u32 i = all + thread; i < a.most; i += threads) a.list[i] = make_int4(-1, 0, 0, 0);
    if (thread < 3) a.count[thread] = thread ? 0 : min(all, a.most);
}

DEVICE void add_counts(u32* counts, const int (&expert)[AHEAD]) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (expert[i] >= 0) atomicAdd(counts + expert[i], 1);
}

// counts[block] = pairs per expert in its share.
extern "C" __global__ void __launch_bounds__(COUNT_THREADS) count(const __grid_constant__ RouteArgs a) {
    wait_for_previous_kernel();
    launch_dependents();  // behind the wait: `route` reads ids without one
    const u32 experts = a.ids.experts, begin = blockIdx.x * a.share, end = min(begin + a.share, a.count);
    for (u32 e = threadIdx.x; e < experts; e += COUNT_THREADS) smem[e] = 0;
    __syncthreads();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 first = begin + warp * 32 * AHEAD; first < end; first += COUNT_THREADS * AHEAD) {
        int expert[AHEAD];
        local_experts(a.ids, first + lane, end, expert);
        add_counts(smem, expert);
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < experts; e += COUNT_THREADS) a.counts[blockIdx.x * experts + e] = smem[e];
}

// Sums over the blocks: before this one, and all. Both are zero at first.
DEVICE void add_blocks(const u32* counts, u32 experts, u32* before, u32* all) {
    const u32 lane = threadIdx.x % 32;
    for (u32 b = threadIdx.x / 32; b < gridDim.x; b += blockDim.x / 32)
        for (u32 first = lane; first < experts; first += 32 * AHEAD) {
            u32 v[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) v[i] = first + i * 32 < experts ? counts[b * experts + first + i * 32] : 0;
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (v[i]) {
                    atomicAdd(all + first + i * 32, v[i]);
                    if (b < blockIdx.x) atomicAdd(before + first + i * 32, v[i]);
                }
        }
}

// counts[w * step] = `before` and the sum of those before it, for all warps; the sum of all.
DEVICE u32 scan_warps(u32* counts, u32 warps, u32 step, u32 before) {
    u32 sum = before;
    for (u32 w = 0; w < warps; w += 8) {  // loads at a time
        u32 v[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) v[i] = w + i < warps ? counts[(w + i) * step] : 0;
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            if (w + i < warps) counts[(w + i) * step] = sum;
            sum += v[i];
        }
    }
    return sum - before;
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32) route(const __grid_constant__ RouteArgs a) {
    const bool several = gridDim.x > 1;
    if (!several) wait_for_previous_kernel();
    launch_dependents();
    const u32 experts = a.ids.experts, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 start = blockIdx.x * a.share, size = min(a.share, a.count - start);
    const u32 warps = min(blockDim.x / 32, (size + 31) / 32);  // that have pairs
    const u32 share = (size + warps * 32 - 1) / (warps * 32) * 32;
    const u32 begin = start + min(warp * share, size), end = min(begin + share, start + size);
    u32 *first = first_row(), *rows = first + experts, *tile = rows + experts, *counts = tile + experts;
    u32* mine = counts + min(warp, warps - 1) * experts;

    int kept[AHEAD];
    local_experts(a.ids, begin + lane, end, kept);
    if (warp < warps)
        for (u32 e = lane; e < experts; e += 32) mine[e] = 0;
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) first[e] = rows[e] = 0;
    __syncwarp();
    add_counts(mine, kept);
    for (u32 at = begin + 32 * AHEAD; at < end; at += 32 * AHEAD) {
        int expert[AHEAD];
        local_experts(a.ids, at + lane, end, expert);
        add_counts(mine, expert);
    }
    __syncthreads();
    if (several) {
        wait_for_previous_kernel();
        add_blocks(a.counts, experts, first, rows);
        __syncthreads();
    }

    Sums all = {0, 0};
    for (u32 base = 0; base < experts; base += blockDim.x) {
        const u32 e = base + threadIdx.x;
        u32 sum = 0;
        if (e < experts) {
            sum = scan_warps(counts + e, warps, experts, first[e]);
            if (several) sum = rows[e];
        }
        const Sums before = scan_block({sum, tiles_of(a.tiles, sum)}, all);
        if (e < experts) first[e] = before.rows, rows[e] = sum, tile[e] = before.tiles;
    }
    __syncthreads();
    if (blockIdx.x == 0) {
        for (u32 e = threadIdx.x; e < experts; e += blockDim.x) a.offsets[e] = first[e];
        if (threadIdx.x == 0) a.offsets[experts] = all.rows;
    }

    auto place = [&](const int(&expert)[AHEAD], u32 at) {
        u32 same[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (at + i * 32 < end) same[i] = __match_any_sync(0xffffffffu, expert[i]);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (at + i * 32 < end) {
                const u32 before = __popc(same[i] & ((1u << lane) - 1));
                const u32 those = expert[i] >= 0 ? mine[expert[i]] : 0;
                __syncwarp();
                if (expert[i] >= 0) {
                    a.pairs[first[expert[i]] + those + before] = at + i * 32 + lane;
                    if (before == 0) mine[expert[i]] = those + __popc(same[i]);
                }
                __syncwarp();
            }
    };
    place(kept, begin);
    for (u32 at = begin + 32 * AHEAD; at < end; at += 32 * AHEAD) {
        int expert[AHEAD];
        local_experts(a.ids, at + lane, end, expert);
        place(expert, at);
    }
    write_tiles(a.tiles, first, rows, tile, experts, all.tiles, blockIdx.x, gridDim.x);
}

// Block 0 makes the tiles, the others the zeros.
extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32) tile_groups(const __grid_constant__ GroupArgs a) {
    wait_for_previous_kernel();
    launch_dependents();
    auto offset = [&](u32 e) { return group_offset(a.offsets, e, a.m); };
    if (blockIdx.x == 0) {
        u32 *first = first_row(), *rows = first + a.experts, *tile = rows + a.experts;
        Sums all = {0, 0};
        for (u32 base = 0; base < a.experts; base += blockDim.x) {
            const u32 e = base + threadIdx.x;
            u32 begin = 0, end = 0;
            if (e < a.experts) begin = offset(e), end = max(begin, offset(e + 1));
            const Sums before = scan_block({end - begin, tiles_of(a.tiles, end - begin)}, all);
            if (e < a.experts) first[e] = begin, rows[e] = end - begin, tile[e] = before.tiles;
        }
        __syncthreads();
        write_tiles(a.tiles, first, rows, tile, a.experts, all.tiles, 0, 1);
        return;
    }
    zero_other_rows(a.out, a.m, a.n, offset(0), offset(a.experts), (u64)(blockIdx.x - 1) * blockDim.x + threadIdx.x,
                    (u64)(gridDim.x - 1) * blockDim.x);
}
