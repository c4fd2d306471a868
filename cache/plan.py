"""From evidence to a decision: intervals of M for every layout, and which layout is marked.

For one layout, the Ms with a time are its anchors. The best candidate of an anchor serves every M from just above
the anchor before it up to the anchor itself: M is rounded up, since a kernel that computes tiles takes at M at most
the time it takes at the next anchor. The tuner refines a crossover by measuring at further Ms, which are anchors like
any other. Beyond the last anchor its best candidate goes on. A kernel's default that is within 2 % of the best is
taken: a smaller gain is not told apart from one run to the next. `routings` says which is best with several routings.

A candidate serves a range only if its kernel says it is valid at both ends and at the anchors inside, and if it did
not fail at an M inside. Where the best of an anchor cannot serve its whole range, as after a tuning at few Ms, it
serves the upper part, from the lowest of the usual anchors on, and what is below goes to the next best, as long as that
is not much slower. What is left a later anchor may serve; else it is a gap, which runs untuned, as does what lies
behind the last range where that ends. Where a default failed on the device, any candidate that can serve is better than
a gap, also one of an earlier anchor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import InvalidInput, message
from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from ..kernels.untuned import ANCHORS, FAR
from .evidence import Candidate, Evidence, Timed, behind, gather
from .records import Environment, Interval, LayoutPlan, Measurement, Plan

__all__ = [
    "CHECKPOINT_ADVANTAGE",
    "TRAFFIC",
    "Piece",
    "anchors_of",
    "counted_at",
    "make_plan",
    "marked",
    "mean_us",
    "piece_at",
    "pieces_by_layout",
]

# The share of calls in each band of M, given by the band's upper end; inside a band every anchor counts the same.
# decode-heavy: serving, where a prompt is one call of many tokens and its answer some hundred calls of few.
TRAFFIC: Mapping[str, tuple[tuple[int | None, float], ...]] = {
    "decode-heavy": ((8, 0.50), (64, 0.40), (512, 0.08), (None, 0.02)),
    "uniform": ((8, 0.25), (64, 0.25), (512, 0.25), (None, 0.25)),
}

# A layout other than the checkpoint's costs a conversion, so it must be worth it.
CHECKPOINT_ADVANTAGE = 0.03

# A challenger must beat what runs untuned by more than one run differs from the next; else the default stays.
DEFAULT_ADVANTAGE = 0.02

# A candidate that is further behind the best of its anchor is not taken for other M: the default is likelier to be fast
# there. Unless a default failed on this device.
GAP = 0.30


@dataclass(frozen=True, slots=True)
class Piece:
    """The range of M that one anchor decides; m_hi None: no end."""

    m_lo: int
    m_hi: int | None
    best: Timed
    runner_up: Timed | None


def make_plan(
    device: Device,
    problem: Problem,
    measurements: Iterable[Measurement],
    *,
    kernels: Mapping[str, Kernel],
    environment: Environment,
    traffic: str = "decode-heavy",
    allow_nondeterministic: bool = False,
    implementation_by_kernel: Mapping[str, str] | None = None,
) -> Plan | None:
    """The best plan that the measurements support, or None when there is no time of a candidate that can be used.

    Parameters
    ----------
    measurements
        Of this device and problem; others are left out, and so is all that `evidence.gather` does not trust.
    kernels
        The kernels that exist here, by name.
    environment
        Saved with the plan; times of another timing protocol than its `timing` are left out.
    traffic
        A name in `TRAFFIC`: how much each M weighs when layouts are compared.
    allow_nondeterministic
        Take candidates whose results differ in the last bits from run to run.
    implementation_by_kernel
        What `evidence.implementations(kernels)` returns, for callers that plan often.

    Raises
    ------
    InvalidInput
        An unknown traffic.
    """
    if traffic not in TRAFFIC:
        raise InvalidInput(message("unknown traffic", got=traffic, expected=" or ".join(TRAFFIC)))
    evidence = gather(
        device,
        problem,
        measurements,
        kernels,
        implementation_by_kernel=implementation_by_kernel,
        timing=environment.timing,
        allow_nondeterministic=allow_nondeterministic,
    )
    pieces = pieces_by_layout(evidence)
    if not pieces:
        return None
    anchors = anchors_of(pieces)
    layouts = tuple(
        LayoutPlan(layout=layout, intervals=_merge(found), traffic_us=mean_us(found, anchors, traffic))
        for layout, found in pieces.items()
    )
    return Plan(
        device=device,
        problem=problem,
        layout=marked({entry.layout: entry.traffic_us for entry in layouts}),
        layouts=layouts,
        traffic=traffic,
        environment=environment,
    )


def pieces_by_layout(evidence: Evidence) -> dict[str, list[Piece]]:
    """For every layout, sorted by name: ranges that ascend, with gaps where none can serve, or only slow ones."""
    return {layout: _pieces(evidence, layout) for layout in evidence.layouts()}


def anchors_of(pieces: Mapping[str, Sequence[Piece]]) -> list[int]:
    """The Ms at which some layout was measured, ascending: where layouts are compared."""
    return sorted({piece.best.m for found in pieces.values() for piece in found})


def _pieces(evidence: Evidence, layout: str) -> list[Piece]:
    """Every anchor's range, and beyond the last one."""
    anchors = evidence.anchors(layout)
    failed = evidence.failed_defaults(layout)
    pieces: list[Piece] = []
    m_lo = 1
    for i, m in enumerate(anchors):
        anyhow = any(m_lo <= at <= m for at in failed)
        left, m_lo = [(m_lo, m)], m + 1
        fewer = reversed(anchors[:i]) if anyhow else ()  # better measured at fewer tokens than a default that failed
        for measured_at in (*anchors[i:], *fewer):
            ranges, left = left, []
            for low, high in ranges:
                found, rest = _fill(evidence, evidence.times[layout, measured_at], low, high, anyhow)
                pieces += found
                left += rest
    anyhow = any(at >= m_lo for at in failed)
    last = reversed(anchors) if anyhow else anchors[-1:]
    beyond = (_piece(evidence, evidence.times[layout, m], m_lo, None, anyhow) for m in last)
    pieces += [piece for piece in beyond if piece is not None][:1]
    return sorted(pieces, key=lambda piece: piece.m_lo)


