"""The tables of `nvfp4 inspect`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console

from ..cache.inspect import ProblemReport, Summary
from ..cache.records import with_gaps
from ..cache.why import Why
from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from .output import Grid
from .words import (
    NOT_FINISHED,
    UNTUNED,
    candidate_words,
    config_words,
    counts,
    device_words,
    microseconds,
    percent,
    planned,
    problem_words,
    range_words,
    ratio,
    ratios,
)

__all__ = ["KernelVerdict", "show_report", "show_summary", "show_verdicts", "show_why", "verdicts"]

SHOWN_FATES = 12
TRIED_MS = (1, 16, 256, 4096)  # a config counts as usable if it can run one of these


class KernelVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one kernel can run one problem on one device."""

    device: Device
    problem: Problem
    kernel: str
    ok: bool
    reason: str  # "" when it can
    layout: str  # that it would read, "" when it cannot run
    configs: int  # of its space, those that can run
    deterministic: bool


def verdicts(device: Device, problem: Problem, kernels: Iterable[Kernel]) -> list[KernelVerdict]:
    """Every kernel's verdict."""
    found = []
    for kernel in kernels:
        verdict = kernel.supports(device, problem)
        space = kernel.space(device, problem) if verdict else ()
        usable = sum(any(kernel.is_valid(device, problem, config, m) for m in TRIED_MS) for config in space)
        found.append(
            KernelVerdict(
                device=device,
                problem=problem,
                kernel=kernel.name,
                ok=bool(verdict),
                reason=verdict.reason,
                layout=kernel.layout(device, problem) if verdict else "",
                configs=usable,
                deterministic=kernel.deterministic,
            )
        )
    return found


def show_verdicts(console: Console, found: list[KernelVerdict]) -> None:
    """One line a kernel."""
    if not found:
        console.print("no kernel is installed")
        return
    console.print(f"{problem_words(found[0].problem)} on {device_words(found[0].device)}")
    made = Grid("kernel", "runs", "layout", ">configs", "~reason")
    for one in found:
        reason = one.reason or ("" if one.deterministic else "results differ from run to run: only if asked for")
        made.row(one.kernel, "yes" if one.ok else "no", one.layout, str(one.configs) if one.ok else "", reason)
    console.print(made)


def show_summary(console: Console, path: Path, found: tuple[Summary, ...]) -> None:
    """One table a device."""
    console.print(f"database  {path}", soft_wrap=True)
    if not found:
        console.print("nothing was measured yet: run `nvfp4 tune`")
    for device in dict.fromkeys(line.device for line in found):
        console.print(f"device    {device_words(device)}")
        made = Grid("problem", "~kernels by M", ">bf16", ">rows", "~failed")
        lines = [line for line in found if line.device == device]
        for line in lines:
            layout = f"{line.layout}: " if line.layout not in ("", "checkpoint") else ""
            made.row(
                problem_words(line.problem),
                layout + (planned(line.intervals) or ("no plan yet" if line.failures else NOT_FINISHED)),
                ratios(line.over_bf16.values()),
                str(line.measurements),
                counts(line.failures),
            )
        console.print(made)
        _notes(console, sum(line.retired for line in lines), sorted({text for line in lines for text in line.changed}))
    if any(line.over_bf16 for line in found):
        console.print("bf16: how many times faster than torch.matmul on bf16 weights, smallest and largest over M")


def _notes(console: Console, retired: int, changed: Iterable[str]) -> None:
    if retired:
        console.print(f"{retired} rows of kernels that have changed since, or are gone, do not count")
    for text in changed:
        console.print(f"changed since it was measured: {text}")


def show_report(console: Console, found: ProblemReport) -> None:
    """The plan's intervals, then what was measured at every M."""
    console.print(f"{problem_words(found.problem)} on {device_words(found.device)}")
    if found.plan is None:
        cut_short = "no plan yet: the tuning was cut short, or no candidate could be used"
        console.print(f"{cut_short if found.failures else NOT_FINISHED}; `nvfp4 tune` goes on with it")
    else:
        plan = found.plan
        console.print(f"plan {found.plan_id}: layout {plan.layout}, for {plan.traffic} traffic")
        made = Grid("M", "kernel", "~config", ">µs", "~runner-up", ">behind")
        for interval, m_lo, m_hi in with_gaps(plan.intervals()):
            if interval is None:
                made.row(range_words(m_lo, m_hi), UNTUNED, "", "", "", "")
                continue
            made.row(
                range_words(m_lo, m_hi),
                interval.kernel,
                config_words(interval.config),
                microseconds(interval.expected_us),
                candidate_words(interval.runner_up),
                percent(interval.margin) if interval.runner_up else "",
            )
        console.print(made)
    roofline = any(at.of_roofline is not None for at in found.anchors)
    for layout in dict.fromkeys(at.layout for at in found.anchors):
        console.print(f"best of layout {layout} at every M that was measured")
        routed = any(at.by_routing_us for at in found.anchors)
        names = [">M", "kernel", ">µs", ">±", *([] if routed else [">bf16"]), ">untuned"]
        made = Grid(*names, *([">of limit"] if roofline else []), *(["worst routing"] if routed else []), "by")
        for at in (at for at in found.anchors if at.layout == layout):
            spread = "" if at.p20_us is None or at.p80_us is None else percent((at.p80_us - at.p20_us) / 2 / at.p50_us)
            bf16 = [] if routed else [ratio(at.over_bf16)]
            cells = [str(at.m), at.kernel, microseconds(at.p50_us), spread, *bf16, ratio(at.over_default)]
            worst = [f"{at.worst_routing} +{percent(at.worst)}"] if routed else []
            made.row(*cells, *([percent(at.of_roofline)] if roofline else []), *worst, at.protocol)
        console.print(made)
    if any(at.by_routing_us for at in found.anchors):
        console.print("±: half of what lies between the 20th and the 80th percentile; untuned: times faster")
        console.print(
            "µs: geometric mean over the routings; worst routing: where it is furthest behind the fastest candidate"
            " there, and how far, which is what decides",
            soft_wrap=True,
        )
    elif found.anchors:
        console.print("±: half of what lies between the 20th and the 80th percentile; bf16, untuned: times faster")
    rows = f"{found.measurements} measurements"
    console.print(f"{rows}; failed: {counts(found.failures)}" if found.failures else rows)
    _notes(console, found.retired, found.changed)


def show_why(console: Console, found: Why) -> None:
    """What became of the candidates, those that came closest first."""
    console.print(f"{found.kernel} for {problem_words(found.problem)} on {device_words(found.device)}")
    if found.reason:
        console.print(found.reason, soft_wrap=True)
    if not found.candidates:
        if not found.reason:
            console.print("none of its candidates was measured")
        return
    made = Grid("~config", "outcome", "~reason")
    for fate in found.candidates[:SHOWN_FATES]:
        made.row(config_words(fate.config), fate.outcome, fate.reason)
    console.print(made)
    if len(found.candidates) > SHOWN_FATES:
        console.print(f"{len(found.candidates) - SHOWN_FATES} more; --json has all")
    fate = found.candidates[0]
    if fate.at:
        console.print(f"{config_words(fate.config)} at every M")
        made = Grid(">M", "outcome", ">µs", ">winner µs", ">slower", "~winner")
        for at in fate.at:
            made.row(
                str(at.m),
                at.outcome,
                microseconds(at.p50_us),
                microseconds(at.best_us),
                percent(at.slower),
                "" if at.outcome == "won" else candidate_words(at.best),
            )
        console.print(made)
