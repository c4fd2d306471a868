"""One product of `marlin_grouped` or `marlin_moe`: compiled, and launched on the tiles of a routing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..cuda.compile import compile_cuda
from ..cuda.launch import CudaLaunch, dependent_launches
from ..gemm._marlin_model import MarlinConfig, macros
from ..problem import Device, Problem
from ..weights.fragment import BLOCK_BYTES, padded
from ..workspace import zeroed_counters
from ._marlin_experts import Size, blocks_per_sm, row_tiles, smem_bytes
from .activations import ACTIVATIONS, Constants
from .cuda_routing import IDS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FIRST", "GROUPED", "SECOND", "SOURCE", "Found", "Product"]

SOURCE = Path(__file__).with_name("marlin_experts.cu")
FIELDS = f"12P{IDS}2Q8I3f"  # struct Args of the source
FIRST, SECOND, GROUPED = range(3)  # enum Product
NO_IDS = (0, 0, 0, 0, 0, 0)
NO_CONSTANTS = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """Where a product finds its tiles: in a list with or without pairs, or by the ids themselves."""

    most_tiles: int
    tiles: Tensor | None = None
    pairs: Tensor | None = None
    ids: tuple[int, ...] = NO_IDS  # values of struct Ids, of so many pairs:
    count: int = 0


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
            for first in ((False, True) if kind == FIRST else (False,))
            for scaled in ((False, True) if kind == FIRST else (False,))
        }

    def load(self, index: int) -> None:
        """Onto a device, all variants."""
        for launch in self.launches.values():
            launch.load(index)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        global_scale: Tensor,
        out: Tensor,
        found: Found,
        *,
        top_k: int = 1,
        bias: Tensor | None = None,
        pre_quant_scale: Tensor | None = None,
        next_scale: Tensor | None = None,
        router: Tensor | None = None,
        constants: Constants = NO_CONSTANTS,
    ) -> None:
        """Launch it on the current stream; the source says what the arguments are."""
        c, most = self.c, found.most_tiles
        first = found.tiles is None and (True, False) in self.launches  # no kernel of our own comes before
        partial = counters = 0
        if c.split > 1 and c.meet == "memory":
            met = most * self.row_tiles
            space = global_scale.new_empty(met * c.split * c.tokens * c.rows)
            partial, counters = space.data_ptr(), zeroed_counters(out.device, met).data_ptr()
        self.launches[first, pre_quant_scale is not None].launch(
            most * self.row_tiles * c.split,
            1,
            1,
            torch._C._cuda_getCurrentRawStream(out.get_device()),
            weight.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            global_scale.data_ptr(),
            _address(bias),
            _address(pre_quant_scale),
            _address(next_scale),
            _address(router),
            _address(found.tiles),
            _address(found.pairs),
            partial,
            counters,
            *found.ids,
            self.expert_bytes,
            x.stride(0),
            found.count,
            top_k,
            self.n,
            self.size.k,
            self.row_tiles,
            global_scale.shape[1],
            0 if bias is None else 1 if bias.dtype == x.dtype else 2,
            self.n if next_scale is not None and next_scale.ndim == 2 else 0,
            *constants,
        )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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
