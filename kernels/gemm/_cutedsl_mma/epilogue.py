"""From accumulators to out: partial sums of blocks that share a tile, scales, bias, and the transposition."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .._cutedsl_wgmma.ptx import load_bias, load_float, pack, store_partial
from . import index, ptx
from .decode import unscale
from .shape import VALUE_BYTES, Shape

LOADS = 16  # of partial sums, sixteen bytes each, that a thread has on their way


@cute.jit
def fetch_edges(
    c: cutlass.Constexpr,
    smem: Int32,
    thread: Int32,
    row: Int32,
    n: Int32,
    global_scale: Int64,
    scale_stride: Int32,
    bias: Int64,
    bias_kind: Int32,
):
    """Global scales and biases of a tile's rows, to shared memory; barriers of the loop make them visible."""
    for i in cutlass.range_constexpr((c.rows + c.threads - 1) // c.threads):
        at = thread + i * c.threads
        if at < c.rows:
            here = cutlass.min(row * c.rows + at, n - 1)
            scale = load_float(global_scale + Int64(here * scale_stride) * 4)
            added = load_bias(bias + Int64(here) * Int64(2 * bias_kind), bias_kind, c.float16)
            ptx.store_shared_float(smem + c.edge_offset + at * 4, scale)
            ptx.store_shared_float(smem + c.edge_offset + (c.rows + at) * 4, added)


class Epilogue:
    """One thread's view of what follows the multiplication."""

    def __init__(
        self,
        shape: Shape,
        smem: Int32,
        thread: Int32,
        warp: Int32,
        tile: Int32,
        row: Int32,
        token: Int32,
        out: Int64,
        partials: Int64,
        counters: Int64,
        m: Int32,
        n: Int32,
    ) -> None:
        c = self.shape = shape
        self.smem, self.thread, self.tile = smem, thread, tile
        self.row, self.token = row * c.rows, token * c.tokens
        self.out, self.partials, self.counters = out, partials, counters
        self.m, self.n = m, n
        lane = thread % 32
        subtile, first = index.warp_place(warp, c)
        self.written = smem + index.out_written(lane, subtile, first, c)
        self.edges = smem + c.edge_offset + (subtile * 16 + lane // 4) * 4

    @cute.jit
    def finish(self, sums: cute.Tensor, rank: Int32):
        """Publish this block's part of a tile, and complete the tile where it was the last one."""
        c = self.shape
        if const_expr(c.split > 1):
            self.publish(sums, rank)
            if self.order() == c.split - 1:
                self.gather()
                self.store()
        else:
            for i in cutlass.range_constexpr(c.subtiles):
                for t in cutlass.range_constexpr(c.octets):
                    self.turn([sums[e, t, i] for e in range(4)], i, t)
            self.store()

    @cute.jit
    def partial(self, rank: Int32) -> Int64:
        """Where this thread's part starts; the next vector is one row of threads further on."""
        c = self.shape
        vectors = c.subtiles * c.octets
        return self.partials + (Int64(self.tile * c.split + rank) * (vectors * c.threads) + Int64(self.thread)) * 16

    @cute.jit
    def publish(self, sums: cute.Tensor, rank: Int32):
        """Write partial sums."""
        c = self.shape
        base = self.partial(rank)
        for i in cutlass.range_constexpr(c.subtiles):
            for t in cutlass.range_constexpr(c.octets):
                to = base + (i * c.octets + t) * (c.threads * 16)
                store_partial(to, sums[0, t, i], sums[1, t, i], sums[2, t, i], sums[3, t, i])

    @cute.jit
    def order(self) -> Int32:
        """How many blocks of this tile were done before this one; the same number for all threads.

        The last one leaves the counter zero, as the next launch needs it.
        """
        c = self.shape
        cute.arch.barrier()
        if self.thread == 0:
            before = ptx.count_up(self.counters + Int64(self.tile) * 4, c.split - 1)
            ptx.store_shared(self.smem + c.order_offset, before)
        cute.arch.barrier()
        return ptx.load_shared(self.smem + c.order_offset)

    @cute.jit
    def gather(self):
        """The sums of all blocks, this one's too, in the order of their ranks.

        A loop, whose registers are bounded: unrolled, ptxas has so many loads on their way that it spills.
        """
        c = self.shape
        part = c.subtiles * c.octets * c.threads * 16  # bytes of a block's sums
        first = self.partial(Int32(0))
        for vector in cutlass.range(c.subtiles * c.octets, unroll=max(1, LOADS // c.split)):
            four = ptx.add_partials(first + Int64(vector) * (c.threads * 16), part, c.split)
            self.turn(four, vector // c.octets, vector % c.octets)

    @cute.jit
    def turn(self, four, i, t):
        """Scale, add bias, round, and put into shared memory: 16 rows and 8 tokens, each token's rows together."""
        c = self.shape
        factor = Float32(unscale(c.encoding, c.float16))
        for half in cutlass.range_constexpr(2):
            edge = self.edges + (i * 64 + half * 32)
            scale, added = ptx.load_shared_float(edge), ptx.load_shared_float(edge + c.rows * 4)
            # In this order: a global scale may be tiny or huge.
            low = four[2 * half] * factor * scale + added
            high = four[2 * half + 1] * factor * scale + added
            to = self.written + (t * (8 * c.out_pitch) + (i * 16 + half * 8) * VALUE_BYTES)
            ptx.store_shared(to, ptx.transpose(pack(low, high, c.float16)))

    @cute.jit
    def store(self):
        """Rows of out from shared memory."""
        c = self.shape
        cute.arch.barrier()
        count = c.rows * c.tokens // (c.store_values * c.threads)
        for i in cutlass.range(count, unroll=4):
            token, row, offset = index.out_read(i * c.threads + self.thread, c)
            m, n = self.token + token, self.row + row
            address = self.out + (Int64(m) * Int64(self.n) + Int64(n)) * VALUE_BYTES
            there = Int32((m < self.m) & (n < self.n))
            ptx.copy_out(self.smem + offset, address, there, c.store_values * VALUE_BYTES)
