"""Random inputs of a gemm, of the kinds that have broken kernels before, and their right results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..kernels import reference
from ..kernels.kernel import Launcher
from ..kernels.problem import Problem
from ..kernels.weights.layouts import to_layout
from .close import assert_gemm_close

__all__ = ["GemmCase"]

_Arguments = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class GemmCase:
    """One random input of a gemm, with its weight in the layout `layout_id`."""

    layout_id: str
    x_buffer: Tensor  # [M + 1, stride], NaN outside x
    x: Tensor  # [M, K], a view of it
    nan_row: int | None
    weight: Tensor  # checkpoint form
    scale: Tensor
    global_scale: Tensor
    bias: Tensor | None
    pre_quant_scale: Tensor | None

    @staticmethod
    def random(problem: Problem, m: int, seed: int, device: torch.device, layout_id: str) -> GemmCase:
        """A case whose features the seed decides: see `conformance.check`."""
        per_row, pre_quant, strided, signed = (bool(seed >> bit & 1) for bit in range(4))
        bias_dtype = (None, getattr(torch, problem.dtype), torch.float32)[seed % 3]
        n, k, dtype = problem.n, problem.k, getattr(torch, problem.dtype)
        g = torch.Generator().manual_seed(seed)
        x_buffer = torch.full((m + 1, k + 24 if strided else k), math.nan, dtype=dtype)
        row_size = torch.exp2(torch.randint(-4, 5, (m, 1), generator=g))
        x_buffer[:m, :k] = (torch.randn(m, k, generator=g) * row_size).to(dtype)
        nan_row = int(torch.randint(m, (), generator=g)) if m > 1 else None
        if nan_row is not None:
            x_buffer[nan_row, :k] = math.nan
        base = 1 / (200 * math.sqrt(k))  # results near 1, far from the largest float16
        global_scale = torch.full((1,), base)
        if per_row:
            global_scale = base * 10 ** (-3 * torch.rand(n, generator=g))
            global_scale[seed % n] = 1e-38  # subnormal
        x_buffer = x_buffer.to(device)
        return GemmCase(
            layout_id=layout_id,
            x_buffer=x_buffer,
            x=x_buffer[:m, :k],
            nan_row=nan_row,
            weight=torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g).to(device),
            scale=_random_scales(n, k // 16, seed, signed, g).to(device),
            global_scale=global_scale.to(device),
            bias=torch.randn(n, generator=g).to(bias_dtype).to(device) if bias_dtype is not None else None,
            pre_quant_scale=(0.5 + torch.rand(k, generator=g)).to(dtype).to(device) if pre_quant else None,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result."""
        return self.x.shape[0], self.weight.shape[0]

    @cached_property
    def arguments(self) -> _Arguments:
        """What follows x in a launcher's call."""
        packed = to_layout(self.weight, self.scale, self.global_scale, layout_id=self.layout_id)
        return packed.data, packed.scale, packed.global_scale, self.bias, self.pre_quant_scale

    def tensors(self) -> list[Tensor]:
        """What a launcher must not change."""
        return [tensor for tensor in (self.x_buffer, *self.arguments) if tensor is not None]

    def launch(self, launcher: Launcher, out: Tensor) -> None:
        """Call it."""
        launcher(self.x, *self.arguments, out)

    def compare(self, out: Tensor) -> None:
        """Raise AssertionError unless this is the result."""
        rows = [row for row in range(out.shape[0]) if row != self.nan_row]
        x = self.x[rows]
        if self.nan_row is not None:
            assert bool(out[self.nan_row].isnan().all()), f"row {self.nan_row} of x is NaN, its results are not"
        ref = reference.gemm(
            x, self.weight, self.scale, self.global_scale, self.bias, self.pre_quant_scale, round_output=False
        )
        magnitude = reference.gemm(
            x.abs(),
            self.weight & 0x77,
            self.scale & 0x7F,
            self.global_scale,
            None if self.bias is None else self.bias.abs(),
            self.pre_quant_scale,
            round_output=False,
        )
        assert_gemm_close(out[rows], ref, k=x.shape[1], dtype=x.dtype, magnitude=magnitude)


def _random_scales(n: int, groups: int, seed: int, signed: bool, g: torch.Generator) -> Tensor:
    """[n, groups] e4m3 bytes. Rows take turns: subnormal, all finite ones, common ones, zero.

    Subnormal scales need rows of their own: beside large ones their products would be lost in the rounding.
    """
    kind = ((torch.arange(n) + seed) % 4).unsqueeze(1)
    low = torch.tensor([0x00, 0x00, 0x28, 0x00])[kind]
    high = torch.tensor([0x08, 0x7E, 0x58, 0x00])[kind]
    scales = low + (torch.rand(n, groups, generator=g) * (high - low + 1)).long().clamp_max(high - low)
    if signed:
        scales |= torch.randint(0, 2, (n, groups), generator=g) << 7
    return scales.to(torch.uint8)
