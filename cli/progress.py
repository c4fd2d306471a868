"""Showing a tuning while it runs: live in a terminal, as plain lines elsewhere, or as JSON lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..tuner.events import (
    CeilingsMeasured,
    Event,
    Note,
    ProblemFinished,
    ProblemStarted,
    Progress,
    Standing,
    TuningFinished,
    TuningStarted,
)
from .output import Grid, print_json
from .words import (
    NOT_FINISHED,
    config_words,
    counts,
    device_words,
    duration,
    microseconds,
    plural,
    problem_words,
    ratio,
    ratios,
)

__all__ = ["Display", "JsonLines", "Lines", "display", "ends", "is_unfinished", "without_plan"]

NO_MEMORY = "its inputs do not fit in memory"
LINE_EVERY_S = 10.0  # of progress inside one problem, where there is no terminal


class Display:
    """What every display keeps: how the tuning began, and the problems that are done."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started: TuningStarted | None = None
        self.ceilings: CeilingsMeasured | None = None
        self.problem: ProblemStarted | None = None
        self.finished: list[ProblemFinished] = []
        self.end: TuningFinished | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to put back."""

    def __call__(self, event: Event) -> None:
        """Keep what the summary needs, then show it."""
        match event:
            case TuningStarted():
                self.started = event
            case CeilingsMeasured():
                self.ceilings = event
            case ProblemStarted():
                self.problem = event
            case ProblemFinished():
                # One that was cut short is tuned again with the time that others left: the later event holds.
                self.finished = [done for done in self.finished if done.problem != event.problem] + [event]
            case TuningFinished():
                self.end = event
        self.show(event)

    def show(self, event: Event) -> None:
        """Show one event."""
        raise NotImplementedError

    def say(self, event: Event) -> None:
        """The lines that stay, in a terminal and elsewhere."""
        match event:
            case TuningStarted():
                self.console.print(f"device    {device_words(event.device)}")
                self.console.print(f"database  {event.database}", soft_wrap=True)
                self.console.print(f"tuning    {plural(len(event.problems), 'problem')} at {_ms_words(event.ms)}")
            case CeilingsMeasured():
                self.console.print(
                    f"ceilings  copy {event.copy_gbps:,.0f} GB/s, bf16 product {event.bf16_tflops:,.3g} TFLOP/s"
                )
            case Note():
                self.console.print(f"note: {event.text}", soft_wrap=True)
            case ProblemFinished():
                self.console.print(
                    f"{self.numbered()} {problem_words(event.problem)}: {_outcome(event)}", soft_wrap=True
                )

    def numbered(self) -> str:
        """ "[2/5]"."""
        return f"[{self.problem.index + 1}/{self.problem.of}]" if self.problem else ""


class JsonLines(Display):
    """Every event as one line of JSON on stdout."""

    def show(self, event: Event) -> None:
        """Print it."""
        print_json(event, indent=0)


class Lines(Display):
    """Plain lines, for files and pipes."""

    _last_s = 0.0

    def show(self, event: Event) -> None:
        """Print it, progress not too often."""
        self.say(event)
        match event:
            case ProblemStarted():
                self._last_s = time.monotonic()
                self._line(f"{problem_words(event.problem)}: {_pending(event)}")
            case Progress() if time.monotonic() - self._last_s >= LINE_EVERY_S:
                self._last_s = time.monotonic()
                parts = [f"{event.done} of {event.of} candidates", _left(event), *ends(event.best)]
                self._line("  " + "; ".join(part for part in parts if part))

    def _line(self, text: str) -> None:
        self.console.print(f"{self.numbered()} {text}", soft_wrap=True)


class Screen(Display):
    """Lines that stay above, and below them the problem at work."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, event: Event) -> None:
        """Print what stays, draw what changes."""
        self.say(event)
        match event:
            case ProblemStarted():
                self._live.update(Text(f"{self.numbered()} {problem_words(event.problem)}: {_pending(event)}"))
            case Progress():
                self._live.update(self._picture(event))
            case ProblemFinished() | TuningFinished():
                self._live.update(Text(""))

    def _picture(self, event: Progress) -> Group:
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(1, event.of), completed=event.done, width=min(30, self.console.width // 3))
        head.add_row(
            f"{self.numbered()} {problem_words(event.problem)}", bar, f"{event.done} of {event.of}", _left(event)
        )
        failures = Text(f"failed: {counts(event.failures)}" if event.failures else "")
        room = max(3, self.console.height - 8)
        return Group(head, standings_table(event.best[-room:]), failures)


def display(console: Console, *, as_json: bool) -> Display:
    """The display that suits the console."""
    if as_json:
        return JsonLines(console)
    return Screen(console) if console.is_terminal else Lines(console)


def standings_table(best: tuple[Standing, ...]) -> Grid:
    """The fastest candidate at every M so far."""
    made = Grid(">M", "best so far", "~config", ">µs", ">untuned", ">bf16")
    for at in best:
        made.row(
            str(at.m),
            at.kernel,
            config_words(at.config),
            microseconds(at.best_us),
            ratio(at.over_default),
            ratio(at.over_bf16),
        )
    return made


def ends(best: tuple[Standing, ...]) -> list[str]:
    """The first and the last M in words."""
    chosen = dict.fromkeys((best[0], best[-1])) if best else {}
    return [f"M = {at.m}: {at.kernel} {microseconds(at.best_us)} µs{_against(at)}" for at in chosen]


def is_unfinished(event: ProblemFinished) -> bool:
    """Whether a problem has no plan because candidates were not tried."""
    return event.plan is None and not event.unprepared and event.unexplored > 0


def without_plan(event: ProblemFinished) -> str:
    """Of a problem that has none: "no winner (3 wrong)", or that it is not finished."""
    failed = counts(event.failures)
    if is_unfinished(event):
        parts = [failed, f"{plural(event.unexplored, 'candidate')} not tried"]
        return f"{NOT_FINISHED}: {', '.join(part for part in parts if part)}"
    return f"no winner ({NO_MEMORY if event.unprepared else failed or 'nothing can be measured'})"


def _ms_words(ms: Sequence[int]) -> str:
    return f"M = {ms[0]}" if len(ms) == 1 else f"{len(ms)} values of M, {ms[0]} to {ms[-1]}"


def _against(at: Standing) -> str:
    parts = [f"{ratio(at.over_default)} untuned"] if at.default_us else []
    parts += [f"{ratio(at.over_bf16)} bf16"] if at.bf16_us else []
    return f" ({', '.join(parts)})" if parts else ""


def _pending(event: ProblemStarted) -> str:
    earlier = event.candidates - event.pending
    text = f"{event.candidates} candidates" + (f", {earlier} measured by an earlier run" if earlier else "")
    return text + (f", {duration(event.budget_s)} for it" if event.budget_s is not None else "")


def _left(event: Progress) -> str:
    return f"about {duration(event.eta_s)} left" if event.eta_s is not None else ""


def _outcome(event: ProblemFinished) -> str:
    if event.plan is None:
        return without_plan(event)
    parts = [f"{duration(event.seconds)}, {event.measured} measurements"]
    parts += [NO_MEMORY] if event.unprepared else []
    untuned, bf16 = ratios(at.over_default for at in event.best), ratios(at.over_bf16 for at in event.best)
    parts += [f"{untuned} untuned"] if untuned else []
    parts += [f"{bf16} bf16"] if bf16 else []
    parts += [f"failed: {counts(event.failures)}"] if event.failures else []
    parts += [f"{event.unexplored} candidates not tried"] if event.unexplored else []
    return "; ".join(parts)
