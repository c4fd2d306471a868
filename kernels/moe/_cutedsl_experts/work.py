"""The pieces of work of one block: which tile of the list, and which rows of W.

A block begins with the tile of its own number and then takes the next that nobody has taken: tiles differ in rows, so
with equal shares some blocks would be done long before others. The producer takes them, and tells the others in
shared memory; what a tile's first stage was loaded for is read after that stage's barrier.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...gemm._cutedsl_wgmma import schedule
from ...gemm._cutedsl_wgmma.work import Ring
from . import ptx
from .shape import SLOT_BYTES, ExpertShape

TILE_BYTES = 16  # int32 expert, first position, rows, and one that is not used
NO_EXPERT = -1


class ExpertWork:
    """A list of tiles that an earlier kernel wrote, times the row tiles of an expert's weight."""

    def __init__(
        self,
        shape: ExpertShape,
        ring: Ring,
        tiles: Int64,
        count: Int64,
        taken: Int64,
        n: Int32,
        blocks: Int32,
        k_blocks: Int32,
        band: Int32,
    ) -> None:
        self.shape, self.tiles, self.taken, self.n, self.k_blocks = shape, tiles, taken, n, k_blocks
        self.weight_blocks = blocks
        self.slots = ring.bars.toint() + 2 * shape.stages * 8
        block, _, _ = cute.arch.block_idx()
        groups, _, _ = cute.arch.grid_dim()
        self.group, self.groups = block, groups
        self.k_tiles = (k_blocks + shape.k_blocks - 1) // shape.k_blocks
        self.row_tiles = (blocks + shape.row_blocks - 1) // shape.row_blocks
        self.token_tiles = cute.arch.make_warp_uniform(ptx.load_int(count))
        self.band = cutlass.max(cutlass.min(self.token_tiles, band), 1)
        self.total = self.row_tiles * self.token_tiles

    # ---- the producer's side ----

    @cute.jit
    def take(self) -> Int32:
        """The number of the next tile, from `total` on: there is none. One lane's; see `place`."""
        lane, _, _ = cute.arch.thread_idx()
        return self.groups + ptx.add_one(self.taken, Int32(lane % 32 == 0))

    @cute.jit
    def place(self, tile: Int32) -> Any:
        """(row tile, expert, first position, rows of x) of a tile; no expert from `total` on."""
        tile = cute.arch.make_warp_uniform(tile)
        row, token = schedule.raster(
            cutlass.min(tile, self.total - 1), self.row_tiles, self.token_tiles, self.band, cutlass.min
        )
        expert, first, rows = ptx.load_tile(self.tiles + Int64(token) * TILE_BYTES)
        if tile >= self.total:
            expert = Int32(NO_EXPERT)
        return row, expert, first, rows

    @cute.jit
    def tell(self, slot: Int32, row: Int32, expert: Int32, first: Int32, rows: Int32):
        """Before the arrival at the barrier of the tile's first stage."""
        ptx.store_four(self.slots + slot * SLOT_BYTES, row, expert, first, rows)

    # ---- the others' ----

    @cute.jit
    def told(self, slot: Int32) -> Any:
        """(row tile, expert, first position, rows of x) of a tile; no expert: the last was before it."""
        row, expert, first, rows = ptx.load_four(self.slots + slot * SLOT_BYTES)
        return row, expert, first, rows

    @cute.jit
    def next_slot(self, slot: Int32) -> Int32:
        """One more than stages: a slot is written again when a stage after its tile's first has been freed."""
        following = slot + 1
        if following > self.shape.stages:
            following = Int32(0)
        return following

    @cute.jit
    def pieces(self, rows: Int32) -> Int32:
        """How many of a tile's pieces are multiplied."""
        c = self.shape
        return cutlass.max(cutlass.min((rows + c.step_tokens - 1) // c.step_tokens, c.pieces), 1)
