"""The choice of a weight layout as plain records, for `nvfp4 inspect --layout`: what each takes, by M and on average.

It shows what the plan in force was decided by, in the plan's own terms. So measurements of a kernel that has changed
since count here as long as there are none of the installed one, and the report names such kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from .evidence import gather, implementations
from .plan import TRAFFIC, Piece, anchors_of, counted_at, marked, mean_us, piece_at, pieces_by_layout
from .records import BASELINE, TIMING, Measurement, Plan
from .store import Store
from .words import UNTUNED

__all__ = ["LayoutAtM", "LayoutReport", "LayoutRow", "LayoutSum", "layout_report"]

DEFAULT_TRAFFIC = "decode-heavy"


class LayoutAtM(msgspec.Struct, frozen=True, kw_only=True):
    """The best candidate of one layout at one M, as the plan takes it."""

    layout: str
    kernel: str = ""
    config: str = ""
    p50_us: float | None = None
    protocol: str = ""
    measured_at: int | None = None  # this M, or the larger one whose candidate serves it
    stale: bool = False  # measured with another implementation than the installed one
    costs: float | None = None  # its time over the marked layout's, minus 1; None for the marked one
    reason: str = ""  # why there is no time; UNTUNED: no candidate either, the time is what the mean counts


class LayoutRow(msgspec.Struct, frozen=True, kw_only=True):
    """All layouts at one M."""

    m: int
    layouts: tuple[LayoutAtM, ...]  # in the order of `LayoutReport.layouts`


class LayoutSum(msgspec.Struct, frozen=True, kw_only=True):
    """What the layouts are compared by."""

    layout: str
    traffic_us: float | None  # traffic-weighted mean time of a call
    planned_us: float | None  # the same as the plan in force has it
    costs: float | None  # traffic_us over the marked layout's, minus 1; None for the marked one
    reason: str = ""  # why there is no mean, so that it cannot be marked


class LayoutReport(msgspec.Struct, frozen=True, kw_only=True):
    """The layouts of one problem on one device."""

    device: Device
    problem: Problem
    plan_id: str  # "" without a plan
    marked: str  # by the plan in force; "" without one
    would_mark: str  # by the measurements shown here; "" if they support no plan
    traffic: str
    layouts: tuple[LayoutSum, ...]  # the marked one first
    rows: tuple[LayoutRow, ...]  # ascending M
    stale: dict[str, int]  # by kernel, rows shown here though the kernel has changed since
    superseded: int  # rows left out: of kernels that were measured again after they had changed
    gone: dict[str, int]  # by kernel, rows left out because it is not installed


def layout_report(store: Store, device: Device, problem: Problem, kernels: Mapping[str, Kernel]) -> LayoutReport:
    """Compare the layouts of a problem by the plan's own rules.

    Parameters
    ----------
    kernels
        The kernels that exist here, by name.
    """
    rows = store.measurements(device, problem)
    plan = store.load_plan(device, problem)
    known = implementations(kernels)
    measured = _as_measured(rows, known)
    evidence = gather(
        device,
        problem,
        rows,
        kernels,
        implementation_by_kernel=measured,
        timing=plan.environment.timing if plan else TIMING,
        allow_nondeterministic=_has_nondeterministic(plan, kernels),
    )
    pieces = pieces_by_layout(evidence)
    traffic = plan.traffic if plan and plan.traffic in TRAFFIC else DEFAULT_TRAFFIC
    anchors = anchors_of(pieces)
    means = {layout: mean_us(found, anchors, traffic) for layout, found in pieces.items()}
    would_mark = marked(means) if means else ""
    reference = plan.layout if plan else would_mark
    planned = {entry.layout: entry.traffic_us for entry in plan.layouts} if plan else {}
    names = sorted({*evidence.layouts(), *planned}, key=lambda name: (name != reference, name))
    stale = {name for name in measured if measured[name] != known[name]}
    every_m = sorted({m for name in evidence.layouts() for m in evidence.anchors(name)})
    ours = [row for row in rows if row.kernel != BASELINE]
    return LayoutReport(
        device=device,
        problem=problem,
        plan_id=plan.id if plan else "",
        marked=plan.layout if plan else "",
        would_mark=would_mark,
        traffic=traffic,
        layouts=tuple(
            LayoutSum(
                layout=name,
                traffic_us=means.get(name),
                planned_us=planned.get(name),
                costs=_costs(means.get(name), means.get(reference)) if name != reference else None,
                reason=_reason(pieces, name, means.get(name)),
            )
            for name in names
        ),
        rows=tuple(_row(pieces, names, m, stale) for m in every_m),
        stale=_count(row.kernel for row in ours if row.kernel in stale and row.implementation == measured[row.kernel]),
        superseded=sum(row.kernel in measured and row.implementation != measured[row.kernel] for row in ours),
        gone=_count(row.kernel for row in ours if row.kernel not in kernels),
    )


def _as_measured(rows: Iterable[Measurement], known: Mapping[str, str]) -> dict[str, str]:
    """The implementation by kernel whose rows count: the installed one, else the one that was measured last."""
    found: dict[str, str] = {}
    for row in rows:
        if row.kernel in known and found.get(row.kernel) != known[row.kernel]:
            found[row.kernel] = row.implementation
    return found


def _has_nondeterministic(plan: Plan | None, kernels: Mapping[str, Kernel]) -> bool:
    """Whether the plan was made with kernels that differ from run to run, so that these belong into the comparison."""
    named = {interval.kernel for entry in (plan.layouts if plan else ()) for interval in entry.intervals}
    return any(not kernels[name].deterministic for name in named if name in kernels)


def _row(pieces: Mapping[str, Sequence[Piece]], names: Sequence[str], m: int, stale: set[str]) -> LayoutRow:
    """The layouts at M = m; `names` begins with the one that the others are compared with."""
    cells = [_at_m(pieces.get(name), name, m, stale) for name in names]
    first = cells[0].p50_us
    others = [msgspec.structs.replace(cell, costs=_costs(cell.p50_us, first)) for cell in cells[1:]]
    return LayoutRow(m=m, layouts=(cells[0], *others))


def _at_m(found: Sequence[Piece] | None, layout: str, m: int, stale: set[str]) -> LayoutAtM:
    counted, serving = counted_at(found or (), m), piece_at(found or (), m)
    if counted is None or (serving is not None and serving is not counted):
        return LayoutAtM(layout=layout, reason="not measured")
    best = counted.best
    return LayoutAtM(
        layout=layout,
        kernel=best.candidate.kernel if serving else "",
        config=best.candidate.config if serving else "",
        reason="" if serving else UNTUNED,
        p50_us=best.p50_us,
        protocol=best.protocol,
        measured_at=best.m,
        stale=best.candidate.kernel in stale,
    )


def _reason(pieces: Mapping[str, Sequence[Piece]], layout: str, mean: float | None) -> str:
    if mean is not None:
        return ""
    return "not measured at the largest M" if layout in pieces else "no measurement of it counts"


def _costs(us: float | None, marked_us: float | None) -> float | None:
    return None if us is None or marked_us is None else us / marked_us - 1


def _count(kernels: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(kernels).items()))
