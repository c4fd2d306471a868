"""The loop over the candidates of one problem: which are screened, in which order, and when it ends."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator

from .candidates import Candidate, default_at, ordered
from .events import Progress, Standing
from .messages import Entrant
from .session import ProblemRun
from .suggest import Suggester

__all__ = ["WHOLE", "screen_all", "standings", "submit_builds"]

WHOLE = 400  # candidates: a space up to this size is measured whole, if time allows; of a larger one so many
LEARN = 8  # candidates screened before the time for all is estimated
AHEAD = 16  # candidates proposed before those ahead of them are measured: they compile meanwhile
PROGRESS_S = 0.5


def screen_all(run: ProblemRun, *, first: tuple[Entrant, ...] = (), deadline: float | None = None) -> int:
    """Screen the candidates of a problem.

    Parameters
    ----------
    first
        Candidates worth trying early: winners of similar shapes.
    deadline
        Of `time.monotonic`: no candidate is begun after it. None: no limit.

    Returns
    -------
    int
        How many candidates were left unexplored: by the deadline, or because the space is too large.
    """
    queue = ordered(run.session.device, run.problem, run.candidates, first)
    whole = len(queue) <= WHOLE
    early = set(first)
    order = _Order(run, queue, head=len(queue) if whole else LEARN + sum(c.entrant in early for c in queue))
    begun = shown = time.monotonic()
    done = spent = 0
    for candidate in order:
        now = time.monotonic()
        if (deadline is not None and now >= deadline) or (not whole and _explored(run) >= WHOLE):
            break
        pending = bool(run.known.pending(candidate, run.known.best_us()))
        run.screen(candidate)
        order.measured(candidate)
        done, spent = done + 1, spent + pending
        now = time.monotonic()
        each_s = (now - begun) / max(1, spent)
        left = len(queue) - done
        if deadline is not None and spent == LEARN and now + each_s * left > deadline:
            order.be_choosy()
        if now - shown > PROGRESS_S or left == 0:
            shown = now
            eta_s = each_s * left if spent else None
            if deadline is not None and eta_s is not None:
                eta_s = max(0.0, min(eta_s, deadline - now))
            run.session.emit(
                Progress(
                    problem=run.problem,
                    done=done,
                    of=len(queue),
                    eta_s=eta_s,
                    best=standings(run),
                    failures=run.known.failures(),
                )
            )
    best_us = run.known.best_us()
    return sum(
        bool(run.known.pending(candidate, best_us)) and candidate.entrant not in run.known.screens
        for candidate in queue
    )


def _explored(run: ProblemRun) -> int:
    """How many candidates were screened or failed, in this run and earlier ones."""
    return len(run.candidates.keys() & (run.known.screens.keys() | run.known.failed.keys()))


def submit_builds(run: ProblemRun, first: tuple[Entrant, ...] = ()) -> None:
    """Start to compile what is certain to be screened: all candidates of a space that is measured whole."""
    session = run.session
    queue = ordered(session.device, run.problem, run.candidates, first)
    best_us = run.known.best_us()
    for candidate in queue if len(queue) <= WHOLE else queue[:LEARN]:
        if run.known.pending(candidate, best_us):
            session.builds.submit(session.device, run.problem, candidate.kernel, candidate.config)


class _Order:
    """Yields candidates: the first ones of the queue, then the rest of it or what a Suggester proposes."""

    def __init__(self, run: ProblemRun, queue: list[Candidate], *, head: int) -> None:
        self._run, self._queue, self._head = run, queue, head
        self._measured: dict[Entrant, Candidate] = {}
        self._suggester: Suggester | None = None
        self._ahead: deque[Candidate] = deque()  # proposed, and being compiled

    def __iter__(self) -> Iterator[Candidate]:
        at = 0
        while at < min(self._head, len(self._queue)):
            yield self._queue[at]
            at += 1
        while len(self._measured) < len(self._queue):
            candidate = self._propose()
            if candidate is None:
                return
            yield candidate

    def measured(self, candidate: Candidate) -> None:
        """Tell that a candidate has been dealt with."""
        self._measured[candidate.entrant] = candidate
        if self._suggester is not None:
            self._suggester.tell(candidate, self._slowdown(candidate))

    def be_choosy(self) -> None:
        """There is no time for all: let the rest be proposed."""
        self._head = 0

    def _propose(self) -> Candidate | None:
        if self._suggester is None:
            run = self._run
            kernels = {candidate.kernel.name: candidate.kernel for candidate in self._queue}
            spaces = {name: kernel.space(run.session.device, run.problem) for name, kernel in kernels.items()}
            self._suggester = Suggester(run.candidates, spaces)
            for known in self._measured.values():
                self._suggester.tell(known, self._slowdown(known))
        while len(self._ahead) < AHEAD and (proposed := self._suggester.propose()) is not None:
            session = self._run.session
            session.builds.submit(session.device, self._run.problem, proposed.kernel, proposed.config)
            self._ahead.append(proposed)
        return self._ahead.popleft() if self._ahead else None

    def _slowdown(self, candidate: Candidate) -> dict[int, float]:
        if self._run.known.given_up(candidate.entrant):
            return {}
        best_us = self._run.known.best_us()
        times = self._run.known.screen_us(candidate)
        return {m: us / best_us[m] for m, us in times.items() if us < math.inf and m in best_us}


def standings(run: ProblemRun) -> tuple[Standing, ...]:
    """The fastest candidate at every M: among finals where there are some, else among screens."""
    found = []
    for m in sorted({*run.ms, *(m for rows in run.known.finals.values() for m in rows)}):
        for protocol, rows in (("final", run.known.finals), ("screen", run.known.screens)):
            times = {
                entrant: by_m[m].p50_us or math.inf
                for entrant, by_m in rows.items()
                if m in by_m and entrant in run.candidates and run.known.usable(entrant, m)
            }
            if not times:
                continue
            best = min(times, key=lambda entrant: (times[entrant], entrant.kernel, entrant.config))
            default = default_at(run.session.device, run.problem, m, run.candidates)
            found.append(
                Standing(
                    m=m,
                    kernel=best.kernel,
                    config=best.config,
                    best_us=times[best],
                    default_us=times.get(default) if default else None,
                    bf16_us=run.known.bf16_us(m),
                    protocol=protocol,
                )
            )
            break
    return tuple(found)
