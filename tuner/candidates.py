"""Which candidates a problem has, which of them go first, and what is known about each."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from ..cache.records import BASELINE, TIMING, Measurement, Plan
from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from .messages import BASELINE_CONFIG, Entrant
from .statistics import hopeless, spread

__all__ = ["Candidate", "Known", "candidates_of", "default_at", "neighbours", "ordered"]

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
    """What runs untuned: the default of the kernel made for the narrowest range that contains m."""
    kernels = {candidate.kernel.name: candidate.kernel for candidate in candidates.values()}
    widths = [
        (math.inf if high is None else high - low, name)
        for name, kernel in kernels.items()
        for low, high in kernel.made_for
        if low <= m and (high is None or m <= high)
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
) -> list[Candidate]:
    """Defaults, then `first`, then the others: shuffled (the same way in every run), kernels taking turns."""
    kernels = {candidate.kernel.name: candidate.kernel for candidate in candidates.values()}
    ms = sorted({m for candidate in candidates.values() for m in candidate.ms})
    defaults = [
        Entrant(kernel=name, config=kernel.default_config(device, problem, m).to_json())
        for m in ms
        for name, kernel in kernels.items()
    ]
    early = [candidates[entrant] for entrant in dict.fromkeys((*defaults, *first)) if entrant in candidates]
    groups = [
        [candidate for candidate in candidates.values() if candidate.kernel.name == name and candidate not in early]
        for name in sorted(kernels)
    ]
    for group in groups:
        random.Random(problem.label).shuffle(group)
    late = [candidate for turn in zip_longest(*groups) for candidate in turn if candidate is not None]
    return early + late


@dataclass(slots=True)
class Known:
    """What was measured for one problem on one device: earlier runs' rows and this one's."""

    implementations: Mapping[str, str]  # of every kernel and the baseline, by name
    screens: dict[Entrant, dict[int, Measurement]] = field(default_factory=dict)
    finals: dict[Entrant, dict[int, Measurement]] = field(default_factory=dict)
    failed: dict[Entrant, dict[int, str]] = field(default_factory=dict)  # status by M
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
            (self.screens if row.protocol == "screen" else self.finals).setdefault(entrant, {})[row.m] = row

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
