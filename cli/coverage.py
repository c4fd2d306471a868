"""`nvfp4 inspect --checkpoint`: which layers of a checkpoint have a plan, which fall back, and what they weigh."""

from __future__ import annotations

import shlex
from collections import Counter

import msgspec
from rich.console import Console

from ..cache.records import Plan
from ..cache.store import Store
from ..cache.words import tune_command
from ..dispatch.checkpoint import Checkpoint
from ..dispatch.layout import choose_layout
from ..dispatch.segments import decide
from ..errors import Unsupported
from ..kernels.problem import Device, Problem
from ..kernels.weights.layouts import first_layout, layout_ids
from ..kernels.weights.layouts import layout as get_layout
from ..tuner.workload import problems_of_linears
from .checkpoint import dtype_of, layers_of
from .checkpoint_experts import experts_of, left_out_words
from .output import Grid
from .words import device_words, kernels_by_m, plural, problem_words

__all__ = ["Coverage", "Covered", "coverage", "show_coverage"]

SHOWN_FOREIGN = 3


class Covered(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of a checkpoint on one device."""

    problem: Problem
    layers: tuple[str, ...]
    extra: int  # of these, how many belong to multi-token prediction or lie beyond the model's last layer
    status: str  # "plan", "partly" (some of the plan's entries cannot be used here), "default" (no plan) or "none"
    layout: str  # that packing would take; of experts that of w2
    w13_layout: str  # of experts; "" for a linear layer
    kernels: str  # which runs at which M
    reason: str  # of a status other than "plan"
    layout_bytes: dict[str, int]  # of one layer's weights on one rank, by layout; of experts by that of w2


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's layers against the plans of a database."""

    path: str
    device: Device
    database: str
    tp: int
    ep: int
    dtype: str | None  # as asked for; None: the checkpoint's own
    fused: bool
    problems: tuple[Covered, ...]
    planned_layers: int
    layers: int
    extra: int  # of these, how many belong to multi-token prediction or lie beyond the model's last layer
    bytes: dict[str, int]  # of all these layers on the fullest rank, by layout: "planned" takes each one's own
    left_out: dict[str, str]  # expert layers that have no problem, and why
    foreign: dict[str, str]  # layers in other formats
    tune: str  # the command that tunes all these problems


def coverage(
    checkpoint: Checkpoint, store: Store | None, device: Device, *, tp: int, ep: int, dtype: str | None, fused: bool
) -> Coverage:
    """Compare the NVFP4 layers of a checkpoint, dense ones and experts, with a database.

    Parameters
    ----------
    store
        None when there is no database: everything falls back.
    tp, ep, dtype, fused
        As for `problems_of_checkpoint`.
    """
    x_dtype = dtype_of(checkpoint, dtype)
    asked = {
        one.name: tuple(problems_of_linears([one], tp=tp, dtype=x_dtype)) for one in layers_of(checkpoint, fused=fused)
    }
    experts = experts_of(checkpoint, tp=tp, ep=ep, dtype=x_dtype)
    asked |= experts.problems
    layers: dict[Problem, list[str]] = {}
    for name, problems in asked.items():
        for problem in problems:
            layers.setdefault(problem, []).append(name)
    found = {}
    for problem, names in layers.items():
        plan = store.load_plan(device, problem) if store is not None else None
        found[problem] = _covered(checkpoint, device, problem, tuple(names), plan)
    total: Counter[str] = Counter()
    for problems in asked.values():
        one = found[problems[0]]
        total.update(one.layout_bytes)
        total["planned"] += one.layout_bytes[one.layout]
    return Coverage(
        path=str(checkpoint.path),
        device=device,
        database=str(store.path) if store is not None else "",
        tp=tp,
        ep=ep,
        dtype=dtype,
        fused=fused,
        problems=tuple(found.values()),
        planned_layers=sum(
            all(found[problem].status in ("plan", "partly") for problem in problems) for problems in asked.values()
        ),
        layers=len(asked),
        extra=sum(checkpoint.is_extra(name) for name in asked),
        bytes=dict(total),
        left_out=dict(experts.left_out),
        foreign=dict(checkpoint.foreign),
        tune=_command(checkpoint, tp=tp, ep=ep, dtype=dtype, fused=fused),
    )


def _covered(
    checkpoint: Checkpoint, device: Device, problem: Problem, names: tuple[str, ...], plan: Plan | None
) -> Covered:
    layout = choose_layout(device, problem, plan)
    try:
        decision = decide(device, problem, layout, plan)
    except Unsupported as error:
        status, kernels, reason = "none", "", str(error)
    else:
        kernels = kernels_by_m((one.kernel.name, one.m_lo, one.m_hi) for one in decision.segments)
        if not decision.tuned:
            status, reason = "default", f"nothing was measured: `{tune_command(problem)}`"
        else:
            status = "partly" if decision.ignored else "plan"
            reason = "; ".join(decision.ignored)
    return Covered(
        problem=problem,
        layers=names,
        extra=sum(checkpoint.is_extra(name) for name in names),
        status=status,
        layout=layout,
        w13_layout=first_layout(layout, problem) if problem.op == "moe" else "",
        kernels=kernels,
        reason=reason,
        layout_bytes=_layout_bytes(problem),
    )


def _layout_bytes(problem: Problem) -> dict[str, int]:
    """Of one layer's weights, by every layout that there is for them."""
    known = {name: get_layout(name) for name in layout_ids()}
    fitting = {name: one for name, one in known.items() if problem.dtype in one.dtypes and not one.gated}
    if problem.op != "moe":
        return {name: one.bytes(problem.n, problem.k) for name, one in fitting.items()}
    rows = (2 if problem.gated else 1) * problem.n
    return {
        name: problem.experts
        * (known[first_layout(name, problem)].bytes(rows, problem.k) + one.bytes(problem.k, problem.n))
        for name, one in fitting.items()
        if one.experts
    }


def show_coverage(console: Console, found: Coverage) -> None:
    """A line a problem, then totals."""
    console.print(f"checkpoint  {found.path}", soft_wrap=True)
    console.print(f"database    {found.database or 'none'}", soft_wrap=True)
    ranks = max(found.tp, found.ep)
    console.print(f"device      {device_words(found.device)}" + (f", 1 of {ranks} ranks" if ranks > 1 else ""))
    made = Grid("problem", ">layers", "plan", "layout", "~kernels by M", ">weights")
    for one in found.problems:
        made.row(
            problem_words(one.problem),
            str(len(one.layers)),
            one.status,
            one.layout,
            one.kernels,
            _size(one.layout_bytes[one.layout] * len(one.layers)),
        )
    if found.problems:
        console.print(made)
    for one in found.problems:
        if one.status in ("partly", "none"):
            console.print(f"{problem_words(one.problem)}: {one.reason}", soft_wrap=True)
    if found.problems:
        _show_totals(console, found)
    if found.left_out:
        console.print(left_out_words(found.left_out), soft_wrap=True)
    if found.foreign:
        names = ", ".join(f"{name} ({algo})" for name, algo in list(found.foreign.items())[:SHOWN_FOREIGN])
        console.print(f"{plural(len(found.foreign), 'layer')} in other formats: {names}", soft_wrap=True)


def _show_totals(console: Console, found: Coverage) -> None:
    rest = found.layers - found.planned_layers
    fall = f"; {rest} fall back to default kernels: `{found.tune}`" if rest else ""
    console.print(f"{found.planned_layers} of {plural(found.layers, 'layer')} have a plan{fall}", soft_wrap=True)
    sizes = ", ".join(f"{layout} {_size(size)}" for layout, size in found.bytes.items())
    console.print(f"all of them by layout: {sizes}", soft_wrap=True)
    if found.extra:
        extra = plural(found.extra, "layer")
        console.print(f"{extra} of these are for multi-token prediction, or beyond the last layer")


def _command(checkpoint: Checkpoint, *, tp: int, ep: int, dtype: str | None, fused: bool) -> str:
    ranks = (f" --tp {tp}" if tp > 1 else "") + (f" --ep {ep}" if ep > 1 else "")
    options = (" --fused" if fused else "") + ranks + (f" --dtype {dtype}" if dtype else "")
    return f"nvfp4 tune --checkpoint {shlex.quote(str(checkpoint.path))}{options}"


def _size(size: int) -> str:
    for unit, scale in (("GiB", 30), ("MiB", 20)):
        if size >= 1 << scale:
            return f"{size / (1 << scale):.1f} {unit}"
    return f"{size / 1024:.1f} KiB"
