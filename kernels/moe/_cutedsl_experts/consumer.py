"""A warpgroup that multiplies; a tile that is not full as far as it has rows."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...gemm._cutedsl_wgmma.consumer import Consumer
from ...gemm._cutedsl_wgmma.work import Ring, element
from .epilogue import ExpertEpilogue
from .shape import ExpertShape
from .work import ExpertWork


def instruction(shape: ExpertShape, tokens: int) -> Any:
    """wgmma of 64 rows of W and that many tokens."""
    kind = element(shape)
    return sm90.make_trivial_tiled_mma(
        kind,
        kind,
        OperandMajorMode.K,
        OperandMajorMode.K,
        Float32,
        (1, 1, 1),
        (64, tokens),
        warpgroup.OperandSource.RMEM,
    )


class ExpertConsumer(Consumer):
    """As `Consumer`, with an instruction for every number of pieces."""

    def __init__(self, shape: ExpertShape, ring: Ring, work: ExpertWork, warp: Int32, epilogue: ExpertEpilogue) -> None:
        super().__init__(shape, ring, work, warp, instruction(shape, shape.tokens), epilogue)
        self.ways = []
        for pieces in range(1, shape.pieces + 1):
            tokens = pieces * shape.step_tokens
            tiled_mma = instruction(shape, tokens)
            x = cute.local_tile(ring.x, (tokens, shape.block_k), (0, 0, None))
            x = tiled_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(x))
            # [(token of a pair, row half, pairs), block of 64 rows, 1]
            layout = cute.make_layout(
                ((2, 2, tokens // 8), shape.own_blocks, 1), stride=((1, 2, 4), shape.tokens // 2, 0)
            )
            self.ways.append((tiled_mma, cute.make_tensor(self.acc.iterator, layout), x))

    @cute.jit
    def run(self):
        """Multiply every piece of work, and hand its sums to the epilogue."""
        c = self.shape
        stage = Int32(0)
        phase = Int32(0)
        left = self.work.segments * self.work.k_tiles
        if left > 0:
            if const_expr(c.prefetch):
                cute.arch.mbarrier_wait(self.bars, 0)
                self.fetch(stage)
            row, expert, first, rows = self.work.place(Int32(0))
            for index in cutlass.range(self.work.segments, unroll=1):
                rows = self.work.uniform(rows)
                scales = self.epilogue.scales(row, expert, first, rows)  # on their way while the tile is multiplied
                following = self.work.place(index + 1)
                stage, phase, left = self.multiply_pieces(self.work.pieces(rows), 1, stage, phase, left)
                self.epilogue.finish_tile(self.acc, row, first, rows, scales)
                row, expert, first, rows = following

    @cute.jit
    def multiply_pieces(
        self, pieces: Int32, way: cutlass.Constexpr[int], stage: Int32, phase: Int32, left: Int32
    ) -> Any:
        """Multiply a tile of at least `way` pieces."""
        if const_expr(way == self.shape.pieces):
            stage, phase, left = self.multiply_way(way, stage, phase, left)
        else:
            if pieces == way:
                stage, phase, left = self.multiply_way(way, stage, phase, left)
            else:
                stage, phase, left = self.multiply_pieces(pieces, way + 1, stage, phase, left)
        return stage, phase, left

    @cute.jit
    def multiply_way(self, way: cutlass.Constexpr[int], stage: Int32, phase: Int32, left: Int32) -> Any:
        """Multiply a tile of that many pieces."""
        tiled_mma, acc, x = self.ways[way - 1]
        self.acc.fill(0.0)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        return self.multiply(tiled_mma, acc, x, Int32(0), self.work.k_tiles, stage, phase, left)
