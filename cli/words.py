"""Numbers and records as short text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from ..cache.records import Interval, with_gaps
from ..cache.words import UNTUNED, candidate_words, config_words, microseconds
from ..kernels.problem import SHORT_DTYPES, Device, Problem

__all__ = [
    "NOT_FINISHED",
    "UNTUNED",
    "candidate_words",
    "config_words",
    "counts",
    "device_words",
    "duration",
    "kernels_by_m",
    "microseconds",
    "percent",
    "planned",
    "plural",
    "problem_words",
    "range_words",
    "ratio",
    "ratios",
]

NOT_FINISHED = "no plan yet (not finished)"


def device_words(device: Device) -> str:
    """ "NVIDIA H200 (sm_90, 132 SMs, 140 GiB)"; for a CPU its cores."""
    units = f"{device.arch}, {device.units} SMs" if device.kind == "cuda" else f"cpu, {device.units} cores"
    return f"{device.name} ({units}, {device.memory_bytes >> 30} GiB)"


def problem_words(problem: Problem) -> str:
    """ "gemm 4096x14336 bf16"."""
    return problem.label.replace(problem.dtype, SHORT_DTYPES.get(problem.dtype, problem.dtype))


def range_words(m_lo: int, m_hi: int | None) -> str:
    """ "1", "2-8", "129+"."""
    if m_hi is None:
        return f"{m_lo}+"
    return str(m_lo) if m_hi == m_lo else f"{m_lo}-{m_hi}"


def kernels_by_m(ranges: Iterable[tuple[str, int, int | None]]) -> str:
    """ "triton_gemv 1-16, two_pass 17+" from (kernel, m_lo, m_hi): neighbours of one kernel are one range here."""
    parts = []
    for kernel, group in itertools.groupby(ranges, key=lambda one: one[0]):
        run = tuple(group)
        parts.append(f"{kernel} {range_words(run[0][1], run[-1][2])}")
    return ", ".join(parts)


def planned(intervals: Sequence[Interval]) -> str:
    """The same of a plan's intervals, "untuned" where there is none; "" without any."""
    found = with_gaps(intervals) if intervals else ()
    return kernels_by_m((one.kernel if one else UNTUNED, m_lo, m_hi) for one, m_lo, m_hi in found)


def ratio(times: float | None) -> str:
    """ "1.85x"; "" for None."""
    return "" if times is None else f"{times:.2f}x" if times < 100 else f"{times:.0f}x"


def ratios(times: Iterable[float | None]) -> str:
    """The smallest and the largest: "0.98-3.21x"; "" for none but None."""
    found = sorted(one for one in times if one is not None)
    if not found:
        return ""
    low, high = ratio(found[0]), ratio(found[-1])
    return high if low == high else f"{low.removesuffix('x')}-{high}"


def percent(share: float | None) -> str:
    """ "87 %", "3.1 %"; "" for None."""
    return "" if share is None else f"{100 * share:.{0 if share >= 0.1 else 1}f} %"


def counts(by_status: Mapping[str, int]) -> str:
    """ "3 wrong, 1 crash"; "" for none."""
    return ", ".join(f"{count} {status}" for status, count in by_status.items() if count)


def plural(count: int, noun: str) -> str:
    """ "1 problem", "2 problems"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """ "8 s", "3 min 05 s", "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
