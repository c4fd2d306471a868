"""The warpgroup that fills the ring where x is read by token: weights as ever, rows of x in pieces of 16 bytes.

TMA cannot gather, and a copy for each row would keep the one thread busy that issues them. So all threads copy: one
takes the same piece of 128 bytes in every sixteenth row. The first warp leads: it takes tiles, tells what they are, and
loads weights.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ...gemm._cutedsl_wgmma.shape import WARPGROUP
from ...gemm._cutedsl_wgmma.work import Ring, advance
from . import ptx
from .producer import BOX_COLUMNS, ROW_BYTES, ExpertProducer
from .shape import LIST_BYTES, QUAD_TOKENS, ExpertShape
from .work import NO_EXPERT, ExpertWork

GATHER_BARRIER = 6  # of hardware barriers
PIECE_BYTES = 16
PIECE_VALUES = 8
APART = 16  # tokens between two rows of a thread


class GatherProducer(ExpertProducer):
    """One thread's view."""

    def __init__(
        self,
        shape: ExpertShape,
        ring: Ring,
        work: ExpertWork,
        leads: Boolean,
        x: Int64,
        pairs: Int64,
        weight: Int64,
        k: Int32,
        row_pieces: Int32,
        top_k: Int32,
    ) -> None:
        self.shape, self.work, self.leads, self.weight = shape, work, leads, weight
        self.bars, self.weights, self.weight_blocks = ring.bars, ring.weights, work.weight_blocks
        self.pairs, self.k, self.row_pieces, self.top_k = pairs, k, row_pieces, top_k
        thread, _, _ = cute.arch.thread_idx()
        self.thread = thread % WARPGROUP
        self.token, self.piece = self.thread // 8, self.thread % 8
        self.x = x + Int64(self.piece) * PIECE_BYTES
        # The swizzle that TMA writes and wgmma reads. Sixteen rows further on it is the same.
        swizzled = self.piece ^ (self.token % 8)
        self.target = ring.out - shape.out_offset + self.token * ROW_BYTES + swizzled * PIECE_BYTES
        start = ring.bars.toint() - shape.barrier_offset
        self.places = start + shape.places_offset
        self.following = self.places + shape.places_bytes  # the number of the next tile

    @cute.jit
    def run(self):
        """As in `ExpertProducer`. What a tile's rows are is asked while the tile before it is loaded."""
        c = self.shape
        stage = Int32(0)
        phase = Int32(1)
        slot = Int32(0)
        expert_bytes = self.expert_bytes()
        expert = Int32(NO_EXPERT)
        row = Int32(0)
        first = Int32(0)
        rows = Int32(0)
        pairs = [Int32(0) for _ in range(-(-c.tokens // WARPGROUP))]
        following = self.work.group
        if following < self.work.total:
            row, expert, first, rows = self.work.place(following)
            pairs = self.load_pairs(first, rows)
            if self.leads:
                following = self.work.take()
        while cute.arch.make_warp_uniform(expert) >= 0:
            following = self.share(pairs, following)
            weight = self.weight + Int64(expert) * expert_bytes
            here = (row, expert, first, cute.arch.make_warp_uniform(rows))
            row, expert, first, rows = self.work.place(following)
            if self.leads:
                following = self.work.take()
            for k_tile in cutlass.range(self.work.k_tiles, unroll=1):
                cute.arch.mbarrier_wait(self.bars + c.stages + stage, phase)
                if self.leads:
                    if k_tile == 0:
                        with cute.arch.elect_one():
                            self.work.tell(slot, *here)
                    self.load_weights(stage, weight, here[0], k_tile, 0)
                self.copy_rows(stage, here[3], k_tile)
                cute.arch.cp_async_mbarrier_arrive_noinc(self.bars + stage)
                if k_tile == 0:
                    pairs = self.load_pairs(first, rows)
                stage, phase = advance(stage, phase, c.stages)
            slot = self.work.next_slot(slot)
        cute.arch.mbarrier_wait(self.bars + c.stages + stage, phase)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)  # no thread ends before its copies
        if self.leads:
            with cute.arch.elect_one():
                self.work.tell(slot, row, Int32(NO_EXPERT), first, rows)
                cute.arch.mbarrier_arrive(self.bars + stage)
        cute.arch.mbarrier_arrive(self.bars + stage)

    @cute.jit
    def load_pairs(self, first: Int32, rows: Int32) -> Any:
        """The pairs of a tile's tokens that this thread looks up; pair 0 for those that it does not have."""
        found = []
        for t in cutlass.range_constexpr(-(-self.shape.tokens // WARPGROUP)):
            token = self.thread + t * WARPGROUP
            found.append(ptx.load_pair(self.pairs + Int64(first + token) * LIST_BYTES, Int32(token < rows)))
        return found

    @cute.jit
    def share(self, pairs: Any, following: Int32) -> Int32:
        """List where the rows of these pairs lie; the number of the next tile, which the leader has taken."""
        c = self.shape
        cute.arch.barrier(barrier_id=GATHER_BARRIER, number_of_threads=WARPGROUP)  # the list before has been read
        for t in cutlass.range_constexpr(len(pairs)):
            token = self.thread + t * WARPGROUP
            # Four rows of a thread stand side by side.
            quad, of_quad = token // QUAD_TOKENS, token % APART * 4 + token // APART % 4
            target = self.places + (quad * QUAD_TOKENS + of_quad) * LIST_BYTES
            place = ptx.quotient(pairs[t], self.top_k) * self.row_pieces
            if const_expr((t + 1) * WARPGROUP <= c.tokens):
                ptx.store_shared(target, place)
            else:
                if token < c.tokens:
                    ptx.store_shared(target, place)
        if self.thread == 0:
            ptx.store_shared(self.following, following)
        cute.arch.barrier(barrier_id=GATHER_BARRIER, number_of_threads=WARPGROUP)
        return ptx.load_shared(self.following)

    @cute.jit
    def copy_rows(self, stage: Int32, rows: Int32, k_tile: Int32):
        """Begin to copy this thread's pieces of a stage: zeros past K, and nothing past the tile's last row.

        Rows that are multiplied and not copied are what shared memory holds; a row only changes its own sums.
        """
        c = self.shape
        own_rows = rows - self.token
        x = self.x + Int64(k_tile) * (c.k_blocks * ROW_BYTES)
        target = self.target + stage * c.x_bytes
        column = k_tile * c.block_k + self.piece * PIECE_VALUES
        sizes = [Int32(column + i * BOX_COLUMNS < self.k) * PIECE_BYTES for i in range(c.k_blocks)]
        for quad in cutlass.range_constexpr(-(-c.tokens // QUAD_TOKENS)):
            if quad * QUAD_TOKENS < rows:
                places = ptx.load_four(self.places + self.token * (4 * LIST_BYTES) + quad * QUAD_TOKENS * LIST_BYTES)
                for g in cutlass.range_constexpr(min(4, c.tokens // APART - 4 * quad)):
                    token = quad * QUAD_TOKENS + g * APART
                    for i in cutlass.range_constexpr(c.k_blocks):
                        ptx.copy_piece(
                            target,
                            x,
                            places[g],
                            sizes[i],
                            Int32(token < own_rows),
                            (i * c.tokens + token) * ROW_BYTES,
                            i * ROW_BYTES,
                        )
