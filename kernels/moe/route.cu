// Pairs of token and slot in the order of their experts, and the tiles of rows that follow: one block, no two runs
// differ. `tile_groups` makes the same tiles from given offsets.
//
// A counting sort. Each warp has a share of the pairs that lie together; it counts them per expert (lanes with the same
// expert find each other by a match), the counts are summed, and it goes through its share again and places each pair
// behind those of the warps and lanes before it.

#include "pairs.cuh"

constexpr u32 MAX_WARPS = 32;
constexpr int AHEAD = 4;  // ids a thread asks for at a time

struct Tiles {
    int4* list;     // [most] expert or -1 (none), its first row or position in `pairs`, rows, 0; expert by expert
    int* count;     // of those with an expert
    u32 most, rows; // in the list; of a tile at most
};

struct RouteArgs {
    Ids ids;
    int* offsets;  // [experts + 1]
    int* pairs;    // [count], written up to the last offset
    Tiles tiles;
    u32 count;
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
DEVICE void write_tiles(const Tiles& a, const u32* first, const u32* rows, const u32* tile, u32 experts, u32 all) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 e = warp; e < experts; e += blockDim.x / 32)
        for (u32 i = lane; i < tiles_of(a, rows[e]); i += 32)
            if (tile[e] + i < a.most)  // offsets that descend may ask for more
                a.list[tile[e] + i] = make_int4(e, first[e] + i * a.rows, min(rows[e] - i * a.rows, a.rows), 0);
    for (u32 i = all + threadIdx.x; i < a.most; i += blockDim.x) a.list[i] = make_int4(-1, 0, 0, 0);
    if (threadIdx.x == 0) *a.count = min(all, a.most);
}

// Calls body(expert, pair) for pairs begin to end, a warp's lanes side by side; expert is -1 for none.
template <class Body>
DEVICE void for_each_pair(const Ids& ids, u32 begin, u32 end, const Body& body) {
    const u32 lane = threadIdx.x % 32;
    for (u32 first = begin; first < end; first += 32 * AHEAD) {
        int expert[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const u32 pair = first + i * 32 + lane;
            expert[i] = pair < end ? local_expert(ids, pair) : -1;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) body(expert[i], first + i * 32 + lane);
    }
}

extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32) route(const __grid_constant__ RouteArgs a) {
    wait_for_previous_kernel();
    launch_dependents();
    const u32 experts = a.ids.experts, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 warps = min(blockDim.x / 32, (a.count + 31) / 32);  // that have pairs
    const u32 share = (a.count + warps * 32 - 1) / (warps * 32) * 32;
    const u32 begin = min(warp * share, a.count), end = min(begin + share, a.count);
    u32 *first = first_row(), *rows = first + experts, *tile = rows + experts, *counts = tile + experts;
    u32* mine = counts + min(warp, warps - 1) * experts;

    for (u32 i = threadIdx.x; i < warps * experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for_each_pair(a.ids, begin, end, [&](int expert, u32) {
        const u32 same = __match_any_sync(0xffffffffu, expert);
        if (expert >= 0 && lane == __ffs(same) - 1) mine[expert] += __popc(same);
        __syncwarp();
    });
    __syncthreads();

    Sums all = {0, 0};
    for (u32 base = 0; base < experts; base += blockDim.x) {
        const u32 e = base + threadIdx.x;
        u32 sum = 0;
        if (e < experts)
            for (u32 w = 0; w < warps; w++) {
                const u32 count = counts[w * experts + e];
                counts[w * experts + e] = sum;
                sum += count;
            }
        const Sums before = scan_block({sum, tiles_of(a.tiles, sum)}, all);
        if (e < experts) a.offsets[e] = first[e] = before.rows, rows[e] = sum, tile[e] = before.tiles;
    }
    if (threadIdx.x == 0) a.offsets[experts] = all.rows;
    __syncthreads();

    for_each_pair(a.ids, begin, end, [&](int expert, u32 pair) {
        const u32 same = __match_any_sync(0xffffffffu, expert), before = __popc(same & ((1u << lane) - 1));
        const u32 at = expert >= 0 ? mine[expert] : 0;
        __syncwarp();
        if (expert >= 0) {
            a.pairs[first[expert] + at + before] = pair;
            if (before == 0) mine[expert] = at + __popc(same);
        }
        __syncwarp();
    });
    write_tiles(a.tiles, first, rows, tile, experts, all.tiles);
}

// Block 0 makes the tiles, the others the zeros.
extern "C" __global__ void __launch_bounds__(MAX_WARPS * 32) tile_groups(const __grid_constant__ GroupArgs a) {
    wait_for_previous_kernel();
    launch_dependents();
    auto offset = [&](u32 e) { return (u32)min(max(a.offsets[e], 0), (int)a.m); };
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
        write_tiles(a.tiles, first, rows, tile, a.experts, all.tiles);
        return;
    }
    const u64 begin = (u64)offset(0) * a.n, end = (u64)offset(a.experts) * a.n, size = (u64)a.m * a.n;
    const u64 thread = (u64)(blockIdx.x - 1) * blockDim.x + threadIdx.x, step = (u64)(gridDim.x - 1) * blockDim.x;
    if (a.n % 8 == 0 && (u64)a.out % 16 == 0) {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        for (u64 i = thread * 8; i < begin; i += step * 8) *(uint4*)(a.out + i) = zero;
        for (u64 i = end + thread * 8; i < size; i += step * 8) *(uint4*)(a.out + i) = zero;
    } else {
        for (u64 i = thread; i < begin; i += step) a.out[i] = 0;
        for (u64 i = end + thread; i < size; i += step) a.out[i] = 0;
    }
}
