"""The database as plain records, for `nvfp4 inspect` and for JSON: nothing here prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from ..kernels.untuned import made_for_width, untuned_layout
from .evidence import Evidence, Timed, behind, gather, implementations
from .fingerprint import changes, environment
from .records import BASELINE, TIMING, Interval, Measurement, Plan
from .store import Store

__all__ = ["AnchorReport", "Limits", "ProblemReport", "Summary", "baseline_us", "report", "roofline_us", "summary"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a device, from which the roofline follows."""

    copy_bytes_per_s: float  # bytes read plus bytes written by a large copy
    matrix_flops_per_s: float  # dense matrix products in x's dtype, a multiply and an add counting two


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One problem on one device, in a line."""

    device: Device
    problem: Problem
    layout: str  # the marked one; "" without a plan
    intervals: tuple[Interval, ...]  # of the marked layout
    measurements: int
    failures: dict[str, int]  # rows by status, "ok" left out
    retired: int  # rows of kernels that have changed or are gone
    over_bf16: dict[int, float]  # by M: how many times faster than BASELINE the planned candidate was measured
    changed: tuple[str, ...]  # software that differs from what the plan was made with


class AnchorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The best candidate of one layout at one M that was measured."""

    layout: str
    m: int
    kernel: str
    config: str
    protocol: str
    p20_us: float | None
    p50_us: float
    p80_us: float | None
    runner_up: str  # "kernel {config}" of the second best under the same protocol, "" if there is none
    margin: float  # runner-up's time over the winner's, minus 1; of ops with experts: of their largest regrets
    bf16_us: float | None  # BASELINE
    default_us: float | None  # what an untuned machine would have run
    roofline_us: float | None
    over_bf16: float | None  # bf16_us / p50_us: above 1 is faster than bf16
    over_default: float | None
    of_roofline: float | None  # roofline_us / p50_us: 1 is the limit
    by_routing_us: dict[str, float]  # of ops with experts, whose geometric mean p50_us is
    worst_routing: str  # where it is furthest behind the fastest candidate of any layout at that routing; "" without
    worst: float | None  # its time there over that candidate's, minus 1


class ProblemReport(msgspec.Struct, frozen=True, kw_only=True):
    """All about one problem on one device."""

    device: Device
    problem: Problem
    plan_id: str  # "" without a plan
    plan: Plan | None
    anchors: tuple[AnchorReport, ...]  # by layout, the marked one first, then by M
    measurements: int
    failures: dict[str, int]
    retired: int
    changed: tuple[str, ...]


def summary(store: Store, kernels: Mapping[str, Kernel]) -> tuple[Summary, ...]:
    """Every device and problem of the database.

    Parameters
    ----------
    kernels
        The kernels that exist here, by name.
    """
    known = implementations(kernels)
    found = []
    for device, problem in store.problems():
        rows = store.measurements(device, problem)
        plan = store.load_plan(device, problem)
        evidence = gather(device, problem, rows, kernels, implementation_by_kernel=known, allow_nondeterministic=True)
        found.append(
            Summary(
                device=device,
                problem=problem,
                layout=plan.layout if plan else "",
                intervals=plan.intervals() if plan else (),
                measurements=len(rows),
                failures=_failures(rows),
                retired=_retired(rows, known),
                over_bf16=_over_bf16(plan, evidence, rows) if plan else {},
                changed=changes(plan.environment, environment()) if plan else (),
            )
        )
    return tuple(found)


def report(
    store: Store, device: Device, problem: Problem, kernels: Mapping[str, Kernel], *, limits: Limits | None = None
) -> ProblemReport:
    """One problem: its plan, and for every M that was measured the winner and what it is compared with.

    Parameters
    ----------
    kernels
        The kernels that exist here, by name.
    limits
        The device's bandwidth and matrix rate, if known: without them nothing is said about the roofline.
    """
    rows = store.measurements(device, problem)
    plan = store.load_plan(device, problem)
    known = implementations(kernels)
    evidence = gather(device, problem, rows, kernels, implementation_by_kernel=known)
    marked = plan.layout if plan else "checkpoint"
    order = sorted(evidence.times, key=lambda key: (key[0] != marked, *key))
    return ProblemReport(
        device=device,
        problem=problem,
        plan_id=plan.id if plan else "",
        plan=plan,
        anchors=tuple(_anchor(evidence, layout, m, rows, limits) for layout, m in order),
        measurements=len(rows),
        failures=_failures(rows),
        retired=_retired(rows, known),
        changed=changes(plan.environment, environment()) if plan else (),
    )


