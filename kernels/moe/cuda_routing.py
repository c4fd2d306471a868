"""Routing in CUDA C++: one launch sorts (token, slot) pairs by expert and lists the tiles that follow; capturable.

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

__all__ = ["IDS", "ROUTE", "CudaRouting", "Routed", "Tiles", "id_fields", "smem_bytes"]

ROUTE = Path(__file__).with_name("route.cu")
IDS = "PP4I"  # struct Ids of pairs.cuh
MAX_WARPS = 32
GROUP_THREADS = 256
ZEROS = 1 << 14  # elements of out for which there is one more block that looks for rows of no expert
MAX_ZERO_BLOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiles:
    """Tiles of rows, expert by expert."""

    tiles: Tensor  # int32 [most_tiles, 4]: expert (-1: nothing to do), first row or position in pairs, rows, 0
    count: Tensor  # int32 [1]: how many have an expert
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
        self._route = CudaLaunch(
            compile_cuda(ROUTE, device.capability, entry="route"),
            fields=IDS + "4P3I",
            block=32 * warps,
            smem_bytes=smem_bytes(experts, warps),
            pdl=dependent_launches(),
        )
        self._groups = CudaLaunch(
            compile_cuda(ROUTE, device.capability, entry="tile_groups"),
            fields="4P5I",
            block=GROUP_THREADS,
            smem_bytes=smem_bytes(experts, 0),
            pdl=dependent_launches(),
        )

    def load(self, index: int) -> None:
        """Onto a device, both kernels."""
        for launch in (self._route, self._groups):
            launch.load(index)

    def __call__(self, topk_ids: Tensor, expert_map: Tensor | None, tile_rows: int) -> Routed:
        """Sort pairs by expert, and cut each expert's into tiles of at most tile_rows.

        topk_ids and expert_map are contiguous int32 or int64; there is at least one pair.
        """
        count = topk_ids.numel()
        most = most_tiles(count, self.experts, tile_rows)
        space = topk_ids.new_empty(4 * most + self.experts + 1 + count + 1, dtype=torch.int32)
        tiles, offsets, pairs, number = space.split_with_sizes((4 * most, self.experts + 1, count, 1))
        self._route.launch(
            1,
            1,
            1,
            torch._C._cuda_getCurrentRawStream(topk_ids.get_device()),
            *id_fields(topk_ids, expert_map, self.experts),
            offsets.data_ptr(),
            pairs.data_ptr(),
            tiles.data_ptr(),
            number.data_ptr(),
            most,
            tile_rows,
            count,
        )
        return Routed(tiles=tiles.view(most, 4), count=number, most_tiles=most, offsets=offsets, pairs=pairs)

    def groups(self, expert_offsets: Tensor, out: Tensor, tile_rows: int) -> Tiles:
        """The same tiles from given offsets, int32 [E + 1]; rows of out [M, N] that belong to no expert become zero.

        The offsets may have any values: those that descend or lie outside [0, M] lead to no other memory.
        """
        m, n = out.shape
        most = most_tiles(m, self.experts, tile_rows)
        space = expert_offsets.new_empty(4 * most + 1)
        tiles, number = space.split_with_sizes((4 * most, 1))
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


def id_fields(topk_ids: Tensor, expert_map: Tensor | None, experts: int) -> tuple[int, ...]:
    """Values of struct Ids: contiguous int32 or int64 tensors, as words."""
    known = (
        (0, 0, 0) if expert_map is None else (expert_map.data_ptr(), expert_map.element_size() // 4, len(expert_map))
    )
    return topk_ids.data_ptr(), known[0], topk_ids.element_size() // 4, *known[1:], experts


def smem_bytes(experts: int, warps: int) -> int:
    """Sums of the scan; first row, rows and first tile of every expert; and counts per warp."""
    return 4 * (2 * MAX_WARPS + (3 + warps) * experts)
