"""One tuning at work: the device, its worker, the database, and how what the worker says becomes rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from ..cache.evidence import implementations
from ..cache.records import BASELINE, Environment, Measurement
from ..cache.store import Store
from ..errors import Nvfp4Error, message
from ..kernels.build import BuildPool
from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from .candidates import Candidate, Known
from .events import Emit, Measured
from .inputs import least_bytes
from .messages import BASELINE_CONFIG, Done, Entrant, Pace, Race, Recorded, Row, Screen
from .worker import Died, Worker

__all__ = ["BASELINE_ENTRANT", "ProblemRun", "Session", "Unprepared"]

BASELINE_ENTRANT = Entrant(kernel=BASELINE, config=BASELINE_CONFIG)
DENSE = "dense"  # the layout of the baseline's weights


class Unprepared(Nvfp4Error, RuntimeError):
    """The inputs of a problem do not fit the device."""


@dataclass(slots=True, kw_only=True)
class Session:
    """What all problems of one tuning share."""

    device: Device
    environment: Environment
    installed: Mapping[str, Kernel]  # all there are: plans are made from the rows of all
    kernels: Mapping[str, Kernel]  # those to measure
    worker: Worker
    builds: BuildPool
    store: Store
    emit: Emit
    pace: Pace
    recorded: Recorded | None = None
    implementations: dict[str, str] = field(init=False)
    measured: int = 0  # rows saved

    def __post_init__(self) -> None:
        self.implementations = {**implementations(self.installed), BASELINE: f"torch {self.environment.torch}"}


@dataclass(slots=True, kw_only=True)
class ProblemRun:
    """One problem of a tuning."""

    session: Session
    problem: Problem
    ms: tuple[int, ...]
    candidates: dict[Entrant, Candidate]
    known: Known
    refused: tuple[str, ...] = ()  # why kernels have no candidate here

    @property
    def recorded(self) -> Recorded | None:
        """The routing that a user recorded, if the problem has experts."""
        return None if self.problem.op == "gemm" else self.session.recorded

    def screen(self, candidate: Candidate) -> None:
        """Build, check and screen one candidate at the M where that is still to be done."""
        session, entrant = self.session, candidate.entrant
        for attempt in (0, 1):
            best_us = self.known.best_us()
            pending = self.known.pending(candidate, best_us)
            if not pending:
                return
            reason = session.builds.wait(session.device, self.problem, candidate.kernel, candidate.config)
            if reason:
                self.save([self._failure(entrant, candidate.ms[0], "screen", "build_error", reason)])
                return
            request = Screen(
                device=session.device,
                problem=self.problem,
                entrant=entrant,
                ms=pending,
                all_ms=self.ms,
                best_us=best_us,
                known_us=self.known.screen_us(candidate),
                pace=session.pace,
                recorded=self.recorded,
            )
            lost: list[Died] = []
            self._ask(request, lost.append)
            if not lost:
                return
            if attempt or not lost[0].killed:  # who was killed from outside gets a second chance
                self._blame(entrant, candidate.ms[0], "screen", lost[0])
                return

    def race(self, entrants: Iterable[Entrant], m: int, protocol: str = "final") -> None:
        """Time entrants in turns. One that fails is left out; when nobody knows which, each runs alone first."""
        wanted = tuple(entrants)
        for attempt in (0, 1):
            running = tuple(entrant for entrant in wanted if self.known.usable(entrant, m))
            if not running:
                return
            lost: list[Died] = []
            done = self._ask(self._race(running, m, protocol), lost.append)
            if not lost and not done.tainted:
                return
            found = any(not self.known.usable(entrant, m) for entrant in running)
            if attempt == 0 and (found or (lost and lost[0].killed)):
                continue
            culprit = running[0] if len(running) == 1 else self._culprit(lost)
            if culprit is not None and lost:
                self._blame(culprit, m, protocol, lost[0])
            elif attempt == 0:
                for entrant in running:
                    self._alone(entrant, m)

    def save(self, rows: Iterable[Measurement]) -> None:
        """Into the database, into what is known, and out as events."""
        for row in rows:
            self.session.store.add([row])
            self.session.measured += 1
            self.known.add(row)
            self.session.emit(
                Measured(
                    problem=self.problem,
                    kernel=row.kernel,
                    config=row.config,
                    m=row.m,
                    status=row.status,
                    protocol=row.protocol,
                    routing=row.routing,
                    p50_us=row.p50_us,
                    detail=row.detail,
                )
            )

    def _race(self, entrants: tuple[Entrant, ...], m: int, protocol: str) -> Race:
        return Race(
            device=self.session.device,
            problem=self.problem,
            entrants=entrants,
            m=m,
            all_ms=self.ms,
            protocol=protocol,
            pace=self.session.pace,
            recorded=self.recorded,
        )

    def _alone(self, entrant: Entrant, m: int) -> None:
        """Find out whether an entrant ruins the worker when it runs by itself."""
        if not self.known.usable(entrant, m):
            return
        lost: list[Died] = []
        done = self._ask(self._race((entrant,), m, "screen"), lost.append)
        for died in lost:
            self._blame(entrant, m, "screen", died)
        if done.tainted and self.known.usable(entrant, m):  # its row, if it has one, said so already
            self.save([self._failure(entrant, m, "screen", "crash", done.tainted)])

    def _ask(self, request: Screen | Race, on_death: Callable[[Died], None]) -> Done:
        try:
            for body in self.session.worker.run(request):
                if isinstance(body, Row):
                    self.save([self._measurement(body)])
                else:
                    if body.unprepared:
                        raise self._unprepared(body.unprepared)
                    return body
        except Died as died:
            if died.last is not None and died.last.step == "prepare":
                raise self._unprepared(died.detail) from died
            on_death(died)
        return Done()

    def fits(self) -> None:
        """Raise Unprepared when the device has less memory than the inputs need, before it is asked for."""
        if 0 < self.session.device.memory_bytes < least_bytes(self.problem, self.ms):
            raise self._unprepared()

    def _unprepared(self, got: str | None = None) -> Unprepared:
        need, has = least_bytes(self.problem, self.ms), self.session.device.memory_bytes
        return Unprepared(
            message(
                f"the inputs of {self.problem.label} do not fit in memory for M up to {max(self.ms)}: they need at"
                f" least {need / 2**30:,.1f} GiB, and the device has {has / 2**30:,.1f} GiB",
                got=got,
                do="tune smaller M (--m)" if need > has else "free memory on the device, or tune smaller M (--m)",
            )
        )

    def _culprit(self, lost: list[Died]) -> Entrant | None:
        last = lost[0].last if lost else None
        if last is None or not last.kernel:
            return None  # several replays were running
        return Entrant(kernel=last.kernel, config=last.config)

    def _blame(self, entrant: Entrant, m: int, protocol: str, died: Died) -> None:
        if died.last is not None and died.last.m:
            m = died.last.m
        step = f" while it was at: {died.last.step}, M = {m}" if died.last is not None else ""
        self.save([self._failure(entrant, m, protocol, died.status, f"{died.detail}{step}")])

    def _failure(self, entrant: Entrant, m: int, protocol: str, status: str, detail: str) -> Measurement:
        row = Row(kernel=entrant.kernel, config=entrant.config, m=m, status=status, protocol=protocol, detail=detail)
        return self._measurement(row)

    def _measurement(self, row: Row) -> Measurement:
        session = self.session
        candidate = self.candidates.get(Entrant(kernel=row.kernel, config=row.config))
        return Measurement(
            device=session.device,
            environment=session.environment,
            problem=self.problem,
            layout=candidate.layout if candidate else DENSE,
            implementation=session.implementations[row.kernel],
            **msgspec.structs.asdict(row),
        )
