"""`triton_grouped`: grouped_gemm from the checkpoint layout; dequantises in registers, as `triton_fused` does.

out[rows of e] = x[rows of e] . W_e^T * global_scale_e, float32 accumulation, one rounding; sm_80 and newer. Which tile
belongs to which expert is found on the device. K is not split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernel import Kernel
from ..problem import Device, Problem
from ._triton_experts import Planes, TritonExperts, TritonExpertsConfig, expert_launch
from .routing import most_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import GroupedLauncher


class TritonGrouped(TritonExperts):
    """See the module."""

    name = "triton_grouped"
    op = "grouped_gemm"

    def build(self, device: Device, problem: Problem, config: TritonExpertsConfig) -> GroupedLauncher:
        """Compile for the device, for this K's alignment, x's dtype and the next power of two of experts."""
        return _Launch(device, problem, config)


class _Launch:
    def __init__(self, device: Device, problem: Problem, config: TritonExpertsConfig) -> None:
        from ._triton_grouped_device import grouped

        self.problem, self.config = problem, config
        self.planes = Planes(device, problem)
        self.product = expert_launch(grouped, device, problem, config, problem.k)

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
        assert weight_scale is not None, "the layout has one"
        p, c, m = self.problem, self.config, x.shape[0]
        tiles = most_tiles(m, p.experts + 2, c.block_m)  # rows before the first and behind the last expert too
        self.product.launch(
            (tiles * -(-p.n // c.block_n), 1, 1),
            self.planes(x, None),
            weight,
            weight_scale,
            global_scale,
            expert_offsets,
            out,
            m,
            p.n,
            p.k,
            p.experts,
            global_scale.shape[1],
        )


KERNEL: Kernel = TritonGrouped()
