"""From accumulators of a product of experts to its result."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...gemm._cutedsl_wgmma import ptx as gemm_ptx
from ...gemm._cutedsl_wgmma.decode import UNSCALE
from ...gemm._cutedsl_wgmma.epilogue import ROW_BYTES, VALUE_BYTES, Epilogue
from ...gemm._cutedsl_wgmma.shape import BLOCK, WARPGROUP
from ...gemm._cutedsl_wgmma.work import Ring
from . import ptx
from .activation import activate
from .shape import LIST_BYTES, ExpertShape
from .work import ExpertWork

HALF_ROW_BYTES = ROW_BYTES // 2  # of a token behind a gate: 32 values
FLOAT_BYTES = 4


class ExpertEpilogue(Epilogue):
    """One thread's view of what follows the multiplication.

    Of "activated" with a gate a thread's rows g and g + 8 are gate and up of one result.
    """

    def __init__(
        self,
        shape: ExpertShape,
        ring: Ring,
        work: ExpertWork,
        warp: Int32,
        out: Int64,
        global_scale: Int64,
        parts: Int32,
        bias: Int64,
        bias_kind: Int32,
        pairs: Int64,
        factors: Int64,
        vector: Int64,
        vector_stride: Int32,
        constants: tuple[Float32, Float32, Float32],
    ) -> None:
        nothing = Int64(0)
        super().__init__(shape, ring, work, warp, out, global_scale, Int32(0), bias, bias_kind, nothing, nothing)
        self.parts, self.pairs, self.factors, self.constants = parts, pairs, factors, constants
        self.vector, self.vector_stride = vector, vector_stride
        if shape.listed:
            self.listed = self.chunks + (shape.out_bytes - shape.tokens * LIST_BYTES)
        lane = self.thread % 32
        warp_row = warp % 4
        self.pair_token = lane % 4 * 2  # and the next: of each eight tokens
        if shape.halved:
            self.row = warp_row * 8 + lane // 4  # of the results
            # Eight tokens' rows are one after the other in memory; pieces of 16 bytes are shuffled between banks.
            shuffle = lane % 8 // 2
            self.written = self.chunks + lane % 16 * HALF_ROW_BYTES + (warp_row ^ shuffle) * 16
            self.token, self.piece = self.thread // 4, self.thread % 4
            self.read = self.chunks + self.token * HALF_ROW_BYTES + (self.piece ^ (self.token % 8 // 2)) * 16

    @cute.jit
    def scales(self, row: Int32, expert: Int32, first: Int32, rows: Int32) -> Any:
        """Global scales, biases and the vector's values of this thread's rows; pairs or factors of its tokens."""
        c, n = self.shape, self.work.n
        _, global_scale, bias, _, _ = self.addresses
        found = []
        for i in cutlass.range_constexpr(c.own_blocks):
            block = self.block_row(row, i)
            for half in cutlass.range_constexpr(2):
                if const_expr(c.gated):
                    at = cutlass.min(block // 2 + self.row, n - 1)
                    part = half * (self.parts - 1)
                    index = Int64(expert) * Int64(2 * n) + Int64(half * n + at)
                else:
                    at = cutlass.min(block + self.row + 8 * half, n - 1)
                    part = Int32(2 * at >= n) * (self.parts - 1)
                    index = Int64(expert) * Int64(n) + Int64(at)
                value = gemm_ptx.load_float(global_scale + Int64(expert * self.parts + part) * FLOAT_BYTES)
                added = gemm_ptx.load_bias(bias + index * (2 * self.bias_kind), self.bias_kind, c.float16)
                times = Int32(0)
                if const_expr(c.result == "activated" and not (c.gated and half == 1)):
                    where = self.vector + (Int64(expert) * Int64(self.vector_stride) + Int64(at)) * VALUE_BYTES
                    times = ptx.load_vector(where, Int32(self.vector != 0), c.float16)
                found.append((value, added, times))
        listed = []  # of this thread's tokens: where their summands go, or their factors
        if const_expr(c.listed):
            for t in cutlass.range_constexpr((c.tokens + WARPGROUP - 1) // WARPGROUP):
                token = self.thread + t * WARPGROUP
                here = Int32(token < rows)
                place = Int64(first + token) * FLOAT_BYTES
                if const_expr(c.result == "summand"):
                    listed.append(ptx.load_pair(self.pairs + place, here))
                else:
                    listed.append(ptx.load_factor(self.factors + place, here & Int32(self.factors != 0)))
        return found, listed

    @cute.jit
    def finish_tile(self, acc: cute.Tensor, row: Int32, first: Int32, rows: Int32, scales: Any):
        """Complete a tile and store what it has of rows."""
        c = self.shape
        found, listed = scales
        if const_expr(c.result == "out"):
            self.store(acc, row, first, first + rows, [(value, added) for value, added, _ in found])
        else:
            self.barrier()  # the tile before has been read
            for t in cutlass.range_constexpr(len(listed)):
                token = self.thread + t * WARPGROUP
                if const_expr((t + 1) * WARPGROUP <= c.tokens):
                    ptx.store_shared(self.listed + token * LIST_BYTES, listed[t])
                else:
                    if token < c.tokens:
                        ptx.store_shared(self.listed + token * LIST_BYTES, listed[t])
            for i in cutlass.range_constexpr(c.own_blocks):
                if const_expr(c.listed if i == 0 else c.result == "activated"):
                    self.barrier()  # the list is written, and the block before has been read
                if const_expr(c.result == "summand"):
                    for sixteen in cutlass.range_constexpr(c.tokens // 16):
                        if sixteen * 16 < rows:
                            self.summands(acc, row, rows, found[2 * i], found[2 * i + 1], i, sixteen * 16)
                else:
                    for chunk in cutlass.range_constexpr(c.tokens // c.chunk_tokens):
                        if chunk * c.chunk_tokens < rows:
                            self.chunk(acc, row, first, rows, found[2 * i], found[2 * i + 1], i, chunk)

    @cute.jit
    def summands(
        self,
        acc: cute.Tensor,
        row: Int32,
        rows: Int32,
        upper: Any,
        lower: Any,
        i: cutlass.Constexpr[int],
        token: cutlass.Constexpr[int],
    ):
        """Store sixteen tokens of a block of rows, without the router's weights.

        A warp's store is 32 bytes of each of four tokens: whole sectors, so nothing is turned around first.
        """
        c, n = self.shape, self.work.n
        at = self.block_row(row, i) + self.row  # n is a multiple of 16: the row 8 further on is there too
        out = self.addresses[0] + Int64(at) * FLOAT_BYTES
        for eight in cutlass.range_constexpr(2):
            here = token + eight * 8 + self.pair_token
            sums = [acc[i * (c.tokens // 2) + token // 2 + eight * 4 + e] for e in range(4)]  # g, g, g + 8, g + 8
            values = [sums[e] * UNSCALE * (upper, lower)[e // 2][0] + (upper, lower)[e // 2][1] for e in range(4)]
            there = Int32(at < n)
            ptx.store_summands(
                self.listed + here * LIST_BYTES,
                out,
                n * FLOAT_BYTES,
                there & Int32(here < rows),
                there & Int32(here + 1 < rows),
                *values,
            )

    @cute.jit
    def chunk(
        self,
        acc: cute.Tensor,
        row: Int32,
        first: Int32,
        rows: Int32,
        upper: Any,
        lower: Any,
        i: cutlass.Constexpr[int],
        chunk: cutlass.Constexpr[int],
    ):
        """Turn some tokens of a block of rows around through shared memory, and store them."""
        c = self.shape
        buffer = chunk % c.chunks * c.chunk_bytes
        for h in cutlass.range_constexpr(c.chunk_tokens // 16):
            token = chunk * c.chunk_tokens + h * 16
            sums = [acc[i * (c.tokens // 2) + token // 2 + e] for e in range(8)]  # rows g, g, g + 8, g + 8; again
            if const_expr(c.gated):
                self.write_gated(sums, upper, lower, token, buffer + h * 16 * HALF_ROW_BYTES)
            else:
                self.write_plain(sums, upper, lower, token, buffer + h * 16 * ROW_BYTES)
        self.barrier()
        token = chunk * c.chunk_tokens
        block = self.block_row(row, i)
        n = self.work.n
        if const_expr(c.gated):
            at = block // 2 + self.piece * 8
            for h in cutlass.range_constexpr((c.chunk_tokens + 31) // 32):
                own = h * 32 + self.token
                here = token + own
                address = self.addresses[0] + (Int64(first + here) * Int64(n) + Int64(at)) * VALUE_BYTES
                there = Int32((own < c.chunk_tokens) & (here < rows) & (at < n))
                ptx.copy_out_if(self.read + buffer + h * 32 * HALF_ROW_BYTES, address, there)
        else:
            for h in cutlass.range_constexpr(c.chunk_tokens // 16):
                m = token + h * 16 + self.token
                self.store_row(self.read + buffer + h * 16 * ROW_BYTES, first + m, first + rows, block + self.piece * 8)

    @cute.jit
    def write_gated(self, sums: Any, gate: Any, up: Any, token: cutlass.Constexpr[int], buffer: cutlass.Constexpr[int]):
        """Sixteen tokens of activations."""
        c = self.shape
        words = []
        for eight in cutlass.range_constexpr(2):
            pair = []
            factors = self.two_factors(token + eight * 8)
            for e in cutlass.range_constexpr(2):
                g = (sums[4 * eight + e] * UNSCALE * gate[0] + gate[1]) * factors[e]
                u = (sums[4 * eight + 2 + e] * UNSCALE * up[0] + up[1]) * factors[e]
                pair.append(activate(c.activation, g, u, *self.constants))
            words.append(ptx.scaled(gemm_ptx.pack(pair[0], pair[1], c.float16), gate[2], c.float16))
        ptx.store_half(self.written + buffer, *words)

    @cute.jit
    def two_factors(self, token: cutlass.Constexpr[int]) -> Any:
        """Of this thread's two of eight tokens."""
        found = (Float32(1.0), Float32(1.0))
        if const_expr(self.shape.listed):
            found = ptx.load_two(self.listed + (token + self.pair_token) * LIST_BYTES)
        return found

    @cute.jit
    def write_plain(
        self, sums: Any, upper: Any, lower: Any, token: cutlass.Constexpr[int], buffer: cutlass.Constexpr[int]
    ):
        """The same without a gate."""
        c = self.shape
        words = []
        for p in cutlass.range_constexpr(4):
            value, added, times = lower if p % 2 else upper
            pair = []
            factors = self.two_factors(token + p // 2 * 8)
            for e in cutlass.range_constexpr(2):
                a = (sums[2 * p + e] * UNSCALE * value + added) * factors[e]
                pair.append(activate(c.activation, a, a, *self.constants))
            words.append(ptx.scaled(gemm_ptx.pack(pair[0], pair[1], c.float16), times, c.float16))
        gemm_ptx.store_transposed(self.written + buffer, *words)


assert BLOCK == 64
