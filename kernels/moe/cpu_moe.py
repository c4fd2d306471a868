"""`cpu_moe`: a layer of experts on a CPU; one block of an expert's rows at a time, decoded into cache.

Routing, first product with the activation, second product, sum over a token's experts. Products, sums, the activation,
router weights and global scales are float32; the activation's result is rounded once to x's dtype, and so is the sum.
`cpu_decode` says how weights are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..cpu_decode import Decoder, prepare_tables
from ..kernel import Kernel
from ..problem import Device, Problem
from ._cpu_experts import LOOKUP, Block, CpuExperts, CpuExpertsConfig, blocks, product, run_blocks
from .activations import activate
from .arguments import in_parts
from .routing import route

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import MoeArguments, MoeLauncher

SUM_BYTES = 256 << 20  # of float32 results of the second product held at a time


class CpuMoe(CpuExperts):
    """See the module."""

    name = "cpu_moe"
    op = "moe"

    def build(self, device: Device, problem: Problem, config: CpuExpertsConfig) -> MoeLauncher:
        """Nothing to compile; the tables are made once per process."""
        return _Launch(problem, config)


class _Launch:
    def __init__(self, problem: Problem, config: CpuExpertsConfig) -> None:
        self.problem, self.config = problem, config
        prepare_tables(LOOKUP)

    def __call__(self, a: MoeArguments, out: Tensor) -> None:
        """The launcher: see `arguments.MoeLauncher`."""
        import torch

        step = max(1, SUM_BYTES // (4 * self.problem.k * self.problem.top_k))
        with torch.no_grad():
            in_parts(a, out, step, self._run)

    def _run(self, a: MoeArguments, out: Tensor) -> None:
        p = self.problem
        offsets, order = route(a.topk_ids, p.experts, a.expert_map)
        ends, pairs = offsets.tolist(), order.long()
        between = self._first(a, ends, pairs)
        results = between.new_zeros((out.shape[0], p.top_k, p.k), dtype=a.topk_weights.dtype)
        self._second(a, ends, pairs, between, results.view(-1, p.k))
        out.copy_(results.sum(1))

    def _first(self, a: MoeArguments, ends: list[int], pairs: Tensor) -> Tensor:
        """Activations [pairs in order, inter], in x's dtype."""
        p = self.problem
        x = (a.x if a.pre_quant_scale is None else a.x * a.pre_quant_scale).float()
        result = a.x.new_empty((ends[-1], p.n))
        scale = a.w13_scale
        assert scale is not None, "the layout has one"
        vectors = None if a.w2_pre_quant_scale is None else a.w2_pre_quant_scale.expand(p.experts, p.n)

        def half(decoder: Decoder, h: Tensor, expert: int, rows: slice, part: int) -> Tensor:
            rows = slice(part * p.n + rows.start, part * p.n + rows.stop)
            factor = a.w13_scale_2[expert, part % a.w13_scale_2.shape[1]]
            y = product(decoder, h, a.w13[expert, rows], scale[expert, rows], factor)
            return y if a.w13_bias is None else y + a.w13_bias[expert, rows]

        def work(decoder: Decoder, todo: Iterable[Block]) -> None:
            for expert, rows in todo:
                mine = slice(ends[expert], ends[expert + 1])
                h = x[pairs[mine] // p.top_k]
                g = half(decoder, h, expert, rows, 0)
                u = half(decoder, h, expert, rows, 1) if p.gated else None
                if a.weights_on_input:
                    router = a.topk_weights.view(-1, 1)[pairs[mine]]
                    g, u = g * router, None if u is None else u * router
                m = activate(p.activation, g, u, a.constants).to(result.dtype)
                result[mine, rows] = m if vectors is None else m * vectors[expert, rows]

        run_blocks(blocks(ends, p.n, self.config.block_rows), self.config, p.k, work)
        return result

    def _second(self, a: MoeArguments, ends: list[int], pairs: Tensor, between: Tensor, results: Tensor) -> None:
        """Rows `pairs` of results [pairs, hidden]: the second product, times the router's weight."""
        p = self.problem
        floats, scale = between.float(), a.w2_scale
        assert scale is not None, "the layout has one"

        def work(decoder: Decoder, todo: Iterable[Block]) -> None:
            for expert, rows in todo:
                mine = slice(ends[expert], ends[expert + 1])
                block = a.w2[expert, rows], scale[expert, rows]
                y = product(decoder, floats[mine], *block, a.w2_scale_2[expert])
                if a.w2_bias is not None:
                    y = y + a.w2_bias[expert, rows]
                if not a.weights_on_input:
                    y = y * a.topk_weights.view(-1, 1)[pairs[mine]]
                results[pairs[mine], rows] = y

        run_blocks(blocks(ends, p.k, self.config.block_rows), self.config, p.n, work)


KERNEL: Kernel = CpuMoe()
