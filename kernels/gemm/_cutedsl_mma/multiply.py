"""A warp's multiplication: words of weights decoded in registers, x through `ldmatrix`, sums in registers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from . import index, ptx
from .decode import decode
from .loader import Loader
from .shape import BLOCK_BYTES, SUBTILE_BYTES, Shape


class Multiply:
    """One thread's registers and its view of the ring."""

    def __init__(self, shape: Shape, smem: Int32, thread: Int32, warp: Int32, loader: Loader) -> None:
        c = self.shape = shape
        self.loader = loader
        lane = thread % 32
        subtile, token = index.warp_place(warp, c)
        self.codes = smem + c.weight_offset + index.code_offset(lane, subtile, c)
        self.scales = smem + c.weight_offset + index.scale_offset(lane, subtile, c)
        self.x, self.smem = index.x_read(lane, token, c), smem
        self.code_words = cute.make_rmem_tensor((4, c.subtiles), Int32)
        self.scale_words = cute.make_rmem_tensor((2, c.subtiles), Int32)
        self.fragments = cute.make_rmem_tensor((2, c.octets, 2), Int32)  # [k half, octet of tokens, step % 2]
        self.sums = cute.make_rmem_tensor((4, c.octets, c.subtiles), Float32)
        self.sums.fill(0.0)

    @cute.jit
    def run(self, begin: Int32, end: Int32):
        """All k-tiles of a range, the first of which are on their way.

        Words and x of a step are read while the step before is multiplied. At the end all copies have landed, and
        nobody reads the ring any more for what is still multiplied.
        """
        c = self.shape
        cute.arch.cp_async_wait_group(c.stages - 2)
        cute.arch.barrier()
        reading, filling = Int32(0), Int32(c.stages - 1)
        self.fetch_words(reading, 0)
        self.fetch_x(reading, 0)
        for k_tile in cutlass.range(begin, end, unroll=1):
            for step in cutlass.range_constexpr(c.steps):
                words = self.words(step)
                if const_expr(step == c.steps - 1):
                    # The next stage has landed, and this one has been read by all: the next round fills it.
                    cute.arch.cp_async_wait_group(c.stages - 2)
                    cute.arch.barrier()
                    reading = following(reading, c.stages)
                if const_expr(step % 4 == 3):
                    self.fetch_words(reading, (step + 1) % c.steps // 4)
                self.fetch_x(reading, (step + 1) % c.steps)
                if const_expr(step == 0):
                    ahead = k_tile + (c.stages - 1)
                    self.loader.load_weights(filling, ahead, end)
                    self.loader.load_x(filling, ahead, end)
                    cute.arch.cp_async_commit_group()
                    filling = following(filling, c.stages)
                self.step(step, words)

    @cute.jit
    def fetch_words(self, stage: Int32, block: cutlass.Constexpr[int]):
        """A block of 64 k of this thread's codes and scales."""
        c = self.shape
        at = stage * c.weight_bytes + block * BLOCK_BYTES
        for i in cutlass.range_constexpr(c.subtiles):
            codes = ptx.load_words(self.codes + at + i * SUBTILE_BYTES, 4)
            scales = ptx.load_words(self.scales + at + i * SUBTILE_BYTES, 2)
            for j in cutlass.range_constexpr(4):
                self.code_words[j, i] = codes[j]
            for j in cutlass.range_constexpr(2):
                self.scale_words[j, i] = scales[j]

    @cute.jit
    def words(self, step: cutlass.Constexpr[int]):
        """Of one step: (codes, scales) per subtile. Later fetches do not change them."""
        return [(self.code_words[step % 4, i], self.scale_words[step % 4 // 2, i]) for i in range(self.shape.subtiles)]

    @cute.jit
    def fetch_x(self, stage: Int32, step: cutlass.Constexpr[int]):
        """X of one step, for all tokens of this warp."""
        c = self.shape
        at = self.smem + stage * c.x_bytes + index.x_step(self.x, step)
        for pair in cutlass.range_constexpr(c.octets // 2):
            four = ptx.load_matrices(at + pair * 16 * c.x_pitch)
            for r in cutlass.range_constexpr(4):
                self.fragments[r % 2, 2 * pair + r // 2, step % 2] = four[r]

    @cute.jit
    def step(self, step: cutlass.Constexpr[int], words):
        """Multiply one step."""
        c = self.shape
        for i in cutlass.range_constexpr(c.subtiles):
            code, scale = words[i]
            a = decode(code, scale, step % 2, c.encoding, c.float16, c.hopper)
            for t in cutlass.range_constexpr(c.octets):
                b = [self.fragments[0, t, step % 2], self.fragments[1, t, step % 2]]
                four = ptx.mma([self.sums[e, t, i] for e in range(4)], a, b, c.float16)
                for e in cutlass.range_constexpr(4):
                    self.sums[e, t, i] = four[e]


@cute.jit
def following(stage: Int32, stages: cutlass.Constexpr[int]) -> Int32:
    """The next stage of the ring."""
    after = stage + 1
    if after == stages:
        after = Int32(0)
    return after
