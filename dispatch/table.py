"""From a problem to bound launchers: the plan's intervals when it was tuned, the kernels' own defaults when not.

Binding happens once per problem, layout and device; a call then costs a dict look-up and a bisect on M.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ..cache import lookup
from ..cache.words import tune_command
from ..errors import BuildError, NotWarm, caller_level, message
from ..kernels.device import describe
from ..kernels.kernel import Launcher
from ..kernels.problem import Device, Problem
from ..kernels.untuned import ANCHORS
from .segments import Segment, decide

__all__ = ["Bound", "UntunedWarning", "bind", "clear", "database_stamp", "on_clear"]

# (upper ends of all intervals but the last, launchers): launchers[bisect_left(uppers, m)] serves m tokens.
Bound: TypeAlias = tuple[tuple[int, ...], tuple[Launcher, ...]]

# Runs a launcher once at m tokens, so that its module is loaded before a capture may begin.
Load: TypeAlias = Callable[[Launcher, int], None]

LOAD_BYTES = 64 << 20  # of x and the output together, when a launcher is run for loading

_bound: dict[tuple[torch.device, Problem, str], Bound] = {}
_announced: set[tuple[Problem, str]] = set()
_dependents: list[Callable[[], None]] = []
_lock = threading.RLock()


class UntunedWarning(UserWarning):
    """A problem runs default kernels because nothing was measured for it on this device."""


def bind(device: torch.device, problem: Problem, layout: str, load: Load | None) -> Bound:
    """The launchers of one problem and weight layout; built by the first call, looked up by later ones.

    Parameters
    ----------
    device
        With an index for CUDA.
    load
        Called once per launcher with an M that it serves; None leaves loading to the first real call.

    Raises
    ------
    NotWarm
        The problem was never bound, and the current stream is being captured.
    Unsupported
        No kernel can run it; the message lists every kernel's reason.
    """
    key = (device, problem, layout)
    found = _bound.get(key)
    if found is not None:
        return found
    if _is_capturing(device):
        raise NotWarm(
            message(
                f"{problem.label} was never run on {device} before this CUDA graph capture, and building it would"
                " break the capture",
                do=f"call nvfp4.warmup {_what_to_warm(problem, layout)} first, or run it once without capture",
            )
        )
    with _lock:
        found = _bound.get(key)
        if found is None:
            found = _bound[key] = _build(device, problem, layout, load)
    return found


def clear() -> None:
    """Forget every binding, so that new plans and kernels take effect."""
    with _lock:
        _bound.clear()
        for forget in _dependents:
            forget()


def on_clear(forget: Callable[[], None]) -> None:
    """Have `forget` called by `clear`: for whoever keeps what `bind` returned."""
    _dependents.append(forget)


def _build(torch_device: torch.device, problem: Problem, layout: str, load: Load | None) -> Bound:
    device = describe(torch_device)
    plan = lookup.find_plan(device, problem)
    broken: dict[str, str] = {}  # kernel -> why it could not be built
    while True:
        decision = decide(device, problem, layout, plan, broken)
        built: dict[tuple[str, str], Launcher] = {}
        try:
            for segment in decision.segments:
                if segment.key not in built:
                    built[segment.key] = segment.kernel.build(device, problem, segment.config)
        except BuildError as error:
            broken[segment.kernel.name] = f"cannot be built: {error}"
            continue
        break
    for name, reason in broken.items():
        warnings.warn(f"kernel {name} {reason}; {problem.label} runs others", RuntimeWarning, stacklevel=caller_level())
    if decision.ignored:
        warnings.warn(
            message(
                f"{len(decision.ignored)} of the tuned entries of {problem.label} are not used here: "
                f"{decision.ignored[0]}",
                do=f"tune again: {tune_command(problem)}",
            ),
            RuntimeWarning,
            stacklevel=caller_level(),
        )
    if not decision.tuned and (problem, layout) not in _announced:
        _announced.add((problem, layout))
        warnings.warn(
            f"{problem.label} is not tuned on {device.name} for weight layout {layout!r} (database: {_database()}): "
            f"default kernels run, which may be much slower. Tune it: {tune_command(problem)}",
            UntunedWarning,
            stacklevel=caller_level(),
        )
    launchers = {key: _guarded(launcher, torch_device) for key, launcher in built.items()}
    if load is not None:
        loaded = set()
        for segment in decision.segments:
            if segment.key not in loaded:
                loaded.add(segment.key)
                _load(load, launchers[segment.key], segment, device, problem)
    uppers = tuple(segment.m_hi for segment in decision.segments[:-1] if segment.m_hi is not None)
    return uppers, tuple(launchers[segment.key] for segment in decision.segments)


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def database_stamp() -> tuple[object, ...]:
    """`cache.files.stamp`, imported where it is used."""
    from ..cache import files  # sqlite3 comes with it

    return files.stamp()


def _database() -> object:
    """The file that plans are looked up in, which may not be there."""
    from ..cache import files

    return files.default_path()


def _what_to_warm(problem: Problem, layout: str) -> str:
    return "with the model's weights" if problem.op == "gemm" else f"with {problem} and layout={layout!r}"


def _load(load: Load, launcher: Launcher, segment: Segment, device: Device, problem: Problem) -> None:
    """Run the launcher once, at an M that it serves or, where that needs much memory, at a smaller valid one."""
    row_bytes = 2 * (problem.n + problem.k) * (1 + 2 * problem.top_k)
    for m in (segment.m_lo, *(a for a in reversed(ANCHORS) if a < segment.m_lo)):
        if m * row_bytes <= LOAD_BYTES and segment.kernel.is_valid(device, problem, segment.config, m):
            break
    else:
        m = segment.m_lo
    load(launcher, m)


def _guarded(launcher: Launcher, device: torch.device) -> Launcher:
    """The launcher, run with its own GPU as the current one where there are several."""
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return launcher

    def run(*arguments: Any) -> None:
        if torch.cuda.current_device() == device.index:
            launcher(*arguments)
        else:
            with torch.cuda.device(device):
                launcher(*arguments)

    return run
