"""The kernel: roles of warps, and what the host hands over."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ...gemm._cutedsl_wgmma.kernel import READY_BARRIER
from ...gemm._cutedsl_wgmma.shape import WARPGROUP
from ...gemm._cutedsl_wgmma.work import Ring, x_layout
from .consumer import ExpertConsumer
from .epilogue import ExpertEpilogue
from .gather import GatherProducer
from .producer import ExpertProducer
from .shape import ExpertShape
from .work import ExpertWork


class Product:
    """One shape of the kernel, to be compiled; its machine code is launched without this object."""

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape

    @cute.jit
    def __call__(self, x: cute.Pointer, m: Int32, k: Int32, stream: cuda.CUstream):
        """Only compiled, never called: it shows CuTe DSL the kernel's arguments."""
        c = self.shape
        k = cute.assume(k, divby=8)
        tensor = cute.make_tensor(x, cute.make_layout((m, k), stride=(k, 1)))
        stage = cute.slice_(x_layout(c), (None, None, 0))
        operation: Any = cpasync.CopyBulkTensorTileG2SOp()
        x_copy, x_tensor = cpasync.make_tiled_tma_atom(operation, tensor, stage, (c.tokens, c.block_k))
        a, i, f = Int64(0), Int32(0), Float32(0.0)
        addresses, integers = (a,) * 11, (i,) * 10
        self.kernel(x_copy, x_tensor, *addresses, *integers, f, f, f).launch(
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
        x_copy: cute.CopyAtom,  # with the tensor map of x; not of rows that are gathered
        x: cute.Tensor,  # [rows, K]: by position
        x_rows: Int64,  # x [T, K] by token, where rows are gathered
        weight: Int64,  # [E, blocks, k_blocks, 2304] bytes
        out: Int64,  # by position [rows, n] of x's type, or by pair [pairs, n] float32
        global_scale: Int64,  # [E, parts] float32
        bias: Int64,  # [E, n], or [E, 2 n] behind a gate
        tiles: Int64,  # int32 [count, 4]: expert, first position, rows
        count: Int64,  # int32
        taken: Int64,  # int32, zero: tiles that blocks have taken behind their first
        pairs: Int64,  # int32, by position: rows of out, or where rows are gathered those of x times top_k
        factors: Int64,  # float32, by position; 0: none
        vector: Int64,  # [n] or [E, n] of x's type; 0: none
        n: Int32,  # columns of out
        blocks: Int32,  # of 64 rows of an expert's weight
        k_blocks: Int32,
        parts: Int32,  # 1 or 2
        bias_kind: Int32,  # 0: none, 1: of x's type, 2: float32
        vector_stride: Int32,  # 0 or n
        band: Int32,  # tiles that advance together
        k: Int32,  # of x_rows
        row_pieces: Int32,  # of 16 bytes from one of its rows to the next
        top_k: Int32,
        limit: Float32,
        alpha: Float32,
        beta: Float32,
    ):
        c = self.shape
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer_warp = 4 * c.warpgroups
        ring = Ring(c)
        if warp == producer_warp:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(ring.bars + stage, c.full_arrivals)
                    cute.arch.mbarrier_init(ring.bars + c.stages + stage, WARPGROUP * c.warpgroups)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            if const_expr(not c.gathered):
                cpasync.prefetch_descriptor(x_copy)
            cute.arch.barrier_arrive(barrier_id=READY_BARRIER, number_of_threads=c.waiting_threads)
        waits = warp < producer_warp
        if const_expr(c.gathered):
            waits = warp != producer_warp
        if waits:
            cute.arch.barrier(barrier_id=READY_BARRIER, number_of_threads=c.waiting_threads)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        work = ExpertWork(c, ring, tiles, count, taken, n, blocks, k_blocks, band)
        if warp >= producer_warp:
            if const_expr(c.consumer_registers):
                cute.arch.setmaxregister_decrease(c.producer_registers)
            if const_expr(c.gathered):
                leads = warp == producer_warp
                GatherProducer(c, ring, work, leads, x_rows, pairs, weight, k, row_pieces, top_k).run()
            else:
                if warp == producer_warp:
                    ExpertProducer(c, ring, work, x_copy, weight).run()
        else:
            if const_expr(c.consumer_registers):
                cute.arch.setmaxregister_increase(c.consumer_registers)
            epilogue = ExpertEpilogue(
                c,
                ring,
                work,
                warp,
                out,
                global_scale,
                parts,
                bias,
                bias_kind,
                pairs,
                factors,
                vector,
                vector_stride,
                (limit, alpha, beta),
            )
            ExpertConsumer(c, ring, work, warp, epilogue).run()
