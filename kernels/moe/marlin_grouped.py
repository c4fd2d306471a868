"""`marlin_grouped`: grouped_gemm for few rows per expert, from the fragment layout; CUDA C++ for sm_80 and newer.

out[rows of e] = x[rows of e] . W_e^T * global_scale_e, float32 accumulation, one rounding: `marlin`'s tiles on the rows
of each expert. Up to DIRECT_ROWS rows it is one launch, whose blocks find their tiles by the offsets; beyond, a launch
before it lists the tiles. Any number of rows is right; above some 64 per expert their products would want larger tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..cuda.compile import cuda_sources
from ..kernel import Config, Kernel, Space
from ..problem import Device, Problem, Verdict
from ._marlin_experts import SHAPES, SPLITS, TOKENS, best, fits, fits_tokens, product_us, sizes, tile
from ._marlin_product import GROUPED, NO_IDS, SOURCE, MarlinExperts, Product
from .cuda_routing import ROUTE, CudaRouting
from .routing import most_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import GroupedLauncher

DIRECT_ROWS = 512  # up to here no tiles are listed: every block looks at all offsets, and there are few blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class MarlinGroupedConfig(Config):
    """One compiled tile."""

    tokens: int  # rows of x, at most
    shape: str  # see `_marlin_experts.SHAPES`
    split: int  # blocks along K


class MarlinGrouped(MarlinExperts):
    """See the module."""

    name = "marlin_grouped"
    op = "grouped_gemm"
    config_type = MarlinGroupedConfig

    def is_valid(self, device: Device, problem: Problem, config: MarlinGroupedConfig, m: int) -> Verdict:
        """Tiles that suit an expert's rows, and what a multiprocessor holds."""
        c, (size,) = config, sizes(problem)
        verdict = fits_tokens(problem, c.tokens, m)
        return verdict and fits(device, problem, size, tile(device, c.tokens, c.shape, c.split), m)

    def space(self, device: Device, problem: Problem) -> Space[MarlinGroupedConfig]:
        """Tiles and splits."""
        return Space(MarlinGroupedConfig, {"tokens": TOKENS, "shape": SHAPES, "split": SPLITS})

    def default_config(self, device: Device, problem: Problem, m: int) -> MarlinGroupedConfig:
        """What `predicted_us` ranks first."""
        return _default(device, problem, m)

    def predicted_us(self, device: Device, problem: Problem, config: MarlinGroupedConfig, m: int) -> float:
        """From bytes, instructions and the number of tiles expected."""
        c, (size,) = config, sizes(problem)
        return product_us(device, problem, size, tile(device, c.tokens, c.shape, c.split), m)

    def build(self, device: Device, problem: Problem, config: MarlinGroupedConfig) -> GroupedLauncher:
        """Compile for the device, x's dtype and the config; sizes stay run-time values."""
        return _Launch(device, problem, config)

    def source_files(self) -> tuple[Path, ...]:
        """Device code with its headers, and the files that say what is compiled and launched."""
        here = Path(__file__).parent
        own = ("marlin_grouped.py", "_marlin_experts.py", "_marlin_product.py", "cuda_routing.py", "routing.py")
        shared = here.parent / "gemm" / "_marlin_model.py"
        return tuple(
            dict.fromkeys((*(here / name for name in own), shared, *cuda_sources(SOURCE), *cuda_sources(ROUTE)))
        )


@cache
def _default(device: Device, problem: Problem, m: int) -> MarlinGroupedConfig:
    tokens, ((shape, split),) = best(device, problem, m)
    return MarlinGroupedConfig(tokens=tokens, shape=shape, split=split)


class _Launch:
    def __init__(self, device: Device, problem: Problem, config: MarlinGroupedConfig) -> None:
        (size,), c = sizes(problem), tile(device, config.tokens, config.shape, config.split)
        self.experts, self.tokens = problem.experts, config.tokens
        self.routing = CudaRouting(device, problem.experts)
        self.product = Product(GROUPED, device, problem, size, problem.n, c)
        self._loaded = False

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None,
        global_scale: Tensor,
        expert_offsets: Tensor,
        out: Tensor,
    ) -> None:
        """The launcher: see `arguments.GroupedLauncher`."""
        if not self._loaded:  # all of it: nothing may be loaded within a graph capture later
            self.routing.load_groups(out.get_device())
            self.product.load(out.get_device())
            self._loaded = True
        m = out.shape[0]
        if m <= DIRECT_ROWS:
            most, tiles_at = most_tiles(m, self.experts, self.tokens), 0
            ids, count = (expert_offsets.data_ptr(), 0, 1, 0, 0, self.experts), m
        else:
            listed = self.routing.groups(expert_offsets, out, self.tokens)  # referred to until the product is launched
            most, tiles_at, ids, count = listed.most_tiles, listed.tiles.data_ptr(), NO_IDS, 0
        self.product(
            torch._C._cuda_getCurrentRawStream(out.get_device()),
            out.device,
            x.data_ptr(),
            weight,
            global_scale,
            out.data_ptr(),
            row=x.stride(0),
            most_tiles=most,
            tiles=tiles_at,
            ids=ids,
            count=count,
        )


KERNEL: Kernel = MarlinGrouped()
