"""`triton_moe`: a layer of experts from the checkpoint layout, with Triton; sm_80 and newer.

A chain of kernels: x by planes (with pre_quant_scale); routing; first product with global scales, bias, activation and
one rounding; second product with global scale, bias and the router's weight, in float32; the sum over each token's
experts in the order of its slots, and one rounding. Results do not change from run to run, and nothing is read back to
the host. Weights are decoded as `triton_fused` does it. K is not split.

Many tokens go through the chain in parts, so that float32 results of the second product stay within SUM_BYTES.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..kernel import Kernel
from ..problem import Device, Problem
from ..triton_launch import TRITON_TYPES, TritonLaunch
from ._triton_experts import STEP, Planes, TritonExperts, TritonExpertsConfig, expert_launch
from .routing import TritonRouting, as_words, most_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import MoeArguments, MoeLauncher

SUM_BYTES = 1 << 30  # of results of both products held at a time
SUM_COLUMNS = 1024  # per block of the kernel that adds


class TritonMoe(TritonExperts):
    """See the module."""

    name = "triton_moe"
    op = "moe"

    def build(self, device: Device, problem: Problem, config: TritonExpertsConfig) -> MoeLauncher:
        """Compile for the device, both K's alignment, x's dtype, the activation and a power of two of experts."""
        return _Launch(device, problem, config)


class _Launch:
    def __init__(self, device: Device, problem: Problem, config: TritonExpertsConfig) -> None:
        from ._triton_grouped_device import first_product, second_product, sum_experts

        p = self.problem = problem
        self.config = config
        self.inter_steps = -(-p.n // STEP)
        self.planes = Planes(device, p)
        self.routing = TritonRouting(device, p.experts)
        self.first = expert_launch(first_product, device, p, config, p.k, ACTIVATION=p.activation, GATED=p.gated)
        self.second = expert_launch(second_product, device, p, config, p.n, FLOAT_OUT=True)
        pointers = {"results_ptr": "*fp32", "ids_ptr": "*i32", "map_ptr": "*i32"}
        pointers["out_ptr"] = f"*{TRITON_TYPES[p.dtype]}"
        integers = ("N", "top_k", "experts", "id_words", "map_words", "map_size")
        self.sum = TritonLaunch(
            sum_experts,
            device,
            signature=pointers | dict.fromkeys(integers, "i32"),
            constants={"BLOCK": SUM_COLUMNS},
        )

    def __call__(self, a: MoeArguments, out: Tensor) -> None:
        """The launcher: see `arguments.MoeLauncher`."""
        p, tokens = self.problem, out.shape[0]
        step = max(4, SUM_BYTES // (p.top_k * (4 * p.k + 2 * self.inter_steps * STEP)) // 4 * 4)
        if tokens <= step:
            self._run(a, out)
            return
        for first in range(0, tokens, step):
            some = slice(first, first + step)
            part = replace(a, x=a.x[some], topk_ids=a.topk_ids[some], topk_weights=a.topk_weights[some])
            self._run(part, out[some])

    def _run(self, a: MoeArguments, out: Tensor) -> None:
        p = self.problem
        offsets, order = self.routing(a.topk_ids, a.expert_map)
        between = a.x.new_empty((order.shape[0], self.inter_steps * STEP))
        results = a.topk_weights.new_empty((order.shape[0], p.k))
        tiles = most_tiles(order.shape[0], p.experts, self.config.block_m)  # those of left-out pairs would be behind
        self._first(a, self.planes(a.x, a.pre_quant_scale), offsets, order, between, tiles)
        self._second(a, between, offsets, order, results, tiles)
        ids, id_words = as_words(a.topk_ids)
        known, map_words = (ids, 0) if a.expert_map is None else as_words(a.expert_map)
        map_size = 0 if a.expert_map is None else a.expert_map.numel()
        blocks = out.shape[0] * -(-p.k // SUM_COLUMNS)
        self.sum.launch(
            (blocks, 1, 1), results, ids, known, out, p.k, p.top_k, p.experts, id_words, map_words, map_size
        )

    def _first(
        self, a: MoeArguments, planes: Tensor, offsets: Tensor, order: Tensor, between: Tensor, tiles: int
    ) -> None:
        p, vector = self.problem, a.w2_pre_quant_scale
        assert a.w13_scale is not None, "the layout has one"
        bias, float_bias, bias_kind = _bias(a.w13_bias, planes, a.topk_weights)
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
        bias, float_bias, bias_kind = _bias(a.w2_bias, between, a.topk_weights)
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


def _bias(bias: Tensor | None, low: Tensor, full: Tensor) -> tuple[Tensor, Tensor, int]:
    """The bias in x's dtype, the bias in float32, and which of them is one: 0, 1 or 2. The others are never read."""
    if bias is None:
        return low, full, 0
    return (bias, full, 1) if bias.dtype == low.dtype else (low, bias, 2)


KERNEL: Kernel = TritonMoe()
