"""The warp that fills the ring: an expert's weights, and rows of x from any position on."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...gemm._cutedsl_wgmma.producer import Producer
from ...gemm._cutedsl_wgmma.shape import BLOCK, BLOCK_BYTES
from ...gemm._cutedsl_wgmma.work import Ring, advance
from . import ptx
from .shape import ExpertShape
from .work import NO_EXPERT, ExpertWork

BOX_COLUMNS = BLOCK  # that the 128-byte swizzle can have
ROW_BYTES = 2 * BOX_COLUMNS


class ExpertProducer(Producer):
    """As `Producer`, but for the addresses."""

    def __init__(self, shape: ExpertShape, ring: Ring, work: ExpertWork, x_copy: Any, weight: Int64) -> None:
        self.shape, self.work, self.weight = shape, work, weight
        self.bars, self.weights, self.x = ring.bars, ring.weights, ring.out - shape.out_offset
        self.weight_blocks = work.weight_blocks
        self.x_map = ptx.map_address(x_copy)

    @cute.jit
    def run(self):
        """Load every k-tile of every piece of work, in the order in which they are multiplied; then say it was all."""
        c = self.shape
        stage = Int32(0)
        phase = Int32(1)
        slot = Int32(0)
        expert_bytes = self.expert_bytes()
        expert = Int32(NO_EXPERT)
        row = Int32(0)
        first = Int32(0)
        rows = Int32(0)
        tile = self.work.group
        if tile < self.work.total:
            row, expert, first, rows = self.work.place(tile)
            tile = self.work.take()
        while cute.arch.make_warp_uniform(expert) >= 0:
            weight = self.weight + Int64(expert) * expert_bytes
            boxes = cutlass.max((rows + c.box_tokens - 1) // c.box_tokens, 1)
            here = (row, expert, first, rows)
            row, expert, first, rows = self.work.place(tile)
            tile = self.work.take()
            for k_tile in cutlass.range(self.work.k_tiles, unroll=1):
                cute.arch.mbarrier_wait(self.bars + c.stages + stage, phase)
                if k_tile == 0:
                    with cute.arch.elect_one():
                        self.work.tell(slot, *here)
                self.load_weights(stage, weight, here[0], k_tile, boxes * (c.box_tokens * c.block_k * 2))
                self.load_boxes(stage, here[2], boxes, k_tile)
                stage, phase = advance(stage, phase, c.stages)
            slot = self.work.next_slot(slot)
        cute.arch.mbarrier_wait(self.bars + c.stages + stage, phase)
        with cute.arch.elect_one():
            self.work.tell(slot, row, Int32(NO_EXPERT), first, rows)
            cute.arch.mbarrier_arrive(self.bars + stage)

    @cute.jit
    def expert_bytes(self) -> Int64:
        """Of one expert's weight."""
        return Int64(self.weight_blocks) * Int64(self.work.k_blocks) * BLOCK_BYTES

    @cute.jit
    def load_boxes(self, stage: Int32, position: Int32, boxes: Int32, k_tile: Int32):
        """Load a stage's x: boxes of 64 columns. What lies past M and K becomes zero."""
        c = self.shape
        bar = (self.bars + stage).toint()
        with cute.arch.elect_one():
            for box in cutlass.range(boxes, unroll=1):
                for i in cutlass.range_constexpr(c.k_blocks):
                    target = self.x + stage * c.x_bytes + (i * c.tokens + box * c.box_tokens) * ROW_BYTES
                    column = (k_tile * c.k_blocks + i) * BOX_COLUMNS
                    ptx.load_x(target, self.x_map, column, position + box * c.box_tokens, bar)
