// Rows of x in the order of the sorted pairs, times pre_quant_scale and rounded; and the pairs' router weights.
//
// A warp takes segments of rows, one after the other, as many warps as there are; it asks for a segment's pair before it
// copies the one before.

#include "fragment.cuh"

#if HALF
using Type = Fp16;
#else
using Type = Bf16;
#endif

constexpr u32 THREADS = 256, COLUMNS = 8;  // of a block, of a load
constexpr u32 LOADS = 4;                   // of a thread, of a segment
constexpr u32 SEGMENT = 32 * COLUMNS * LOADS;

struct Args {
    const u16* x;         // [tokens, k], rows `stride` apart
    const u16* vector;    // [k], or null: all ones
    const int* pairs;     // [most] token * top_k + slot, by position
    const int* count;     // of them, at most `most`
    const float* router;  // [tokens * top_k]
    u16* out;             // [most, k]
    float* factors;       // [most]
    u64 stride;
    u32 k, top_k, most;   // k a multiple of COLUMNS
};

DEVICE uint4 load_narrow(const u16* p) {
    u32 words[COLUMNS / 2];
#pragma unroll
    for (u32 i = 0; i < COLUMNS / 2; i++) words[i] = p[2 * i] | (u32)p[2 * i + 1] << 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ Args a) {
    const u32 segments = (a.k + SEGMENT - 1) / SEGMENT, lane = threadIdx.x % 32;
    const u32 first = (blockIdx.x * THREADS + threadIdx.x) / 32, warps = gridDim.x * (THREADS / 32);
    const bool wide = ((u64)a.x | a.stride * 2) % 16 == 0;
    wait_for_previous_kernel();
    launch_dependents();
    const u32 count = *a.count;
    u32 position = first / segments, part = first % segments;
    u32 pair = position < a.most ? a.pairs[position] : 0;  // what lies beyond `count` is not used
    while (position < count) {
        const u32 next = position * segments + part + warps, next_position = next / segments;
        const u32 next_pair = next_position < count ? a.pairs[next_position] : 0;
        const u32 column = part * SEGMENT + lane * COLUMNS;
        const u16* row = a.x + pair / a.top_k * a.stride + column;
        u16* out = a.out + (u64)position * a.k + column;
        float factor;
        const bool mine = part == 0 && lane == 0;
        if (mine) factor = a.router[pair];
        uint4 v[LOADS];
        if (wide) {
#pragma unroll
            for (u32 i = 0; i < LOADS; i++)
                if (column + i * 32 * COLUMNS < a.k) v[i] = *(const uint4*)(row + i * 32 * COLUMNS);
        } else {
#pragma unroll
            for (u32 i = 0; i < LOADS; i++)
                if (column + i * 32 * COLUMNS < a.k) v[i] = load_narrow(row + i * 32 * COLUMNS);
        }
        if (a.vector) {
#pragma unroll
            for (u32 i = 0; i < LOADS; i++) {
                const u32 at = i * 32 * COLUMNS;
                if (column + at >= a.k) continue;
                const uint4 s = *(const uint4*)(a.vector + column + at);
                v[i] = make_uint4(Type::times(v[i].x, s.x), Type::times(v[i].y, s.y), Type::times(v[i].z, s.z),
                                  Type::times(v[i].w, s.w));
            }
        }
#pragma unroll
        for (u32 i = 0; i < LOADS; i++)
            if (column + i * 32 * COLUMNS < a.k) *(uint4*)(out + i * 32 * COLUMNS) = v[i];
        if (mine) a.factors[position] = factor;
        position = next_position, part = next % segments, pair = next_pair;
    }
}
