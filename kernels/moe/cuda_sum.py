"""The end of a chain of experts in CUDA C++: every token's results added up in the order of its slots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..cuda.compile import compile_cuda
from ..cuda.launch import CudaLaunch
from ..problem import Device
from .cuda_routing import IDS, even_blocks, id_fields

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SUM", "CudaSum"]

SUM = Path(__file__).with_name("sum.cu")
THREADS, COLUMNS = 128, 4  # of a block, of a thread
BLOCKS_PER_UNIT = 8  # of a multiprocessor, for many tokens


class CudaSum:
    """Compiled for a device and a dtype.

    Parameters
    ----------
    device
        To compile for.
    dtype
        Of the sums: "bfloat16" or "float16".
    pdl
        It may start while the kernel before it still runs.
    """

    def __init__(self, device: Device, dtype: str, *, pdl: bool) -> None:
        self._most_blocks = BLOCKS_PER_UNIT * device.units
        self._sum = CudaLaunch(
            compile_cuda(SUM, device.capability, entry="sum", defines={"HALF": int(dtype == "float16")}),
            fields=IDS + "3P3I",
            block=THREADS,
            smem_bytes=0,
            pdl=pdl,
        )

    def __call__(
        self,
        results: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        experts: int,
        out: Tensor,
        router: Tensor | None = None,
    ) -> None:
        """out[t] = rounded sum of results [T * top_k, N] float32 over the slots that `local_experts` keeps.

        Each times its router's weight, float32 [T, top_k], where they are given. N is a multiple of 4, and all tensors
        are contiguous.
        """
        tokens, n = out.shape
        self._sum.launch(
            even_blocks(tokens * -(-n // (THREADS * COLUMNS)), self._most_blocks),
            1,
            1,
            torch._C._cuda_getCurrentRawStream(out.get_device()),
            *id_fields(topk_ids, expert_map, experts),
            results.data_ptr(),
            0 if router is None else router.data_ptr(),
            out.data_ptr(),
            n,
            topk_ids.shape[1],
            tokens,
        )
