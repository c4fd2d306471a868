"""A warpgroup that multiplies: words from shared memory, decoded in registers, are wgmma's first operand.

An accumulator tile is [rows of W, tokens]: out transposed.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from .decode import decode
from .ptx import arrive_if
from .shape import BLOCK_BYTES, WARPGROUP, Shape
from .work import Ring, advance, element

BLOCK_WORDS = BLOCK_BYTES // 4
SUBTILE_WORDS = BLOCK_WORDS // 4  # 16 rows, one warp's
SCALE_WORDS = 128  # where a subtile's scales start


class Consumer:
    """One thread's view of the ring and its registers."""

    shape: Any
    work: Any
    epilogue: Any

    def __init__(self, shape: Shape, ring: Ring, work: Any, warp: Int32, tiled_mma: Any, epilogue: Any) -> None:
        self.shape, self.work, self.tiled_mma, self.epilogue = shape, work, tiled_mma, epilogue
        self.bars = ring.bars
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        self.x = tiled_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(ring.x))
        self.fragment = cute.make_rmem_tensor(
            tiled_mma.partition_shape_A((64 * shape.own_blocks, shape.block_k)), element(shape)
        )
        self.registers = cute.recast_tensor(self.fragment, Int32)  # [(0, row half, k half), block, step]
        self.acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((64 * shape.own_blocks, shape.tokens)), Float32)
        stage_words = shape.row_blocks * shape.k_blocks * BLOCK_WORDS
        block_strides = (BLOCK_WORDS, BLOCK_WORDS * shape.k_blocks, stage_words)
        counts = (shape.k_blocks, shape.own_blocks, shape.stages)
        start = warp // 4 * (shape.own_blocks * shape.k_blocks * BLOCK_WORDS) + warp % 4 * SUBTILE_WORDS
        self.codes = cute.make_tensor(
            (ring.words + (start + lane * 4)).align(16), cute.make_layout((4, *counts), stride=(1, *block_strides))
        )
        self.scales = cute.make_tensor(
            (ring.words + (start + SCALE_WORDS + lane // 4 * 2)).align(8),
            cute.make_layout((2, *counts), stride=(1, *block_strides)),
        )
        self.code_words = cute.make_rmem_tensor((4, shape.k_blocks, shape.own_blocks), Int32)
        self.scale_words = cute.make_rmem_tensor((2, shape.k_blocks, shape.own_blocks), Int32)

    @cute.jit
    def run(self):
        """Multiply every segment, and hand its sums to the epilogue."""
        c = self.shape
        tiled_mma = self.tiled_mma
        stage = Int32(0)
        phase = Int32(0)
        left = self.work.waves * self.work.k_tiles + self.work.end - self.work.begin
        if const_expr(c.prefetch):
            if left > 0:
                cute.arch.mbarrier_wait(self.bars, 0)
            self.fetch(stage)
        for index in cutlass.range(self.work.segments, unroll=1):
            tile, first, behind = self.work.segment(index)
            row, token = self.work.place(tile)
            scales = self.epilogue.scales(row)  # on their way while the tile is multiplied
            self.acc.fill(0.0)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            stage, phase, left = self.multiply(tiled_mma, self.acc, self.x, first, behind, stage, phase, left)
            self.epilogue.finish(self.acc, tile, row, token, first, behind, scales)

    @cute.jit
    def multiply(
        self,
        tiled_mma: Any,
        acc: cute.Tensor,
        x: cute.Tensor,
        first: Int32,
        behind: Int32,
        stage: Int32,
        phase: Int32,
        left: Int32,
    ) -> Any:
        """Add k-tiles `first` to `behind` to the sums; the stage that follows, its parity, and how many are left."""
        c = self.shape
        previous = stage
        for k_tile in cutlass.range(first, behind, unroll=1):
            if const_expr(not c.prefetch):
                cute.arch.mbarrier_wait(self.bars + stage, phase)
                self.fetch(stage)
            following, parity = advance(stage, phase, c.stages)
            waits, frees = c.waits
            for step in cutlass.range_constexpr(c.steps):
                self.decode_step(step)
                warpgroup.fence()
                cute.gemm(tiled_mma, acc, self.fragment[None, None, step], x[None, None, step, stage], acc)
                warpgroup.commit_group()
                if const_expr(c.prefetch and step == c.steps - 1):
                    left -= 1
                    next_stage = following
                    next_parity = parity
                    if left == 0:  # nothing follows: look at this stage again, whose barrier has completed
                        next_stage = stage
                        next_parity = phase
                    cute.arch.mbarrier_wait(self.bars + next_stage, next_parity)
                    self.fetch(next_stage)
                if const_expr(waits[step] is not None):
                    warpgroup.wait_group(waits[step])
                if const_expr(step == frees):
                    self.release(previous, Int32(k_tile > first))
            previous = stage
            stage = following
            phase = parity
        warpgroup.wait_group(0)
        self.release(previous, Int32(1))
        return stage, phase, left

    @cute.jit
    def decode_step(self, step: cutlass.Constexpr[int]):
        """The fragment of one step along k, of every block of 64 rows."""
        for i in cutlass.range_constexpr(self.shape.own_blocks):
            four = decode(
                self.code_words[step % 4, step // 4, i],
                self.scale_words[step % 4 // 2, step // 4, i],
                step % 2,
                self.shape.float16,
            )
            for r in cutlass.range_constexpr(4):
                self.registers[(0, r % 2, r // 2), i, step] = four[r]

    @cute.jit
    def fetch(self, stage: Int32):
        """A stage's words of this thread to registers."""
        for i in cutlass.range_constexpr(self.shape.own_blocks):
            for b in cutlass.range_constexpr(self.shape.k_blocks):
                cute.autovec_copy(self.codes[None, b, i, stage], self.code_words[None, b, i])
                cute.autovec_copy(self.scales[None, b, i, stage], self.scale_words[None, b, i])

    @cute.jit
    def release(self, stage: Int32, condition: Int32):
        """Every lane arrives, at every block that loads x for this one: each says that its own reads are done.

        One lane for its warp would do, but racecheck does not follow an order that goes through another lane.
        """
        c = self.shape
        bar = (self.bars + c.stages + stage).toint()
        for block in cutlass.range_constexpr(c.multicast):
            arrive_if(bar, Int32(block), condition, c.multicast > 1)


assert WARPGROUP == 4 * 32
