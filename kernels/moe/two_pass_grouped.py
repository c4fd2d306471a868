"""`two_pass_grouped`: grouped_gemm for long prefill: active experts to 16 bits in scratch, then a dense product.

`two_pass_grouped_fragment` does the same from the fragment layout. Not with `torch._grouped_mm`: it rounds sums to
bfloat16, and a global scale behind that would round again. sm_80 and newer; float32 accumulation, one rounding.
Nothing is read back to the host.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..kernel import Kernel
from ..problem import Device, Problem
from ._two_pass_experts import Chunks, Dequantise, TwoPassExperts, TwoPassExpertsConfig, wide_rows

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import GroupedLauncher


class TwoPassGrouped(TwoPassExperts):
    """See the module."""

    name = "two_pass_grouped"
    op = "grouped_gemm"

    def build(self, device: Device, problem: Problem, config: TwoPassExpertsConfig) -> GroupedLauncher:
        """Compile for the device, x's dtype and a power of two of experts in a chunk."""
        return _Launch(device, problem, config, self.layout(device, problem))


class _Launch:
    def __init__(self, device: Device, problem: Problem, config: TwoPassExpertsConfig, layout: str) -> None:
        from ._triton_dense_device import dense_grouped

        self.problem, self.chunks = problem, Chunks(device, problem, config)
        self.dequantise = Dequantise(device, problem, problem.n, problem.k, layout, gated=False)
        self.product = self.chunks.product(dense_grouped)

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
        x = wide_rows(x)
        multiply = partial(self._multiply, x, global_scale, expert_offsets, out)
        rows, columns = out.shape
        self.chunks.run(self.dequantise, weight, weight_scale, expert_offsets, x, rows, multiply, columns)

    def _multiply(
        self,
        x: Tensor,
        global_scale: Tensor,
        offsets: Tensor,
        out: Tensor,
        grid: tuple[int, int, int],
        dense: Tensor,
        first: int,
        count: int,
    ) -> None:
        p, (m, n) = self.problem, out.shape
        tensors = (x, dense, global_scale, offsets, out)
        sizes = (m, n, p.k, x.stride(0) // 8, p.experts, first, count, global_scale.shape[1])
        self.product.launch(grid, *tensors, *sizes)


KERNEL: Kernel = TwoPassGrouped()
