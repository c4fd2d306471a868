"""Finals: at every M the best screened candidates run against each other; then crossovers are located more finely."""

from __future__ import annotations

import itertools
import math
import time

from ..cache.plan import make_plan
from ..cache.records import Measurement, Plan
from .candidates import default_at
from .messages import Entrant
from .session import BASELINE_ENTRANT, ProblemRun
from .statistics import HOPELESS, Timing, beats, spread

__all__ = ["decide", "entrants_at", "refine", "run_baseline", "run_finals"]

BEST = 4  # candidates of an M that reach its final
BEST_OF_LAYOUT = 2  # of every layout, which all need a plan
REFINE_SHARE = 4  # a crossover is searched while the gap between anchors is above a quarter of the lower one
REFINE_GAP = 4


def run_baseline(run: ProblemRun) -> None:
    """Screen the bf16 matmul at every M, so that progress can be compared with it. Ops with experts have none."""
    if run.problem.op != "gemm":
        return
    for m in run.ms:
        if run.known.usable(BASELINE_ENTRANT, m) and m not in run.known.screens.get(BASELINE_ENTRANT, {}):
            run.race([BASELINE_ENTRANT], m, "screen")


def entrants_at(run: ProblemRun, m: int, incumbent: Plan | None) -> tuple[Entrant, ...]:
    """The four best screens, the two best of every layout, what runs untuned, the incumbent, the baseline."""
    layouts = {entrant: one.layout for entrant, one in run.candidates.items() if run.known.usable(entrant, m)}
    ranked = run.known.ranked(layouts, m)
    best_us = run.known.best_us()
    chosen = [e for e in ranked if (run.known.screens[e][m].p50_us or math.inf) <= HOPELESS * best_us[m]][:BEST]
    for layout in sorted(set(layouts.values())):
        chosen += [entrant for entrant in ranked if layouts[entrant] == layout][:BEST_OF_LAYOUT]
    default = default_at(run.session.device, run.problem, m, run.candidates)
    others = [default] if default else []
    for interval in incumbent.intervals() if incumbent else ():
        if interval.m_lo <= m and (interval.m_hi is None or m <= interval.m_hi):
            others.append(Entrant(kernel=interval.kernel, config=interval.config))
    chosen += [entrant for entrant in others if entrant in run.candidates and m in run.candidates[entrant].ms]
    chosen = [entrant for entrant in dict.fromkeys(chosen) if run.known.usable(entrant, m)]
    if not chosen:
        return ()
    compared = run.problem.op == "gemm" and run.known.usable(BASELINE_ENTRANT, m)
    return (*chosen, *((BASELINE_ENTRANT,) if compared else ()))


def run_finals(run: ProblemRun, incumbent: Plan | None, deadline: float | None) -> None:
    """One race per M, unless all its entrants have raced before."""
    for m in spread(run.ms):
        if deadline is not None and time.monotonic() >= deadline:
            return
        entrants = entrants_at(run, m, incumbent)
        if any(m not in run.known.finals.get(entrant, {}) for entrant in entrants):
            run.race(entrants, m)


def decide(run: ProblemRun, measurements: list[Measurement], *, allow_nondeterministic: bool = False) -> Plan | None:
    """The plan that all measurements of the problem support."""
    return make_plan(
        run.session.device,
        run.problem,
        measurements,
        kernels=run.session.installed,
        environment=run.session.environment,
        allow_nondeterministic=allow_nondeterministic,
        implementation_by_kernel=run.session.implementations,
    )


def refine(run: ProblemRun, plan: Plan, deadline: float | None) -> bool:
    """Race the winners on both sides of every wide crossover of the marked layout, halfway between the two.

    Returns
    -------
    bool
        Whether that told anything new, a failure also: the plan is to be made again, and its crossovers may still be
        wide.
    """
    learnt = False
    intervals = plan.intervals()
    for below, above in itertools.pairwise(intervals):
        if deadline is not None and time.monotonic() >= deadline:
            break
        pair = [Entrant(kernel=side.kernel, config=side.config) for side in (below, above)]
        if below.m_hi is None or below.m_hi + 1 != above.m_lo:
            continue  # what lies between runs untuned
        low, high = below.m_hi, _next_anchor(run, pair[1], below.m_hi)
        if high is None:
            continue
        high = min(high, above.m_hi or high)  # what is beyond belongs to neither of the two
        m = (low + high) // 2
        if high - low <= max(REFINE_GAP, low // REFINE_SHARE) or m > max(run.ms):  # inputs are made for run.ms
            continue
        valid = all(_serves(run, entrant, m) and run.known.usable(entrant, m) for entrant in pair)
        if not valid or not _differ(run, pair, high) or all(m in run.known.finals.get(e, {}) for e in pair):
            continue
        before = _known_at(run, pair, m)
        run.race(pair, m)
        learnt |= _known_at(run, pair, m) != before
    return learnt


def _known_at(run: ProblemRun, pair: list[Entrant], m: int) -> list[tuple[bool, bool]]:
    """Of each: whether it has raced at m, and whether it is out of the question there."""
    return [(m in run.known.finals.get(entrant, {}), not run.known.usable(entrant, m)) for entrant in pair]


def _next_anchor(run: ProblemRun, winner: Entrant, low: int) -> int | None:
    """The smallest M above `low` at which the winner above the crossover raced."""
    return min((m for m in run.known.finals.get(winner, {}) if m > low), default=None)


def _serves(run: ProblemRun, entrant: Entrant, m: int) -> bool:
    candidate = run.candidates.get(entrant)
    return candidate is not None and bool(
        candidate.kernel.is_valid(run.session.device, run.problem, candidate.config, m)
    )


def _differ(run: ProblemRun, pair: list[Entrant], m: int) -> bool:
    """Whether the upper winner beats the lower one beyond noise at m, with one routing at least.

    Within noise, where they cross does not matter.
    """
    if any(m not in run.known.finals.get(entrant, {}) for entrant in pair):
        return True
    below, above = (run.known.by_routing(entrant, m, "final") for entrant in pair)
    return any(beats(_timing(above[routing]), _timing(below[routing])) for routing in below.keys() & above.keys())


def _timing(row: Measurement) -> Timing:
    assert row.p50_us is not None
    return Timing(
        p20_us=row.p20_us or row.p50_us, p50_us=row.p50_us, p80_us=row.p80_us or row.p50_us, samples=row.samples
    )
