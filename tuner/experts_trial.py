"""The trial of grouped_gemm and moe: copies of all experts' weights, and every kind of routing, in rotation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from ..testing.close import moe_tolerance, relative_error, relative_tolerance
from ..testing.experts import GroupedCase, MoeCase, experts_case, random_weight
from .inputs import COLD, MAX_COPIES, byte_sum, copies_needed, rotating, rows_to_check
from .messages import Recorded
from .outcome import Step, Wrong
from .output import Output
from .recorded import recorded_ids
from .routing import relabel, relabelings, routed_ids
from .timing import Launch
from .trial import Trial, bound, gate_ms

__all__ = ["ExpertsTrial"]

# Of `testing.experts`: together they have all optional tensors, both id dtypes, an expert_map, rows of no expert, a
# strided x, biases of both dtypes, and router weights on the input where top_k is 1.
GATE_SEEDS = (63, 24)
CHUNK_WEIGHTS = 1 << 26  # made at once


@dataclass(slots=True, kw_only=True, eq=False)
class _Gate:
    """One random call with everything that a kernel might ignore."""

    case: GroupedCase | MoeCase
    exact: tuple[Tensor, ...]
    checksum: int


class ExpertsTrial(Trial):
    """See Trial. Only the checkpoint layout exists for experts."""

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
        self.device, self.place = device, place
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
        self.copies = self._copies()
        self._gates: dict[tuple[int, int], _Gate] = {}
        self._exact: dict[tuple[int, str], tuple[Tensor, Tensor, float]] = {}
        self._checksum = self._sum()

    def gate(self, kernel: Kernel, launcher: Launcher, ms: Sequence[int], step: Step) -> None:
        """All that a call may have besides, at the smallest M and at a ragged one; element by element."""
        layout = kernel.layout(self.device, self.problem)
        _only_checkpoint(layout)
        config = kernel.parse_config(self.device, self.problem, step.entrant.config)
        at = gate_ms(ms, lambda m: bool(kernel.is_valid(self.device, self.problem, config, m)))
        for m, seed in itertools.product(at, GATE_SEEDS):
            step.begin("check", m)
            made = self._gate(m, seed)
            case: Any = made.case
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
        _only_checkpoint(layout)
        call = self._call(launcher, m, self.ids[routing][:m], self.copies[0])
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
        out = self._output.out(m, poison=False)
        found = []
        for i in range(count):
            call = self._call(launcher, m, relabel(ids, self.relabelings[i]), self.copies[i % len(self.copies)])
            found.append(bound(call, out))
        return found

    def baseline(self, m: int) -> tuple[list[Launch], float]:
        """There is none: no single bf16 call does the same."""
        raise Wrong("invalid", "ops with experts have no baseline")

    def unchanged(self, layout: str) -> bool:
        """See Trial."""
        return self._sum() == self._checksum

    def close(self) -> None:
        """See Trial."""
        self._gates.clear()
        self._exact.clear()
        del self.x, self.router, self.ids, self.copies, self._output
        if self.place.type == "cuda":
            torch.cuda.empty_cache()

    def _copies(self) -> list[tuple[Tensor, ...]]:
        """w13 and w2, or the one weight, each with its scales; rotating copies of the large tensors."""
        p, g = self.problem, torch.Generator(self.place).manual_seed(torch.initial_seed() % (1 << 31))
        shapes = [(p.n * (2 if p.gated else 1), p.k), (p.k, p.n)] if p.op == "moe" else [(p.n, p.k)]
        count = copies_needed(self.device, p.weight_bytes)
        parts: list[list[Tensor]] = []
        for i, (rows, k) in enumerate(shapes):
            # Two factors an expert where that is allowed: kernels read them anyhow.
            factors = 2 if i == 0 and (p.gated or (p.op == "grouped_gemm" and rows % 2 == 0)) else 1
            step = max(1, CHUNK_WEIGHTS // (rows * k))
            some = [
                random_weight(min(step, p.experts - first), rows, k, g, parts=factors)
                for first in range(0, p.experts, step)
            ]
            weight, scale, global_scale = (torch.cat(part) for part in zip(*some, strict=True))
            del some
            parts += [rotating(weight, count), rotating(scale, count), [global_scale] * count]
        return list(zip(*parts, strict=True))

    def _call(self, launcher: Launcher, m: int, ids: Tensor, weights: tuple[Tensor, ...]) -> Callable[[Tensor], None]:
        p, x = self.problem, self.x[:m]
        if p.op == "grouped_gemm":
            offsets = _offsets(ids, p.experts)
            return lambda out: launcher(x, *weights, offsets, out)
        names = ("w13", "w13_scale", "w13_scale_2", "w2", "w2_scale", "w2_scale_2")
        given: dict[str, Any] = dict(zip(names, weights, strict=True))
        arguments = MoeArguments(
            x=x, topk_ids=ids, topk_weights=self.router[:m], constants=constants(p.activation), **given
        )
        return lambda out: launcher(arguments, out)

    def _known(self, m: int, routing: str) -> tuple[Tensor, Tensor, float]:
        """Rows that are compared, their exact results, and the largest relative error that a right kernel shows."""
        if (m, routing) not in self._exact:
            p, at = self.problem, torch.tensor(rows_to_check(m), device=self.place)
            x = self.x[at]
            w = self.copies[0]
            if p.op == "grouped_gemm":
                among = torch.searchsorted(at, _offsets(self.ids[routing][:m], p.experts).long())
                exact = reference.grouped_gemm(x, w[0], w[1], w[2], among, round_output=False)
                tolerance = relative_tolerance(exact, k=p.k, dtype=self.dtype)
            else:
                ids, router = self.ids[routing][at], self.router[at]
                exact = reference.moe(
                    x, w[0], w[1], w[2], w[3], w[4], w[5], ids, router, activation=p.activation, round_output=False
                )
                tolerance = moe_tolerance(exact, hidden=p.k, inter=p.n, top_k=p.top_k, dtype=self.dtype)
            self._exact[m, routing] = at, exact, tolerance
        return self._exact[m, routing]

    def _gate(self, m: int, seed: int) -> _Gate:
        if (m, seed) not in self._gates:
            case = experts_case(self.problem, m, seed, self.place, weights=self.copies[0])
            self._gates[m, seed] = _Gate(case=case, exact=case.exact(), checksum=self._case_sum(case))
        return self._gates[m, seed]

    def _case_sum(self, case: GroupedCase | MoeCase) -> int:
        large = {tensor.data_ptr() for tensor in self.copies[0]}  # in `_sum` already
        return int(torch.stack([byte_sum(t) for t in case.tensors() if t.data_ptr() not in large]).sum())

    def _sum(self) -> int:
        tensors = [self.x, self.router, *self.ids.values()]
        for tensor in self.copies[0]:
            tensors.append(tensor if tensor._base is None else tensor._base)  # the buffer of all copies
        return int(torch.stack([byte_sum(tensor) for tensor in tensors]).sum())


def _offsets(ids: Tensor, experts: int) -> Tensor:
    """int32 [E + 1]: rows of x in the order of their experts."""
    counts = _counts(ids, experts)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


def _counts(ids: Tensor, experts: int) -> Tensor:
    """int64 [E]: how many tokens every expert has."""
    return torch.bincount(ids.flatten().long() + 1, minlength=experts + 1)[1:]  # -1 is nobody's


def _only_checkpoint(layout: str) -> None:
    if layout != "checkpoint":
        raise Wrong("invalid", f"the tuner makes no experts in layout {layout!r}")
