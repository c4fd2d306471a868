"""x in the order of the sorted pairs, for products that read it by TMA: see `gather.cu`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..cuda.compile import compile_cuda
from ..cuda.launch import CudaLaunch
from ..problem import Device
from .cuda_routing import Routed, even_blocks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GATHER", "CudaGather"]

GATHER = Path(__file__).with_name("gather.cu")
THREADS = 256
SEGMENT = 1024  # columns that a warp copies at a time
BLOCKS_PER_UNIT = 5  # of a multiprocessor, for many rows


class CudaGather:
    """Compiled for a device and a dtype.

    Parameters
    ----------
    device
        To compile for.
    dtype
        Of x: "bfloat16" or "float16".
    pdl
        It may start while the kernel before it still runs.
    """

    def __init__(self, device: Device, dtype: str, *, pdl: bool) -> None:
        self._most_blocks = BLOCKS_PER_UNIT * device.units
        self._gather = CudaLaunch(
            compile_cuda(GATHER, device.capability, entry="gather", defines={"HALF": int(dtype == "float16")}),
            fields="7PQ3I",
            block=THREADS,
            smem_bytes=0,
            pdl=pdl,
        )

    def load(self, index: int) -> None:
        """Onto a device."""
        self._gather.load(index)

    def __call__(
        self,
        x: Tensor,
        pre_quant_scale: Tensor | None,
        routed: Routed,
        router: Tensor,
        out: Tensor,
        factors: Tensor,
    ) -> None:
        """out[i] = rounded x[pairs[i] / top_k] * pre_quant_scale, factors[i] = router[pairs[i]], for all sorted pairs.

        x [T, K] may have any strides between rows; K is a multiple of 8, and out [T * top_k, K] contiguous. router is
        float32 [T, top_k], factors float32 [T * top_k].
        """
        rows, k = out.shape
        self._gather.launch(
            even_blocks(-(-rows * -(-k // SEGMENT) // (THREADS // 32)), self._most_blocks),
            1,
            1,
            torch._C._cuda_getCurrentRawStream(x.get_device()),
            x.data_ptr(),
            0 if pre_quant_scale is None else pre_quant_scale.data_ptr(),
            routed.pairs.data_ptr(),
            routed.offsets.data_ptr() + 4 * (len(routed.offsets) - 1),
            router.data_ptr(),
            out.data_ptr(),
            factors.data_ptr(),
            x.stride(0) if len(x) > 1 else k,
            k,
            router.shape[1],
            rows,
        )
