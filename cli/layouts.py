"""`nvfp4 inspect --layout`: a table per problem, with a row per M and what every weight layout takes there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from ..cache.layouts import LayoutAtM, LayoutReport
from ..cache.plan import CHECKPOINT_ADVANTAGE
from .output import Grid
from .words import UNTUNED, counts, device_words, microseconds, plural, problem_words

__all__ = ["show_layouts"]

STALE = "*"


def show_layouts(console: Console, found: Sequence[LayoutReport]) -> None:
    """Every problem's table, its mean by layout, and what makes it doubtful; then what the words mean."""
    if not found:
        console.print("no problem to show")
    for one in found:
        console.print(f"{problem_words(one.problem)} on {device_words(one.device)}")
        console.print(_marked_words(one), soft_wrap=True)
        if one.rows:
            console.print(_table(one))
        for line in _notes(one):
            console.print(line, soft_wrap=True)
        console.print()
    for line in _legend(found):
        console.print(line, soft_wrap=True)


def _marked_words(found: LayoutReport) -> str:
    if not found.plan_id:
        would = f"; by these measurements it would mark layout {found.would_mark}" if found.would_mark else ""
        return f"no plan yet{would}"
    return f"plan {found.plan_id} marks layout {found.marked}, for {found.traffic} traffic"


def _table(found: LayoutReport) -> Grid:
    columns = [">M"]
    for index, one in enumerate(found.layouts):
        columns += [f">{one.layout} µs", "kernel", *([">costs"] if index else [])]
    made = Grid(*columns)
    for row in found.rows:
        cells = [str(row.m)]
        for index, cell in enumerate(row.layouts):
            cells += [_time(cell, row.m), _kernel(cell), *([_signed(cell.costs)] if index else [])]
        made.row(*cells)
    means, planned = ["mean"], ["in plan"]
    for index, total in enumerate(found.layouts):
        means += [_mean(total.traffic_us), "", *([_signed(total.costs)] if index else [])]
        planned += [_mean(total.planned_us), "", *([""] if index else [])]
    made.row(*means)
    if found.plan_id and any(_mean(total.traffic_us) != _mean(total.planned_us) for total in found.layouts):
        made.row(*planned)
    return made


def _mean(us: float | None) -> str:
    return microseconds(us) or "none"


def _time(cell: LayoutAtM, m: int) -> str:
    if cell.p50_us is None:
        return "none"
    return microseconds(cell.p50_us) + (f" @{cell.measured_at}" if cell.measured_at != m else "")


def _kernel(cell: LayoutAtM) -> str:
    return cell.reason or cell.kernel + (STALE if cell.stale else "")


def _signed(share: float | None) -> str:
    """ "+87 %", "-3.1 %"; "" for None."""
    return "" if share is None else f"{100 * share:+.{0 if abs(share) >= 0.1 else 1}f} %"


def _notes(found: LayoutReport) -> Iterator[str]:
    for total in found.layouts:
        if total.reason:
            yield f"{total.layout}: {total.reason}, so it cannot be marked"
    sums = {total.layout: total.traffic_us for total in found.layouts if total.traffic_us is not None}
    if found.would_mark == "checkpoint" and sums["checkpoint"] > min(sums.values()):
        yield f"checkpoint goes first while it is at most {100 * CHECKPOINT_ADVANTAGE:.0f} % slower than the fastest"
    if found.plan_id and found.would_mark and found.would_mark != found.marked:
        yield f"by these measurements a new plan would mark layout {found.would_mark}: run `nvfp4 tune`"
    if found.stale:
        yield f"{STALE} rows measured with another implementation than the installed one: {counts(found.stale)}"
    if found.superseded:
        yield f"{plural(found.superseded, 'row')} of earlier implementations left out"
    if found.gone:
        yield f"rows of kernels that are not installed, left out: {counts(found.gone)}"


def _legend(found: Sequence[LayoutReport]) -> Iterator[str]:
    if any(total.traffic_us is not None for one in found for total in one.layouts):
        bands = " and ".join(dict.fromkeys(one.traffic for one in found))
        several = any(len(one.layouts) > 1 for one in found)
        costs = "; costs: how much more than the first layout takes" if several else ""
        yield f"mean: of a call in {bands} traffic{costs}"
    if any(cell.measured_at not in (None, row.m) for one in found for row in one.rows for cell in row.layouts):
        yield "@M: the time at that M, whose candidate serves this one too and takes at most as long"
    if any(cell.reason == UNTUNED for one in found for row in one.rows for cell in row.layouts):
        yield f"{UNTUNED}: no candidate serves that M, so a default runs; the time is what the mean counts for it"
    if any(one.stale for one in found):
        yield f"{STALE} the kernel or its compiler has changed since; `nvfp4 tune` measures it again"
