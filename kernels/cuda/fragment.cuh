// Decoding the fragment layout (kernels/weights/fragment.py) in registers, and the tensor-core step it feeds.
//
// A 32-bit word holds the eight codes of one lane's A registers of mma.m16n8k16. Decoding gives w * 2^-126 (bf16) or
// w * 2^-14 (fp16) by rotations and masks alone; multiplying by the scale code, which carries 2^119 or 2^7, gives
// w * s * 2^-7, exact in both types. "nib" words are converted by the hardware and end at 2^7 (bf16) or 2^-7 (fp16).
#pragma once
#include "ptx.cuh"

constexpr u32 SUBTILE_BYTES = 576;  // 16 rows x 64 k: 512 bytes of codes, then 64 of scales
constexpr u32 CODE_BYTES = 512;
constexpr u32 BLOCK_BYTES = 4 * SUBTILE_BYTES;  // 64 rows x 64 k

DEVICE u32 rotate_left(u32 x, int bits) { return __funnelshift_l(x, x, bits); }

// (a & b) | c, one instruction also when b and c are constants (the compiler takes two).
DEVICE u32 and_or(u32 a, u32 b, u32 c) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

struct Bf16 {
    static constexpr float UNDO = 128.f;

    // Both halves of `a` times the low (high) half of `s`: ptxas folds the broadcast into the operand.
#if __CUDA_ARCH__ >= 900
#define SCALE_BF16(half) "mul.rn.bf16x2 %0, %1, t;}"
#else
#define SCALE_BF16(half) ".reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 %0, %1, t, z;}"
#endif
    DEVICE u32 times_low(u32 a, u32 s) {
        u32 r;
        asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l};" SCALE_BF16(l) : "=r"(r) : "r"(a), "r"(s));
        return r;
    }
    DEVICE u32 times_high(u32 a, u32 s) {
        u32 r;
        asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h};" SCALE_BF16(h) : "=r"(r) : "r"(a), "r"(s));
        return r;
    }
    DEVICE u32 times(u32 a, u32 b) {  // rounded to nearest
        u32 r;
#if __CUDA_ARCH__ >= 900
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
        return r;
    }
    DEVICE void codes(u32 q, u32 r[4]) {
        const u32 mask = 0x81C081C0u;
        r[0] = q & mask;
        r[1] = (q << 4) & mask;
        r[2] = rotate_left(q, 26) & mask;
        r[3] = (rotate_left(q, 30) & 0x81808180u) | ((q << 6) & 0x00400040u);
    }
    // Scale codes of rows r0 (low half) and r0 + 8 (high half) for an even or odd k16 group.
    DEVICE u32 scale_even(u32 v) { return and_or(v << 4, 0x0FF00FF0u, 0x70007000u); }
    DEVICE u32 scale_odd(u32 v) { return and_or(v >> 4, 0x0FF00FF0u, 0x70007000u); }

    DEVICE void mma(float* c, const u32* a, u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    DEVICE u32 pack(float low, float high) {
        u32 r;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    DEVICE float widen(u16 v) { return __uint_as_float((u32)v << 16); }
};

struct Fp16 {
    static constexpr float UNDO = 128.f;

    DEVICE u32 times_low(u32 a, u32 s) {
        u32 r;
        asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {l, l}; mul.rn.f16x2 %0, %1, t;}" : "=r"(r) : "r"(a), "r"(s));
        return r;
    }
    DEVICE u32 times_high(u32 a, u32 s) {
        u32 r;
        asm("{.reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, %2; mov.b32 t, {h, h}; mul.rn.f16x2 %0, %1, t;}" : "=r"(r) : "r"(a), "r"(s));
        return r;
    }
    DEVICE u32 times(u32 a, u32 b) {
        u32 r;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    DEVICE void codes(u32 q, u32 r[4]) {
        const u32 a = q << 2, b = rotate_left(q, 29);
        r[0] = (q & 0x8C008C00u) | (a & 0x02000200u);
        r[1] = (a & 0x84008400u) | (b & 0x0A000A00u);
        r[2] = (q << 6) & 0x8E008E00u;
        r[3] = rotate_left(q, 25) & 0x8E008E00u;
    }
    DEVICE u32 scale_even(u32 v) { return (v << 7) & 0x7F807F80u; }
    DEVICE u32 scale_odd(u32 v) { return (v >> 1) & 0x7F807F80u; }

    DEVICE void mma(float* c, const u32* a, u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    DEVICE u32 pack(float low, float high) {
        u32 r;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    DEVICE float widen(u16 v) {
        float r;
        asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
        return r;
    }
};

// "nib": byte r of a word is register r, low nibble first. sm_100 and sm_12x convert two codes to f16x2 at once.
DEVICE void convert_nibbles(u32 q, u32 r[4]) {
#if __CUDA_ARCH__ >= 1000
    asm("{.reg .b8 a, b, c, d; mov.b32 {a, b, c, d}, %4;"
        " cvt.rn.f16x2.e2m1x2 %0, a; cvt.rn.f16x2.e2m1x2 %1, b; cvt.rn.f16x2.e2m1x2 %2, c; cvt.rn.f16x2.e2m1x2 %3, d;}"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(q));
#endif
}

struct NibFp16 : Fp16 {
    DEVICE void codes(u32 q, u32 r[4]) { convert_nibbles(q, r); }
    // s * 2^7 would let w * s overflow: s * 2^-7 is exact, as a subnormal too.
    DEVICE u32 scale_even(u32 v) { return times(Fp16::scale_even(v), 0x04000400u /* 2^-14 */); }
    DEVICE u32 scale_odd(u32 v) { return times(Fp16::scale_odd(v), 0x04000400u); }
};

struct NibBf16 : Bf16 {
    static constexpr float UNDO = 1.f / 128.f;

    // The conversion to f16 has no bf16 sibling in CUDA 13.0. A shift by 3 aligns the fields: f16 bits of w become the
    // bf16 bits of w * 2^-112, and all codes are normal or zero.
    DEVICE void codes(u32 q, u32 r[4]) {
        convert_nibbles(q, r);
#pragma unroll
        for (int i = 0; i < 4; i++) r[i] = and_or(r[i], 0x80008000u, (r[i] >> 3) & 0x0FFF0FFFu);
    }
};

// The A registers of one k16 step.
template <class T>
DEVICE void decode(u32 word, u32 scale, u32 a[4]) {
    u32 r[4];
    T::codes(word, r);
    a[0] = T::times_low(r[0], scale);
    a[1] = T::times_high(r[1], scale);
    a[2] = T::times_low(r[2], scale);
    a[3] = T::times_high(r[3], scale);
}
