"""From accumulators to out: partial sums of tiles that several groups share, scales, bias, and the transposition."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from . import ptx
from .decode import UNSCALE
from .shape import BLOCK, WARPGROUP, Shape
from .work import Ring

VALUE_BYTES = 2  # of out
ROW_BYTES = BLOCK * VALUE_BYTES  # of a token in a chunk
FETCH_VECTORS = 16  # of partial sums that one thread has on their way
FIRST_BARRIER = 1  # of hardware barriers: one per warpgroup


class Epilogue:
    """One thread's view of what follows the multiplication."""

    shape: Any
    work: Any

    def __init__(
        self,
        shape: Shape,
        ring: Ring,
        work: Any,
        warp: Int32,
        out: Int64,
        global_scale: Int64,
        scale_stride: Int32,
        bias: Int64,
        bias_kind: Int32,
        partials: Int64,
        flags: Int64,
    ) -> None:
        self.shape, self.work = shape, work
        self.addresses = (out, global_scale, bias, partials, flags)
        self.scale_stride, self.bias_kind = scale_stride, bias_kind
        thread, _, _ = cute.arch.thread_idx()
        self.thread = thread % WARPGROUP
        lane = thread % 32
        self.warpgroup = warp // 4
        self.row = warp % 4 * 16 + lane // 4  # of the block, and that plus 8
        self.chunks = ring.out + self.warpgroup * shape.out_bytes
        # stmatrix: lane l names 16 bytes of matrix l / 8, whose halves are rows and tokens; row l % 8 of it is a token.
        matrix = lane // 8
        token = lane % 8 + matrix // 2 * 8
        piece = (warp % 4 * 2 + matrix % 2) ^ (lane % 8)
        self.written = self.chunks + token * ROW_BYTES + piece * 16
        # On the way out eight threads take a token's 128 bytes.
        self.token, self.piece = self.thread // 8, self.thread % 8
        self.read = self.chunks + self.token * ROW_BYTES + (self.piece ^ (self.token % 8)) * 16

    @cute.jit
    def scales(self, row: Int32) -> Any:
        """Global scales and biases of this thread's rows: [block][row half] of pairs."""
        c = self.shape
        _, global_scale, bias, _, _ = self.addresses
        found = []
        for i in cutlass.range_constexpr(c.own_blocks):
            for half in cutlass.range_constexpr(2):
                n = cutlass.min(self.block_row(row, i) + self.row + 8 * half, self.work.n - 1)
                value = ptx.load_float(global_scale + Int64(n * self.scale_stride) * 4)
                added = ptx.load_bias(bias + Int64(n) * (2 * self.bias_kind), self.bias_kind, c.float16)
                found.append((value, added))
        return found

    @cute.jit
    def finish(self, acc: cute.Tensor, tile: Int32, row: Int32, token: Int32, first: Int32, behind: Int32, scales: Any):
        """Publish a part of a tile, or complete and store a whole one."""
        if const_expr(self.shape.stream_k):
            if behind < self.work.k_tiles:
                self.publish(acc)
            else:
                if first > 0:
                    self.gather(acc, tile)
                self.store(acc, row, token * self.shape.tokens, self.work.m, scales)
        else:
            self.store(acc, row, token * self.shape.tokens, self.work.m, scales)

    @cute.jit
    def block_row(self, row: Int32, i: cutlass.Constexpr[int]) -> Int32:
        """The first row of W of this warpgroup's i-th block."""
        c = self.shape
        return ((row * c.warpgroups + self.warpgroup) * c.own_blocks + i) * BLOCK

    @cute.jit
    def barrier(self):
        """All threads of the warpgroup."""
        cute.arch.barrier(barrier_id=FIRST_BARRIER + self.warpgroup, number_of_threads=WARPGROUP)

    @cute.jit
    def slot(self, group: Int32) -> Int32:
        """Whose partial sums: one slot per block and warpgroup."""
        c = self.shape
        return (group * c.multicast + self.work.rank) * c.warpgroups + self.warpgroup

    @cute.jit
    def partial(self, group: Int32) -> Int64:
        """Where this thread's part of them starts; the next vector is one row of threads further on."""
        vectors = self.shape.own_blocks * self.shape.tokens // 8
        return self.addresses[3] + Int64(self.slot(group) * (vectors * WARPGROUP) + self.thread) * 16

    @cute.jit
    def publish(self, acc: cute.Tensor):
        """Write partial sums, then raise the flag."""
        base = self.partial(self.work.group)
        for v in cutlass.range_constexpr(cute.size(acc) // 4):
            ptx.store_partial(base + v * (WARPGROUP * 16), acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3])
        self.barrier()
        if self.thread == 0:
            ptx.raise_flag(self.addresses[4] + Int64(self.slot(self.work.group)) * 4)

    @cute.jit
    def gather(self, acc: cute.Tensor, tile: Int32):
        """Wait for the other groups' sums of this tile and add them in their order; leave the flags zero."""
        vectors = cute.size(acc) // 4
        first, count = self.work.peers(tile)
        for p in cutlass.range(self.thread, count, WARPGROUP, unroll=1):
            flag = self.addresses[4] + Int64(self.slot(first + p)) * 4
            while ptx.read_flag(flag) == 0:
                pass
            ptx.clear_flag(flag)
        self.barrier()
        together = max(1, min(4, FETCH_VECTORS // vectors))
        for p in cutlass.range(0, count, together, unroll=1):
            fetched = []
            for d in cutlass.range_constexpr(together):
                base = self.partial(first + p + d)
                for v in cutlass.range_constexpr(vectors):
                    fetched.append(ptx.load_partial(base + v * (WARPGROUP * 16), Int32(p + d < count)))
            for d in cutlass.range_constexpr(together):
                for v in cutlass.range_constexpr(vectors):
                    for e in cutlass.range_constexpr(4):
                        acc[4 * v + e] = acc[4 * v + e] + fetched[d * vectors + v][e]

    @cute.jit
    def store(self, acc: cute.Tensor, row: Int32, first: Int32, behind: Int32, scales: Any):
        """Scale, add bias, round, turn around through shared memory and store rows of out from `first` on."""
        c = self.shape
        count = c.tokens // c.chunk_tokens
        if const_expr(c.own_blocks * count % 2 == 1):
            self.barrier()  # the tile before ended with the buffer that this one begins with: it has been read
        for i in cutlass.range_constexpr(c.own_blocks):
            n = self.block_row(row, i) + self.piece * 8
            for chunk in cutlass.range_constexpr(count):
                buffer = (i * count + chunk) % c.chunks * c.chunk_bytes
                for h in cutlass.range_constexpr(c.chunk_tokens // 16):
                    at = i * (c.tokens // 2) + (chunk * c.chunk_tokens + h * 16) // 2
                    words = []
                    for p in cutlass.range_constexpr(4):
                        value, added = scales[2 * i + p % 2]
                        low = acc[at + 2 * p] * UNSCALE * value + added
                        high = acc[at + 2 * p + 1] * UNSCALE * value + added
                        words.append(ptx.pack(low, high, c.float16))
                    ptx.store_transposed(self.written + buffer + h * 16 * ROW_BYTES, *words)
                self.barrier()
                for h in cutlass.range_constexpr(c.chunk_tokens // 16):
                    m = first + chunk * c.chunk_tokens + h * 16 + self.token
                    self.store_row(self.read + buffer + h * 16 * ROW_BYTES, m, behind, n)

    @cute.jit
    def store_row(self, smem: Int32, m: Int32, behind: Int32, n: Int32):
        """Eight values of a token, if it lies before `behind`."""
        address = self.addresses[0] + (Int64(m) * Int64(self.work.n) + Int64(n)) * VALUE_BYTES
        if const_expr(self.shape.wide_stores):
            ptx.copy_out(smem, address, Int32((m < behind) & (n < self.work.n)))
        else:
            count = self.work.n - n
            if m >= behind:
                count = Int32(0)
            ptx.copy_out_some(smem, address, count)
