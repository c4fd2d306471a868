"""`nvfp4.pack`: a checkpoint's tensors, once, into the layout that the measurements call for."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidInput, message
from ..kernels.problem import Problem
from ..kernels.weights.experts import pack_experts
from ..kernels.weights.layouts import GLU, first_layout, layout_ids, to_layout
from ..kernels.weights.weight import Weight, check_tensors
from .checks import DTYPE_NAMES, check_dtype
from .layout import fragment_layout, planned_layout

__all__ = ["pack"]


def pack(
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: str | None = None,
    scale_layout: str = "linear",
    repair_nan: bool = False,
    problem: Problem | None = None,
) -> Weight:
    """Check a weight and convert it for `nvfp4.gemm`, or the weights of experts for `grouped_gemm` and `moe`.

    Parameters
    ----------
    weight
        [N, K/2] uint8, contiguous; low nibble = even k. For experts [E, N, K/2].
    weight_scale
        [N, K/16] float8_e4m3fn or its uint8 view, contiguous; for experts [E, N, K/16].
    weight_scale_2
        The global scale, a factor: float32 with one element, or [N]; for experts [E], [E, 1], or [E, 2]: gate, up.
    dtype
        Of the x it will meet: layouts may depend on it, and so do plans. A layout for one dtype refuses x of the
        other; "checkpoint" takes both.
    layout
        Layout id of the result; "fragment" picks the one of the fragment layouts that fits device and dtype, and
        "fragment-glu" its form for w13 with a gate. None takes what the plan of this problem on this device marks.
        Without a plan, or where no kernel here reads that layout, it takes the fragment layout on a GPU and
        "checkpoint" on a CPU. Experts stay in "checkpoint" if neither a layout nor a problem is given.
    scale_layout
        "linear", or "swizzled" when weight_scale is in the 128x4 order (any shape).
    repair_nan
        Take 448 for NaN block scales instead of raising.
    problem
        Of experts: the moe or grouped_gemm that they are for. Its plan is then followed as that of a dense weight is,
        for its dtype, and w13 with a gate is packed in the -glu form, of "fragment" too.

    Returns
    -------
    Weight
        On weight's device. In layout "checkpoint" it shares storage with the arguments where they are aligned; in any
        other it is a copy, beside which the arguments may be dropped: `Weight.to_checkpoint` gives them back.

    Raises
    ------
    InvalidInput
        The tensors, the layout or an option is wrong.
    """
    check_dtype(dtype)
    check_tensors(weight=weight)
    if problem is not None:
        layout = _experts_layout(weight, layout, problem)
    elif layout is None:
        layout = _planned_layout(weight, dtype) if weight.ndim == 2 else "checkpoint"
    elif layout in ("fragment", "fragment" + GLU):
        layout = fragment_layout(weight.device, DTYPE_NAMES[dtype]) + layout.removeprefix("fragment")
    elif layout not in layout_ids():
        known = ", ".join(layout_ids())
        raise InvalidInput(
            message("unknown weight layout", got=repr(layout), expected=f"fragment, fragment{GLU} or one of {known}")
        )
    convert = pack_experts if weight.ndim == 3 else to_layout
    return convert(
        weight, weight_scale, weight_scale_2, layout_id=layout, scale_layout=scale_layout, repair_nan=repair_nan
    )


def _planned_layout(weight: Tensor, dtype: torch.dtype) -> str:
    problem = Problem(n=weight.shape[0], k=2 * weight.shape[1], dtype=DTYPE_NAMES[dtype])
    return planned_layout(weight.device, problem)


def _experts_layout(weight: Tensor, layout: str | None, problem: Problem) -> str:
    """The layout of one of a problem's stacks, which its shape tells apart."""
    if not isinstance(problem, Problem) or problem.op == "gemm":
        what = problem.label if isinstance(problem, Problem) else repr(problem)
        raise InvalidInput(
            message("wrong problem", got=what, expected="a Problem of moe or grouped_gemm; none for a dense weight")
        )
    rows = problem.n * (2 if problem.gated else 1)
    first, second = (problem.experts, rows, problem.k // 2), (problem.experts, problem.k, problem.n // 2)
    shape = tuple(weight.shape)
    if shape != first and (problem.op != "moe" or shape != second):
        expected = f"{first} or {second}" if problem.op == "moe" else str(first)
        raise InvalidInput(message(f"no stack of {problem.label} has this shape", got=shape, expected=expected))
    if layout is None:
        layout = planned_layout(weight.device, problem)
    elif layout == "fragment":
        layout = fragment_layout(weight.device, problem.dtype)
    return first_layout(layout, problem) if shape == first else layout
