"""Calls beyond the plain one, and what comes of them: bias, pre_quant_scale, one global scale a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import reference
from ..kernels.weights.weight import Weight

__all__ = ["Variant", "distinct_scales", "variants"]

LARGEST_PRE_QUANT_SCALE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """One call with everything that a kernel might ignore; results are derived from those of the plain call."""

    name: str
    bias: Tensor
    pre_quant_scale: Tensor | None
    per_row: bool  # the weight's global scale is [N]
    exact: Tensor  # [rows, N] float64, without bias, with one global scale
    row_scale: Tensor | None  # [N] float64: global scale of a row over the one of `exact`

    def expected(self, rows: Tensor) -> Tensor:
        """The exact result of rows of `exact`, float64."""
        exact = self.exact[rows]
        return (exact if self.row_scale is None else exact * self.row_scale) + self.bias.double()

    def magnitude(self, plain: Tensor) -> Tensor:
        """The sum of |x| * |w|, plus |bias|, from that of the plain call, float64; a bound of it with pre_quant_scale.

        That one is at most 1.5, and rounding what it is multiplied with adds less than a tenth.
        """
        if self.pre_quant_scale is not None:
            plain = plain * (1.1 * LARGEST_PRE_QUANT_SCALE)
        return (plain if self.row_scale is None else plain * self.row_scale) + self.bias.double().abs()


def distinct_scales(global_scale: Tensor, n: int) -> Tensor:
    """[N] float32: half to twice a global scale, no two alike."""
    return global_scale * (0.5 + 1.5 * torch.randperm(n, device=global_scale.device) / n)


def variants(x: Tensor, weight: Weight, exact: Tensor, scales: Tensor) -> tuple[Variant, Variant]:
    """A bias in x's dtype with pre_quant_scale; a float32 bias with one global scale a row.

    Parameters
    ----------
    x
        [rows, K], those that `exact` has results of.
    weight
        In the checkpoint layout.
    exact
        [rows, N] float64, of the plain call.
    scales
        [N] float32.
    """
    assert weight.scale is not None
    n, k, device = weight.out_features, weight.in_features, x.device
    pre_quant = (0.5 + torch.rand(k, device=device)).clamp(max=LARGEST_PRE_QUANT_SCALE).to(x.dtype)
    scaled = reference.gemm(x, weight.data, weight.scale, weight.global_scale, None, pre_quant, round_output=False)
    bias = torch.randn(n, device=device)
    short = str(x.dtype).removeprefix("torch.")
    return (
        Variant(
            name=f"{short} bias and pre_quant_scale",
            bias=bias.to(x.dtype),
            pre_quant_scale=pre_quant,
            per_row=False,
            exact=scaled,
            row_scale=None,
        ),
        Variant(
            name="float32 bias and a global scale per row",
            bias=bias,
            pre_quant_scale=None,
            per_row=True,
            exact=exact,
            row_scale=scales.double() / weight.global_scale.double(),
        ),
    )
