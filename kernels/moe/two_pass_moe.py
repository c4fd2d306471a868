"""`two_pass_moe`: a layer of experts for long prefill: active experts to 16 bits in scratch, then dense products.

`two_pass_moe_fragment` does the same from the fragment layout. Routing and the last sum are those of `triton_moe`; x is
gathered by the first product, which applies global scales, bias and activation in float32 and rounds once. Not with
`torch._grouped_mm`, which rounds sums to bfloat16. sm_80 and newer; nothing is read back to the host.

Very many tokens go through in parts, so that float32 results of the second product stay within SUM_BYTES.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..gemm._triton_host import scaled_x
from ..kernel import Kernel
from ..problem import Device, Problem
from ._triton_sum import SUM_BYTES, TritonSum, bias_arguments
from ._two_pass_experts import Chunks, Dequantise, TwoPassExperts, TwoPassExpertsConfig, products, wide_rows
from .arguments import in_parts
from .routing import TritonRouting

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import MoeArguments, MoeLauncher


class TwoPassMoe(TwoPassExperts):
    """See the module."""

    name = "two_pass_moe"
    op = "moe"

    def build(self, device: Device, problem: Problem, config: TwoPassExpertsConfig) -> MoeLauncher:
        """Compile for the device, x's dtype, the activation and powers of two of experts."""
        return _Launch(device, problem, config, self.layout(device, problem))


class _Launch:
    def __init__(self, device: Device, problem: Problem, config: TwoPassExpertsConfig, layout: str) -> None:
        from ._triton_dense_device import dense_first, dense_second

        p = self.problem = problem
        self.routing = TritonRouting(device, p.experts)
        self.chunks = Chunks(device, p, config)
        first, second = products(p)
        self.dequantise_first = Dequantise(device, p, *first, layout, gated=p.gated)
        self.dequantise_second = Dequantise(device, p, *second, layout, gated=False)
        turns = self.dequantise_first.in_turns
        self.first = self.chunks.product(dense_first, ACTIVATION=p.activation, GATED=p.gated, IN_TURNS=turns)
        self.second = self.chunks.product(dense_second, FLOAT_OUT=True)
        self.sum = TritonSum(device, p)

    def __call__(self, a: MoeArguments, out: Tensor) -> None:
        """The launcher: see `arguments.MoeLauncher`."""
        p = self.problem
        step = max(4, SUM_BYTES // (p.top_k * (4 * p.k + 2 * p.n)) // 4 * 4)
        in_parts(a, out, step, self._run)

    def _run(self, a: MoeArguments, out: Tensor) -> None:
        p = self.problem
        offsets, order = self.routing(a.topk_ids, a.expert_map)
        between = a.x.new_empty((order.shape[0], p.n))
        results = a.topk_weights.new_empty((order.shape[0], p.k))
        self._first(a, offsets, order, between)
        self._second(a, offsets, order, between, results)
        self.sum(a, results, out)

    def _first(self, a: MoeArguments, offsets: Tensor, order: Tensor, between: Tensor) -> None:
        p, vector = self.problem, a.w2_pre_quant_scale
        x = wide_rows(scaled_x(a.x, a.pre_quant_scale))
        bias, float_bias, bias_kind = bias_arguments(a.w13_bias, between, a.topk_weights)
        tensors = (a.w13_scale_2, bias, float_bias, between if vector is None else vector, a.topk_weights)

        def multiply(grid: tuple[int, int, int], dense: Tensor, first: int, count: int) -> None:
            self.first.launch(
                grid,
                x,
                dense,
                *tensors,
                offsets,
                order,
                between,
                order.shape[0],
                p.top_k,
                p.n,
                p.k,
                self.dequantise_first.rows,
                x.stride(0) // 8,
                first,
                count,
                a.w13_scale_2.shape[1],
                bias_kind,
                0 if vector is None else 1,
                p.n if vector is not None and vector.ndim == 2 else 0,
                1 if a.weights_on_input else 0,
                *a.constants,
            )

        weights = (a.w13, a.w13_scale)
        self.chunks.run(self.dequantise_first, *weights, offsets, x, order.shape[0], multiply, p.n)

    def _second(self, a: MoeArguments, offsets: Tensor, order: Tensor, between: Tensor, results: Tensor) -> None:
        p = self.problem
        bias, float_bias, bias_kind = bias_arguments(a.w2_bias, between, a.topk_weights)
        tensors = (a.w2_scale_2, bias, float_bias, a.topk_weights, offsets, order, results)
        on_input = 1 if a.weights_on_input else 0

        def multiply(grid: tuple[int, int, int], dense: Tensor, first: int, count: int) -> None:
            sizes = (order.shape[0], p.k, p.n, first, count, bias_kind, on_input)
            self.second.launch(grid, between, dense, *tensors, *sizes)

        weights = (a.w2, a.w2_scale)
        self.chunks.run(self.dequantise_second, *weights, offsets, between, order.shape[0], multiply, p.k)


KERNEL: Kernel = TwoPassMoe()
