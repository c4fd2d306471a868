"""Which candidate serves which M: the plan's intervals where they can be used, the kernels' defaults elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cache.records import Interval, Plan, with_gaps
from ..errors import Unsupported, message
from ..kernels import registry
from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from ..kernels.untuned import ANCHORS, FAR, OPEN, made_for_width

__all__ = ["Decision", "Segment", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """From m_lo to m_hi tokens (both included; None: no end) run this candidate."""

    m_lo: int
    m_hi: int | None
    kernel: Kernel
    config: Any

    @property
    def key(self) -> tuple[str, str]:
        """Equal for equal candidates."""
        return self.kernel.name, self.config.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Segments ascending from 1 without gaps, the last one open; and what to tell the user about them."""

    segments: tuple[Segment, ...]
    tuned: bool  # a plan had intervals for this layout
    ignored: tuple[str, ...]  # why intervals of the plan were not used


def decide(
    device: Device, problem: Problem, layout: str, plan: Plan | None, broken: Mapping[str, str] | None = None
) -> Decision:
    """Choose a candidate for every M.

    Parameters
    ----------
    plan
        None when nothing was measured. Its entries may come from anywhere: those that cannot be used here (an unknown
        kernel, a config that is not in its space or not valid all over its range) are replaced by defaults.
    broken
        Kernels that must not be chosen, with the reason.

    Raises
    ------
    Unsupported
        No kernel can run the problem; the message lists every kernel's reason.
    """
    usable, reasons = _usable(device, problem, layout, broken or {})
    intervals = plan.intervals(layout) if plan is not None else ()
    ascends = _ascend(intervals)
    ignored = [] if ascends else ["its intervals overlap"]
    segments: list[Segment] = []
    for interval, m_lo, m_hi in with_gaps(intervals if ascends else ()):
        if interval is not None:
            segment = _from_interval(device, problem, interval, usable, reasons)
            if isinstance(segment, Segment):
                segments.append(segment)
                continue
            ignored.append(segment)
        segments += _defaults(device, problem, layout, usable, reasons, m_lo, m_hi)
    return Decision(segments=_merged(segments), tuned=bool(intervals), ignored=tuple(ignored))


def _usable(
    device: Device, problem: Problem, layout: str, broken: Mapping[str, str]
) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Kernels that support the problem in this layout, and for all others the reason why not."""
    usable: dict[str, Kernel] = {}
    reasons: dict[str, str] = {}
    for kernel in registry.kernels(problem.op):
        if kernel.name in broken:
            reasons[kernel.name] = broken[kernel.name]
            continue
        verdict = kernel.supports(device, problem)
        if not verdict:
            reasons[kernel.name] = verdict.reason
            continue
        reads = kernel.layout(device, problem)
        if reads != layout:
            reasons[kernel.name] = f"reads weight layout {reads!r}"
            continue
        usable[kernel.name] = kernel
    return usable, reasons


def _ascend(intervals: tuple[Interval, ...]) -> bool:
    least = 1
    for interval in intervals:
        if not 0 < least <= interval.m_lo or (interval.m_hi is not None and interval.m_hi < interval.m_lo):
            return False
        least = 0 if interval.m_hi is None else interval.m_hi + 1
    return True


def _from_interval(
    device: Device, problem: Problem, interval: Interval, usable: Mapping[str, Kernel], reasons: Mapping[str, str]
) -> Segment | str:
    """The interval as a segment, or why it cannot be one."""
    name = interval.kernel
    where = f"M {interval.m_lo} to {interval.m_hi or 'any'}: kernel {name}"
    kernel = usable.get(name)
    if kernel is None:
        return f"{where} {reasons.get(name, 'is not installed')}"
    config = kernel.parse_config(device, problem, interval.config)
    if config is None:
        return f"{where} has no config {interval.config}"
    for m in _probes(interval.m_lo, interval.m_hi):
        verdict = kernel.is_valid(device, problem, config, m)
        if not verdict:
            return f"{where} refuses M = {m}: {verdict.reason}"
    return Segment(m_lo=interval.m_lo, m_hi=interval.m_hi, kernel=kernel, config=config)


def _defaults(
    device: Device,
    problem: Problem,
    layout: str,
    usable: Mapping[str, Kernel],
    reasons: Mapping[str, str],
    m_lo: int,
    m_hi: int | None,
) -> list[Segment]:
    """Segments of default configs over m_lo to m_hi: at every M the kernel made for the narrowest range around it.

    Like a plan's, a segment ends at an anchor and runs what suits that anchor: M is rounded up.
    """
    starts = {m_lo, *(anchor + 1 for anchor in ANCHORS)}
    for kernel in usable.values():
        for low, high in kernel.made_for:
            starts |= {low} if high is None else {low, high + 1}
    inside = sorted(m for m in starts if m >= m_lo and (m_hi is None or m <= m_hi))
    segments = []
    for start, following in zip(inside, [*inside[1:], None], strict=True):
        end = following - 1 if following is not None else m_hi
        refusals = dict(reasons)
        for kernel in sorted(usable.values(), key=lambda kernel: (_distance(kernel, start), kernel.name)):
            config = _default_config(device, problem, kernel, start, end, refusals)
            if config is not None:
                segments.append(Segment(m_lo=start, m_hi=end, kernel=kernel, config=config))
                break
        else:
            listed = "; ".join(f"{name}: {reason}" for name, reason in sorted(refusals.items())) or "there are none"
            raise Unsupported(
                message(
                    f"no kernel can run {problem.label} at M = {start} with weight layout {layout!r} on {device.name}"
                    f" ({device.arch})",
                    got=f"these reasons: {listed}",
                )
            )
    return segments


def _default_config(
    device: Device, problem: Problem, kernel: Kernel, start: int, end: int | None, refusals: dict[str, str]
) -> Any | None:
    """The default for the largest M of the range whose default is valid all over it; None, with the reason noted."""
    probes = _probes(start, end)
    for at in reversed(probes):
        config = kernel.default_config(device, problem, at)
        verdicts = [kernel.is_valid(device, problem, config, m) for m in probes]
        if all(verdicts):
            return config
        refusals.setdefault(kernel.name, next(verdict.reason for verdict in verdicts if not verdict))
    return None


def _probes(m_lo: int, m_hi: int | None) -> tuple[int, ...]:
    """Where a candidate must be valid to serve a range: at both ends, and at the anchors inside."""
    last = max(m_lo, FAR) if m_hi is None else m_hi
    return tuple(sorted({m_lo, last, *(m for m in ANCHORS if m_lo < m < last)}))


def _distance(kernel: Kernel, m: int) -> tuple[int, int]:
    """Sorts kernels by the narrowest range around m; those with none come last, the nearest range first."""
    width = made_for_width(kernel, m)
    if width is not None:
        return 0, width
    return 1, min((max(low - m, m - (high or OPEN)) for low, high in kernel.made_for), default=OPEN)


def _merged(segments: list[Segment]) -> tuple[Segment, ...]:
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].key == segment.key:
            last = merged[-1]
            merged[-1] = Segment(m_lo=last.m_lo, m_hi=segment.m_hi, kernel=last.kernel, config=last.config)
        else:
            merged.append(segment)
    return tuple(merged)
