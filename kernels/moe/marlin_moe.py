"""`marlin_moe`: a layer of experts for few rows per expert, from the fragment layouts; CUDA C++ for sm_80 and newer.

A chain of kernels, each of which may start while the one before it ends (sm_90 and newer): routing, unless there are so
few pairs that the first product finds its tiles by itself; the first product with global scales, bias, activation and
one rounding; the second with global scale, bias and the router's weight, in float32; the sum over each token's experts
in the order of its slots, and one rounding. Both products are `marlin`'s tiles on the rows of each expert, gathered
where they lie. Results do not change from run to run, and nothing is read back to the host.

Any number of tokens is right, in parts of which the results stay within SUM_BYTES; above some 64 rows per expert the
products would want larger tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..cuda.compile import cuda_sources
from ..gemm._marlin_model import MarlinConfig
from ..kernel import Config, Kernel, Space
from ..problem import Device, Problem, Verdict
from ._marlin_experts import SHAPES, SPLITS, TOKENS, best, fits, fits_tokens, product_us, sizes, tile
from ._marlin_product import FIRST, NO_IDS, SECOND, SOURCE, MarlinExperts, Product
from .arguments import in_parts
from .cuda_routing import ROUTE, CudaRouting, id_fields
from .cuda_sum import SUM, CudaSum
from .routing import most_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import MoeArguments, MoeLauncher

SUM_BYTES = 1 << 30  # of results of both products held at a time
DIRECT_PAIRS = 64  # up to here no routing is launched: two ids a lane


@dataclass(frozen=True, slots=True, kw_only=True)
class MarlinMoeConfig(Config):
    """One compiled tile for each product."""

    tokens: int  # rows of x, at most
    first: str  # see `_marlin_experts.SHAPES`
    first_split: int  # blocks along K
    second: str
    second_split: int


class MarlinMoe(MarlinExperts):
    """See the module."""

    name = "marlin_moe"
    op = "moe"
    config_type = MarlinMoeConfig

    def is_valid(self, device: Device, problem: Problem, config: MarlinMoeConfig, m: int) -> Verdict:
        """Tiles that suit an expert's rows, and what a multiprocessor holds."""
        verdict = fits_tokens(problem, config.tokens, m)
        for size, c in zip(sizes(problem), tiles(device, config), strict=True):
            verdict = verdict and fits(device, problem, size, c, m)
        return verdict

    def space(self, device: Device, problem: Problem) -> Space[MarlinMoeConfig]:
        """Tiles and splits."""
        choices = {"first": SHAPES, "first_split": SPLITS, "second": SHAPES, "second_split": SPLITS}
        return Space(MarlinMoeConfig, {"tokens": TOKENS, **choices})

    def default_config(self, device: Device, problem: Problem, m: int) -> MarlinMoeConfig:
        """What `predicted_us` ranks first."""
        return _default(device, problem, m)

    def predicted_us(self, device: Device, problem: Problem, config: MarlinMoeConfig, m: int) -> float:
        """Of both products: from bytes, instructions and the number of tiles expected."""
        products = zip(sizes(problem), tiles(device, config), strict=True)
        return sum(product_us(device, problem, size, c, m) for size, c in products)

    def build(self, device: Device, problem: Problem, config: MarlinMoeConfig) -> MoeLauncher:
        """Compile for the device, x's dtype, the activation and the config; sizes stay run-time values."""
        return _Launch(device, problem, config)

    def source_files(self) -> tuple[Path, ...]:
        """Device code with its headers, and the files that say what is compiled and launched."""
        here = Path(__file__).parent
        own = ("marlin_moe", "_marlin_experts", "_marlin_product", "cuda_routing", "cuda_sum", "routing", "activations")
        shared = here.parent / "gemm" / "_marlin_model.py"
        sources = (path for source in (SOURCE, ROUTE, SUM) for path in cuda_sources(source))
        return tuple(dict.fromkeys((*(here / f"{name}.py" for name in own), shared, *sources)))


