// out[t] = the sum of results over the token's slots, in their order, in float32 with one rounding; each times the
// router's weight, unless that is in the results.
//
// A block takes some columns of one token after the other, as many blocks as there are; it asks for the next token's ids
// before it adds.

#include "fragment.cuh"
#include "pairs.cuh"

#if HALF
using Type = Fp16;
#else
using Type = Bf16;
#endif

constexpr u32 THREADS = 128, COLUMNS = 4;  // of a block, of a thread
constexpr u32 AHEAD = 8;                   // slots whose loads are asked for at a time

struct Args {
    Ids ids;               // [tokens, top_k]; slots that are left out have no result
    const float* results;  // [tokens * top_k, n]
    const float* router;   // [tokens * top_k], or null
    u16* out;              // [tokens, n], n a multiple of 4
    u32 n, top_k, tokens;
};

extern "C" __global__ void __launch_bounds__(THREADS) sum(const __grid_constant__ Args a) {
    const u32 parts = (a.n + THREADS * COLUMNS - 1) / (THREADS * COLUMNS), items = a.tokens * parts;
    const u32 lane = threadIdx.x % 32;
    // The expert of this lane's slot, of those from `first` on.
    auto expert = [&](u32 token, u32 first) {
        return first + lane < a.top_k ? local_expert(a.ids, (u64)token * a.top_k + first + lane) : -1;
    };
    auto weight = [&](u32 token, u32 first) {
        return a.router && first + lane < a.top_k ? a.router[(u64)token * a.top_k + first + lane] : 1.f;
    };
    wait_for_previous_kernel();
    launch_dependents();
    u32 token = blockIdx.x / parts, part = blockIdx.x % parts;
    int own = expert(token, 0);
    float own_weight = weight(token, 0);
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const u32 next_token = (item + gridDim.x) / parts, next_part = (item + gridDim.x) % parts;
        const u32 column = (part * THREADS + threadIdx.x) * COLUMNS;
        const bool any = column < a.n;
        const float* results = a.results + (u64)token * a.top_k * a.n + column;
        u16* out = a.out + (u64)token * a.n + column;
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        for (u32 first = 0; first < a.top_k; first += 32) {
            u32 used = __ballot_sync(0xffffffffu, own >= 0);
            const float weights = own >= 0 ? own_weight : 0.f;  // any value may stand beside a slot that is left out
            for (u32 s = 0; s < min(a.top_k - first, 32u); s += AHEAD, used >>= AHEAD, results += AHEAD * a.n) {
                float4 v[AHEAD];
#pragma unroll
                for (u32 i = 0; i < AHEAD; i++) {
                    v[i] = make_float4(0.f, 0.f, 0.f, 0.f);  // adds nothing
                    if (any && used >> i & 1) v[i] = load_global_float4(results + i * a.n);
                }
                if (s == 0) {
                    const bool more = first + 32 < a.top_k;
                    if (more || item + gridDim.x < items) {
                        own = expert(more ? token : next_token, more ? first + 32 : 0);
                        own_weight = weight(more ? token : next_token, more ? first + 32 : 0);
                    }
                }
#pragma unroll
                for (u32 i = 0; i < AHEAD; i++) {
                    const float w = __shfl_sync(0xffffffffu, weights, s + i);
                    total.x += v[i].x * w, total.y += v[i].y * w, total.z += v[i].z * w, total.w += v[i].w * w;
                }
            }
        }
        if (any) *(uint2*)out = make_uint2(Type::pack(total.x, total.y), Type::pack(total.z, total.w));
        token = next_token, part = next_part;
    }
}