def _fill(
    evidence: Evidence, ranked: Sequence[Timed], m_lo: int, m_hi: int, anyhow: bool
) -> tuple[list[Piece], list[tuple[int, int]]]:
    """Ranges that descend from m_hi, each as far as one of the best there can serve, and what none of them can."""
    pieces: list[Piece] = []
    left: list[tuple[int, int]] = []
    while m_lo <= m_hi:
        starts = {m_lo, *(anchor + 1 for anchor in ANCHORS if m_lo <= anchor < m_hi)}
        starts |= {m_hi} if m_hi == ranked[0].m else set()
        ranges = [_piece(evidence, ranked, start, m_hi, anyhow) for start in sorted(starts)]
        served = [one for one in ranges if one is not None]
        if served:
            pieces.append(next(one for one in served if _is_near(one.best, served[-1])))
            m_hi = pieces[-1].m_lo - 1
        else:
            end, m_hi = m_hi, max(starts) - 1
            if left and left[-1][0] == end + 1:
                end = left.pop()[1]
            left.append((m_hi + 1, end))
    return pieces, left


def _is_near(timed: Timed, narrow: Piece) -> bool:
    """Whether a candidate is within 2 % of the fastest that serves the upper end, by the same kind of time."""
    fastest = narrow.runner_up if narrow.runner_up and narrow.runner_up.rank < narrow.best.rank else narrow.best
    return timed.protocol == fastest.protocol and behind(fastest, timed) <= DEFAULT_ADVANTAGE


