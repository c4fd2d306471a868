"""The trial of grouped_gemm and moe: copies of all experts' weights, and every kind of routing, in rotation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..cache.records import ROUTINGS
from ..cache.routings import routings_of
from ..kernels import reference
from ..kernels.kernel import Kernel, Launcher
from ..kernels.moe.activations import constants
from ..kernels.moe.arguments import MoeArguments
from ..kernels.problem import Device, Problem
from ..kernels.weights.weight import Weight
from ..testing.close import moe_tolerance, relative_error, relative_tolerance
from ..testing.experts import GroupedCase, MoeCase, experts_case
from .experts_weights import ExpertWeights
from .inputs import COLD, MAX_COPIES, byte_sum, rows_to_check
from .messages import Recorded
from .outcome import Step, Wrong
from .output import Output
from .recorded import recorded_ids
from .routing import relabel, relabelings, routed_ids
from .timing import Launch
from .trial import Trial, gate_ms

__all__ = ["ExpertsTrial"]

# Of `testing.experts`: together they have all optional tensors, both id dtypes, an expert_map, rows of no expert, a
# strided x, biases of both dtypes, and router weights on the input where top_k is 1.
GATE_SEEDS = (63, 24)


@dataclass(slots=True, kw_only=True, eq=False)
class _Gate:
    """One random call with everything that a kernel might ignore."""

    case: GroupedCase | MoeCase
    exact: tuple[Tensor, ...]
    checksum: int


class ExpertsTrial(Trial):
    """See Trial."""

    def __init__(
        self,
        device: Device,
        place: torch.device,
        problem: Problem,
        ms: Sequence[int],
        sync: Callable[[], None],
        recorded: Recorded | None = None,
    ) -> None:
        p = self.problem = problem
        self.device, self.place, self.ms = device, place, tuple(ms)
        self.dtype: torch.dtype = getattr(torch, p.dtype)
        super().__init__(Output(place, p.k if p.op == "moe" else p.n, self.dtype), sync)
        tokens, top_k = max(ms), p.top_k or 1
        self.x = torch.randn(tokens, p.k, device=place).to(self.dtype)
        self.router = torch.rand(tokens, top_k, device=place) + 0.1
        self.routings = routings_of(p, recorded.name if recorded else "")
        self.ids = {name: routed_ids(name, p.experts, tokens, top_k).to(place) for name in ROUTINGS}
        if recorded is not None:
            self.ids[recorded.name] = recorded_ids(recorded, p, tokens).to(place)
        self.relabelings = relabelings(p.experts, MAX_COPIES[device.kind]).to(place)
        self.weights = ExpertWeights(device, place, problem)
        self._gates: dict[tuple[int, int], _Gate] = {}
        self._exact: dict[tuple[int, str], tuple[Tensor, Tensor, float]] = {}
        self._checksum = self._sum()

    def gate(self, kernel: Kernel, launcher: Launcher, ms: Sequence[int], step: Step) -> None:
        """All that a call may have besides, at the smallest M and at a ragged one; element by element."""
        layout = kernel.layout(self.device, self.problem)
        packed = self.weights.copies(layout)[0]
        config = kernel.parse_config(self.device, self.problem, step.entrant.config)
        at = gate_ms(ms, lambda m: bool(kernel.is_valid(self.device, self.problem, config, m)))
        for m, seed in itertools.product(at, GATE_SEEDS):
            step.begin("check", m)
            made = self._gate(m, seed)
            ready: Any = packed if self.problem.op == "moe" else packed[0]
            case: Any = replace(made.case, layout_id=layout, ready=ready)
            nan_rows = () if case.nan_row is None else (case.nan_row,)
            out = self._into_poison(m, lambda out, case=case: case.launch(launcher, out), nan_rows)  # type: ignore[misc]
            try:
                case.compare(out, made.exact)
            except AssertionError as problem:
                raise Wrong("wrong", f"m={m}, random options: {problem}") from problem
            if self._case_sum(case) != made.checksum:
                raise Wrong("wrong", "it changed its arguments", tainted=True)
            self.require_unchanged(layout)

    def check(self, launcher: Launcher, layout: str, m: int, routing: str) -> float:
        """See Trial."""
        call = self._call(launcher, m, self.ids[routing][:m], self.weights.copies(layout)[0])
        out = self._into_poison(m, call)
        at, exact, tolerance = self._known(m, routing)
        error = relative_error(out[at], exact)
        if not error <= tolerance:
            what = f"m={m}, {routing}: relative error {error:.4g} above {tolerance:.4g}"
            raise Wrong("wrong", what, error=error)
        return error

    def launches(self, launcher: Launcher, layout: str, m: int, routing: str) -> list[Launch]:
        """One copy of the weights after another, each time with the experts in another order.

        As many as read three times the cache: a call with few tokens reads few experts.
        """
        p, ids = self.problem, self.ids[routing][:m]
        touched_bytes = p.weight_bytes * int((_counts(ids, p.experts) > 0).sum()) / p.experts
        wanted = math.ceil(COLD * self.device.l2_bytes / touched_bytes)
        count = max(2, min(wanted, MAX_COPIES[self.device.kind]))
        out, copies = self._output.out(m, poison=False), self.weights.copies(layout)
        found: list[Launch] = []
        for i in range(count):
            call = self._call(launcher, m, relabel(ids, self.relabelings[i]), copies[i % len(copies)])
            found.append(partial(call, out))
        return found

    def baseline(self, m: int) -> tuple[list[Launch], float]:
        """There is none: no single bf16 call does the same."""
        raise Wrong("invalid", "ops with experts have no baseline")

    def unchanged(self, layout: str) -> bool:
        """See Trial."""
        return self._sum() == self._checksum and self.weights.unchanged(layout)

    def close(self) -> None:
        """See Trial."""
        self._gates.clear()
        self._exact.clear()
        del self.x, self.router, self.ids, self.weights, self._output
        if self.place.type == "cuda":
            torch.cuda.empty_cache()

    def _call(self, launcher: Launcher, m: int, ids: Tensor, weights: tuple[Weight, ...]) -> Callable[[Tensor], None]:
        p, x = self.problem, self.x[:m]
        if p.op == "grouped_gemm":
            offsets = _offsets(ids, p.experts)
            (w,) = weights
            return lambda out: launcher(x, w.data, w.scale, w.global_scale, offsets, out)
        w13, w2 = weights
        arguments = MoeArguments(
            x=x,
            w13=w13.data,
            w13_scale=w13.scale,
            w13_scale_2=w13.global_scale,
            w2=w2.data,
            w2_scale=w2.scale,
            w2_scale_2=w2.global_scale,
            topk_ids=ids,
            topk_weights=self.router[:m],
            constants=constants(p.activation),
        )
        return lambda out: launcher(arguments, out)

    def _known(self, m: int, routing: str) -> tuple[Tensor, Tensor, float]:
        """Rows that are compared, their exact results, and the largest relative error that a right kernel shows."""
        if (m, routing) not in self._exact:
            self._exact |= self._exact_at([m] if self._exact else sorted({*self.ms, m}))
        return self._exact[m, routing]

    def _exact_at(self, ms: Sequence[int]) -> dict[tuple[int, str], tuple[Tensor, Tensor, float]]:
        """The same by M and routing, in one pass over all experts: that is what takes time."""
        p, w = self.problem, self.weights.plain
        keys = list(itertools.product(ms, self.routings))
        at = {m: torch.tensor(rows_to_check(m), device=self.place) for m in ms}
        rows = torch.cat([at[m] for m, _ in keys])
        if p.op == "grouped_gemm":
            offsets = [_offsets(self.ids[routing][:m], p.experts) for m, routing in keys]
            pairs = zip(keys, offsets, strict=True)
            expert = torch.cat([torch.searchsorted(ends, at[m], right=True) - 1 for (m, _), ends in pairs])
            order = expert.argsort(stable=True)
            among = torch.searchsorted(expert[order], torch.arange(p.experts + 1, device=self.place)).int()
            exact = torch.empty((len(rows), p.n), dtype=torch.float64, device=self.place)
            exact[order] = reference.grouped_gemm(self.x[rows[order]], w[0], w[1], w[2], among, round_output=False)
        else:
            ids = torch.cat([self.ids[routing][at[m]] for m, routing in keys])
            x, router = self.x[rows], self.router[rows]
            exact = reference.moe(
                x, w[0], w[1], w[2], w[3], w[4], w[5], ids, router, activation=p.activation, round_output=False
            )
        parts = zip(keys, torch.split(exact, [len(at[m]) for m, _ in keys]), strict=True)
        return {(m, routing): (at[m], part, self._tolerance(part)) for (m, routing), part in parts}

    def _tolerance(self, exact: Tensor) -> float:
        p = self.problem
        if p.op == "grouped_gemm":
            return relative_tolerance(exact, k=p.k, dtype=self.dtype)
        return moe_tolerance(exact, hidden=p.k, inter=p.n, top_k=p.top_k, dtype=self.dtype)

    def _gate(self, m: int, seed: int) -> _Gate:
        if (m, seed) not in self._gates:
            case = experts_case(self.problem, m, seed, self.place, weights=self.weights.plain)
            self._gates[m, seed] = _Gate(case=case, exact=case.exact(), checksum=self._case_sum(case))
        return self._gates[m, seed]

    def _case_sum(self, case: GroupedCase | MoeCase) -> int:
        large = self.weights.addresses()  # `unchanged` looks at what kernels get of them
        return int(torch.stack([byte_sum(t) for t in case.tensors() if t.data_ptr() not in large]).sum())

    def _sum(self) -> int:
        tensors = [self.x, self.router, *self.ids.values()]
        return int(torch.stack([byte_sum(tensor) for tensor in tensors]).sum())


def _offsets(ids: Tensor, experts: int) -> Tensor:
    """int32 [E + 1]: rows of x in the order of their experts."""
    counts = _counts(ids, experts)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


def _counts(ids: Tensor, experts: int) -> Tensor:
    """int64 [E]: how many tokens every expert has."""
    return torch.bincount(ids.flatten().long() + 1, minlength=experts + 1)[1:]  # -1 is nobody's
