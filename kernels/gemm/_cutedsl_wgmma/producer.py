"""The warp that fills the ring: weights by plain bulk copies of their blocks, x by TMA."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from .ptx import bulk_load
from .shape import BARRIER_BYTES, BLOCK_BYTES, Shape
from .work import Ring, Work, advance


class Producer:
    """One warp's view of the ring and of global memory."""

    shape: Any
    work: Any

    def __init__(self, shape: Shape, ring: Ring, work: Work, x_copy: Any, x: Any, weight: Int64) -> None:
        self.shape, self.work = shape, work
        self.x_copy, self.weight = x_copy, weight
        self.bars, self.weights = ring.bars, ring.weights
        tiles = cute.local_tile(x, (shape.tokens, shape.block_k), (None, None))
        self.x_smem, self.x_tiles = cpasync.tma_partition(
            x_copy,
            work.rank if shape.multicast > 1 else 0,
            cute.make_layout(shape.multicast),
            cute.group_modes(ring.x, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        self.weight_blocks = (work.n + 63) // 64

    @cute.jit
    def run(self):
        """Load every k-tile of every segment, in the order in which they are multiplied."""
        c = self.shape
        stage = Int32(0)
        phase = Int32(1)
        early = Int32(0)
        # Weights do not depend on the kernel before this one: a ring of them is on its way before x is written.
        cute.arch.griddepcontrol_launch_dependents()
        if self.work.segments > 0:
            tile, first, behind = self.work.segment(Int32(0))
            row, token = self.work.place(tile)
            early = cutlass.min(behind - first, c.stages)
            for i in cutlass.range(early, unroll=1):
                self.load_weights(i, self.weight, row, first + i, c.x_bytes)
            cute.arch.griddepcontrol_wait()
            for i in cutlass.range(early, unroll=1):
                self.load_x(i, token, first + i)
            stage = early
            if early == c.stages:
                stage = Int32(0)
                phase = Int32(0)
        for index in cutlass.range(self.work.segments, unroll=1):
            tile, first, behind = self.work.segment(index)
            row, token = self.work.place(tile)
            first += early
            early = Int32(0)
            for k_tile in cutlass.range(first, behind, unroll=1):
                cute.arch.mbarrier_wait(self.bars + c.stages + stage, phase)
                self.load_weights(stage, self.weight, row, k_tile, c.x_bytes)
                self.load_x(stage, token, k_tile)
                stage, phase = advance(stage, phase, c.stages)
        if const_expr(c.multicast > 1):
            # The other block may still write into, or arrive at, this one's shared memory: stay until all is read.
            for _ in cutlass.range(cutlass.min(self.work.segments, 1) * c.stages, unroll=1):
                cute.arch.mbarrier_wait(self.bars + c.stages + stage, phase)
                stage, phase = advance(stage, phase, c.stages)

    @cute.jit
    def load_weights(self, stage: Int32, weight: Int64, row: Int32, k_tile: Int32, x_bytes: Any):
        """Announce a stage's bytes and load its weights. Row blocks past the last repeat it; nobody stores them.

        A stage of two blocks along k that has only one left takes it twice: x is zero there, but zero times what
        shared memory happens to hold may be NaN.
        """
        c = self.shape
        bar = self.bars + stage
        address = bar.toint()
        both = Int32(1)
        if const_expr(c.k_blocks == 2):
            both = Int32(2 * k_tile + 1 < self.work.k_blocks)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, c.weight_bytes + x_bytes)
            for i in cutlass.range_constexpr(c.row_blocks):
                block = cutlass.min(row * c.row_blocks + i, self.weight_blocks - 1)
                source = weight + Int64(block * self.work.k_blocks + k_tile * c.k_blocks) * BLOCK_BYTES
                target = self.weights + (stage * c.row_blocks + i) * (c.k_blocks * BLOCK_BYTES)
                if const_expr(c.k_blocks == 1):
                    bulk_load(target, source, BLOCK_BYTES, address)
                else:
                    if both != 0:
                        bulk_load(target, source, 2 * BLOCK_BYTES, address)
                    else:
                        bulk_load(target, source, BLOCK_BYTES, address)
                        bulk_load(target + BLOCK_BYTES, source, BLOCK_BYTES, address)

    @cute.jit
    def load_x(self, stage: Int32, token: Int32, k_tile: Int32):
        """Load a stage's x; tokens past M and k past K become zeros."""
        c = self.shape
        source = self.x_tiles[(None, token, k_tile)]
        target = self.x_smem[(None, stage)]
        if const_expr(c.multicast > 1):
            everyone = cutlass.Int16((1 << c.multicast) - 1)
            cute.copy(self.x_copy, source, target, tma_bar_ptr=self.bars + stage, mcast_mask=everyone)
        else:
            cute.copy(self.x_copy, source, target, tma_bar_ptr=self.bars + stage)


assert BARRIER_BYTES == 8  # `bars + stage` counts in Int64
