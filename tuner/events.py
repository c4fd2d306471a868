"""What a tuning says while it runs: plain records, shown by the command line or printed as JSON lines."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..cache.records import Environment, Plan
from ..kernels.problem import Device, Problem

__all__ = [
    "CeilingsMeasured",
    "Emit",
    "Event",
    "Measured",
    "Note",
    "ProblemFinished",
    "ProblemStarted",
    "Progress",
    "Standing",
    "TuningFinished",
    "TuningStarted",
]


class TuningStarted(msgspec.Struct, frozen=True, kw_only=True, tag="tuning_started"):
    """The device answers and the database is open."""

    device: Device
    environment: Environment
    problems: tuple[Problem, ...]
    ms: tuple[int, ...]
    database: str


class CeilingsMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="ceilings_measured"):
    """What this device reaches on a plain copy and a plain bf16 matrix product: for rooflines."""

    copy_gbps: float  # bytes read plus bytes written, 1e9 a second
    bf16_tflops: float


class Note(msgspec.Struct, frozen=True, kw_only=True, tag="note"):
    """Something a person should know."""

    text: str


class ProblemStarted(msgspec.Struct, frozen=True, kw_only=True, tag="problem_started"):
    """A problem's candidates are known."""

    problem: Problem
    index: int  # from 0
    of: int
    candidates: int
    pending: int  # of them, not measured by an earlier run
    refused: tuple[str, ...]  # "kernel: reason" of those that cannot run it
    budget_s: float | None


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """One row was saved."""

    problem: Problem
    kernel: str
    config: str
    m: int
    status: str
    protocol: str
    routing: str  # of ops with experts, else ""
    p50_us: float | None
    detail: str


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest candidate at one M so far, and what it is compared with."""

    m: int
    kernel: str
    config: str
    best_us: float
    default_us: float | None  # of what runs untuned
    bf16_us: float | None  # of the bf16 matmul
    protocol: str

    @property
    def over_default(self) -> float | None:
        """How many times faster than what runs untuned."""
        return self.default_us / self.best_us if self.default_us else None

    @property
    def over_bf16(self) -> float | None:
        """How many times faster than the bf16 matmul."""
        return self.bf16_us / self.best_us if self.bf16_us else None


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far the screens of a problem are."""

    problem: Problem
    done: int  # candidates
    of: int
    eta_s: float | None  # for this problem
    best: tuple[Standing, ...]
    failures: dict[str, int]  # candidates by status


class ProblemFinished(msgspec.Struct, frozen=True, kw_only=True, tag="problem_finished"):
    """A problem's plan is saved, or there is none."""

    problem: Problem
    plan: Plan | None
    best: tuple[Standing, ...]
    failures: dict[str, int]
    unexplored: int  # candidates that the budget left
    unprepared: str = ""  # why its inputs could not be made: nothing was measured
    measured: int  # rows saved
    seconds: float


class TuningFinished(msgspec.Struct, frozen=True, kw_only=True, tag="tuning_finished"):
    """All is done, or was interrupted."""

    measured: int
    without_plan: tuple[Problem, ...]
    unexplored: int
    interrupted: bool
    seconds: float


Event = (
    TuningStarted | CeilingsMeasured | Note | ProblemStarted | Measured | Progress | ProblemFinished | TuningFinished
)
Emit = Callable[[Event], None]
