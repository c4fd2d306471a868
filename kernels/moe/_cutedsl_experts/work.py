"""The pieces of work of one block: which tile of the list, and which rows of W."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...gemm._cutedsl_wgmma import schedule
from . import ptx
from .shape import ExpertShape

TILE_BYTES = 16  # int32 expert, first position, rows, and one that is not used


class ExpertWork:
    """Every warp computes the same, from a list of tiles that an earlier kernel wrote."""

    def __init__(
        self, shape: ExpertShape, tiles: Int64, count: Int64, n: Int32, blocks: Int32, k_blocks: Int32, band: Int32
    ) -> None:
        self.shape, self.tiles, self.n, self.k_blocks = shape, tiles, n, k_blocks
        self.weight_blocks = blocks
        block, _, _ = cute.arch.block_idx()
        groups, _, _ = cute.arch.grid_dim()
        self.group, self.groups = block, groups
        self.k_tiles = (k_blocks + shape.k_blocks - 1) // shape.k_blocks
        self.row_tiles = (blocks + shape.row_blocks - 1) // shape.row_blocks
        self.token_tiles = cute.arch.make_warp_uniform(ptx.load_int(count))
        self.band = cutlass.max(cutlass.min(self.token_tiles, band), 1)
        self.segments, _, _, _, _ = schedule.split(
            self.group, groups, self.row_tiles * self.token_tiles, self.k_tiles, False
        )

    @cute.jit
    def place(self, index: Int32) -> Any:
        """(row tile, expert, first position, rows of x) of this block's piece; the last one's beyond the last."""
        tile = cutlass.min(index, self.segments - 1) * self.groups + self.group
        row, token = schedule.raster(tile, self.row_tiles, self.token_tiles, self.band, cutlass.min)
        expert, first, rows = ptx.load_tile(self.tiles + Int64(token) * TILE_BYTES)
        return row, expert, first, rows

    @cute.jit
    def uniform(self, rows: Int32) -> Int32:
        """Rows as the branches between wgmmas need them. Not at once when they are loaded: this waits for the load."""
        return cute.arch.make_warp_uniform(rows)

    @cute.jit
    def pieces(self, rows: Int32) -> Int32:
        """How many of a tile's pieces are multiplied."""
        c = self.shape
        return cutlass.max(cutlass.min((rows + c.step_tokens - 1) // c.step_tokens, c.pieces), 1)
