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
