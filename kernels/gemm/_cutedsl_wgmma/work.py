"""The pieces of work of one group, as every warp computes them for itself, and shared memory as every warp sees it."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import warpgroup

from . import schedule
from .shape import Shape


class Work:
    """`schedule` with the numbers of one launch."""

    def __init__(self, shape: Shape, m: Int32, n: Int32, k_blocks: Int32, band: Int32) -> None:
        self.shape, self.m, self.n, self.k_blocks = shape, m, n, k_blocks
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        self.block = block
        self.rank = Int32(0)
        if shape.multicast > 1:
            self.rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        self.group, self.groups = block // shape.multicast, blocks // shape.multicast
        self.k_tiles = (k_blocks + shape.k_blocks - 1) // shape.k_blocks
        rows = shape.rows * shape.multicast  # the blocks of a group take neighbouring row tiles
        self.row_tiles = (n + rows - 1) // rows
        self.token_tiles = schedule.token_tiles(m, shape.tokens)
        self.band = cutlass.min(self.token_tiles, band)
        tiles = self.row_tiles * self.token_tiles
        self.waves, self.rest, self.begin, self.end, self.segments = schedule.split(
            self.group, self.groups, tiles, self.k_tiles, shape.stream_k, cutlass.max
        )

    @cute.jit
    def segment(self, index: Int32) -> Any:
        """(tile, first k-tile, k-tile behind the last)."""
        tile = index * self.groups + self.group
        first = Int32(0)
        behind = self.k_tiles
        if const_expr(self.shape.stream_k):
            if index >= self.waves:
                tile, first, behind = schedule.segment(
                    index,
                    self.waves,
                    self.group,
                    self.groups,
                    self.begin,
                    self.end,
                    self.k_tiles,
                    cutlass.min,
                    cutlass.max,
                )
        return tile, first, behind

    @cute.jit
    def place(self, tile: Int32) -> Any:
        """(row tile of this block, token tile)."""
        row, token = schedule.raster(tile, self.row_tiles, self.token_tiles, self.band, cutlass.min)
        return row * self.shape.multicast + self.rank, token

    @cute.jit
    def peers(self, tile: Int32) -> Any:
        """(first group that publishes a part of this group's tile, how many do)."""
        first = schedule.first_peer(tile, self.waves, self.groups, self.k_tiles, self.rest)
        return first, self.group - first


class Ring:
    """Stages of x and weights in shared memory, with a barrier for "full" and one for "empty" each."""

    def __init__(self, shape: Shape) -> None:
        # Through a shuffle, for ptxas would otherwise ask for the start of shared memory anew in every stage.
        start = cute.arch.make_warp_uniform(cute.arch.get_dyn_smem(Uint8, alignment=1024).toint())
        base = cute.make_ptr(Uint8, start, cute.AddressSpace.smem, assumed_align=1024)
        layout = x_layout(shape)
        kind = element(shape)
        pointer = cute.recast_ptr(base, layout.inner, kind)
        self.x = cute.make_tensor(pointer, layout.outer)
        self.out = (base + shape.out_offset).toint()
        self.words = cute.recast_ptr(base + shape.weight_offset, dtype=Int32)
        self.weights = (base + shape.weight_offset).toint()
        self.bars = cute.recast_ptr(base + shape.barrier_offset, dtype=Int64)


def element(shape: Shape) -> Any:
    """x's and out's type."""
    return Float16 if shape.float16 else BFloat16


def x_layout(shape: Shape) -> Any:
    """[tokens, block_k, stages]: 128-byte rows of 64 k, in the swizzle that TMA writes and wgmma reads."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element(shape))
    return cute.tile_to_shape(atom, (shape.tokens, shape.block_k, shape.stages), (0, 1, 2))


@cute.jit
def advance(stage: Int32, phase: Int32, stages: cutlass.Constexpr[int]) -> Any:
    """The next stage of a ring and the parity that its barriers will have."""
    following = stage + 1
    parity = phase
    if following == stages:
        following = Int32(0)
        parity = phase ^ 1
    return following, parity
