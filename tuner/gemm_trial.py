"""The trial of gemm: rotating copies of one weight, a gate of extreme scales, and the bf16 matmul to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..kernels.kernel import Kernel, Launcher
from ..kernels.problem import Device, Problem
from ..kernels.weights.weight import Weight
from ..testing.close import assert_gemm_close, relative_error
from .inputs import POOL_ROWS, Inputs, rows_to_check
from .outcome import Step, Wrong
from .timing import Launch
from .trial import Trial, gate_ms
from .variants import Variant

__all__ = ["GemmTrial"]


class GemmTrial(Trial):
    """See Trial."""

    routings = ("",)

    def __init__(
        self, device: Device, place: torch.device, problem: Problem, ms: Sequence[int], sync: Callable[[], None]
    ) -> None:
        self.inputs = Inputs(device, place, problem, ms)
        super().__init__(self.inputs, sync)

    def gate(self, kernel: Kernel, launcher: Launcher, ms: Sequence[int], step: Step) -> None:
        """Extreme scales, fresh rows of x, a ragged M; element by element. Then all that a call may have besides."""
        inputs = self.inputs
        layout = kernel.layout(inputs.device, inputs.problem)
        config = kernel.parse_config(inputs.device, inputs.problem, step.entrant.config)
        at = gate_ms(ms, lambda m: bool(kernel.is_valid(inputs.device, inputs.problem, config, m)))
        calls: list[tuple[int, Variant | None]] = [(m, None) for m in at]
        calls += zip((at[0], at[-1]), inputs.variants, strict=True)
        for m, variant in calls:
            step.begin("check", m)
            start = random.randrange(max(1, POOL_ROWS - m + 1))
            weight = inputs.extreme_weight(layout, per_row=variant is not None and variant.per_row)
            self._check_extreme(launcher, weight, m, start, variant)
            self.require_unchanged(layout)

    def check(self, launcher: Launcher, layout: str, m: int, routing: str) -> float:
        """See Trial."""
        case = self.inputs.plain
        out = self._run(launcher, self.inputs.copies(layout)[0], m)
        case.know(rows_to_check(m))
        at, known = case.rows(0, m)
        error = relative_error(out[at], case.exact[known])
        if not error <= case.tolerance(m):
            raise Wrong("wrong", f"m={m}: relative error {error:.4g} above {case.tolerance(m):.4g}", error=error)
        return error

    def launches(self, launcher: Launcher, layout: str, m: int, routing: str) -> list[Launch]:
        """See Trial."""
        x, out = self.inputs.x[:m], self.inputs.out(m, poison=False)
        return [_bind(launcher, weight, x, out) for weight in self.inputs.copies(layout)]

    def baseline(self, m: int) -> tuple[list[Launch], float]:
        """torch.matmul on dequantised weights."""
        inputs = self.inputs
        out, x = inputs.out(m), inputs.x[:m]
        launches: list[Launch] = [partial(_matmul, x, dense, out) for dense in inputs.dense_copies()]
        launches[0]()
        at, known = inputs.plain.rows(0, m)
        return launches, relative_error(out[at], inputs.plain.exact[known])

    def unchanged(self, layout: str) -> bool:
        """See Trial."""
        return self.inputs.unchanged(layout)

    def close(self) -> None:
        """See Trial."""
        self.inputs.close()

    def _check_extreme(self, launcher: Launcher, weight: Weight, m: int, start: int, variant: Variant | None) -> None:
        """Run once with extreme scales and compare every element."""
        case = self.inputs.extreme
        out = self._run(launcher, weight, m, start, variant)
        at, known = case.rows(start, m)
        assert case.magnitude is not None
        exact, magnitude = case.exact[known], case.magnitude[known]
        if variant is not None:
            exact, magnitude = variant.expected(known), variant.magnitude(magnitude)
        try:
            assert_gemm_close(out[at], exact, k=case.k, dtype=case.dtype, magnitude=magnitude)
        except AssertionError as problem:
            what = "extreme scales" if variant is None else f"extreme scales, {variant.name}"
            raise Wrong("wrong", f"m={m}, {what}: {problem}", error=relative_error(out[at], exact)) from problem

    def _run(
        self, launcher: Launcher, weight: Weight, m: int, start: int = 0, variant: Variant | None = None
    ) -> Tensor:
        x = self.inputs.x[start : start + m]
        return self._into_poison(m, lambda out: _bind(launcher, weight, x, out, variant)())


def _bind(launcher: Launcher, weight: Weight, x: Tensor, out: Tensor, variant: Variant | None = None) -> Launch:
    bias, pre_quant_scale = (None, None) if variant is None else (variant.bias, variant.pre_quant_scale)
    return partial(launcher, x, weight.data, weight.scale, weight.global_scale, bias, pre_quant_scale, out)


def _matmul(x: Tensor, dense: Tensor, out: Tensor) -> None:
    torch.mm(x, dense.t(), out=out)
