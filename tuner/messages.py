"""What the tuner's parent and its worker say to each other. Plain records; the worker's lines are JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ..kernels.problem import Device, Problem

__all__ = [
    "BASELINE_CONFIG",
    "Ceilings",
    "Done",
    "Entrant",
    "Hello",
    "Line",
    "Pace",
    "Race",
    "Recorded",
    "Row",
    "Screen",
    "Started",
    "shorten",
]

BASELINE_CONFIG = "{}"
DETAIL_BYTES = 1500  # of JSON: a line stays below 4096 bytes, up to which a pipe takes all or nothing


def shorten(text: str) -> str:
    """The beginning of a message, short enough for a line; bytes that were no text (lone surrogates) as escapes."""
    text = text.encode(errors="backslashreplace").decode()
    while len(msgspec.json.encode(text)) > DETAIL_BYTES:
        text = text[: max(1, len(text) * 3 // 4)]
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A candidate by name: kernel and canonical config JSON. The baseline is one, with an empty config."""

    kernel: str
    config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things are timed; tests make it short."""

    screen_us: float = 2500.0  # replays of one screen, all together
    rounds: int = 11  # of a final
    sustain_us: float = 60_000.0  # load before a final of at least `sustain_from` tokens
    sustain_from: int = 256
    idle_us: float = 60_000.0  # pause before each round of a burst


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A routing that a user recorded; `recorded.recorded_ids` unpacks it."""

    name: str  # as in the rows: cache.records.RECORDED and a hash of all that was recorded
    ids: bytes = field(repr=False)  # int32 [tokens, top_k]
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Check one candidate, then time it briefly at every M that is not hopeless."""

    device: Device
    problem: Problem
    entrant: Entrant
    ms: tuple[int, ...]  # to measure, in this order
    all_ms: tuple[int, ...]  # every M of the run: sizes the inputs
    best_us: dict[int, float] = field(default_factory=dict)  # the fastest known screen of any candidate
    known_us: dict[int, float] = field(default_factory=dict)  # this candidate's screens from earlier runs
    pace: Pace = Pace()
    recorded: Recorded | None = None  # timed with this routing too, if the problem has experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Time candidates at one M in turns, under sustained load (`protocol` final) or after pauses (burst)."""

    device: Device
    problem: Problem
    entrants: tuple[Entrant, ...]
    m: int
    all_ms: tuple[int, ...]
    protocol: str = "final"
    pace: Pace = Pace()
    recorded: Recorded | None = None  # timed with this routing too, if the problem has experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Ask the worker for its Device; it answers through the future."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Ask for `events.CeilingsMeasured`."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The worker begins a step: what was in flight, should it die."""

    pid: int
    kernel: str = ""
    config: str = ""
    m: int = 0
    step: str = ""  # "prepare", "build", "check", "screen", "final"


class Row(msgspec.Struct, frozen=True, kw_only=True, tag="row"):
    """One finished step of evidence; the parent makes a Measurement of it, which has all these fields too."""

    kernel: str
    config: str
    m: int
    status: str
    protocol: str
    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    samples: int = 0
    relative_error: float | None = None
    clock_mhz: int | None = None
    routing: str = ""
    detail: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The request is finished."""

    tainted: str = ""  # memory or the CUDA context may be damaged, for this reason: replace the worker
    unprepared: str = ""  # the inputs of the problem could not be made, for this reason: no candidate can be measured


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A message with the number of the request it belongs to."""

    request: int
    body: Started | Row | Done
