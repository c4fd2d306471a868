// out[t] = the sum of results over the token's slots, in their order, in float32 with one rounding.

#include "fragment.cuh"
#include "pairs.cuh"

#if HALF
using Type = Fp16;
#else
using Type = Bf16;
#endif

constexpr u32 THREADS = 128, COLUMNS = 4;  // of a block, of a thread
constexpr int AHEAD = 8;                   // slots whose loads are asked for at a time

struct Args {
    Ids ids;               // [tokens, top_k]; slots that are left out have no result
    const float* results;  // [tokens * top_k, n]
    u16* out;              // [tokens, n], n a multiple of 4
    u32 n, top_k;
};

extern "C" __global__ void __launch_bounds__(THREADS) sum(const __grid_constant__ Args a) {
    const u32 blocks = (a.n + THREADS * COLUMNS - 1) / (THREADS * COLUMNS);
    const u32 column = (blockIdx.x % blocks * THREADS + threadIdx.x) * COLUMNS, lane = threadIdx.x % 32;
    const u64 token = blockIdx.x / blocks, pair = token * a.top_k;
    wait_for_previous_kernel();
    launch_dependents();
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    for (u32 first = 0; first < a.top_k; first += 32) {
        const u32 slots = min(a.top_k - first, 32u);
        const u32 used = __ballot_sync(0xffffffffu, lane < slots && local_expert(a.ids, pair + first + lane) >= 0);
        if (column >= a.n) continue;
        for (u32 s = 0; s < slots; s += AHEAD) {
            float4 v[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                v[i] = make_float4(0.f, 0.f, 0.f, 0.f);  // adds nothing
                if (s + i < slots && used >> (s + i) & 1)
                    v[i] = load_global_float4(a.results + (pair + first + s + i) * a.n + column);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) total.x += v[i].x, total.y += v[i].y, total.z += v[i].z, total.w += v[i].w;
        }
    }
    if (column < a.n)
        *(uint2*)(a.out + token * a.n + column) =
            make_uint2(Type::pack(total.x, total.y), Type::pack(total.z, total.w));
}
