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
        slot = Int32(0)
        cute.arch.mbarrier_wait(self.bars, 0)
        row, expert, first, rows = self.work.told(slot)
        if const_expr(c.prefetch):
            self.fetch(stage)
        while cute.arch.make_warp_uniform(expert) >= 0:
            rows = cute.arch.make_warp_uniform(rows)  # as the branches between wgmmas need them
            scales = self.epilogue.scales(row, expert, first, rows)  # on their way while the tile is multiplied
            stage, phase = self.multiply_pieces(self.work.pieces(rows), 1, stage, phase)
            self.epilogue.finish_tile(self.acc, row, first, rows, scales)
            slot = self.work.next_slot(slot)
            cute.arch.mbarrier_wait(self.bars + stage, phase)
            row, expert, first, rows = self.work.told(slot)

    @cute.jit
    def fetch(self, stage: Int32):
        """As in `Consumer`: what follows the wait for a stage, and comes before its first wgmma.

        Rows that were gathered were written as ordinary stores write, and wgmma reads otherwise: the fence orders the
        two. It stands here because who copies would have to wait for the copies first.
        """
        if const_expr(self.shape.gathered):
            cute.arch.fence_view_async_shared()
        Consumer.fetch(self, stage)

    @cute.jit
    def multiply_pieces(self, pieces: Int32, way: cutlass.Constexpr[int], stage: Int32, phase: Int32) -> Any:
        """Multiply a tile of at least `way` pieces."""
        if const_expr(way == self.shape.pieces):
            stage, phase = self.multiply_way(way, stage, phase)
        else:
            if pieces == way:
                stage, phase = self.multiply_way(way, stage, phase)
            else:
                stage, phase = self.multiply_pieces(pieces, way + 1, stage, phase)
        return stage, phase

    @cute.jit
    def multiply_way(self, way: cutlass.Constexpr[int], stage: Int32, phase: Int32) -> Any:
        """Multiply a tile of that many pieces."""
        tiled_mma, acc, x = self.ways[way - 1]
        self.acc.fill(0.0)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        # There always is a next stage: the last says that no tile follows.
        stage, phase, _ = self.multiply(
            tiled_mma, acc, x, Int32(0), self.work.k_tiles, stage, phase, self.work.k_tiles + 1
        )
        return stage, phase
