"""From accumulators to out: partial sums of blocks that share a tile, scales, bias, and the transposition."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .._cutedsl_wgmma.ptx import load_bias, load_float, load_partial, pack, store_partial
from . import index, ptx
from .decode import unscale
from .shape import VALUE_BYTES, Shape


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
                self.store(sums)
        else:
            self.store(sums)

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
    def four(self, sums: cute.Tensor, t: cutlass.Constexpr[int], i: cutlass.Constexpr[int]):
        """Four sums: this block's own, or those of all blocks, its own too, in the order of their ranks."""
        c = self.shape
        found = [sums[e, t, i] for e in range(4)]
        if const_expr(c.split > 1):
            for rank in cutlass.range_constexpr(c.split):
                part = load_partial(self.partial(Int32(rank)) + (i * c.octets + t) * (c.threads * 16), Int32(1))
                if const_expr(rank == 0):
                    found = list(part)
                else:
                    found = [found[e] + part[e] for e in range(4)]
        return found

    @cute.jit
    def store(self, sums: cute.Tensor):
        """Scale, add bias, round, turn around through shared memory and store rows of out."""
        c = self.shape
        factor = Float32(unscale(c.encoding, c.float16))
        for i in cutlass.range_constexpr(c.subtiles):
            edge = self.edges + i * 64
            scales = [ptx.load_shared_float(edge + half * 32) for half in range(2)]
            added = [ptx.load_shared_float(edge + (c.rows * 4 + half * 32)) for half in range(2)]
            for t in cutlass.range_constexpr(c.octets):
                four = self.four(sums, t, i)
                for half in cutlass.range_constexpr(2):
                    # In this order: a global scale may be tiny or huge.
                    low = four[2 * half] * factor * scales[half] + added[half]
                    high = four[2 * half + 1] * factor * scales[half] + added[half]
                    to = self.written + (t * 8 * c.out_pitch + (i * 16 + half * 8) * VALUE_BYTES)
                    ptx.store_shared(to, ptx.transpose(pack(low, high, c.float16)))
        cute.arch.barrier()
        count = c.rows * c.tokens // (c.store_values * c.threads)
        for i in cutlass.range(count, unroll=4):
            token, row, offset = index.out_read(i * c.threads + self.thread, c)
            m, n = self.token + token, self.row + row
            address = self.out + (Int64(m) * Int64(self.n) + Int64(n)) * VALUE_BYTES
            there = Int32((m < self.m) & (n < self.n))
            ptx.copy_out(self.smem + offset, address, there, c.store_values * VALUE_BYTES)
