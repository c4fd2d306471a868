// Thin wrappers of the PTX that the kernels here use: no header of the CUDA toolkit is needed.
// What sm_90 added (bulk copies, clusters, elect, programmatic launch) has a plain counterpart or does nothing below it.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__

constexpr bool SM90 = __CUDA_ARCH__ >= 900;

// ---- warps ------------------------------------------------------------------------------------------------------

// The warp's index, known to be the same in all lanes: otherwise bulk copies become a loop over lanes.
DEVICE u32 uniform_warp() { return __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0); }

// The same value, which the compiler can only keep, not compute again: it does so in inner loops to save registers.
DEVICE u32 pin(u32 v) { return __shfl_sync(0xffffffffu, v, threadIdx.x & 31); }

DEVICE bool elect_one() {
#if __CUDA_ARCH__ >= 900
    u32 chosen;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
    return chosen;
#else
    return (threadIdx.x & 31) == 0;
#endif
}

// ---- shared memory ----------------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE uint4 load_shared_128(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}

DEVICE uint2 load_shared_64(u32 a) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
    return v;
}

DEVICE float load_shared_float(u32 a) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a));
    return v;
}

DEVICE float4 load_shared_float4(u32 a) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a));
    return v;
}

DEVICE u32 load_shared_u32(u32 a) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
    return v;
}

DEVICE void store_shared_u32(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }

DEVICE void store_shared_float(u32 a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void ldmatrix_x4(u32 a, u32* r) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a));
}

// ---- barriers in shared memory ----------------------------------------------------------------------------------

DEVICE void barrier_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the other CTAs of the cluster and to asynchronous copies.
DEVICE void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

DEVICE void barrier_arrive(u32 bar) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(bar) : "memory");
}

// One arrival that also announces `bytes` of asynchronous copies.
DEVICE void barrier_arrive_expect(u32 bar, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
#endif
}

DEVICE void barrier_wait(u32 bar, u32 parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nWAIT_%=:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(bar), "r"(parity) : "memory");
#else
    asm volatile("{\n.reg .pred p;\nWAIT_%=:\n"
                 "mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n"
                 "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(bar), "r"(parity) : "memory");
#endif
}

// ---- asynchronous copies ----------------------------------------------------------------------------------------

DEVICE void copy_async_16(u32 dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

// 16 bytes, of which the first `bytes` (16 or 0) are read and the rest are zero.
DEVICE void copy_async_16_or_zero(u32 dst, const void* src, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

// One arrival of the calling thread once its copies so far have landed.
DEVICE void copy_async_arrive(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

// `bytes` (a multiple of 16) by one thread; completes on the barrier that expects them.
DEVICE void copy_bulk(u32 dst, const void* src, u32 bytes, u32 bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
#endif
}

// ---- clusters ---------------------------------------------------------------------------------------------------

DEVICE void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same shared address in the CTA of that rank.
DEVICE u32 cluster_address(u32 a, u32 rank) {
    u32 r = a;
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
#endif
    return r;
}

// Store into another CTA's shared memory; the 16 bytes complete on its barrier.
DEVICE void store_async_float4(u32 a, float4 v, u32 bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(a),
                 "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)),
                 "r"(__float_as_uint(v.w)), "r"(bar)
                 : "memory");
#endif
}

// As barrier_wait, and what other CTAs of the cluster stored before it completed is visible.
DEVICE void barrier_wait_cluster(u32 bar, u32 parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nWAIT_%=:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(bar), "r"(parity) : "memory");
#endif
}

// ---- programmatic dependent launch: no effect unless the launch asks for it ---------------------------------------

DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- global memory ----------------------------------------------------------------------------------------------

// Volatile, so that the load stays where it is written, far ahead of its use.
DEVICE float load_global_float(const float* p) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}

DEVICE u16 load_global_16(const u16* p) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

// From L2, where other CTAs' stores are.
DEVICE float4 load_global_float4(const float* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}

DEVICE int4 load_global_int4(const int4* p) {
    int4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
