"""`triton_moe`: a layer of experts from the checkpoint layout, with Triton; sm_80 and newer.

A chain of kernels: x by planes (with pre_quant_scale); routing; first product with global scales, bias, activation and
one rounding; second product with global scale, bias and the router's weight, in float32; the sum over each token's
experts in the order of its slots, and one rounding. Results do not change from run to run, and nothing is read back to
the host. Weights are decoded as `triton_fused` does it. K is not split.

Many tokens go through the chain in parts, so that float32 results of the second product stay within SUM_BYTES.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernel import Kernel
from ..problem import Device, Problem
from ._triton_experts import STEP, Planes, TritonExperts, TritonExpertsConfig, expert_launch
from ._triton_sum import SUM_BYTES, TritonSum, bias_arguments
from .arguments import in_parts
from .routing import TritonRouting, most_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import MoeArguments, MoeLauncher


class TritonMoe(TritonExperts):
    """See the module."""

    name = "triton_moe"
    op = "moe"

    def build(self, device: Device, problem: Problem, config: TritonExpertsConfig) -> MoeLauncher:
        """Compile for the device, both K's alignment, x's dtype, the activation and a power of two of experts."""
        return _Launch(device, problem, config)


class _Launch:
    def __init__(self, device: Device, problem: Problem, config: TritonExpertsConfig) -> None:
        from ._triton_grouped_device import first_product, second_product

        p = self.problem = problem
        self.config = config
        self.inter_steps = -(-p.n // STEP)
        self.planes = Planes(device, p)
        self.routing = TritonRouting(device, p.experts)
        self.first = expert_launch(first_product, device, p, config, p.k, ACTIVATION=p.activation, GATED=p.gated)
        self.second = expert_launch(second_product, device, p, config, p.n, FLOAT_OUT=True)
        self.sum = TritonSum(device, p)

    def __call__(self, a: MoeArguments, out: Tensor) -> None:
        """The launcher: see `arguments.MoeLauncher`."""
        p = self.problem
        step = max(4, SUM_BYTES // (p.top_k * (4 * p.k + 2 * self.inter_steps * STEP)) // 4 * 4)
        in_parts(a, out, step, self._run)

    def _run(self, a: MoeArguments, out: Tensor) -> None:
        p = self.problem
        offsets, order = self.routing(a.topk_ids, a.expert_map)
        between = a.x.new_empty((order.shape[0], self.inter_steps * STEP))
        results = a.topk_weights.new_empty((order.shape[0], p.k))
        tiles = most_tiles(order.shape[0], p.experts, self.config.block_m)  # those of left-out pairs would be behind
        self._first(a, self.planes(a.x, a.pre_quant_scale), offsets, order, between, tiles)
        self._second(a, between, offsets, order, results, tiles)
        self.sum(a, results, out)

    def _first(
        self, a: MoeArguments, planes: Tensor, offsets: Tensor, order: Tensor, between: Tensor, tiles: int
    ) -> None:
        p, vector = self.problem, a.w2_pre_quant_scale
        assert a.w13_scale is not None, "the layout has one"
        bias, float_bias, bias_kind = bias_arguments(a.w13_bias, planes, a.topk_weights)
        self.first.launch(
            (tiles * (self.inter_steps * STEP // self.config.block_n), 1, 1),
            planes,
            a.w13,
            a.w13_scale,
            a.w13_scale_2,
            bias,
            float_bias,
            planes if vector is None else vector,
            a.topk_weights,
            offsets,
            order,
            between,
            order.shape[0],
            p.top_k,
            p.n,
            p.k,
            p.experts,
            a.w13_scale_2.shape[1],
            bias_kind,
            0 if vector is None else 1,
            p.n if vector is not None and vector.ndim == 2 else 0,
            1 if a.weights_on_input else 0,
            *a.constants,
        )

    def _second(
        self, a: MoeArguments, between: Tensor, offsets: Tensor, order: Tensor, results: Tensor, tiles: int
    ) -> None:
        p = self.problem
        assert a.w2_scale is not None, "the layout has one"
        bias, float_bias, bias_kind = bias_arguments(a.w2_bias, between, a.topk_weights)
        self.second.launch(
            (tiles * -(-p.k // self.config.block_n), 1, 1),
            between,
            a.w2,
            a.w2_scale,
            a.w2_scale_2,
            bias,
            float_bias,
            a.topk_weights,
            offsets,
            order,
            results,
            order.shape[0],
            p.k,
            p.n,
            p.experts,
            bias_kind,
            1 if a.weights_on_input else 0,
        )


KERNEL: Kernel = TritonMoe()
