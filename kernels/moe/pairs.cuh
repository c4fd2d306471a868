// Which expert a pair of token and slot goes to. A pair's number is token * top_k + slot.
#pragma once
#include "ptx.cuh"

struct Ids {
    const u32* ids;  // [pairs] int32 or int64, as 32-bit words; any values
    const u32* map;  // [map_size] the same: local expert of each, or -1; unread when map_words is 0
    u32 id_words, map_words, map_size;
    u32 experts;     // local ones
};

// -1 for what int32 cannot hold.
DEVICE int read_id(const u32* p, u64 at, u32 words) {
    const u32 low = p[at * words];
    return words == 1 || p[at * 2 + 1] == 0 ? (int)low : -1;
}

// -1 for a pair that is left out.
DEVICE int local_expert(const Ids& a, u64 pair) {
    int expert = read_id(a.ids, pair, a.id_words);
    if (a.map_words) expert = (u32)expert < a.map_size ? read_id(a.map, (u32)expert, a.map_words) : -1;
    return (u32)expert < a.experts ? expert : -1;
}

// id[i] = read_id(p, at[i], words) if at[i] < size, -1 otherwise. All are asked for before the first is looked at.
template <int N>
DEVICE void read_ids(const u32* p, const u32 (&at)[N], u32 size, u32 words, int (&id)[N]) {
    if (words == 1) {
#pragma unroll
        for (int i = 0; i < N; i++) id[i] = at[i] < size ? (int)p[at[i]] : -1;
    } else {
        uint2 v[N];
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = at[i] < size ? ((const uint2*)p)[at[i]] : make_uint2(0, 1);
#pragma unroll
        for (int i = 0; i < N; i++) id[i] = v[i].y == 0 ? (int)v[i].x : -1;
    }
}

// local_expert of pairs first, first + 32 and so on; -1 from `end` on.
template <int N>
DEVICE void local_experts(const Ids& a, u32 first, u32 end, int (&expert)[N]) {
    u32 at[N];
#pragma unroll
    for (int i = 0; i < N; i++) at[i] = first + i * 32;
    read_ids(a.ids, at, end, a.id_words, expert);
    if (a.map_words) {
#pragma unroll
        for (int i = 0; i < N; i++) at[i] = expert[i];
        read_ids(a.map, at, a.map_size, a.map_words, expert);
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if ((u32)expert[i] >= a.experts) expert[i] = -1;
}
