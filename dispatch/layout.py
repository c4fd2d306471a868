"""Which weight layout `nvfp4.pack` and what else holds weights convert to when none is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from ..cache import lookup
from ..cache.records import Plan
from ..errors import Unsupported
from ..kernels import registry
from ..kernels.device import describe
from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from ..kernels.untuned import untuned_layout
from ..kernels.weights.fragment import fragment_id
from ..kernels.weights.layouts import layout as get_layout
from ..kernels.weights.layouts import layout_ids
from . import table
from .segments import decide

__all__ = ["choose_layout", "fragment_layout", "planned_experts_layout", "planned_layout"]

TOP_KS = range(1, 17)  # that models have

_planned: dict[tuple[Device, Problem, str], tuple[object, str]] = {}
table.on_clear(_planned.clear)

REMEMBERED = 4096  # problems; a choice asks kernels for defaults at some twenty M, which takes tens of milliseconds


def planned_layout(device: torch.device, problem: Problem) -> str:
    """`choose_layout` with the plan of the user's database; "checkpoint" on devices that have no kernels.

    Remembered until the database changes, or `table.clear` is called: asking it takes half a millisecond.
    """
    return _remembered(device, problem, "", lambda here: choose_layout(here, problem, lookup.find_plan(here, problem)))


def planned_experts_layout(device: torch.device, problem: Problem) -> str:
    """`planned_layout` of a moe whose top_k is not known: by the first plan for any, else as untuned with 8."""

    def choose(here: Device) -> str:
        plans = ((one, lookup.find_plan(here, one)) for one in (replace(problem, top_k=top_k) for top_k in TOP_KS))
        one, plan = next(((one, plan) for one, plan in plans if plan), (replace(problem, top_k=8), None))
        return choose_layout(here, one, plan)

    return _remembered(device, problem, "any top_k", choose)


def _remembered(device: torch.device, problem: Problem, what: str, choose: Callable[[Device], str]) -> str:
    if device.type not in ("cpu", "cuda"):
        return "checkpoint"
    here = describe(device)
    stamp, key = table.database_stamp(), (here, problem, what)
    found = _planned.get(key)
    if found is None or found[0] != stamp:
        found = _planned[key] = stamp, choose(here)
    return found[1]


def fragment_layout(device: torch.device, dtype: str) -> str:
    """The fragment layout that fits a device and the dtype of x."""
    capability = describe(device).capability if device.type in ("cpu", "cuda") else (0, 0)
    return fragment_id(capability, dtype)


def choose_layout(device: Device, problem: Problem, plan: Plan | None) -> str:
    """The first of these that the kernels here can run at every M, and that is for this dtype.

    The layout that the plan marks; the plan's others, the fastest first; what is taken untuned
    (`kernels.untuned.untuned_layout`); "checkpoint".
    """
    return _choose(device, problem, plan, registry.kernels(problem.op), layout_ids())


@lru_cache(maxsize=REMEMBERED)
def _choose(
    device: Device, problem: Problem, plan: Plan | None, kernels: tuple[Kernel, ...], known: tuple[str, ...]
) -> str:
    for name in (*_of_plan(plan), untuned_layout(device, problem, kernels)):
        if name in known and problem.dtype in get_layout(name).dtypes and _runs(device, problem, name, plan):
            return name
    return "checkpoint"


def _of_plan(plan: Plan | None) -> tuple[str, ...]:
    if plan is None:
        return ()
    others = sorted((one.traffic_us is None, one.traffic_us or 0.0, one.layout) for one in plan.layouts)
    return (plan.layout, *(name for _, _, name in others))


def _runs(device: Device, problem: Problem, layout: str, plan: Plan | None) -> bool:
    try:
        decide(device, problem, layout, plan)
    except Unsupported:
        return False
    return True
