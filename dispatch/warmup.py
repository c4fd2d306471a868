"""`nvfp4.warmup`: bind problems and load their kernels, so that CUDA graph capture may begin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..errors import InvalidInput, message
from ..kernels.device import describe
from ..kernels.problem import SIZE_END, Problem
from ..kernels.weights.codec import GROUP
from ..kernels.weights.layouts import Layout, layout_ids, to_layout
from ..kernels.weights.layouts import layout as get_layout
from ..kernels.weights.weight import Weight
from . import call, experts
from .checks import DTYPE_NAMES, check_dtype
from .layout import planned_layout

__all__ = ["warmup"]

OF_MODELS = "of a model pass nvfp4.nn.weights(model), and problem(top_k) of its nvfp4.nn.FusedMoE"


def warmup(
    weights_or_problems: Weight | Problem | Iterable[Weight | Problem] | Mapping[str, Weight | Problem],
    *,
    ms: Iterable[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    layout: str | None = None,
) -> int:
    """Bind every problem and run each of its kernels once.

    After it, no call of these problems compiles, loads or looks anything up, at any M. Calls without it do the same
    when they first meet a problem, except under CUDA graph capture, where they raise NotWarm.

    Parameters
    ----------
    weights_or_problems
        Weights from `nvfp4.pack`, or Problems; one, several, or a mapping such as a state dict of them. Layers of
        experts are warmed by their Problem only.
    ms
        Also run a whole call at these M.
    dtype
        Of the x the weights will meet; Problems have their own.
    device
        For Problems; by default the current CUDA device, or the CPU where there is none.
    layout
        For Problems: the layout in which their weights will be, such as "checkpoint" for a checkpoint's own tensors; of
        a moe that of w2. None takes what `nvfp4.pack` and the modules of `nvfp4.nn` take.

    Returns
    -------
    int
        How many distinct problems were bound, those that already were included.

    Raises
    ------
    InvalidInput
        Something else than a Weight or a Problem, a dtype that no op takes, a layout that weights of a problem cannot
        be in, or a device that torch does not know.
    NoDevice
        The device is not there, or is of a kind that has no kernels.
    Unsupported
        No kernel can run one of the problems.
    """
    check_dtype(dtype)
    if isinstance(ms, str) or not isinstance(ms, Iterable | None):
        raise InvalidInput(message("wrong ms", got=repr(ms), expected="several numbers of tokens, such as [1, 64]"))
    sizes = tuple(ms or ())
    if not all(isinstance(m, int) and not isinstance(m, bool) and 1 <= m < SIZE_END for m in sizes):
        raise InvalidInput(message("wrong ms", got=sizes, expected="whole numbers, at least 1 each, below 2^31"))
    where_problems_run = _device(device)
    seen: set[tuple[Problem, str, torch.device]] = set()
    for item in _items(weights_or_problems):
        if isinstance(item, Problem):
            problem = item
            if problem.k % GROUP:
                raise InvalidInput(
                    message("no weight is of this problem", got=problem.label, expected=f"K a multiple of {GROUP}")
                )
            where = where_problems_run
            reads = planned_layout(where, problem) if layout is None else _layout_for(problem, layout)
        elif isinstance(item, Weight):
            if item.global_scale.ndim == 2:
                raise InvalidInput(message("warmup takes no weights of experts", got=item, do="pass their Problem"))
            problem = Problem(n=item.out_features, k=item.in_features, dtype=DTYPE_NAMES[dtype])
            where, reads = item.data.device, item.layout
        else:
            raise InvalidInput(
                message(
                    "warmup cannot use this",
                    got=type(item).__name__,
                    expected="Weight or Problem",
                    do=OF_MODELS if isinstance(item, torch.nn.Module) else "",
                )
            )
        if (problem, reads, where) in seen:
            continue
        seen.add((problem, reads, where))
        if problem.op != "gemm":
            experts.warm(problem, where, reads, sizes or (1,))
        else:
            weight = item if isinstance(item, Weight) else _zero_weight(problem, reads, where)
            _run(weight, getattr(torch, problem.dtype), sizes)
    if any(where.type == "cuda" for _, _, where in seen):
        torch.cuda.synchronize()
    return len(seen)


def _run(weight: Weight, dtype: torch.dtype, ms: tuple[int, ...]) -> None:
    n = None if weight.layout == "checkpoint" else weight.out_features
    with torch.inference_mode():
        for m in ms or (1,):
            x = torch.zeros((m, weight.in_features), dtype=dtype, device=weight.data.device)
            call.gemm(x, weight.data, weight.scale, weight.global_scale, layout=weight.layout, out_features=n)


def _layout_for(problem: Problem, layout: str) -> str:
    """The layout, if weights of the problem can be in it; of a moe that of w2."""

    def fits(one: Layout) -> bool:
        return not one.gated and problem.dtype in one.dtypes and (problem.op == "gemm" or one.experts)

    if not fits(get_layout(layout)):
        known = ", ".join(one for one in layout_ids() if fits(get_layout(one)))
        raise InvalidInput(message("wrong layout", got=f"{layout!r} for {problem.label}", expected=f"one of {known}"))
    return layout


def _items(given: object) -> list[object]:
    if isinstance(given, Weight | Problem):
        return [given]
    if isinstance(given, Mapping):
        return list(given.values())
    if isinstance(given, Iterable) and not isinstance(given, Tensor):
        return list(given)
    return [given]


def _device(wanted: torch.device | str | None) -> torch.device:
    """The device that `warmup` was given, with its index for CUDA."""
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(message("wrong device", got=repr(wanted), expected='such as "cuda:0" or "cpu"')) from error
    describe(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _zero_weight(problem: Problem, layout: str, device: torch.device) -> Weight:
    return to_layout(
        torch.zeros((problem.n, problem.k // 2), dtype=torch.uint8, device=device),
        torch.zeros((problem.n, problem.k // 16), dtype=torch.uint8, device=device),
        torch.ones(1, device=device),
        layout_id=layout,
    )
