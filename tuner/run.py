"""`tune`: measure problems on one device, save everything, and leave a plan for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..cache.fingerprint import environment
from ..cache.records import Plan
from ..cache.store import Store, open_or_set_aside
from ..errors import InvalidInput, message
from ..kernels import registry
from ..kernels.build import BuildPool
from ..kernels.kernel import Kernel
from ..kernels.problem import Problem
from .candidates import Known, candidates_of, neighbours
from .events import Event, Note, ProblemFinished, ProblemStarted, TuningFinished, TuningStarted
from .finals import decide, refine, run_baseline, run_finals
from .messages import Pace
from .recorded import read_routing
from .search import screen_all, standings, submit_builds
from .session import ProblemRun, Session, Unprepared
from .worker import Worker

__all__ = ["Interrupted", "Result", "tune"]

SHOWN_REFUSED = 3
SCREEN_SHARE = 0.7  # of a problem's budget; the rest is for finals


@dataclass(slots=True, kw_only=True)
class Result:
    """What a tuning did."""

    plans: dict[Problem, Plan | None] = field(default_factory=dict)  # of the problems that were finished
    measured: int = 0  # rows saved
    failures: dict[str, int] = field(default_factory=dict)  # candidates by status, over all problems
    # Candidates that the budget left, or that a large space has beyond 400.
    unexplored: dict[Problem, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def without_plan(self) -> tuple[Problem, ...]:
        """Problems that have no winner."""
        return tuple(problem for problem, plan in self.plans.items() if plan is None)

    @property
    def exit_code(self) -> int:
        """0; 4 when some problem has no winner; 130 when interrupted."""
        return 130 if self.interrupted else 4 if self.without_plan else 0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a tuning. All rows measured so far are saved; `result` says what was done."""

    def __init__(self, result: Result) -> None:
        super().__init__("tuning was interrupted; what was measured is saved")
        self.result = result


@dataclass(frozen=True, slots=True)
class Options:
    """How problems are tuned."""

    quick: bool
    allow_nondeterministic: bool


def _ignore(event: Event) -> None:
    pass


def tune(
    problems: Sequence[Problem],
    ms: Sequence[int],
    *,
    device: str = "cuda:0",
    store_path: Path | None = None,
    budget_s: float | None = None,
    quick: bool = False,
    events: Callable[[Event], None] = _ignore,
    kernels: Sequence[str] | None = None,
    allow_nondeterministic: bool = False,
    pace: Pace | None = None,
    hang_s: float | None = None,
    routing: Path | None = None,
) -> Result:
    """Measure every candidate of every problem and save a plan for each. Continues where an earlier run stopped.

    Parameters
    ----------
    problems, ms
        What to tune, and at which numbers of tokens.
    device
        A torch device: "cuda:0", "cpu".
    store_path
        The database; by default NVFP4_DB or the one in the user's cache folder. A damaged one is moved aside.
    budget_s
        Seconds for all problems together, in equal shares; what some leave goes to those that were cut short. None
        measures everything.
    quick
        Crossovers are not refined.
    events
        Called with every `events.Event`, in this thread.
    kernels
        Names of the kernels to try; by default all that support a problem.
    allow_nondeterministic
        Also try kernels whose results differ in the last bits from run to run.
    pace
        How long things are timed; for tests.
    hang_s
        Seconds without a sign of life after which the worker is killed; by default 30 on CUDA, 120 on a CPU.
    routing
        A file with a recorded routing, as `recorded.read_routing` reads it: with it problems of experts are timed too.

    Returns
    -------
    Result
        Its `exit_code` is 4 when some problem has no winner.

    Raises
    ------
    NoDevice
        The device is not there.
    DatabaseError
        The database cannot be opened or written. What was saved before stays.
    InvalidInput
        No problem, no M, an M below 1, an unknown kernel, or a routing that does not fit the problems.
    Interrupted
        Ctrl-C; a KeyboardInterrupt with the partial result.
    """
    chosen_ms = tuple(sorted(set(ms)))
    if not problems or not chosen_ms or chosen_ms[0] < 1:
        raise InvalidInput(message("nothing to tune", got=f"{len(problems)} problems at M = {chosen_ms}"))
    installed = _installed(problems)
    chosen = _chosen(installed, kernels, allow_nondeterministic)
    of_experts = [problem for problem in problems if problem.op != "gemm"]
    if routing is not None and not of_experts:
        raise InvalidInput(message("a recorded routing is for problems of experts", got="none of them"))
    recorded = read_routing(routing, of_experts, most_tokens=chosen_ms[-1]) if routing is not None else None
    result = Result()
    begun = time.monotonic()
    store, moved = open_or_set_aside(store_path)
    worker, builds = Worker(device, hang_s=hang_s), BuildPool()
    try:
        session = Session(
            device=worker.describe(),
            environment=environment(),
            installed=installed,
            kernels=chosen,
            worker=worker,
            builds=builds,
            store=store,
            emit=events,
            pace=pace or Pace(),
            recorded=recorded,
        )
        unique = tuple(dict.fromkeys(problems))
        events(
            TuningStarted(
                device=session.device,
                environment=session.environment,
                problems=unique,
                ms=chosen_ms,
                database=str(store.path),
            )
        )
        if moved is not None:
            _note(session, result, f"the database was damaged: it is kept as {moved}, and a fresh one was started")
        runs = _runs(session, unique, chosen_ms)
        for run in runs:
            if run.known.others and not run.known.recorded:
                names = ", ".join(sorted(run.known.others))
                text = f"{run.problem.label} was tuned with {names}: give the file again (--routing), or what is new"
                _note(session, result, f"{text} is not compared with what was measured then")
        if any(_open(run) for run in runs):
            events(worker.ceilings())
        deadline = None if budget_s is None else begun + budget_s
        _all_problems(session, runs, result, deadline, Options(quick, allow_nondeterministic))
    except KeyboardInterrupt as stop:
        result.interrupted = True
        raise Interrupted(result) from stop
    finally:
        _close(worker, builds, store)
        events(
            TuningFinished(
                measured=result.measured,
                without_plan=result.without_plan,
                unexplored=sum(result.unexplored.values()),
                interrupted=result.interrupted,
                seconds=time.monotonic() - begun,
            )
        )
    return result


