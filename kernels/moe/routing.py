"""Routing: (token, slot) pairs in the order of their experts, by a counting sort that no two runs do differently.

A pair's number is token * top_k + slot. Pairs of one expert stay in the order of their numbers. A pair is left out if
its id is negative or beyond the experts, or if `expert_map` sends it to none of the local ones.

`route` is for tensors on a CPU; `_triton_routing_device` does the same on a GPU without the host reading anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..problem import Device
from ..triton_launch import TritonLaunch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TritonRouting", "as_words", "local_experts", "most_tiles", "power_of_two", "route"]

ONE_BLOCK_PAIRS = 2048  # up to here one thread block counts and sorts all pairs
TILE = 4096  # pairs times experts that a thread block compares at a time
SPREAD_EXPERTS = 8  # experts per thread block otherwise


def local_experts(topk_ids: Tensor, experts: int, expert_map: Tensor | None = None) -> Tensor:
    """Local expert of each pair, -1 for those that are left out.

    Parameters
    ----------
    topk_ids
        Integers, any shape: local ids or, with an expert_map, global ones.
    experts
        How many are local.
    expert_map
        Integers [global experts], at least one: local expert of each, or -1.

    Returns
    -------
    int64, the shape of topk_ids.
    """
    ids = topk_ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        ids = expert_map.long()[ids.where(known, 0)].where(known, -1)
    return ids.where((ids >= 0) & (ids < experts), -1)


def route(topk_ids: Tensor, experts: int, expert_map: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert.

    Parameters
    ----------
    topk_ids
        int32 or int64 [T, top_k].
    experts, expert_map
        As for `local_experts`.

    Returns
    -------
    offsets, pairs
        int32 [E + 1]: expert e has pairs[offsets[e] : offsets[e + 1]]. int32 [T * top_k], ordered; what lies beyond
        offsets[E] are the pairs that are left out.
    """
    import torch

    local = local_experts(topk_ids, experts, expert_map).flatten()
    counts = torch.bincount(local + 1, minlength=experts + 1)  # those left out come first, for -1 is the smallest
    skipped = counts[:1]
    pairs = torch.argsort(local, stable=True).roll(-int(skipped))
    offsets = torch.cat([torch.zeros_like(skipped), counts[1:].cumsum(0)])
    return offsets.int(), pairs.int()


def power_of_two(size: int) -> int:
    """The smallest one that is not below size."""
    return 1 << max(0, size - 1).bit_length()


def most_tiles(rows: int, groups: int, block_m: int) -> int:
    """Tiles of at most `groups` groups of rows, however the rows are divided: each group may leave one part-filled."""
    return min(rows, (rows + min(groups, rows) * (block_m - 1)) // block_m)


def as_words(ids: Tensor) -> tuple[Tensor, int]:
    """Contiguous int32 or int64 as int32 words, and words per element: kernels then need no variants."""
    import torch

    return ids.view(torch.int32), ids.element_size() // 4


class TritonRouting:
    """The same with Triton: one launch for few pairs, two for many; capturable.

    Parameters
    ----------
    device
        To compile for.
    experts
        How many are local.
    """

    def __init__(self, device: Device, experts: int) -> None:
        from ._triton_routing_device import count_pairs, sort_pairs

        self.experts = experts
        self._ran = False
        ids = {"ids_ptr": "*i32", "map_ptr": "*i32", "counts_ptr": "*i32"}
        integers = dict.fromkeys(("pairs", "experts", "id_words", "map_words", "map_size"), "i32")
        sorted_ = ids | {"offsets_ptr": "*i32", "pairs_ptr": "*i32"} | integers
        padded = power_of_two(experts)
        one = {"EXPERTS": padded, "PADDED": padded, "PAIRS": max(16, TILE // padded), "COUNTED": False}
        self._spread = min(SPREAD_EXPERTS, padded)
        many = {"EXPERTS": self._spread, "PAIRS": TILE // self._spread}
        self._one = TritonLaunch(sort_pairs, device, signature=sorted_, constants=one)
        self._count = TritonLaunch(count_pairs, device, signature=ids | integers, constants=many)
        self._sort = TritonLaunch(
            sort_pairs, device, signature=sorted_, constants={"PADDED": padded, "COUNTED": True} | many
        )

    def __call__(self, topk_ids: Tensor, expert_map: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Offsets and pairs as `route` returns them, but what lies beyond offsets[E] is not written.

        topk_ids and expert_map are contiguous int32 or int64; there is at least one pair.
        """
        import torch

        pairs = topk_ids.numel()
        ids, id_words = as_words(topk_ids)
        known, map_words = (ids, 0) if expert_map is None else as_words(expert_map)
        map_size = 0 if expert_map is None else expert_map.numel()
        ordered = topk_ids.new_empty(pairs, dtype=torch.int32)
        offsets = topk_ids.new_empty(self.experts + 1, dtype=torch.int32)
        numbers = (pairs, self.experts, id_words, map_words, map_size)
        few = pairs <= ONE_BLOCK_PAIRS
        # The first call goes both ways: neither may be loaded onto the GPU within a graph capture later.
        if few or not self._ran:
            self._one.launch((1, 1, 1), ids, known, offsets, offsets, ordered, *numbers)
        if not few or not self._ran:
            counts = torch.empty_like(offsets)
            blocks = -(-self.experts // self._spread)
            self._count.launch((blocks, 1, 1), ids, known, counts, *numbers)
            self._sort.launch((blocks, 1, 1), ids, known, counts, offsets, ordered, *numbers)
        self._ran = True
        return offsets, ordered
