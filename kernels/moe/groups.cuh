// Groups of rows, one an expert, by offsets [experts + 1] of any values: nothing they may be leads to other rows.
#pragma once
#include "ptx.cuh"

// Expert e has the rows from here to what the next offset says, or none if that is less.
DEVICE u32 group_offset(const int* offsets, u32 e, u32 m) { return (u32)min(max(offsets[e], 0), (int)m); }

// Zeros in [begin, end), EACH at a time. All lanes of a warp take as many turns, so that it stays together.
template <int EACH>
DEVICE void zero_range(u16* out, u64 begin, u64 end, u64 thread, u64 threads) {
    const u32 lane = thread % 32;
    for (u64 first = begin + (thread - lane) * EACH; first < end; first += threads * EACH) {
        const u64 i = first + lane * EACH;
        if (i >= end) continue;
        if constexpr (EACH == 8)
            *(uint4*)(out + i) = make_uint4(0, 0, 0, 0);
        else
            out[i] = 0;
    }
}

// Zeros in rows [0, begin) and [end, m) of out [m, n], by so many threads, of which this is one.
DEVICE void zero_other_rows(u16* out, u32 m, u32 n, u32 begin, u32 end, u64 thread, u64 threads) {
    if (n % 8 == 0 && (u64)out % 16 == 0) {
        zero_range<8>(out, 0, (u64)begin * n, thread, threads);
        zero_range<8>(out, (u64)end * n, (u64)m * n, thread, threads);
    } else {
        zero_range<1>(out, 0, (u64)begin * n, thread, threads);
        zero_range<1>(out, (u64)end * n, (u64)m * n, thread, threads);
    }
}
