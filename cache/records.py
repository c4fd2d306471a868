"""Measurement and Plan: what the tuner records and what the dispatcher reads. Plain records, no torch, no SQL."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable, Iterator

import msgspec

from ..kernels.problem import Device, Problem

__all__ = [
    "BASELINE",
    "PROTOCOLS",
    "RECORDED",
    "ROUTINGS",
    "STATUSES",
    "TIMING",
    "Environment",
    "Interval",
    "LayoutPlan",
    "Measurement",
    "Plan",
    "with_gaps",
]

STATUSES = ("ok", "wrong", "nan", "invalid", "build_error", "launch_error", "crash", "timeout", "oom")

# screen: a few milliseconds of replays, one per config. final: interleaved with the incumbent, sustained clocks; what
# decides. burst: after an idle pause, for reports.
PROTOCOLS = ("screen", "final", "burst")

# Which experts the tokens of a measurement went to, for ops with experts: tokens to all experts alike, to independent
# ones, and to some far more often than to others (Zipf). docs/timing.md says how they are made.
ROUTINGS = ("balanced", "random", "skewed")

RECORDED = "recorded-"  # begins the name of a routing that a user recorded; 12 hex digits of its content follow

TIMING = "1"  # version of the timing protocol: rows of other versions are not compared

BASELINE = "bf16_matmul"  # torch.matmul on dequantised weights: what users have today; measured, never planned


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The software a measurement ran on; versions as text, "" when absent."""

    nvfp4: str
    torch: str
    triton: str = ""
    cutlass_dsl: str = ""
    cuda: str = ""
    driver: str = ""
    timing: str = TIMING


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of evidence: a candidate on a problem at one M, on one device and environment."""

    device: Device
    environment: Environment
    problem: Problem
    kernel: str
    config: str  # canonical JSON (Config.to_json)
    layout: str
    implementation: str  # implementation_hash(kernel)
    m: int
    status: str  # one of STATUSES
    protocol: str = "screen"  # one of PROTOCOLS
    routing: str = ""  # of a time of an op with experts: one of ROUTINGS, or RECORDED and a hash; else ""
    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    samples: int = 0
    relative_error: float | None = None  # Frobenius norm against the exact reference
    clock_mhz: int | None = None  # SM clock while it was timed
    detail: str = ""  # the message of a failure
    when: float = msgspec.field(default_factory=time.time)  # seconds since the epoch
    uuid: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """From m_lo to m_hi tokens (both included; None: no end) run this candidate."""

    m_lo: int
    m_hi: int | None
    kernel: str
    config: str
    expected_us: float  # measured at the interval's largest anchor
    runner_up: str = ""  # "kernel {config}" of the best other candidate there, measured under the same protocol
    margin: float = 0.0  # runner-up's time over the winner's, minus 1; down to -2 % when the winner is the default.
    # Of ops with experts: the same of their largest regrets (`routings`), by which they are ranked


def with_gaps(intervals: Iterable[Interval]) -> Iterator[tuple[Interval | None, int, int | None]]:
    """Every M once, as (interval, first M, last M): None for an interval where none is; last M None: no end."""
    m_lo: int | None = 1
    for interval in intervals:
        if m_lo is not None and m_lo < interval.m_lo:
            yield None, m_lo, interval.m_lo - 1
        yield interval, interval.m_lo, interval.m_hi
        m_lo = None if interval.m_hi is None else interval.m_hi + 1
    if m_lo is not None:
        yield None, m_lo, None


class LayoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The best candidates that read one weight layout; intervals ascend, and what is between them runs untuned."""

    layout: str
    intervals: tuple[Interval, ...]
    traffic_us: float | None  # traffic-weighted mean of the winners' times, by which layouts are compared; None: the
    # layout has no candidate at the largest M that another layout was measured at, so it cannot be marked


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision for one problem on one device."""

    device: Device
    problem: Problem
    layout: str  # the marked one: what `nvfp4.pack` converts to
    layouts: tuple[LayoutPlan, ...]
    traffic: str  # name of the weighting over M
    environment: Environment

    @property
    def id(self) -> str:
        """Hash of the content: equal decisions have equal ids."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    def intervals(self, layout: str | None = None) -> tuple[Interval, ...]:
        """Intervals of one layout (the marked one by default); () when that layout was not measured."""
        wanted = layout or self.layout
        return next((entry.intervals for entry in self.layouts if entry.layout == wanted), ())
