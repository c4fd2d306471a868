"""Routing in CUDA C++: (token, slot) pairs sorted by expert, and the tiles that follow; capturable.

One launch with one block for few pairs; for many several blocks, and a launch before that counts for them.
`route.cu` says how; a pair's number is token * top_k + slot, as in `routing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..cuda.compile import compile_cuda
from ..cuda.launch import CudaLaunch, dependent_launches
from ..problem import Device
from .routing import most_tiles

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IDS", "ROUTE", "CudaRouting", "Routed", "Tiles", "even_blocks", "id_fields", "parts", "smem_bytes"]

ROUTE = Path(__file__).with_name("route.cu")
IDS = "PP4I"  # struct Ids of pairs.cuh
ONE_BLOCK_PAIRS = 2048  # up to here one block sorts
PART_PAIRS = 1024  # of a block beyond it,
MAX_PARTS = 64  # until there are so many blocks
WARP = 32
MAX_WARPS = 32
COUNT_THREADS = 256
GROUP_THREADS = 256
ZEROS = 1 << 14  # elements of out for which there is one more block that looks for rows of no expert
MAX_ZERO_BLOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiles:
    """Tiles of rows, expert by expert."""

    tiles: Tensor  # int32 [most_tiles, 4]: expert (-1: nothing to do), first row or position in pairs, rows, 0
    count: Tensor  # int32 [3]: how many have an expert, and two zeros for products that take them in turns
    most_tiles: int  # a launch's upper bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed(Tiles):
    """Sorted pairs, and their tiles."""

    offsets: Tensor  # int32 [E + 1]: expert e has pairs[offsets[e] : offsets[e + 1]]
    pairs: Tensor  # int32 [T * top_k]; what lies beyond the last offset is not written


class CudaRouting:
    """Compiled for a device and any number of local experts that it has shared memory for.

    Parameters
    ----------
    device
        To compile for.
    experts
        How many are local.
    """

    def __init__(self, device: Device, experts: int) -> None:
        self.experts = experts
        warps = max(1, min(MAX_WARPS, (device.smem_bytes - smem_bytes(experts, 0)) // (4 * experts)))
        fields, pdl = IDS + "5P4I", dependent_launches()
        route = compile_cuda(ROUTE, device.capability, entry="route")
        smem = smem_bytes(experts, warps)
        self._route = CudaLaunch(route, fields=fields, block=WARP * warps, smem_bytes=smem, pdl=pdl)
        self._count = CudaLaunch(
            compile_cuda(ROUTE, device.capability, entry="count"),
            fields=fields,
            block=COUNT_THREADS,
            smem_bytes=4 * experts,
            pdl=pdl,
        )
        own = device.capability >= (9, 0)  # between the two
        self._sort = CudaLaunch(route, fields=fields, block=WARP * warps, smem_bytes=smem, pdl=own)
        self._groups = CudaLaunch(
            compile_cuda(ROUTE, device.capability, entry="tile_groups"),
            fields="4P5I",
            block=GROUP_THREADS,
            smem_bytes=smem_bytes(experts, 0),
            pdl=pdl,
        )
        self._loaded = False

    def load(self, index: int) -> None:
        """Onto a device, all kernels."""
        for launch in (self._route, self._count, self._sort):
            launch.load(index)
        self.load_groups(index)
        self._loaded = True

    def load_groups(self, index: int) -> None:
        """Onto a device, what `groups` launches: it has room for more experts than the others."""
        self._groups.load(index)

    def __call__(self, topk_ids: Tensor, expert_map: Tensor | None, tile_rows: int) -> Routed:
        """Sort pairs by expert, and cut each expert's into tiles of at most tile_rows.

        topk_ids and expert_map are contiguous int32 or int64; there is at least one pair.
        """
        if not self._loaded:  # all of it: nothing may be loaded within a graph capture later
            self.load(topk_ids.get_device())
        count = topk_ids.numel()
        most = most_tiles(count, self.experts, tile_rows)
        blocks, share = parts(count)
        sizes = 4 * most, self.experts + 1, count, 3, blocks * self.experts
        space = topk_ids.new_empty(sum(sizes), dtype=torch.int32)
        tiles, offsets, pairs, number, counts = space.split_with_sizes(sizes)
        stream = torch._C._cuda_getCurrentRawStream(topk_ids.get_device())
        values = (
            *id_fields(topk_ids, expert_map, self.experts),
            offsets.data_ptr(),
            pairs.data_ptr(),
            counts.data_ptr(),
            tiles.data_ptr(),
            number.data_ptr(),
            most,
            tile_rows,
            count,
            share,
        )
        if blocks == 1:
            self._route.launch(1, 1, 1, stream, *values)
        else:
            self._count.launch(blocks, 1, 1, stream, *values)
            self._sort.launch(blocks, 1, 1, stream, *values)
        return Routed(tiles=tiles.view(most, 4), count=number, most_tiles=most, offsets=offsets, pairs=pairs)

    def groups(self, expert_offsets: Tensor, out: Tensor, tile_rows: int) -> Tiles:
        """The same tiles from given offsets, int32 [E + 1]; rows of out [M, N] that belong to no expert become zero.

        The offsets may have any values: those that descend or lie outside [0, M] lead to no other memory.
        """
        m, n = out.shape
        most = most_tiles(m, self.experts, tile_rows)
        space = expert_offsets.new_empty(4 * most + 3)
        tiles, number = space.split_with_sizes((4 * most, 3))
        self._groups.launch(
            1 + min(MAX_ZERO_BLOCKS, -(-m * n // ZEROS)),
            1,
            1,
            torch._C._cuda_getCurrentRawStream(out.get_device()),
            expert_offsets.data_ptr(),
            out.data_ptr(),
            tiles.data_ptr(),
            number.data_ptr(),
            most,
            tile_rows,
            self.experts,
            m,
            n,
        )
        return Tiles(tiles=tiles.view(most, 4), count=number, most_tiles=most)


def parts(count: int) -> tuple[int, int]:
    """Blocks that sort so many pairs, and pairs of each but the last, which has no more; none is without."""
    blocks = 1 if count <= ONE_BLOCK_PAIRS else min(MAX_PARTS, -(-count // PART_PAIRS))
    share = -(-count // (blocks * WARP)) * WARP
    return -(-count // share), share


def even_blocks(items: int, most: int) -> int:
    """Blocks, at most so many, that take items in turns, so that no turn is taken by few of them."""
    turns = -(-items // most)
    return -(-items // turns)


def id_fields(topk_ids: Tensor, expert_map: Tensor | None, experts: int) -> tuple[int, ...]:
    """Values of struct Ids: contiguous int32 or int64 tensors, as words."""
    known = (
        (0, 0, 0) if expert_map is None else (expert_map.data_ptr(), expert_map.element_size() // 4, len(expert_map))
    )
    return topk_ids.data_ptr(), known[0], topk_ids.element_size() // 4, *known[1:], experts


def smem_bytes(experts: int, warps: int) -> int:
    """Sums of the scan; first row, rows and first tile of every expert; and counts per warp."""
    return 4 * (2 * MAX_WARPS + (3 + warps) * experts)
