"""Numbers and records as short text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..cache.records import Interval
from ..cache.words import candidate_words, config_words, microseconds
from ..kernels.problem import Device, Problem

__all__ = [
    "candidate_words",
    "config_words",
    "counts",
    "device_words",
    "duration",
    "interval_words",
    "kernels_by_m",
    "microseconds",
    "percent",
    "plural",
    "problem_words",
    "ratio",
    "ratios",
]

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


def device_words(device: Device) -> str:
    """ "NVIDIA H200 (sm_90, 132 SMs, 140 GiB)"; for a CPU its cores."""
    units = f"{device.arch}, {device.units} SMs" if device.kind == "cuda" else f"cpu, {device.units} cores"
    return f"{device.name} ({units}, {device.memory_bytes >> 30} GiB)"


def problem_words(problem: Problem) -> str:
    """ "gemm 4096x14336 bf16"."""
    return problem.label.replace(problem.dtype, SHORT_DTYPES.get(problem.dtype, problem.dtype))


def interval_words(interval: Interval) -> str:
    """ "1", "2-8", "129+"."""
    if interval.m_hi is None:
        return f"{interval.m_lo}+"
    return str(interval.m_lo) if interval.m_hi == interval.m_lo else f"{interval.m_lo}-{interval.m_hi}"


def kernels_by_m(intervals: Sequence[Interval]) -> str:
    """ "triton_gemv 1-16, two_pass 17+": neighbouring intervals of one kernel are one range here."""
    parts = []
    for kernel, group in itertools.groupby(intervals, key=lambda interval: interval.kernel):
        run = tuple(group)
        parts.append(f"{kernel} {interval_words(msgspec.structs.replace(run[0], m_hi=run[-1].m_hi))}")
    return ", ".join(parts)


def ratio(times: float | None) -> str:
    """ "1.85x"; "" for None."""
    return "" if times is None else f"{times:.2f}x" if times < 100 else f"{times:.0f}x"


def ratios(times: Iterable[float]) -> str:
    """The smallest and the largest: "0.98-3.21x"; "" for none."""
    found = sorted(times)
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