def _close(worker: Worker, builds: BuildPool, store: Store) -> None:
    try:
        worker.close()
        builds.close()
    finally:
        store.close()


def _installed(problems: Sequence[Problem]) -> dict[str, Kernel]:
    ops = sorted({problem.op for problem in problems})
    return {kernel.name: kernel for op in ops for kernel in registry.kernels(op)}


def _chosen(
    installed: dict[str, Kernel], names: Sequence[str] | None, allow_nondeterministic: bool
) -> dict[str, Kernel]:
    unknown = [name for name in names or () if name not in installed]
    if unknown:
        raise InvalidInput(
            message("unknown kernels", got=", ".join(unknown), expected=f"some of {', '.join(installed)}")
        )
    return {
        name: kernel
        for name, kernel in installed.items()
        if (names is None or name in names) and (kernel.deterministic or allow_nondeterministic)
    }


def _runs(session: Session, problems: Sequence[Problem], ms: tuple[int, ...]) -> list[ProblemRun]:
    runs = []
    for problem in problems:
        kernels = [kernel for kernel in session.kernels.values() if kernel.op == problem.op]
        candidates, refused = candidates_of(session.device, problem, ms, kernels)
        recorded = session.recorded if problem.op != "gemm" else None
        known = Known(session.implementations, recorded.name if recorded else "")
        for row in session.store.measurements(session.device, problem):
            known.add(row)
        runs.append(
            ProblemRun(session=session, problem=problem, ms=ms, candidates=candidates, known=known, refused=refused)
        )
    return runs


def _open(run: ProblemRun) -> int:
    """How many candidates still need screens."""
    best_us = run.known.best_us()
    return sum(bool(run.known.pending(candidate, best_us)) for candidate in run.candidates.values())


def _all_problems(
    session: Session, runs: list[ProblemRun], result: Result, deadline: float | None, options: Options
) -> None:
    try:
        _in_turn(session, runs, result, deadline, options)
        cut_short = [run for run in runs if run.problem in result.unexplored]
        if cut_short and deadline is not None and time.monotonic() < deadline:  # others needed less than their share
            result.unexplored.clear()
            _in_turn(session, cut_short, result, deadline, options)
    finally:
        for run in runs:
            for status, count in run.known.failures().items():
                result.failures[status] = result.failures.get(status, 0) + count


