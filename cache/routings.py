"""Ops with experts are timed with several routings: how candidates are compared over all of them.

The regret of a candidate with one routing is its time over the best time with that routing. The best candidate is the
one whose largest regret is the least, since nobody knows the routings that are to come; of equals the one with the
least geometric mean, which is also the one time that is shown and compared with other values of M and other layouts.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import msgspec

from ..kernels.problem import Problem
from .records import RECORDED, ROUTINGS, Measurement

__all__ = ["combine", "is_routing", "routings_of", "worst_regrets"]

K = TypeVar("K", bound=Hashable)


def routings_of(problem: Problem, recorded: str = "") -> tuple[str, ...]:
    """The routings with which a problem is timed: one without a name where there are no experts.

    `recorded` is the name of one that a user recorded.
    """
    return ("",) if problem.op == "gemm" else (*ROUTINGS, recorded) if recorded else ROUTINGS


def is_routing(name: str) -> bool:
    """Whether a row may have this routing."""
    return name in ("", *ROUTINGS) or re.fullmatch(f"{RECORDED}[0-9a-f]{{12}}", name) is not None


def combine(problem: Problem, rows: Mapping[str, Measurement], recorded: str = "") -> Measurement | None:
    """One row out of those of a candidate at one M, by routing; None while the time of some routing is missing.

    Times are geometric means, the relative error is the largest, and samples are the fewest of any routing.
    """
    wanted = routings_of(problem, recorded)
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


def worst_regrets(times_us: Mapping[K, Mapping[str, float]]) -> dict[K, tuple[float, str]]:
    """The largest regret of every candidate at one M, and with which routing.

    Parameters
    ----------
    times_us
        By candidate, then by routing: the same routings for all.
    """
    best_us: dict[str, float] = {}
    for own in times_us.values():
        for routing, us in own.items():
            best_us[routing] = min(us, best_us.get(routing, us))
    return {
        candidate: max((us / best_us[routing], routing) for routing, us in own.items())
        for candidate, own in times_us.items()
    }


def _mean(times_us: Iterable[float | None]) -> float | None:
    known = [us for us in times_us if us is not None]
    return statistics.geometric_mean(known) if known else None
