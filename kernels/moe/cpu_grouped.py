"""`cpu_grouped`: grouped_gemm on a CPU; one block of an expert's rows at a time, decoded into cache.

out[rows of e] = x[rows of e] . W_e^T * global_scale_e, float32 products and sums, one rounding. `cpu_decode` says how
weights are decoded. Blocks of all experts are done one after another on torch's intra-op threads, or side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..cpu_decode import Decoder, prepare_tables
from ..kernel import Kernel
from ..problem import Device, Problem
from ._cpu_experts import LOOKUP, Block, CpuExperts, CpuExpertsConfig, blocks, product, run_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import GroupedLauncher


class CpuGrouped(CpuExperts):
    """See the module."""

    name = "cpu_grouped"
    op = "grouped_gemm"

    def build(self, device: Device, problem: Problem, config: CpuExpertsConfig) -> GroupedLauncher:
        """Nothing to compile; the tables are made once per process."""
        return _Launch(config)


class _Launch:
    def __init__(self, config: CpuExpertsConfig) -> None:
        self.config = config
        prepare_tables(LOOKUP)

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
        import torch

        m, n = out.shape
        assert weight_scale is not None, "the layout has one"
        factors = global_scale.detach()
        half = -(-n // factors.shape[1])  # rows per factor
        ends = [min(max(end, 0), m) for end in expert_offsets.tolist()]

        def work(decoder: Decoder, todo: Iterable[Block]) -> None:
            for expert, rows in todo:
                mine = slice(ends[expert], ends[expert + 1])
                factor = factors[expert].repeat_interleave(half)[rows]
                block = weight[expert, rows], weight_scale[expert, rows]
                out[mine, rows] = product(decoder, floats[mine], *block, factor)

        with torch.no_grad():
            floats = x.float()
            out[: ends[0]] = 0
            out[max(ends) :] = 0
            run_blocks(blocks(ends, n, self.config.block_rows), self.config, x.shape[1], work)


KERNEL: Kernel = CpuGrouped()
