"""Copies of a stage from global to shared memory, sixteen bytes a thread at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from . import index, ptx
from .shape import BLOCK_BYTES, PIECE_BYTES, VALUE_BYTES, Shape


class Loader:
    """One thread's share of the copies."""

    def __init__(
        self,
        shape: Shape,
        smem: Int32,
        thread: Int32,
        row: Int32,
        token: Int32,
        x: Int64,
        weight: Int64,
        x_stride: Int64,
        m: Int32,
        n: Int32,
        k: Int32,
    ) -> None:
        c = self.shape = shape
        self.thread = thread
        own_token, own_k, offset = index.x_copied(thread, c)
        first = token * c.tokens + own_token
        _, together = index.x_copies(c)
        self.x = x + (Int64(first) * x_stride + Int64(own_k)) * VALUE_BYTES
        self.x_jump = x_stride * (together * VALUE_BYTES)
        self.x_target = smem + offset
        self.tokens_left, self.k_left = m - first, k - own_k
        self.k_blocks = (k + 63) // 64
        last = (n + 63) // 64 - 1
        self.runs = []  # row blocks past the last repeat it; nobody stores them
        for i in range(c.row_blocks):
            block = cutlass.min(row * c.row_blocks + i, last)
            self.runs.append(weight + Int64(block) * (Int64(self.k_blocks) * BLOCK_BYTES) + Int64(thread * PIECE_BYTES))
        self.weight_target = smem + c.weight_offset + thread * PIECE_BYTES

    @cute.jit
    def load_weights(self, stage: Int32, k_tile: Int32, end: Int32):
        """A stage of weights, if there is one; blocks past the last one along k become zeros."""
        c = self.shape
        there = Int32(k_tile < end)
        target = self.weight_target + stage * c.weight_bytes
        source = Int64(k_tile) * c.run_bytes
        blocks_left = self.k_blocks - k_tile * c.k_blocks
        pieces = c.run_bytes // PIECE_BYTES
        for at in cutlass.range_constexpr(len(index.weight_copies(c))):
            first = index.weight_copies(c)[at]
            size, wanted = Int32(16), there
            if const_expr(c.k_blocks > 1):
                size = Int32((first + self.thread) * PIECE_BYTES // BLOCK_BYTES < blocks_left) * 16
            if const_expr(first + c.threads > pieces):
                wanted = there & Int32(self.thread < pieces - first)
            for i in cutlass.range_constexpr(c.row_blocks):
                offset = first * PIECE_BYTES
                ptx.copy_async(target + (i * c.run_bytes + offset), self.runs[i] + source + offset, size, wanted)

    @cute.jit
    def load_x(self, stage: Int32, k_tile: Int32, end: Int32):
        """A stage of x, if there is one; what is past K becomes zeros, tokens past M stay what they are."""
        c = self.shape
        there = Int32(k_tile < end)
        k = k_tile * c.block_k
        size = Int32(k < self.k_left) * 16
        copies, together = index.x_copies(c)
        source = self.x + Int64(k) * VALUE_BYTES
        target = self.x_target + stage * c.x_bytes
        for i in cutlass.range_constexpr(copies):
            ptx.copy_async(
                target + i * together * c.x_pitch, source, size, there & Int32(i * together < self.tokens_left)
            )
            source += self.x_jump
