"""From measurements to the times that can be trusted: what the plan is made from and `inspect` shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ..kernels.kernel import Kernel, implementation_hash
from ..kernels.problem import Device, Problem
from ..kernels.untuned import ANCHORS, FAR
from .records import BASELINE, RECORDED, TIMING, Measurement
from .routings import combine, routings_of, worst_regrets

__all__ = ["Candidate", "Evidence", "Timed", "behind", "gather", "implementations"]

# By candidate and M, then by protocol, then by routing.
_Newest: TypeAlias = dict[tuple["Candidate", int], dict[str, dict[str, Measurement]]]

# By M and protocol: of the routings that users recorded the one that was timed last. Only it counts.
_Recorded: TypeAlias = dict[tuple[int, str], str]

TRUST_LOST = ("wrong", "nan")  # at any M: a kernel that computed garbage once is planned nowhere

TRANSIENT = {"oom", "timeout"}  # they say nothing about other M


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel, one config of its space as canonical JSON, and the layout it reads."""

    kernel: str
    config: str
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The time of a candidate at one M: its newest "final" row, else its newest "screen" row.

    Of ops with experts: the newest of every routing, and `routings.combine` of them. Where some candidate was timed
    with a recorded routing, those that were not have no time.
    """

    candidate: Candidate
    m: int
    p20_us: float | None
    p50_us: float
    p80_us: float | None
    protocol: str
    is_default: bool  # the config is its kernel's default at this M
    by_routing_us: Mapping[str, float] = field(default_factory=dict)  # of ops with experts, whose mean p50_us is
    regret: float = 1.0  # its time over the best of any layout under this protocol, with the routing where it is worst
    worst_routing: str = ""

    @property
    def rank(self) -> tuple[bool, float, float, bool, str, str]:
        """Sorts best first: finals before screens, then by regret, then by time; a default wins a tie."""
        return (
            self.protocol != "final",
            self.regret,
            self.p50_us,
            not self.is_default,
            self.candidate.kernel,
            self.candidate.config,
        )


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What is known about one problem on one device."""

    device: Device
    problem: Problem
    kernels: Mapping[str, Kernel]
    times: dict[tuple[str, int], tuple[Timed, ...]] = field(default_factory=dict)  # by (layout, M), best first
    failures: dict[Candidate, dict[int, str]] = field(default_factory=dict)  # by M, the status of the newest row
    distrusted: set[Candidate] = field(default_factory=set)
    configs: dict[Candidate, Any] = field(default_factory=dict)  # parsed and in the kernel's space

    def layouts(self) -> tuple[str, ...]:
        """The layouts that have a time, sorted."""
        return tuple(sorted({layout for layout, _ in self.times}))

    def anchors(self, layout: str) -> tuple[int, ...]:
        """The Ms at which a candidate of this layout has a time, ascending."""
        return tuple(sorted(m for name, m in self.times if name == layout))

    def is_valid(self, candidate: Candidate, m: int) -> bool:
        """Whether the kernel takes this config at M = m."""
        kernel = self.kernels[candidate.kernel]
        return bool(kernel.is_valid(self.device, self.problem, self.configs[candidate], m))

    def failed_defaults(self, layout: str) -> set[int]:
        """Ms at which what may run untuned in this layout has failed; where that was no want of memory or time, all."""
        known = {**{candidate: {} for candidate in self.distrusted}, **self.failures}
        kernels = {self.kernels[candidate.kernel] for candidate in known if candidate.layout == layout}
        defaults = {(k.name, k.default_config(self.device, self.problem, m)) for k in kernels for m in ANCHORS}
        found: set[int] = set()
        for candidate, by_m in known.items():
            if (candidate.kernel, self.configs[candidate]) in defaults:
                found |= by_m.keys()
                if candidate in self.distrusted or {*by_m.values()} - TRANSIENT:
                    found |= {*ANCHORS, *self.anchors(layout), FAR}
        return found


def behind(best: Timed, other: Timed) -> float:
    """How far another candidate is behind the best one of an M: the ratio of what ranks them, minus 1."""
    return (other.regret / best.regret if best.by_routing_us else other.p50_us / best.p50_us) - 1


def implementations(kernels: Mapping[str, Kernel]) -> dict[str, str]:
    """The implementation hash of every kernel, by name."""
    return {name: implementation_hash(kernel) for name, kernel in kernels.items()}


