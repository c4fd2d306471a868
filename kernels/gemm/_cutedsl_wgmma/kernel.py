"""The kernel: roles of warps, and what the host hands over."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from .consumer import Consumer
from .epilogue import Epilogue
from .producer import Producer
from .shape import PRODUCER_REGISTERS, WARPGROUP, Shape
from .work import Ring, Work, element, x_layout

READY_BARRIER = 7  # of hardware barriers: the ring's own are initialised


class Gemm:
    """One shape of the kernel, to be compiled; its machine code is launched without this object."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    @cute.jit
    def __call__(self, x: cute.Pointer, m: Int32, k: Int32, stream: cuda.CUstream):
        """Only compiled, never called: it shows CuTe DSL the kernel's arguments."""
        c = self.shape
        k = cute.assume(k, divby=8)
        tensor = cute.make_tensor(x, cute.make_layout((m, k), stride=(k, 1)))
        stage = cute.slice_(x_layout(c), (None, None, 0))
        if const_expr(c.multicast > 1):
            operation: Any = cpasync.CopyBulkTensorTileG2SMulticastOp()
        else:
            operation = cpasync.CopyBulkTensorTileG2SOp()
        x_copy, x_tensor = cpasync.make_tiled_tma_atom(operation, tensor, stage, (c.tokens, c.block_k), c.multicast)
        nothing, zero = Int64(0), Int32(0)
        self.kernel(
            x_copy, x_tensor, nothing, nothing, nothing, nothing, nothing, nothing, zero, zero, zero, zero, zero, zero
        ).launch(
            grid=[1, 1, 1],
            block=[c.threads, 1, 1],
            cluster=[c.multicast, 1, 1] if c.multicast > 1 else None,
            smem=c.smem_bytes,
            min_blocks_per_mp=c.blocks_per_sm,
            # Without this the DSL asks the driver for the device's shared memory, and compiling needs a GPU.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x_copy: cute.CopyAtom,  # with the tensor map of x
        x: cute.Tensor,  # [M, K], coordinates only
        weight: Int64,  # [Np/64, Kp/64, 2304] bytes
        out: Int64,  # [M, N]
        global_scale: Int64,  # float32, `scale_stride` apart
        bias: Int64,  # [N]
        partials: Int64,  # float32, a tile per block
        flags: Int64,  # int32, one per block and warpgroup; zero before and after
        m: Int32,
        n: Int32,
        k_blocks: Int32,  # Kp/64
        scale_stride: Int32,  # 0 or 1
        bias_kind: Int32,  # 0: none, 1: of x's type, 2: float32
        band: Int32,  # token tiles that advance together
    ):
        c = self.shape
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        producer_warp = 4 * c.warpgroups
        ring = Ring(c)
        if warp == producer_warp:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(ring.bars + stage, 1)
                    cute.arch.mbarrier_init(ring.bars + c.stages + stage, WARPGROUP * c.warpgroups * c.multicast)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()  # its other lanes wait on them too
            cpasync.prefetch_descriptor(x_copy)
        if const_expr(c.multicast > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            # The producer made the barriers and needs nobody for its first loads.
            if warp == producer_warp:
                cute.arch.barrier_arrive(barrier_id=READY_BARRIER, number_of_threads=WARPGROUP * c.warpgroups + 32)
            if warp < producer_warp:
                cute.arch.barrier(barrier_id=READY_BARRIER, number_of_threads=WARPGROUP * c.warpgroups + 32)
        work = Work(c, m, n, k_blocks, band)
        if warp >= producer_warp:
            if const_expr(c.consumer_registers):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == producer_warp:
                Producer(c, ring, work, x_copy, x, weight).run()
        else:
            if const_expr(c.consumer_registers):
                cute.arch.setmaxregister_increase(c.consumer_registers)
            cute.arch.griddepcontrol_wait()
            tiled_mma = sm90.make_trivial_tiled_mma(
                element(c),
                element(c),
                OperandMajorMode.K,
                OperandMajorMode.K,
                Float32,
                (1, 1, 1),
                (64, c.tokens),
                warpgroup.OperandSource.RMEM,
            )
            epilogue = Epilogue(c, ring, work, warp, out, global_scale, scale_stride, bias, bias_kind, partials, flags)
            Consumer(c, ring, work, warp, tiled_mma, epilogue).run()
