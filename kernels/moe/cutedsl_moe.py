"""`cutedsl_moe`: a layer of experts on Hopper for many tokens, decoding in the registers that wgmma reads. CuTe DSL.

A chain of kernels, each of which may start while the one before it ends: routing; first product with global scales,
bias, activation and one rounding; second product with global scale and bias, in float32; the sum over each token's
experts times the router's weights, in the order of its slots, and one rounding. The products are those of
`cutedsl_grouped`, but the first reads rows of x where they lie. Where it cannot, for TMA has to read them or
something multiplies x or the sums first (see `gathers`), a kernel before it writes x in the order of the sorted pairs,
with pre_quant_scale. Results do not change from run to run, and nothing is read back to the host.

Many tokens go through the chain in parts, so that what stands between its kernels stays within WORKSPACE_BYTES.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..cuda.compile import cuda_sources
from ..kernel import Kernel
from ..problem import Device, Problem
from . import _cutedsl_config as configs
from ._cutedsl_config import CuteDslExpertsConfig
from .arguments import in_parts
from .cuda_gather import GATHER
from .cuda_sum import SUM
from .cutedsl_grouped import CuteDslExperts

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import MoeArguments, MoeLauncher

WORKSPACE_BYTES = 1 << 30
MOST_VALUES = 1 << 35  # of x with what lies between its rows: where one begins is counted in 16 bytes, in 32 bits


class CuteDslMoe(CuteDslExperts):
    """See the module."""

    name = "cutedsl_moe"
    op = "moe"
    # Ahead of `marlin_moe` at 512 tokens (Qwen3-30B-A3B 156 and 231 us, DeepSeek-V3 2,161 and 2,577; H200, 2026-12), at
    # 256 with the first only (131 and 152, 2,086 and 1,953).
    made_for = ((257, None),)

    def build(self, device: Device, problem: Problem, config: CuteDslExpertsConfig) -> MoeLauncher:
        """Compile for x's dtype and the activation; sizes stay run-time values."""
        return _Launch(device, problem, config)

    def source_files(self) -> tuple[Path, ...]:
        """More kernels than a product alone has."""
        here = Path(__file__).parent
        own = tuple(here / name for name in ("cuda_gather.py", "cuda_sum.py", "activations.py"))
        return tuple(
            dict.fromkeys((*CuteDslExperts.source_files(self), *own, *cuda_sources(GATHER), *cuda_sources(SUM)))
        )


class _Launch:
    def __init__(self, device: Device, problem: Problem, config: CuteDslExpertsConfig) -> None:
        from ._cutedsl_experts.launch import ProductLaunch
        from .cuda_gather import CudaGather
        from .cuda_routing import CudaRouting
        from .cuda_sum import CudaSum

        self.problem, self._tokens = problem, config.tokens
        self.routing = CudaRouting(device, problem.experts)
        self.gather = CudaGather(device, problem.dtype, pdl=True)
        (first, second), (activated, summand) = configs.sizes(problem), configs.shapes(problem, config)
        self.gathering_first, self.first, self.second = (
            ProductLaunch(device, shape, rows=size.rows, k=size.k, n=size.n, band=config.band, pdl=True)
            for size, shape in ((first, replace(activated, gathered=True)), (first, activated), (second, summand))
        )
        self.sum = CudaSum(device, problem.dtype, pdl=True)
        self._loaded = False

    def __call__(self, a: MoeArguments, out: Tensor) -> None:
        """The launcher: see `arguments.MoeLauncher`."""
        if not self._loaded:  # both ways: nothing may be loaded within a graph capture later
            for kernel in (self.gather, self.first, self.gathering_first):
                kernel.load(out.get_device())
            self._loaded = True
        p, tokens = self.problem, out.shape[0]
        parts = -(-tokens // max(1, WORKSPACE_BYTES // (p.top_k * (4 * p.k + 2 * p.n))))
        in_parts(a, out, -(-tokens // parts), self._run)

    def _run(self, a: MoeArguments, out: Tensor) -> None:
        p, pairs = self.problem, a.topk_ids.numel()
        routed = self.routing(a.topk_ids, a.expert_map, self._tokens)
        results = a.topk_weights.new_empty((pairs, p.k))
        between = a.x.new_empty((pairs, p.n))
        if gathers(a):
            self.gathering_first(
                a.x,
                a.w13,
                a.w13_scale_2,
                routed,
                between,
                bias=a.w13_bias,
                pairs=routed.pairs,
                vector=a.w2_pre_quant_scale,
                constants=a.constants,
                top_k=p.top_k,
            )
        else:
            # The first product has read x when the second begins to write: they share memory.
            x = results.view(-1).view(a.x.dtype)[: pairs * p.k].view(pairs, p.k)
            factors = a.topk_weights.new_empty(pairs)
            self.gather(a.x, a.pre_quant_scale, routed, a.topk_weights, x, factors)
            self.first(
                x,
                a.w13,
                a.w13_scale_2,
                routed,
                between,
                bias=a.w13_bias,
                factors=factors if a.weights_on_input else None,
                vector=a.w2_pre_quant_scale,
                constants=a.constants,
            )
        self.second(
            between,
            a.w2,
            a.w2_scale_2,
            routed,
            results,
            turn=1,
            bias=a.w2_bias,
            pairs=routed.pairs,
        )
        router = None if a.weights_on_input else a.topk_weights
        self.sum(results, a.topk_ids, a.expert_map, p.experts, out, router)


def gathers(a: MoeArguments) -> bool:
    """Whether the first product can read x where it lies.

    Rows begin on 16-byte boundaries, and neither pre_quant_scale nor router weights on the input come before it.
    """
    x, stride = a.x, a.x.stride(0)
    aligned = x.data_ptr() % 16 == 0 and (len(x) == 1 or (stride % 8 == 0 and len(x) * stride <= MOST_VALUES))
    return aligned and a.pre_quant_scale is None and not a.weights_on_input


KERNEL: Kernel = CuteDslMoe()