def gather(
    device: Device,
    problem: Problem,
    measurements: Iterable[Measurement],
    kernels: Mapping[str, Kernel],
    *,
    implementation_by_kernel: Mapping[str, str] | None = None,
    timing: str = TIMING,
    allow_nondeterministic: bool = False,
) -> Evidence:
    """Keep what counts: rows of kernels that exist, unchanged, with a config of their space.

    At one M the newest row of a candidate decides whether it works there; a row that is "wrong" or "nan" at any M
    ends the trust in that candidate everywhere, until its implementation changes.

    Parameters
    ----------
    measurements
        In the order they were added, as `Store.measurements` returns them: that order says which row is the newest.
        Clocks are set back.
    kernels
        The kernels that exist here, by name.
    implementation_by_kernel
        What `implementations(kernels)` returns, for callers that gather often.
    timing
        Times of other versions of the timing protocol are not compared, so they are left out.
    """
    known = implementations(kernels) if implementation_by_kernel is None else implementation_by_kernel
    evidence = Evidence(device=device, problem=problem, kernels=kernels)
    usable = _usable_kernels(device, problem, kernels, allow_nondeterministic)
    seen: dict[tuple[str, str], Candidate | None] = {}
    newest: _Newest = {}
    recorded: _Recorded = {}
    for row in measurements:
        if row.device != device or row.problem != problem or row.layout != usable.get(row.kernel):
            continue
        if known.get(row.kernel) != row.implementation:
            continue
        if (row.kernel, row.config) not in seen:
            seen[row.kernel, row.config] = _candidate(evidence, row)
        candidate = seen[row.kernel, row.config]
        if candidate is None:
            continue
        if row.status != "ok":
            evidence.failures.setdefault(candidate, {})[row.m] = row.status
            if row.status in TRUST_LOST:
                evidence.distrusted.add(candidate)
        else:
            evidence.failures.get(candidate, {}).pop(row.m, None)
            if row.environment.timing == timing:
                newest.setdefault((candidate, row.m), {}).setdefault(row.protocol, {})[row.routing] = row
                if row.routing.startswith(RECORDED):
                    recorded[row.m, row.protocol] = row.routing
    _rank(evidence, newest, recorded)
    return evidence


def _usable_kernels(
    device: Device, problem: Problem, kernels: Mapping[str, Kernel], allow_nondeterministic: bool
) -> dict[str, str]:
    """The layout of every kernel that may be planned."""
    return {
        name: kernel.layout(device, problem)
        for name, kernel in kernels.items()
        if name != BASELINE
        and kernel.op == problem.op
        and (kernel.deterministic or allow_nondeterministic)
        and kernel.supports(device, problem)
    }


def _decisive(
    problem: Problem, m: int, by_protocol: Mapping[str, Mapping[str, Measurement]], recorded: _Recorded
) -> tuple[Measurement | None, Mapping[str, Measurement]]:
    """The row that counts, a final where there is one, and what it was made from."""
    for protocol in ("final", "screen"):
        rows, name = by_protocol.get(protocol, {}), recorded.get((m, protocol), "")
        if (row := combine(problem, rows, name)) is not None:
            return row, {routing: rows[routing] for routing in routings_of(problem, name)}
    return None, {}


def _candidate(evidence: Evidence, row: Measurement) -> Candidate | None:
    config = evidence.kernels[row.kernel].parse_config(evidence.device, evidence.problem, row.config)
    if config is None:
        return None
    candidate = Candidate(row.kernel, config.to_json(), row.layout)
    evidence.configs[candidate] = config
    return candidate


def _rank(evidence: Evidence, newest: _Newest, recorded: _Recorded) -> None:
    found: dict[tuple[int, str], list[Timed]] = {}
    defaults: dict[tuple[str, int], Any] = {}
    for (candidate, m), by_protocol in newest.items():
        row, rows = _decisive(evidence.problem, m, by_protocol, recorded)
        if row is None or row.p50_us is None or candidate in evidence.distrusted:
            continue
        if m in evidence.failures.get(candidate, {}) or not evidence.is_valid(candidate, m):
            continue
        kernel = evidence.kernels[candidate.kernel]
        if (kernel.name, m) not in defaults:
            defaults[kernel.name, m] = kernel.default_config(evidence.device, evidence.problem, m)
        timed = Timed(
            candidate=candidate,
            m=m,
            p20_us=row.p20_us,
            p50_us=row.p50_us,
            p80_us=row.p80_us,
            protocol=row.protocol,
            is_default=defaults[kernel.name, m] == evidence.configs[candidate],
            by_routing_us={name: one.p50_us for name, one in rows.items() if name and one.p50_us is not None},
        )
        found.setdefault((m, row.protocol), []).append(timed)
    by_layout: dict[tuple[str, int], list[Timed]] = {}
    for entries in found.values():
        regrets = worst_regrets({one.candidate: one.by_routing_us or {"": one.p50_us} for one in entries})
        for one in entries:
            regret, routing = regrets[one.candidate]
            by_layout.setdefault((one.candidate.layout, one.m), []).append(
                replace(one, regret=regret, worst_routing=routing)
            )
    evidence.times = {key: tuple(sorted(entries, key=lambda timed: timed.rank)) for key, entries in by_layout.items()}
