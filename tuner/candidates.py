"""Which candidates a problem has, which of them go first, and what is known about each."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from ..cache.records import BASELINE, RECORDED, TIMING, Measurement, Plan
from ..cache.routings import combine, routings_of, worst_regrets
from ..kernels import registry
from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from ..kernels.untuned import made_for_width, untuned_layout
from .messages import BASELINE_CONFIG, Entrant
from .statistics import hopeless, spread

__all__ = ["Candidate", "Known", "candidates_of", "default_at", "neighbours", "ordered", "promising"]

PROMISING = 16  # configs per M of a kernel that predicts
NEIGHBOURS = 3  # plans of similar shapes whose winners are tried early
GIVEN_UP = ("wrong", "nan", "crash", "timeout", "build_error", "invalid")  # at one M: not trusted at any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A kernel and one config, with the values of M it serves."""

    kernel: Kernel
    config: Any
    entrant: Entrant
    layout: str
    ms: tuple[int, ...]


def candidates_of(
    device: Device, problem: Problem, ms: Sequence[int], kernels: Iterable[Kernel]
) -> tuple[dict[Entrant, Candidate], tuple[str, ...]]:
    """All candidates valid at some M, and the reasons of the kernels that have none."""
    found: dict[Entrant, Candidate] = {}
    refused = []
    for kernel in kernels:
        verdict = kernel.supports(device, problem)
        if not verdict:
            refused.append(f"{kernel.name}: {verdict.reason}")
            continue
        layout = kernel.layout(device, problem)
        before = len(found)
        for config in kernel.space(device, problem):
            served = tuple(m for m in ms if kernel.is_valid(device, problem, config, m))
            if served:
                entrant = Entrant(kernel=kernel.name, config=config.to_json())
                found[entrant] = Candidate(kernel=kernel, config=config, entrant=entrant, layout=layout, ms=served)
        if len(found) == before:
            refused.append(f"{kernel.name}: no config is valid at any of these M")
    return found, tuple(refused)


def default_at(device: Device, problem: Problem, m: int, candidates: Mapping[Entrant, Candidate]) -> Entrant | None:
    """What runs untuned: of the layout that is taken then, the default of the kernel made for the narrowest range."""
    kernels = {candidate.kernel.name: candidate.kernel for candidate in candidates.values()}
    layout = untuned_layout(device, problem, registry.kernels(problem.op))  # of those that are not measured too
    widths = [
        (width, name)
        for name, kernel in kernels.items()
        if kernel.layout(device, problem) == layout and (width := made_for_width(kernel, m)) is not None
    ]
    for _, name in sorted(widths):
        entrant = Entrant(kernel=name, config=kernels[name].default_config(device, problem, m).to_json())
        if entrant in candidates and m in candidates[entrant].ms:
            return entrant
    return None


def neighbours(plans: Iterable[Plan], device: Device, problem: Problem) -> tuple[Entrant, ...]:
    """Winners of the most similar shapes on the same device."""

    def distance(plan: Plan) -> float:
        other = plan.problem
        return abs(math.log(other.n / problem.n)) + abs(math.log(other.k / problem.k))

    similar = [
        plan
        for plan in plans
        if plan.device == device and (plan.problem.op, plan.problem.dtype) == (problem.op, problem.dtype)
    ]
    nearest = sorted(similar, key=distance)[:NEIGHBOURS]
    winners = (
        Entrant(kernel=interval.kernel, config=interval.config)
        for plan in nearest
        for layout in plan.layouts
        for interval in layout.intervals
    )
    return tuple(dict.fromkeys(winners))