def roofline_us(problem: Problem, m: int, limits: Limits) -> float | None:
    """The least time of a gemm: its bytes over the bandwidth or its products over the matrix rate, in microseconds.

    Weights count once (codes and block scales), activations and output once each at two bytes. None for other ops:
    there the experts that are used decide.
    """
    if problem.op != "gemm":
        return None
    moved = problem.weight_bytes + 2 * m * (problem.n + problem.k)
    products = 2 * m * problem.n * problem.k
    return 1e6 * max(moved / limits.copy_bytes_per_s, products / limits.matrix_flops_per_s)


def baseline_us(rows: Iterable[Measurement], m: int, protocol: str) -> float | None:
    """The time of BASELINE at M = m that was added last: under this protocol if there is one, else under the other."""
    newest: dict[str, Measurement] = {}
    for row in rows:
        if row.kernel == BASELINE and row.m == m and row.status == "ok" and row.environment.timing == TIMING:
            newest[row.protocol] = row
    chosen = newest.get(protocol) or newest.get("final") or newest.get("screen")
    return chosen.p50_us if chosen else None


def untuned(evidence: Evidence, m: int) -> Timed | None:
    """What runs at m without a plan, if it was timed: the default of the kernel made for the narrowest range around m.

    Of those that read the layout that is taken then.
    """
    layout = untuned_layout(evidence.device, evidence.problem, evidence.kernels.values())
    found = [
        (width, timed.candidate.kernel, timed)
        for timed in evidence.times.get((layout, m), ())
        if timed.is_default and (width := made_for_width(evidence.kernels[timed.candidate.kernel], m)) is not None
    ]
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def _anchor(
    evidence: Evidence, layout: str, m: int, rows: Sequence[Measurement], limits: Limits | None
) -> AnchorReport:
    best, *others = evidence.times[layout, m]
    second = next((timed for timed in others if timed.protocol == best.protocol), None)
    default = untuned(evidence, m)
    bf16 = baseline_us(rows, m, best.protocol)
    roofline = roofline_us(evidence.problem, m, limits) if limits else None
    return AnchorReport(
        layout=layout,
        m=m,
        kernel=best.candidate.kernel,
        config=best.candidate.config,
        protocol=best.protocol,
        p20_us=best.p20_us,
        p50_us=best.p50_us,
        p80_us=best.p80_us,
        runner_up=f"{second.candidate.kernel} {second.candidate.config}" if second else "",
        margin=behind(best, second) if second else 0.0,
        bf16_us=bf16,
        default_us=default.p50_us if default else None,
        roofline_us=roofline,
        over_bf16=_ratio(bf16, best.p50_us),
        over_default=_ratio(default.p50_us if default else None, best.p50_us),
        of_roofline=_ratio(roofline, best.p50_us),
        by_routing_us=dict(best.by_routing_us),
        worst_routing=best.worst_routing,
        worst=best.regret - 1 if best.by_routing_us else None,
    )


def _ratio(other_us: float | None, own_us: float) -> float | None:
    return None if other_us is None else other_us / own_us


def _failures(rows: Iterable[Measurement]) -> dict[str, int]:
    return dict(sorted(Counter(row.status for row in rows if row.status != "ok").items()))


def _retired(rows: Iterable[Measurement], known: Mapping[str, str]) -> int:
    return sum(row.kernel != BASELINE and known.get(row.kernel) != row.implementation for row in rows)


def _over_bf16(plan: Plan, evidence: Evidence, rows: Sequence[Measurement]) -> dict[int, float]:
    found: dict[int, float] = {}
    for interval in plan.intervals():
        for m in evidence.anchors(plan.layout):
            if m < interval.m_lo or (interval.m_hi is not None and m > interval.m_hi):
                continue
            for timed in evidence.times[plan.layout, m]:
                if (timed.candidate.kernel, timed.candidate.config) == (interval.kernel, interval.config):
                    bf16 = baseline_us(rows, m, timed.protocol)
                    if bf16 is not None:
                        found[m] = bf16 / timed.p50_us
    return found
