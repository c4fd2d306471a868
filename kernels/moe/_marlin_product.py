"""What `marlin_grouped` and `marlin_moe` share: where they run, and a product launched on the tiles of a routing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..cuda.compile import compile_cuda
from ..cuda.launch import CudaLaunch, dependent_launches
from ..gemm._marlin_model import MarlinConfig, macros
from ..kernel import Kernel
from ..problem import Device, Problem, Verdict
from ..weights.fragment import BLOCK_BYTES, fragment_id, padded
from ..workspace import zeroed_counters
from ._marlin_experts import Size, blocks_per_sm, row_tiles, smem_bytes, supports
from .activations import ACTIVATIONS, Constants
from .cuda_routing import IDS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FIRST", "GROUPED", "SECOND", "SOURCE", "MarlinExperts", "Product"]

SOURCE = Path(__file__).with_name("marlin_experts.cu")
FIELDS = f"12P{IDS}2Q8I3f"  # struct Args of the source
FIRST, SECOND, GROUPED = range(3)  # enum Product
NO_IDS = (0, 0, 0, 0, 0, 0)
NO_CONSTANTS = (0.0, 0.0, 0.0)


class MarlinExperts(Kernel):
    """Layout, devices and range of both kernels."""

    packages = ("nvidia-cuda-nvrtc",)
    made_for = ((1, 256), (1, None))

    def layout(self, device: Device, problem: Problem) -> str:
        """Fragment order, in the encoding for the device and x's dtype."""
        return fragment_id(device.capability, problem.dtype)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """CUDA, sm_80 and newer."""
        return supports(device, problem)


class Product:
    """Compiled for a device, a dtype, a tile and what becomes of the sums.

    Parameters
    ----------
    kind
        FIRST, SECOND or GROUPED.
    size
        Of an expert's weight.
    n
        Its outputs: for FIRST inter.
    """

    def __init__(self, kind: int, device: Device, problem: Problem, size: Size, n: int, c: MarlinConfig) -> None:
        self.size, self.n, self.c = size, n, c
        self.row_tiles = row_tiles(size, c)
        self.expert_bytes = size.rows // 64 * (padded(size.k) // 64) * BLOCK_BYTES
        self.meets_in_memory = c.split > 1 and c.meet == "memory"
        self.may_be_first = kind != SECOND  # without a list no kernel of our own comes before
        number = [entry.name for entry in ACTIVATIONS].index(problem.activation) if kind == FIRST else 0
        # After a kernel of our own it may start while that one ends; after others only if that is asked for.
        chained = device.capability >= (9, 0)
        self.launches = {
            (first, scaled): _compiled(
                device,
                problem,
                size,
                c,
                scaled=scaled,
                pdl=dependent_launches() if first else chained,
                PRODUCT=kind,
                ACTIVATION=number,
            )
            for first in ((False, True) if self.may_be_first else (False,))
            for scaled in ((False, True) if kind == FIRST else (False,))
        }

    def load(self, index: int) -> None:
        """Onto a device, all variants."""
        for launch in self.launches.values():
            launch.load(index)

    def __call__(
        self,
        stream: int,
        device: torch.device,
        x: int,
        weight: Tensor,
        global_scale: Tensor,
        out: int,
        *,
        row: int,
        most_tiles: int,
        tiles: int = 0,
        pairs: int = 0,
        ids: tuple[int, ...] = NO_IDS,
        count: int = 0,
        top_k: int = 1,
        bias: Tensor | None = None,
        x_dtype: torch.dtype | None = None,
        pre_quant_scale: Tensor | None = None,
        next_scale: Tensor | None = None,
        router: Tensor | None = None,
        constants: Constants = NO_CONSTANTS,
    ) -> None:
        """Launch it; the source says what the arguments are. What the chain itself makes comes as addresses.

        Parameters
        ----------
        stream, device
            The current ones.
        row
            Elements from one row of x to the next.
        most_tiles, tiles, pairs, ids, count
            Where it finds its tiles, at most so many: in a list, with or without pairs, or by the ids themselves, given
            as values of struct Ids, of so many pairs. For GROUPED in a list or by offsets, given as ids, of so many
            rows of out.
        x_dtype
            Which of its two dtypes a bias has.
        """
        c = self.c
        grid = most_tiles * self.row_tiles * c.split
        partial = counters = 0
        if self.meets_in_memory:
            met = most_tiles * self.row_tiles
            space = global_scale.new_empty(met * c.split * c.tokens * c.rows)
            partial, counters = space.data_ptr(), zeroed_counters(device, met).data_ptr()
        launch = self.launches[self.may_be_first and not tiles, pre_quant_scale is not None]
        launch.launch(
            grid,
            1,
            1,
            stream,
            weight.data_ptr(),
            x,
            out,
            global_scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if pre_quant_scale is None else pre_quant_scale.data_ptr(),
            0 if next_scale is None else next_scale.data_ptr(),
            0 if router is None else router.data_ptr(),
            tiles,
            pairs,
            partial,
            counters,
            *ids,
            self.expert_bytes,
            row,
            count,
            top_k,
            self.n,
            self.size.k,
            self.row_tiles,
            global_scale.shape[1],
            0 if bias is None else 1 if bias.dtype == x_dtype else 2,
            self.n if next_scale is not None and next_scale.ndim == 2 else 0,
            *constants,
        )


def _compiled(
    device: Device, problem: Problem, size: Size, c: MarlinConfig, *, scaled: bool, pdl: bool, **kinds: int
) -> CudaLaunch:
    smem = smem_bytes(c, scaled=scaled)
    blocks = blocks_per_sm(device, c)
    told = macros(device, problem.dtype, size.k, c, scaled=scaled, blocks=blocks, smem_bytes=smem)
    return CudaLaunch(
        compile_cuda(SOURCE, device.capability, entry="experts", defines=told | kinds),
        fields=FIELDS,
        block=c.threads,
        smem_bytes=smem,
        cluster=c.split if c.meet == "cluster" else 1,
        pdl=pdl,
        prefer_smem=True,
    )