def ordered(
    device: Device, problem: Problem, candidates: Mapping[Entrant, Candidate], first: Iterable[Entrant]
) -> tuple[list[Candidate], int]:
    """All candidates in the order of trying, and how many are certain to be tried: defaults and `first`.

    Behind those come the promising ones, then the others, shuffled (the same way in every run); kernels take turns.
    """
    early = [
        candidates[entrant]
        for entrant in dict.fromkeys((*_defaults(device, problem, candidates), *first))
        if entrant in candidates
    ]
    promise = [candidate for candidate, _ in promising(device, problem, candidates)]
    known = {candidate.entrant for candidate in (*early, *promise)}
    kernels = sorted({candidate.kernel.name for candidate in candidates.values()})
    groups = [
        [candidate for entrant, candidate in candidates.items() if entrant.kernel == name and entrant not in known]
        for name in kernels
    ]
    for group in groups:
        random.Random(problem.label).shuffle(group)
    late = [candidate for turn in zip_longest(*groups) for candidate in turn if candidate is not None]
    return list(dict.fromkeys((*early, *promise, *late))), len(early)


def _defaults(device: Device, problem: Problem, candidates: Mapping[Entrant, Candidate]) -> list[Entrant]:
    kernels = {candidate.kernel.name: candidate.kernel for candidate in candidates.values()}
    ms = sorted({m for candidate in candidates.values() for m in candidate.ms})
    untuned = (default_at(device, problem, m, candidates) for m in ms)
    return [entrant for entrant in untuned if entrant is not None] + [
        Entrant(kernel=name, config=kernel.default_config(device, problem, m).to_json())
        for m in ms
        for name, kernel in kernels.items()
    ]


def promising(device: Device, problem: Problem, candidates: Mapping[Entrant, Candidate]) -> list[tuple[Candidate, int]]:
    """What is likely to be near the best, each with the M that it is likely at; kernels and M take turns.

    Of kernels that predict their times the configs in front, PROMISING for every M. Of others the neighbours of the
    default: those that differ in one field.
    """
    by_kernel: dict[str, list[Candidate]] = {}
    for candidate in candidates.values():
        by_kernel.setdefault(candidate.kernel.name, []).append(candidate)
    ranked = []
    for name in sorted(by_kernel):
        group = by_kernel[name]
        for m in sorted({m for candidate in group for m in candidate.ms}):
            ranked.append([(candidate, m) for candidate in _front(device, problem, group, m)])
    found: dict[Entrant, tuple[Candidate, int]] = {}
    for turn in zip_longest(*ranked):
        for pair in turn:
            if pair is not None:
                found.setdefault(pair[0].entrant, pair)
    return list(found.values())


def _front(device: Device, problem: Problem, group: Sequence[Candidate], m: int) -> list[Candidate]:
    kernel = group[0].kernel
    serving = [candidate for candidate in group if m in candidate.ms]
    default = kernel.default_config(device, problem, m)
    if not serving or kernel.predicted_us(device, problem, serving[0].config, m) is None:
        return [candidate for candidate in serving if _fields_apart(candidate.config, default) == 1]
    predicted = {c: kernel.predicted_us(device, problem, c.config, m) or math.inf for c in serving}
    return sorted(serving, key=predicted.__getitem__)[:PROMISING]


def _fields_apart(one: Any, other: Any) -> int:
    return sum(getattr(one, field.name) != getattr(other, field.name) for field in fields(one))


