"""Building kernels for a GPU that is not here: every candidate that plans and defaults can reach there.

What is built goes to the folder of compiled programs (`kernels.cuda.program_cache`). A process that has that folder and
the same versions of the compilers compiles nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..cache.records import Plan
from ..errors import InvalidInput, Unsupported, message
from ..kernels import registry
from ..kernels.build import BuildPool, Built
from ..kernels.cuda.compile import ARCHITECTURES
from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from .segments import Decision, decide

__all__ = ["TYPICAL", "Candidate", "Wanted", "build_all", "capability_of", "reachable"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Stand for the GPUs of an architecture that the database does not know. Defaults depend on their numbers, so that what
# is built for them may not be all that another card of that architecture asks for.
TYPICAL: Mapping[tuple[int, int], tuple[Device, ...]] = {
    capability: tuple(
        Device(
            kind="cuda",
            name=name,
            capability=capability,
            units=units,
            smem_bytes=smem_kib * KIB,
            l2_bytes=l2_mib * MIB,
            memory_bytes=memory_gib * GIB,
        )
        for name, units, smem_kib, l2_mib, memory_gib in cards
    )
    for capability, cards in {
        (8, 0): (("NVIDIA A100", 108, 163, 40, 80),),
        (8, 9): (("NVIDIA L40S", 142, 99, 96, 45),),
        (9, 0): (("NVIDIA H200", 132, 227, 60, 140),),
        (10, 0): (("NVIDIA B200", 148, 227, 126, 179),),
        (12, 0): (("NVIDIA RTX PRO 6000", 188, 99, 128, 96), ("NVIDIA GeForce RTX 5090", 170, 99, 96, 32)),
    }.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A problem on a device, with its plan if it was tuned there."""

    device: Device
    problem: Problem
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A kernel with a config, for one device and problem."""

    device: Device
    problem: Problem
    kernel: Kernel
    config: Any


def capability_of(arch: str, known: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The compute capability that an architecture's name means: "sm_90a" and "sm_90" are (9, 0).

    Raises
    ------
    InvalidInput
        It is none of the known capabilities.
    """
    known = sorted(known)
    names = {capability: ARCHITECTURES.get(capability, "sm_{}{}".format(*capability)) for capability in known}
    found = re.fullmatch(r"sm_(\d+)(\d)(a?)", arch.strip(), re.ASCII)
    capability = (int(found[1]), int(found[2])) if found else None
    if found is None or capability not in names or (found[3] and not names[capability].endswith("a")):
        raise InvalidInput(message("unknown architecture", got=arch, expected=", ".join(names.values())))
    return capability


def reachable(wanted: Wanted, broken: Mapping[str, str]) -> list[Decision]:
    """What serves the problem in every weight layout that some kernel of the device reads.

    Parameters
    ----------
    broken
        Kernels that must not be chosen, with the reason.

    Raises
    ------
    Unsupported
        No kernel can run the problem in any layout.
    """
    device, problem, plan = wanted.device, wanted.problem, wanted.plan
    kernels = [kernel for kernel in registry.kernels(problem.op) if kernel.supports(device, problem)]
    layouts = [entry.layout for entry in plan.layouts] if plan is not None else []
    layouts += ["checkpoint", *(kernel.layout(device, problem) for kernel in kernels)]
    decisions, refusals = [], []
    for layout in dict.fromkeys(layouts):
        try:
            decisions.append(decide(device, problem, layout, plan, broken))
        except Unsupported as error:
            refusals.append(error)
    if not decisions:
        raise refusals[0]
    return decisions


def build_all(
    everything: Sequence[Wanted],
    *,
    pool: BuildPool,
    built: Callable[[Candidate, Built, int], None],
    warn: Callable[[str], None],
) -> None:
    """Build all that the problems can reach; where a kernel cannot be built, what takes its place too.

    Parameters
    ----------
    built
        Called after every candidate with what came of it and with how many are left, as far as that is known.
    warn
        Called with what is wrong with a plan, and with problems that no kernel can run.
    """
    broken: dict[Wanted, dict[str, str]] = {wanted: {} for wanted in everything}
    seen: set[Candidate] = set()
    todo = list(broken)
    while todo:
        batch: dict[Candidate, Wanted] = {}
        for wanted in todo:
            for candidate in _candidates(wanted, broken[wanted], warn):
                if candidate not in seen:
                    seen.add(candidate)
                    batch[candidate] = wanted
                    pool.submit(candidate.device, candidate.problem, candidate.kernel, candidate.config)
        failed: dict[Wanted, None] = {}
        for left, (candidate, wanted) in zip(range(len(batch) - 1, -1, -1), batch.items(), strict=True):
            outcome = _outcome(pool, candidate)
            built(candidate, outcome, left)
            if outcome.error:
                broken[wanted][candidate.kernel.name] = f"cannot be built: {outcome.error}"
                failed[wanted] = None
        todo = list(failed)


def _candidates(wanted: Wanted, broken: Mapping[str, str], warn: Callable[[str], None]) -> list[Candidate]:
    try:
        decisions = reachable(wanted, broken)
    except Unsupported as error:
        warn(str(error))
        return []
    if not broken:  # else it says again what the failed build said
        for reason in (reason for decision in decisions for reason in decision.ignored):
            warn(f"a tuned entry of {wanted.problem.label} is not used on {wanted.device.name}: {reason}")
    return [
        Candidate(device=wanted.device, problem=wanted.problem, kernel=segment.kernel, config=segment.config)
        for decision in decisions
        for segment in decision.segments
        if segment.kernel.packages
    ]


def _outcome(pool: BuildPool, candidate: Candidate) -> Built:
    asked = (candidate.device, candidate.problem, candidate.kernel, candidate.config)
    outcome = pool.outcome(*asked)
    return outcome if outcome.known else pool.outcome(*asked)
