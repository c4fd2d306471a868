// out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias) for few tokens M, W in the fragment layout: marlin_tile.cuh.
//
// Ends: rows past N and tokens past M are computed from the last valid ones and not stored; x past K is zero.

#include "marlin_tile.cuh"

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

struct Gemm {
    static constexpr bool PAIRED = false;

    const Args& a;
    u32 tile, rank, first_token, tokens;

    DEVICE u32 k(const Gemm& w) { return w.a.k; }
    DEVICE void weights(const Gemm& w, Weights& weights, u32 subtile, u32 block, u32 lane) {
        Weights::init(weights, w.a.weight, w.a.n, w.a.k, subtile, block, lane);
    }
    DEVICE void x(const Gemm& w, X& x, u32 block, u32 thread) {
        X::init(x, w.a.x, w.a.x_stride, w.a.pre_quant_scale, w.first_token, w.tokens, w.a.k, block, thread);
    }
    // Weights do not depend on the kernel before this one; all else may.
    DEVICE void wait(const Gemm&) {
        launch_dependents();
        wait_for_previous_kernel();
    }
    DEVICE void edge(const Gemm& w, u32 row, float& scale, float& bias) {
        row = min(row, w.a.n - 1);
        scale = load_global_float(w.a.global_scale + row * w.a.scale_stride);
        bias = 0.f;
        if (w.a.bias_kind == 1) bias = Type::widen(load_global_16((const u16*)w.a.bias + row));
        if (w.a.bias_kind == 2) bias = load_global_float((const float*)w.a.bias + row);
    }
    DEVICE u32 below_2_31(const Gemm& w) { return w.a.m; }
    DEVICE void keep(const Gemm&) {}
    DEVICE void meeting(const Gemm& w, float*& partial, u32*& counter) {
        const u32 index = blockIdx.y * (gridDim.x / C::split) + w.tile;
        partial = w.a.partial + (u64)index * (C::split * C::tokens * ROWS);
        counter = w.a.counters + index;
    }
    DEVICE void store(const Gemm& w, u32 edge, u32 token, u32 row, float4 sum) {
        const float4 v = Edge::finish(Edge::load(edge, row), sum);
        const u32 column = w.tile * ROWS + row;
        store_outputs(w.a.out + (u64)(w.first_token + token) * w.a.n + column, column, w.a.n, v);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) marlin(const __grid_constant__ Args a) {
    const u32 tile = blockIdx.x / C::split, rank = blockIdx.x % C::split;
    const u32 first_token = blockIdx.y * C::tokens, tokens = min(a.m - first_token, (u32)C::tokens);
    Gemm work = {a, tile, rank, first_token, tokens};
    multiply(work);
}
