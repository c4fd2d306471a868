"""Time of calls on the host: what bench/dispatch.py and bench/moe.py share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

ROUNDS_PER_DRAIN = 50


def nothing(*_: object) -> None:
    """The subject that measures the clock, and a launcher that launches nothing."""


def median_us(
    subjects: dict[str, Callable[[], object]], calls: int, drain: Callable[[], None], *, warm: int = 200
) -> dict[str, float]:
    """Median time of one call of each subject, less that of an empty function.

    Subjects are called in turns and each call is timed alone, the first `warm` not; `drain` empties the queue.
    """
    subjects = {"timer": nothing, **subjects}
    samples: dict[str, list[int]] = {name: [] for name in subjects}
    clock = time.perf_counter_ns
    for i in range(calls + warm):
        if i % ROUNDS_PER_DRAIN == 0:
            drain()
        if i == warm:
            for taken in samples.values():
                taken.clear()
        for name, subject in subjects.items():
            start = clock()
            subject()
            samples[name].append(clock() - start)
    drain()
    medians = {name: statistics.median(taken) / 1e3 for name, taken in samples.items()}
    timer = medians.pop("timer")
    return {name: round(median - timer, 3) for name, median in medians.items()}
