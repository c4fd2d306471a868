"""Ops with experts are timed with several routings: one time of a candidate out of those of all routings.

It is the geometric mean. The ratio of two candidates is then the geometric mean of their ratios, so a routing counts
no more for taking longer; and it depends on no other candidate, so that nothing that is measured later changes the
order of two that were measured before. How far a candidate falls behind with its worst routing is shown beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

import msgspec

from ..kernels.problem import Problem
from .records import ROUTINGS, Measurement

__all__ = ["combine", "routings_of"]


def routings_of(problem: Problem) -> tuple[str, ...]:
    """The routings with which a problem is timed: one without a name where there are no experts."""
    return ("",) if problem.op == "gemm" else ROUTINGS


def combine(problem: Problem, rows: Mapping[str, Measurement]) -> Measurement | None:
    """One row out of those of a candidate at one M, by routing; None while the time of some routing is missing.

    Times are geometric means, the relative error is the largest, and samples are the fewest of any routing.
    """
    wanted = routings_of(problem)
    found = [rows[routing] for routing in wanted if routing in rows and rows[routing].p50_us is not None]
    if len(found) < len(wanted):
        return None
    if len(found) == 1:
        return found[0]
    errors = [row.relative_error for row in found if row.relative_error is not None]
    return msgspec.structs.replace(
        found[-1],
        routing="",
        p20_us=_mean(row.p20_us for row in found),
        p50_us=_mean(row.p50_us for row in found),
        p80_us=_mean(row.p80_us for row in found),
        samples=min(row.samples for row in found),
        relative_error=max(errors, default=None),
    )


def _mean(times_us: Iterable[float | None]) -> float | None:
    known = [us for us in times_us if us is not None]
    return statistics.geometric_mean(known) if known else None
