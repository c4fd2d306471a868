// Rows of x in the order of the sorted pairs, times pre_quant_scale and rounded; and the pairs' router weights.

#include "fragment.cuh"

#if HALF
using Type = Fp16;
#else
using Type = Bf16;
#endif

constexpr u32 THREADS = 128, COLUMNS = 8;  // of a block, of a thread

struct Args {
    const u16* x;         // [tokens, k], rows `stride` apart
    const u16* vector;    // [k], or null: all ones
    const int* pairs;     // token * top_k + slot, by position
    const int* count;     // of them
    const float* router;  // [tokens * top_k]
    u16* out;             // [positions, k]
    float* factors;       // [positions]
    u64 stride;
    u32 k, top_k;         // k a multiple of COLUMNS
};

extern "C" __global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ Args a) {
    const u32 blocks = (a.k / COLUMNS + THREADS - 1) / THREADS, part = blockIdx.x % blocks, position = blockIdx.x / blocks;
    const u32 column = (part * THREADS + threadIdx.x) * COLUMNS;
    wait_for_previous_kernel();
    launch_dependents();
    if (position >= (u32)*a.count) return;
    const u32 pair = a.pairs[position];
    if (part == 0 && threadIdx.x == 0) a.factors[position] = a.router[pair];
    if (column >= a.k) return;
    const u16* row = a.x + pair / a.top_k * a.stride + column;
    uint4 v;
    if (((u64)a.x | a.stride * 2) % 16 == 0) {
        v = *(const uint4*)row;
    } else {
        u32 words[COLUMNS / 2];
#pragma unroll
        for (u32 i = 0; i < COLUMNS / 2; i++) words[i] = row[2 * i] | (u32)row[2 * i + 1] << 16;
        v = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (a.vector) {
        const uint4 s = *(const uint4*)(a.vector + column);
        v = make_uint4(Type::times(v.x, s.x), Type::times(v.y, s.y), Type::times(v.z, s.z), Type::times(v.w, s.w));
    }
    *(uint4*)(a.out + (u64)position * a.k + column) = v;
}
