"""Why a candidate was not chosen: it lost, was wrong, failed, was not valid, has changed, or was never measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from .evidence import TRUST_LOST, Evidence, Timed, behind, gather, implementations
from .records import BASELINE, TIMING, Measurement
from .store import Store
from .words import candidate_words, microseconds

__all__ = ["Fate", "FateAt", "Why", "why"]


class FateAt(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a candidate at one M."""

    m: int
    outcome: str  # "won", "lost", "screened out", "not valid", "not comparable", or the status of a failure
    p50_us: float | None = None
    best: str = ""  # "kernel {config}" of the winner in the same layout
    best_us: float | None = None
    slower: float | None = None  # its time over the winner's, minus 1; of ops with experts: of their largest regrets
    reason: str = ""  # in words


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one candidate."""

    config: str
    outcome: str  # "won" (somewhere), "lost", "distrusted", "failed", "retired", "not in the space", "never measured"
    reason: str
    at: tuple[FateAt, ...]  # ascending M


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `why`."""

    device: Device
    problem: Problem
    kernel: str
    layout: str  # that the kernel reads here; "" when it cannot run
    reason: str  # why the whole kernel is out, "" when it is not
    candidates: tuple[Fate, ...]  # winners first, then those that came closest


def why(
    store: Store,
    device: Device,
    problem: Problem,
    kernels: Mapping[str, Kernel],
    kernel: str,
    config: str | None = None,
) -> Why:
    """What became of a kernel's candidates, or of one of them.

    Parameters
    ----------
    kernels
        The kernels that exist here, by name.
    config
        JSON of one config; None for all that were measured.
    """
    found = kernels.get(kernel)
    reason = _kernel_reason(found, device, problem, kernel)
    if found is None or reason:
        return Why(device=device, problem=problem, kernel=kernel, layout="", reason=reason, candidates=())
    rows = store.measurements(device, problem)
    known = implementations(kernels)
    evidence = gather(
        device, problem, rows, kernels, implementation_by_kernel=known, allow_nondeterministic=not found.deterministic
    )
    wanted = config
    if config is not None and (parsed := found.parse_config(device, problem, config)) is not None:
        wanted = parsed.to_json()
    by_config: dict[str, list[Measurement]] = {} if wanted is None else {wanted: []}
    for row in rows:
        if row.kernel == kernel and (wanted is None or row.config in (wanted, config)):
            by_config.setdefault(wanted or row.config, []).append(row)
    fates = [_fate(evidence, found, known[kernel], text, mine) for text, mine in by_config.items()]
    return Why(
        device=device,
        problem=problem,
        kernel=kernel,
        layout=found.layout(device, problem),
        reason="" if found.deterministic else "its results differ from run to run; planned only if asked for",
        candidates=tuple(sorted(fates, key=_closeness)),
    )


def _kernel_reason(kernel: Kernel | None, device: Device, problem: Problem, name: str) -> str:
    if name == BASELINE:
        return "it is the baseline that others are compared with, and never planned"
    if kernel is None:
        return "no kernel of that name is installed here"
    if kernel.op != problem.op:
        return f"it computes {kernel.op}, not {problem.op}"
    verdict = kernel.supports(device, problem)
    return "" if verdict else verdict.reason or "it does not support this problem on this device"


def _closeness(fate: Fate) -> tuple[bool, bool, float, str]:
    slower = [at.slower for at in fate.at if at.slower is not None]
    return fate.outcome != "won", fate.outcome != "lost", min(slower, default=float("inf")), fate.config


def _fate(evidence: Evidence, kernel: Kernel, implementation: str, text: str, rows: Sequence[Measurement]) -> Fate:
    config = kernel.parse_config(evidence.device, evidence.problem, text)
    if config is None:
        return Fate(config=text, outcome="not in the space", reason="the kernel has no such config here", at=())
    current = [row for row in rows if row.implementation == implementation]
    if rows and not current:
        reason = f"the kernel has changed since its {len(rows)} measurements"
        return Fate(config=text, outcome="retired", reason=reason, at=())
    at = tuple(
        _fate_at(evidence, kernel, config, [row for row in current if row.m == m])
        for m in sorted({row.m for row in current})
    )
    bad = next((row for row in current if row.status in TRUST_LOST), None)
    outcomes = {entry.outcome for entry in at}
    if bad is not None:
        detail = bad.detail or _error_words(bad)
        outcome, reason = "distrusted", f"{bad.status} at M = {bad.m}: {detail}".rstrip(": ")
    elif "won" in outcomes:
        outcome, reason = "won", "at M = " + ", ".join(str(entry.m) for entry in at if entry.outcome == "won")
    elif outcomes & {"lost", "screened out"}:
        close = min((entry for entry in at if entry.slower is not None), key=lambda entry: entry.slower or 0.0)
        outcome, reason = "lost", f"closest at M = {close.m}: {close.reason}"
    elif at:
        outcome, reason = "failed", at[0].reason
    else:
        outcome, reason = "never measured", "not tried yet"
    return Fate(config=text, outcome=outcome, reason=reason, at=at)


def _fate_at(evidence: Evidence, kernel: Kernel, config: object, rows: Sequence[Measurement]) -> FateAt:
    row = rows[-1]
    m = row.m
    if row.status != "ok":
        return FateAt(m=m, outcome=row.status, reason=row.detail or _error_words(row))
    verdict = kernel.is_valid(evidence.device, evidence.problem, config, m)
    if not verdict:
        return FateAt(m=m, outcome="not valid", p50_us=row.p50_us, reason=verdict.reason)
    ranked = evidence.times.get((row.layout, m), ())
    mine = next(
        (
            timed
            for timed in ranked
            if timed.candidate.kernel == kernel.name and evidence.configs[timed.candidate] == config
        ),
        None,
    )
    if mine is None:
        other = row.environment.timing != TIMING
        reason = (
            "timed by another version of the timing protocol"
            if other
            else "wrong elsewhere, only a burst, or not timed with every routing"
        )
        return FateAt(m=m, outcome="not comparable", p50_us=row.p50_us, reason=reason)
    best = ranked[0]
    name = f"{best.candidate.kernel} {best.candidate.config}"
    if mine is best:
        return FateAt(m=m, outcome="won", p50_us=mine.p50_us, best=name, best_us=best.p50_us, slower=0.0)
    slower = behind(best, mine) if (lost := mine.protocol == best.protocol) else mine.p50_us / best.p50_us - 1
    words = f"{microseconds(mine.p50_us)} µs against {microseconds(best.p50_us)} µs of {candidate_words(name)}"
    if lost and mine.by_routing_us:
        words += f"; furthest behind the fastest {_worst_words(mine)}, the other {_worst_words(best)}"
    return FateAt(
        m=m,
        outcome="lost" if lost else "screened out",
        p50_us=mine.p50_us,
        best=name,
        best_us=best.p50_us,
        slower=slower,
        reason=words if lost else f"{words}, which was measured in a final; this one was only screened",
    )


def _worst_words(timed: Timed) -> str:
    return f"with {timed.worst_routing} routing, by {timed.regret - 1:.0%}"


def _error_words(row: Measurement) -> str:
    return "" if row.relative_error is None else f"relative error {row.relative_error:.3g}"