def _in_turn(
    session: Session, runs: list[ProblemRun], result: Result, deadline: float | None, options: Options
) -> None:
    """Each problem once, with an equal share of the time that is left."""
    for index, run in enumerate(runs):
        begun = time.monotonic()
        budget_s = None if deadline is None else max(0.0, deadline - begun) / (len(runs) - index)
        session.emit(
            ProblemStarted(
                problem=run.problem,
                index=index,
                of=len(runs),
                candidates=len(run.candidates),
                pending=_open(run),
                refused=run.refused,
                budget_s=budget_s,
            )
        )
        if not run.candidates:
            _note(session, result, _nothing_to_measure(run))
        before, unprepared = session.measured, ""
        try:
            plan, unexplored = _one_problem(run, runs[index + 1 :], budget_s, options)
        except Unprepared as error:
            unprepared = str(error)
            _note(session, result, unprepared)
            plan, unexplored = session.store.load_plan(session.device, run.problem), 0
        finally:
            result.measured = session.measured
        result.plans[run.problem] = plan
        if unexplored:
            result.unexplored[run.problem] = unexplored
        session.emit(
            ProblemFinished(
                problem=run.problem,
                plan=plan,
                best=standings(run),
                failures=run.known.failures(),
                unexplored=unexplored,
                unprepared=unprepared,
                measured=session.measured - before,
                seconds=time.monotonic() - begun,
            )
        )


def _one_problem(
    run: ProblemRun, later: Sequence[ProblemRun], budget_s: float | None, options: Options
) -> tuple[Plan | None, int]:
    session, begun = run.session, time.monotonic()
    incumbent = session.store.load_plan(session.device, run.problem)
    if not run.candidates:
        return incumbent, 0
    if budget_s is not None and budget_s <= 0:  # preparing a problem takes seconds that nobody has
        plan = _decide(run, options)  # of rows that no plan was made from: merged ones, or those of a killed run
        _save(session, plan, incumbent)
        return plan or incumbent, _open(run)
    if _open(run):
        run.fits()
    first = neighbours(session.store.plans(), session.device, run.problem)
    for ahead in (run, *later[:1]):  # the next problem's candidates compile while this one's are measured
        submit_builds(ahead, first)
    screens_end = None if budget_s is None else begun + SCREEN_SHARE * budget_s
    end = None if budget_s is None else begun + budget_s
    plan = incumbent
    try:
        run_baseline(run)
        unexplored = screen_all(run, first=first, deadline=screens_end)
        run_finals(run, incumbent, end)
        plan = _decide(run, options)
        while plan is not None and not options.quick and refine(run, plan, end):
            plan = _decide(run, options)
    except KeyboardInterrupt:
        plan = _decide(run, options)  # of what there is: better than defaults, and the next run improves it
        raise
    finally:
        _save(session, plan, incumbent)
    return plan, unexplored


def _nothing_to_measure(run: ProblemRun) -> str:
    """Why a problem has no candidate, and what becomes of its plan."""
    shown, more = run.refused[:SHOWN_REFUSED], len(run.refused) - SHOWN_REFUSED
    reasons = (
        "; ".join(shown) + (f"; and {more} more" if more > 0 else "") or f"no kernel of {run.problem.op} was named"
    )
    stays = run.session.store.load_plan(run.session.device, run.problem) is not None
    return f"{run.problem.label}: nothing can be measured ({reasons})" + ("; its plan stays" if stays else "")


def _save(session: Session, plan: Plan | None, incumbent: Plan | None) -> None:
    if plan is not None and (incumbent is None or plan.id != incumbent.id):
        session.store.save_plan(plan)


def _decide(run: ProblemRun, options: Options) -> Plan | None:
    rows = run.session.store.measurements(run.session.device, run.problem)
    return decide(run, rows, allow_nondeterministic=options.allow_nondeterministic)


def _note(session: Session, result: Result, text: str) -> None:
    result.notes.append(text)
    session.emit(Note(text=text))
