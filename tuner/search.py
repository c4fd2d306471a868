"""The loop over the candidates of one problem: which are screened, in which order, and when it ends."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator

from .candidates import Candidate, default_at, ordered, promising
from .events import Progress, Standing
from .messages import Entrant
from .session import ProblemRun
from .suggest import Suggester

__all__ = ["WHOLE", "screen_all", "standings", "submit_builds"]

WHOLE = 400  # candidates: a space up to this size is measured whole, if time allows; of a larger one so many
LEARN = 8  # candidates screened before the time for all is estimated
FAR = 1.3  # times the best at an M: a kernel that is slower there is not looked into
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
    queue, certain = ordered(run.session.device, run.problem, run.candidates, first)
    whole = len(queue) <= WHOLE
    order = _Order(run, queue, certain=certain, whole=whole)
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
    """Start to compile what is certain to be screened: a space that is measured whole, else defaults and hints."""
    session = run.session
    queue, certain = ordered(session.device, run.problem, run.candidates, first)
    best_us = run.known.best_us()
    for candidate in queue if len(queue) <= WHOLE else queue[:certain]:
        if run.known.pending(candidate, best_us):
            session.builds.submit(session.device, run.problem, candidate.kernel, candidate.config)


class _Order:
    """Yields candidates: those that are certain, and all others where there is time for the whole queue.

    Else the promising ones, as far as their kernel has come near the best at the M they are promising at; then what a
    Suggester proposes.
    """

    def __init__(self, run: ProblemRun, queue: list[Candidate], *, certain: int, whole: bool) -> None:
        self._run, self._queue, self._certain, self._whole = run, queue, certain, whole
        self._measured: dict[Entrant, Candidate] = {}
        self._suggester: Suggester | None = None
        self._ahead: deque[Candidate] = deque()  # proposed, and being compiled

    def __iter__(self) -> Iterator[Candidate]:
        for at, candidate in enumerate(self._queue):
            if at >= self._certain and not self._whole:
                break
            yield candidate
        yield from self._promising()
        while len(self._measured) < len(self._queue):
            proposed = self._propose()
            if proposed is None:
                return
            yield proposed

    def measured(self, candidate: Candidate) -> None:
        """Tell that a candidate has been dealt with."""
        self._measured[candidate.entrant] = candidate
        if self._suggester is not None:
            self._suggester.tell(candidate, self._slowdown(candidate))

    def be_choosy(self) -> None:
        """There is no time for all."""
        self._whole = False

    def _promising(self) -> Iterator[Candidate]:
        run = self._run
        left = deque(promising(run.session.device, run.problem, run.candidates))
        ahead: deque[tuple[Candidate, int]] = deque()  # being compiled
        while left or ahead:
            while left and len(ahead) < AHEAD:
                candidate, m = left.popleft()
                if candidate.entrant not in self._measured and self._near(candidate, m):
                    run.session.builds.submit(run.session.device, run.problem, candidate.kernel, candidate.config)
                    ahead.append((candidate, m))
            if ahead:
                candidate, m = ahead.popleft()
                if self._near(candidate, m):  # the best may have come down meanwhile
                    yield candidate

    def _near(self, candidate: Candidate, m: int) -> bool:
        """Whether the candidate's kernel may still win at m: nothing is known of it there, or it is not FAR behind."""
        known = self._run.known
        times = [
            rows[m].p50_us or math.inf
            for entrant, rows in known.screens.items()
            if entrant.kernel == candidate.kernel.name and m in rows
        ]
        return not times or min(times) <= FAR * known.best_us().get(m, math.inf)

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
    """The best candidate at every M: among finals where there are some, else among screens."""
    found = []
    for m in sorted({*run.ms, *(m for rows in run.known.finals.values() for m in rows)}):
        for protocol, rows in (("final", run.known.finals), ("screen", run.known.screens)):
            usable = [entrant for entrant in rows if entrant in run.candidates and run.known.usable(entrant, m)]
            ranked = run.known.ranked(usable, m, protocol)
            if not ranked:
                continue
            best, times = ranked[0], {entrant: rows[entrant][m].p50_us or math.inf for entrant in ranked}
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