def tiles(device: Device, config: MarlinMoeConfig) -> tuple[MarlinConfig, MarlinConfig]:
    """Of both products."""
    first = tile(device, config.tokens, config.first, config.first_split)
    return first, tile(device, config.tokens, config.second, config.second_split)


@cache
def _default(device: Device, problem: Problem, m: int) -> MarlinMoeConfig:
    tokens, ((first, first_split), (second, second_split)) = best(device, problem, m)
    return MarlinMoeConfig(
        tokens=tokens, first=first, first_split=first_split, second=second, second_split=second_split
    )


class _Launch:
    def __init__(self, device: Device, problem: Problem, config: MarlinMoeConfig) -> None:
        p = self.problem = problem
        self.tokens = config.tokens
        self.routing = CudaRouting(device, p.experts)
        (first, second), (first_tile, second_tile) = sizes(p), tiles(device, config)
        self.first = Product(FIRST, device, p, first, p.n, first_tile)
        self.second = Product(SECOND, device, p, second, p.k, second_tile)
        self.sum = CudaSum(device, p.dtype, pdl=device.capability >= (9, 0))
        # Tokens at a time: of the first product inter values in x's dtype, of the second hidden ones in float32.
        self.step = max(1, SUM_BYTES // (p.top_k * (4 * p.k + 2 * p.n)))
        self._loaded = False

    def __call__(self, a: MoeArguments, out: Tensor) -> None:
        """The launcher: see `arguments.MoeLauncher`."""
        if not self._loaded:  # all of it: nothing may be loaded within a graph capture later
            self.routing.load(out.get_device())
            self.first.load(out.get_device())
            self._loaded = True
        in_parts(a, out, self.step, self._run)

    def _run(self, a: MoeArguments, out: Tensor) -> None:
        p, x, topk_ids, device = self.problem, a.x, a.topk_ids, out.device
        stream = torch._C._cuda_getCurrentRawStream(out.get_device())
        pairs = topk_ids.shape[0] * p.top_k
        # One allocation, because each costs microseconds: the results, float32, and behind them what lies between.
        results = x.new_empty(pairs * (2 * p.k + p.n))
        results_at = results.data_ptr()
        between_at = results_at + 4 * pairs * p.k
        if pairs <= DIRECT_PAIRS:
            most, tiles_at, pairs_at, count = most_tiles(pairs, p.experts, self.tokens), 0, 0, pairs
            ids = id_fields(topk_ids, a.expert_map, p.experts)
        else:
            routed = self.routing(topk_ids, a.expert_map, self.tokens)
            most, ids, count = routed.most_tiles, NO_IDS, 0
            tiles_at, pairs_at = routed.tiles.data_ptr(), routed.pairs.data_ptr()
        self.first(
            stream,
            device,
            x.data_ptr(),
            a.w13,
            a.w13_scale_2,
            between_at,
            row=x.stride(0),
            most_tiles=most,
            tiles=tiles_at,
            pairs=pairs_at,
            ids=ids,
            count=count,
            top_k=p.top_k,
            bias=a.w13_bias,
            x_dtype=x.dtype,
            pre_quant_scale=a.pre_quant_scale,
            next_scale=a.w2_pre_quant_scale,
            router=a.topk_weights if a.weights_on_input else None,
            constants=a.constants,
        )
        self.second(
            stream,
            device,
            between_at,
            a.w2,
            a.w2_scale_2,
            results_at,
            row=p.n,
            most_tiles=most,
            tiles=tiles_at,
            pairs=pairs_at,
            ids=ids,
            count=count,
            bias=a.w2_bias,
            x_dtype=x.dtype,
            router=None if a.weights_on_input else a.topk_weights,
        )
        self.sum(results, topk_ids, a.expert_map, p.experts, out)


KERNEL: Kernel = MarlinMoe()