def _piece(evidence: Evidence, ranked: Sequence[Timed], m_lo: int, m_hi: int | None, anyhow: bool) -> Piece | None:
    serving: list[Timed] = []
    for timed in ranked:
        if serving and timed.protocol != serving[0].protocol:
            break  # a screen says nothing beside a final
        if not (serving or anyhow) and (timed.protocol != ranked[0].protocol or behind(ranked[0], timed) > GAP):
            break
        if len(serving) > 1 and behind(serving[0], timed) > DEFAULT_ADVANTAGE:
            break  # neither a runner-up nor a default that is near is looked for
        if _serves(evidence, timed.candidate, m_lo, m_hi):
            serving.append(timed)
    if not serving:
        return None
    near = (timed for timed in serving if timed.is_default and behind(serving[0], timed) <= DEFAULT_ADVANTAGE)
    best = next(near, serving[0])
    return Piece(m_lo, m_hi, best, next((timed for timed in serving if timed is not best), None))


def _serves(evidence: Evidence, candidate: Candidate, m_lo: int, m_hi: int | None) -> bool:
    last = max(m_lo, FAR) if m_hi is None else m_hi
    if any(m_lo <= m <= last for m in evidence.failures.get(candidate, ())):
        return False
    inside = (m for m in (*ANCHORS, *evidence.anchors(candidate.layout)) if m_lo < m < last)
    return all(evidence.is_valid(candidate, m) for m in (m_lo, *inside, last))


def _merge(pieces: Sequence[Piece]) -> tuple[Interval, ...]:
    """Neighbours with the same candidate become one interval, with the figures of its largest anchor."""
    merged: list[Piece] = []
    for piece in pieces:
        last_end = merged[-1].m_hi if merged else None
        if last_end == piece.m_lo - 1 and merged[-1].best.candidate == piece.best.candidate:
            last = merged.pop()
            # What goes on beyond the last anchor was measured at that anchor, and fewer can follow it there.
            runner_up = piece.runner_up or (last.runner_up if last.best.m == piece.best.m else None)
            piece = Piece(last.m_lo, piece.m_hi, piece.best, runner_up)
        merged.append(piece)
    return tuple(_interval(piece) for piece in merged)


def _interval(piece: Piece) -> Interval:
    other = piece.runner_up
    return Interval(
        m_lo=piece.m_lo,
        m_hi=piece.m_hi,
        kernel=piece.best.candidate.kernel,
        config=piece.best.candidate.config,
        expected_us=piece.best.p50_us,
        runner_up=f"{other.candidate.kernel} {other.candidate.config}" if other else "",
        margin=behind(piece.best, other) if other else 0.0,
    )


def mean_us(pieces: Sequence[Piece], anchors: Sequence[int], traffic: str) -> float | None:
    """The mean time of a call, or None when an anchor of another layout lies beyond what was measured in this one.

    Parameters
    ----------
    anchors
        Of all layouts that it is compared with.
    traffic
        A name in `TRAFFIC`.
    """
    total_us = total = 0.0
    above = 0
    for upper, share in TRAFFIC[traffic]:
        found = [counted_at(pieces, m) for m in anchors if above < m and (upper is None or m <= upper)]
        times = [piece.best.p50_us for piece in found if piece is not None]
        if len(times) < len(found):
            return None
        if times:
            total_us += share * sum(times) / len(times)
            total += share
        above = upper or above
    return total_us / total


def piece_at(pieces: Sequence[Piece], m: int) -> Piece | None:
    """What serves m; None: it runs untuned."""
    return next((piece for piece in pieces if piece.m_lo <= m and (piece.m_hi is None or m <= piece.m_hi)), None)


def counted_at(pieces: Sequence[Piece], m: int) -> Piece | None:
    """Whose time counts at m: of what serves it, measured there or at the anchor above; in a gap of what comes next.

    None beyond the last anchor.
    """
    return next((piece for piece in pieces if m <= (piece.m_hi or m) and m <= piece.best.m), None)


def marked(mean_by_layout: Mapping[str, float | None]) -> str:
    """The layout with the smallest mean; the checkpoint's wins if it is within `CHECKPOINT_ADVANTAGE`."""
    # The layout that was planned from the largest anchor has a mean, so there is always one to take.
    means = {layout: mean for layout, mean in mean_by_layout.items() if mean is not None}
    best = min(means, key=lambda layout: (means[layout], layout))
    checkpoint_us = means.get("checkpoint")
    if checkpoint_us is not None and checkpoint_us <= means[best] * (1 + CHECKPOINT_ADVANTAGE):
        return "checkpoint"
    return best
