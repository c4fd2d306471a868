"""Host side: what is compiled, and how a call is laid out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...cuda.launch import CudaLaunch, dependent_launches
from ...cuda.tensor_map import TensorMaps
from ...cutedsl import compile_cutedsl
from ...problem import Device, Problem
from ...weights.fragment import padded
from ...workspace import zeroed_counters
from . import schedule
from .shape import BLOCK, Shape

if TYPE_CHECKING:
    from torch import Tensor

    from ..cutedsl_wgmma import CuteDslWgmmaConfig

__all__ = ["FIELDS", "Launch", "arguments"]

# The kernel's parameters, in the order of its signature: map of x, shape of x, six addresses, six integers.
FIELDS = ("128s", "2i", *"PPPPPP", *"iiiiii")


class Launch:
    """The launcher of one config; see `kernels.kernel.Launcher`."""

    def __init__(self, device: Device, problem: Problem, config: CuteDslWgmmaConfig, sources: tuple[Path, ...]) -> None:
        self.shape = shape = config.shape(problem)
        self._units, self._band = device.units, config.band
        self._n, self._k_blocks = problem.n, padded(problem.k) // BLOCK
        self.compiled = compile_cutedsl(
            lambda: arguments(shape), device.capability, key=f"cutedsl_wgmma {shape}", sources=sources
        )
        self._launch = CudaLaunch(
            self.compiled,
            fields=FIELDS,
            block=shape.threads,
            smem_bytes=shape.smem_bytes,
            cluster=shape.multicast,
            pdl=dependent_launches(),
            prefer_smem=True,
        )
        self._maps = TensorMaps(problem.dtype, shape.tokens // shape.multicast)
        self._grids: dict[int, tuple[int, int, int]] = {}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None,
        global_scale: Tensor,
        bias: Tensor | None,
        pre_quant_scale: Tensor | None,
        out: Tensor,
    ) -> None:
        """One launch, on the current stream."""
        if pre_quant_scale is not None:
            x = x * pre_quant_scale  # rounded to x's dtype
        m, k = x.shape
        try:
            blocks, floats, flags = self._grids[m]
        except KeyError:
            blocks, floats, flags = self._grids[m] = self.grid(m)
        partials, counters = 0, 0
        if floats:
            workspace = torch.empty(floats, dtype=torch.float32, device=x.device)
            partials = workspace.data_ptr()
            counters = zeroed_counters(x.device, flags).data_ptr()
        address = x.data_ptr()
        self._launch.launch(
            blocks,
            1,
            1,
            torch._C._cuda_getCurrentRawStream(x.device.index),
            self._maps.get(address, m, k, x.stride(0) if m > 1 else k),
            m,
            k,
            weight.data_ptr(),
            out.data_ptr(),
            global_scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            partials,
            counters,
            m,
            self._n,
            self._k_blocks,
            0 if global_scale.shape[0] == 1 else 1,
            0 if bias is None else 1 if bias.dtype == out.dtype else 2,
            self._band,
        )

    def grid(self, m: int) -> tuple[int, int, int]:
        """(blocks, floats of partial sums, flags) for m tokens; no floats where every tile is whole."""
        c = self.shape
        tiles = -(-self._n // (c.rows * c.multicast)) * schedule.token_tiles(m, c.tokens)
        k_tiles = -(-self._k_blocks // c.k_blocks)
        groups = schedule.grid_groups(self._units, c.blocks_per_sm, c.multicast, tiles, k_tiles, c.stream_k)
        blocks = groups * c.multicast
        if not c.stream_k or tiles % groups == 0:
            return blocks, 0, 0
        return blocks, blocks * c.rows * c.tokens, blocks * c.warpgroups


def arguments(shape: Shape) -> tuple[Any, tuple[Any, ...]]:
    """What CuTe DSL compiles: the kernel of a shape, and arguments that only have types."""
    import cuda.bindings.driver as cuda
    from cutlass import Int32, cute
    from cutlass.cute.runtime import make_ptr

    from .kernel import Gemm
    from .work import element

    x = make_ptr(element(shape), 16, cute.AddressSpace.gmem, assumed_align=16)
    return Gemm(shape), (x, Int32(1), Int32(16), cuda.CUstream(0))