@dataclass(slots=True)
class Known:
    """What was measured for one problem on one device: earlier runs' rows and this one's."""

    implementations: Mapping[str, str]  # of every kernel and the baseline, by name
    recorded: str = ""  # name of the routing that a user recorded, with which this run measures too
    others: set[str] = field(default_factory=set)  # recorded routings of other runs
    screens: dict[Entrant, dict[int, Measurement]] = field(default_factory=dict)
    finals: dict[Entrant, dict[int, Measurement]] = field(default_factory=dict)
    failed: dict[Entrant, dict[int, str]] = field(default_factory=dict)  # status by M
    _parts: dict[tuple[Entrant, int, str], dict[str, Measurement]] = field(default_factory=dict)  # rows by routing
    _best_us: dict[int, float] | None = None

    def add(self, row: Measurement) -> None:
        """Take a row; one of another implementation or timing protocol is no evidence here."""
        if row.implementation != self.implementations.get(row.kernel) or row.environment.timing != TIMING:
            return
        entrant = Entrant(kernel=row.kernel, config=row.config)
        self._best_us = None
        if row.status != "ok":
            self.failed.setdefault(entrant, {})[row.m] = row.status
        elif row.protocol in ("screen", "final"):
            if row.routing.startswith(RECORDED) and row.routing != self.recorded:
                self.others.add(row.routing)
            parts = self._parts.setdefault((entrant, row.m, row.protocol), {})
            parts[row.routing] = row
            whole = combine(row.problem, parts, self.recorded)
            if whole is not None:
                (self.screens if row.protocol == "screen" else self.finals).setdefault(entrant, {})[row.m] = whole

    def by_routing(self, entrant: Entrant, m: int, protocol: str) -> dict[str, Measurement]:
        """The newest row of every routing of this run."""
        parts = self._parts.get((entrant, m, protocol), {})
        return {name: row for name, row in parts.items() if name in routings_of(row.problem, self.recorded)}

    def ranked(self, entrants: Iterable[Entrant], m: int, protocol: str = "screen") -> list[Entrant]:
        """Those that were timed at m, best first: the least worst-case regret, of equals the least time."""
        rows = self.screens if protocol == "screen" else self.finals
        timed = {entrant: rows[entrant][m] for entrant in entrants if m in rows.get(entrant, {})}
        parts = {entrant: self.by_routing(entrant, m, protocol) for entrant in timed}
        regrets = worst_regrets(
            {e: {name: row.p50_us or math.inf for name, row in own.items()} for e, own in parts.items()}
        )
        return sorted(timed, key=lambda e: (regrets[e][0], timed[e].p50_us or math.inf, e.kernel, e.config))

    def given_up(self, entrant: Entrant) -> bool:
        """Whether a failure ended this candidate at all M."""
        failures = self.failed.get(entrant, {})
        return any(status in GIVEN_UP for status in failures.values()) or (
            bool(failures) and entrant not in self.screens
        )

    def usable(self, entrant: Entrant, m: int) -> bool:
        """Whether nothing is known against this candidate at m."""
        return not self.given_up(entrant) and m not in self.failed.get(entrant, {})

    def screen_us(self, candidate: Candidate) -> dict[int, float]:
        """Its screens; infinite where it failed."""
        times = {m: row.p50_us or math.inf for m, row in self.screens.get(candidate.entrant, {}).items()}
        failures = dict.fromkeys(self.failed.get(candidate.entrant, {}), math.inf)
        return {m: us for m, us in {**times, **failures}.items() if m in candidate.ms}

    def best_us(self) -> dict[int, float]:
        """The fastest screen of any trusted candidate at every M."""
        if self._best_us is not None:
            return self._best_us
        best = self._best_us = {}
        for entrant, rows in self.screens.items():
            if entrant.kernel == BASELINE or self.given_up(entrant):
                continue
            for m, row in rows.items():
                best[m] = min(best.get(m, math.inf), row.p50_us or math.inf)
        return best

    def pending(self, candidate: Candidate, best_us: Mapping[int, float]) -> tuple[int, ...]:
        """The M at which it is still to be screened."""
        if self.given_up(candidate.entrant):
            return ()
        known = self.screen_us(candidate)
        slowdown = {m: us / best_us.get(m, us) for m, us in known.items() if us < math.inf}
        return tuple(m for m in spread(candidate.ms) if m not in known and not hopeless(m, candidate.ms, slowdown))

    def failures(self) -> dict[str, int]:
        """How many candidates failed, by status."""
        return dict(Counter(status for by_m in self.failed.values() for status in set(by_m.values())))

    def bf16_us(self, m: int) -> float | None:
        """The baseline's final, else its screen."""
        baseline = Entrant(kernel=BASELINE, config=BASELINE_CONFIG)
        row = self.finals.get(baseline, {}).get(m) or self.screens.get(baseline, {}).get(m)
        return row.p50_us if row else None
