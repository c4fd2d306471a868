"""Device code of routing: counting and sorting (token, slot) pairs by expert, and the tiles that follow from offsets.

Nothing depends on the order in which thread blocks run: each counts all pairs of its own experts, in their order.
"""

import triton
import triton.language as tl


@triton.jit
def read_id(ptr, at, words, mask):
    """Element `at` of int32 (words = 1) or int64 (words = 2) integers; -1 for what int32 cannot hold."""
    low = tl.load(ptr + at.to(tl.int64) * words, mask=mask, other=-1)
    high = tl.load(ptr + at.to(tl.int64) * words + 1, mask=mask & (words == 2), other=0)
    return tl.where(high == 0, low, -1)


@triton.jit
def local_expert(ids_ptr, map_ptr, pair, mask, experts, id_words, map_words, map_size):
    """Local expert of each pair; -1 for those that are left out. map_words is 0 without an expert_map."""
    expert = read_id(ids_ptr, pair, id_words, mask)
    if map_words != 0:
        known = (expert >= 0) & (expert < map_size)
        expert = read_id(map_ptr, expert, map_words, mask & known)
    return tl.where((expert >= 0) & (expert < experts), expert, -1)


@triton.jit
def matches(
    ids_ptr, map_ptr, first, mine, pairs, experts, id_words, map_words, map_size, PAIRS: tl.constexpr
):  # fmt: skip
    """Pairs first .. first + PAIRS, and int32 [PAIRS, experts of mine]: 1 where a pair is that expert's."""
    pair = first + tl.arange(0, PAIRS)
    expert = local_expert(ids_ptr, map_ptr, pair, pair < pairs, experts, id_words, map_words, map_size)
    return pair, (expert[:, None] == mine[None, :]).to(tl.int32)


@triton.jit
def count_pairs(
    ids_ptr,  # [pairs] int32 or int64, as int32 words
    map_ptr,  # [map_size] the same; unread when map_words is 0
    counts_ptr,  # [experts] int32, written
    pairs,
    experts,
    id_words,  # int32 words per id
    map_words,  # 0: no expert_map
    map_size,
    EXPERTS: tl.constexpr,  # per block
    PAIRS: tl.constexpr,  # per step
):
    mine = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    count = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, pairs, PAIRS):
        _, is_mine = matches(
            ids_ptr, map_ptr, first, mine, pairs, experts, id_words, map_words, map_size, PAIRS
        )  # fmt: skip
        count += tl.sum(is_mine, axis=0)
    tl.store(counts_ptr + mine, count, mask=mine < experts)


@triton.jit
def sort_pairs(
    ids_ptr,  # [pairs] int32 or int64, as int32 words
    map_ptr,  # [map_size] the same; unread when map_words is 0
    counts_ptr,  # [experts] int32, from `count_pairs`; unread unless COUNTED
    offsets_ptr,  # [experts + 1] int32, written
    pairs_ptr,  # [pairs] int32, written up to the last offset
    pairs,
    experts,
    id_words,  # int32 words per id
    map_words,  # 0: no expert_map
    map_size,
    EXPERTS: tl.constexpr,  # per block; all of them unless COUNTED
    PADDED: tl.constexpr,  # all experts, up to a power of two
    PAIRS: tl.constexpr,  # per step
    COUNTED: tl.constexpr,
):
    mine = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    if COUNTED:
        every = tl.arange(0, PADDED)
        counts = tl.load(counts_ptr + every, mask=every < experts, other=0)
        below = tl.where(every[None, :] < mine[:, None], counts[None, :], 0)
        begin = tl.sum(below, axis=1)
        count = tl.load(counts_ptr + mine, mask=mine < experts, other=0)
    else:
        count = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, pairs, PAIRS):
            _, is_mine = matches(
                ids_ptr, map_ptr, first, mine, pairs, experts, id_words, map_words, map_size, PAIRS
            )  # fmt: skip
            count += tl.sum(is_mine, axis=0)
        begin = tl.cumsum(count, axis=0) - count
    tl.store(offsets_ptr + mine, begin, mask=mine < experts)
    tl.store(offsets_ptr + mine + 1, begin + count, mask=mine == experts - 1)
    for first in range(0, pairs, PAIRS):
        pair, is_mine = matches(
            ids_ptr, map_ptr, first, mine, pairs, experts, id_words, map_words, map_size, PAIRS
        )  # fmt: skip
        place = begin[None, :] + tl.cumsum(is_mine, axis=0) - 1
        tl.store(pairs_ptr + place, tl.broadcast_to(pair[:, None], (PAIRS, EXPERTS)), mask=is_mine != 0)
        begin += tl.sum(is_mine, axis=0)


@triton.jit
def find_tile(offsets_ptr, tile, experts, rows, PADDED: tl.constexpr, BM: tl.constexpr):
    """Which rows a tile has: expert, first row, and the row behind the expert's last.

    Tiles of BM rows are numbered expert by expert, in the order of rows. Those before the first expert's rows belong
    to expert -1, those behind the last one's to expert `experts`, and tiles beyond all rows to experts + 1. PADDED is
    above experts + 1. Offsets that descend or lie outside [0, rows] never lead there.
    """
    group = tl.arange(0, PADDED)  # expert + 1
    begin = tl.load(offsets_ptr + group - 1, mask=(group > 0) & (group <= experts + 1), other=0)
    end = tl.load(offsets_ptr + group, mask=group <= experts, other=rows)
    begin = tl.where(group <= experts + 1, tl.minimum(tl.maximum(begin, 0), rows), rows)
    end = tl.minimum(tl.maximum(end, begin), rows)
    tiles = (end - begin + (BM - 1)) // BM
    upper = tl.cumsum(tiles, axis=0)
    found = tl.sum((upper <= tile).to(tl.int32), axis=0)
    here = group == found
    first = tl.sum(tl.where(here, begin + (tile - (upper - tiles)) * BM, 0), axis=0)
    last = tl.sum(tl.where(here, end, 0), axis=0)
    return tl.minimum(found - 1, experts + 1), first, last
