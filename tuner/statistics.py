"""What is concluded from times: medians, dropped rounds, which M of a candidate need no measurement. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "HOPELESS",
    "Timing",
    "beats",
    "hopeless",
    "percentile",
    "spread",
    "summarise",
    "throttled",
]

MARGIN = 0.02  # below it two candidates count as equal
THROTTLED = 0.9  # a round below this share of the other rounds' clock is dropped
HOPELESS = 3.0  # times the best: a candidate this slow around an M is not timed there
PROBE_STRIDE = 4  # every fourth M of a candidate is measured whatever the others say


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds of one launch over several rounds, and the clock they ran at."""

    p20_us: float
    p50_us: float
    p80_us: float
    samples: int
    clock_mhz: int | None = None


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics; share 0.5 is the median."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def throttled(clocks_mhz: Sequence[int | None]) -> tuple[bool, ...]:
    """Which rounds ran more than 10 % below the median clock of the other rounds; all False when clocks are unknown."""
    marks = []
    for i, clock in enumerate(clocks_mhz):
        others = [other for j, other in enumerate(clocks_mhz) if j != i and other is not None]
        marks.append(clock is not None and bool(others) and clock < THROTTLED * statistics.median(others))
    return tuple(marks)


def summarise(times_us: Sequence[float], clocks_mhz: Sequence[int | None] = ()) -> Timing:
    """Median, 20th and 80th percentile over the rounds that were not throttled.

    Parameters
    ----------
    times_us
        One time per round, at least one.
    clocks_mhz
        The clock of each round, or empty when none was read.
    """
    clocks = tuple(clocks_mhz) or (None,) * len(times_us)
    kept = [
        (time, clock) for time, clock, dropped in zip(times_us, clocks, throttled(clocks), strict=True) if not dropped
    ]  # never empty: the fastest clock is not below the median of the others
    times = [time for time, _ in kept]
    known = [clock for _, clock in kept if clock is not None]
    return Timing(
        p20_us=percentile(times, 0.2),
        p50_us=percentile(times, 0.5),
        p80_us=percentile(times, 0.8),
        samples=len(times),
        clock_mhz=round(statistics.median(known)) if known else None,
    )


def spread(ms: Sequence[int]) -> tuple[int, ...]:
    """The order in which a candidate's values of M are measured: every fourth and the last first, then the others."""
    probes = _probes(ms)
    return (*probes, *(m for m in sorted(ms) if m not in probes))


def hopeless(m: int, ms: Sequence[int], slowdown: Mapping[int, float]) -> bool:
    """Whether m need not be measured: the nearest measured M on both sides are more than 3 times the best there.

    Parameters
    ----------
    m
        The M in question.
    ms
        All values of M of the candidate, in any order.
    slowdown
        For each M measured so far: the candidate's time over the best time of any candidate at that M.
    """
    if m in slowdown or m in _probes(ms):
        return False
    below = max((known for known in slowdown if known < m), default=None)
    above = min((known for known in slowdown if known > m), default=None)
    return below is not None and above is not None and min(slowdown[below], slowdown[above]) > HOPELESS


def _probes(ms: Sequence[int]) -> list[int]:
    ordered = sorted(ms)
    return [m for i, m in enumerate(ordered) if i % PROBE_STRIDE == 0 or i == len(ordered) - 1]


def beats(challenger: Timing, incumbent: Timing) -> bool:
    """Whether a challenger wins: at least 2 % faster, and its slow rounds are faster than the incumbent's median."""
    return challenger.p50_us * (1 + MARGIN) <= incumbent.p50_us and challenger.p80_us < incumbent.p50_us
