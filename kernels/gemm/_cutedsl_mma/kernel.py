"""The kernel: a block's tile, the loop over its K, and what the host hands over."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr

from .._cutedsl_wgmma.schedule import raster
from . import index
from .epilogue import Epilogue, fetch_edges
from .loader import Loader
from .multiply import Multiply
from .shape import Shape

BAND = 8  # token tiles that advance together over the rows


class Gemm:
    """One shape of the kernel, to be compiled; its machine code is launched without this object."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    @cute.jit
    def __call__(self, stream: cuda.CUstream):
        """Only compiled, never called: it shows CuTe DSL the kernel's arguments."""
        c = self.shape
        long, zero = Int64(0), Int32(0)
        self.kernel(long, long, long, long, long, long, long, long, zero, zero, zero, zero, zero).launch(
            grid=[1, 1, 1],
            block=[c.threads, 1, 1],
            smem=c.smem_bytes,
            min_blocks_per_mp=c.blocks_per_sm,
            # Without this the DSL asks the driver for the device's shared memory, and compiling needs a GPU.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,  # [M, K]
        weight: Int64,  # [Np/64, Kp/64, 2304] bytes
        out: Int64,  # [M, N]
        global_scale: Int64,  # float32, `scale_stride` apart
        bias: Int64,  # [N]
        partials: Int64,  # float32, a tile per block
        counters: Int64,  # int32, one per tile; zero before and after
        x_stride: Int64,  # values from one token to the next
        m: Int32,
        n: Int32,
        k: Int32,
        scale_stride: Int32,  # 0 or 1
        bias_kind: Int32,  # 0: none, 1: of x's type, 2: float32
    ):
        c = self.shape
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile, rank, _ = cute.arch.block_idx()
        smem = cute.arch.get_dyn_smem(Uint8, alignment=128).toint()
        token_tiles = (m + c.tokens - 1) // c.tokens
        row, token = raster(tile, (n + c.rows - 1) // c.rows, token_tiles, cutlass.min(token_tiles, BAND), cutlass.min)
        begin, end = Int32(0), (k + c.block_k - 1) // c.block_k
        if const_expr(c.split > 1):
            begin, end = index.k_range(rank, c.split, end)

        loader = Loader(c, smem, thread, row, token, x, weight, x_stride, m, n, k)
        # Weights do not depend on the kernel before this one; everything else may.
        if const_expr(c.hopper):
            cute.arch.griddepcontrol_launch_dependents()
        for stage in cutlass.range_constexpr(c.stages - 1):
            loader.load_weights(Int32(stage), begin + stage, end)
        if const_expr(c.hopper):
            cute.arch.griddepcontrol_wait()
        for stage in cutlass.range_constexpr(c.stages - 1):
            loader.load_x(Int32(stage), begin + stage, end)
            cute.arch.cp_async_commit_group()
        fetch_edges(c, smem, thread, row, n, global_scale, scale_stride, bias, bias_kind)

        multiply = Multiply(c, smem, thread, warp, loader)
        multiply.run(begin, end)
        epilogue = Epilogue(c, smem, thread, warp, tile, row, token, out, partials, counters, m, n)
        epilogue.finish(multiply.sums, rank)
