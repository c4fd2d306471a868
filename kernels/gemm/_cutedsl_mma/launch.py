"""Host side: what is compiled, and how a call is laid out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...cuda.launch import CudaLaunch, dependent_launches
from ...cutedsl import compile_cutedsl
from ...problem import Device, Problem
from ...workspace import zeroed_counters
from .shape import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from ..cutedsl_mma import CuteDslMmaConfig

__all__ = ["FIELDS", "Launch", "arguments"]

# The kernel's parameters, in the order of its signature: seven addresses, the stride of x, five integers.
FIELDS = (*"PPPPPPP", "q", *"iiiii")


class Launch:
    """The launcher of one config; see `kernels.kernel.Launcher`."""

    def __init__(self, device: Device, problem: Problem, config: CuteDslMmaConfig, sources: tuple[Path, ...]) -> None:
        self.shape = shape = config.shape(device, problem)
        self._n, self._k = problem.n, problem.k
        self._row_tiles = -(-problem.n // shape.rows)
        self.compiled = compile_cutedsl(
            lambda: arguments(shape), device.capability, key=f"cutedsl_mma {shape}", sources=sources
        )
        self._launch = CudaLaunch(
            self.compiled,
            fields=FIELDS,
            block=shape.threads,
            smem_bytes=shape.smem_bytes,
            pdl=shape.hopper and dependent_launches(),
            prefer_smem=True,
        )

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
        c = self.shape
        m = x.shape[0]
        tiles, floats = self.grid(m)
        partials = counters = 0
        if floats:
            workspace = global_scale.new_empty(floats)
            partials, counters = workspace.data_ptr(), zeroed_counters(x.device, tiles).data_ptr()
        self._launch.launch(
            tiles,
            c.split,
            1,
            torch._C._cuda_getCurrentRawStream(x.device.index),
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            global_scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            partials,
            counters,
            x.stride(0) if m > 1 else self._k,
            m,
            self._n,
            self._k,
            0 if global_scale.shape[0] == 1 else 1,
            0 if bias is None else 1 if bias.dtype == out.dtype else 2,
        )

    def grid(self, m: int) -> tuple[int, int]:
        """(tiles, floats of partial sums) for m tokens; no floats where every block has a tile of its own."""
        c = self.shape
        tiles = self._row_tiles * -(-m // c.tokens)
        return tiles, tiles * c.split * c.rows * c.tokens if c.split > 1 else 0


def arguments(shape: Shape) -> tuple[Any, tuple[Any, ...]]:
    """What CuTe DSL compiles: the kernel of a shape, and arguments that only have types."""
    import cuda.bindings.driver as cuda

    from .kernel import Gemm

    return Gemm(shape), (cuda.CUstream(0),)
