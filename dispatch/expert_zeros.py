"""A launcher of experts run once, on zeros, so that its modules are loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.kernel import Launcher
from ..kernels.moe.activations import constants
from ..kernels.moe.arguments import MoeArguments
from ..kernels.problem import Problem
from ..kernels.weights.layouts import first_layout
from ..kernels.weights.layouts import layout as get_layout

__all__ = ["run_on_zeros"]


def run_on_zeros(launcher: Launcher, problem: Problem, device: torch.device, layout: str, m: int) -> None:
    """Run a launcher once. Every row goes to the first expert, so there is no memory behind the others' weights."""
    p, dtype = problem, getattr(torch, problem.dtype)

    def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def weight(layout: str, n: int, k: int) -> tuple[Tensor, Tensor | None, Tensor]:
        target = get_layout(layout)
        scale = None if target.scale_shape is None else zeros(1, *target.scale_shape(n, k))
        return zeros(1, *target.data_shape(n, k)), scale, zeros(p.experts, 1, dtype=torch.float32)

    x = zeros(m, p.k, dtype=dtype)
    if p.op == "grouped_gemm":
        offsets = torch.full((p.experts + 1,), m, dtype=torch.int32, device=device)
        offsets[0] = 0
        launcher(x, *weight(layout, p.n, p.k), offsets, zeros(m, p.n, dtype=dtype))
        return
    w13, w13_scale, w13_scale_2 = weight(first_layout(layout, p), p.n * (2 if p.gated else 1), p.k)
    w2, w2_scale, w2_scale_2 = weight(layout, p.k, p.n)
    arguments = MoeArguments(
        x=x,
        w13=w13,
        w13_scale=w13_scale,
        w13_scale_2=w13_scale_2,
        w2=w2,
        w2_scale=w2_scale,
        w2_scale_2=w2_scale_2,
        topk_ids=zeros(m, p.top_k, dtype=torch.int32),
        topk_weights=zeros(m, p.top_k, dtype=torch.float32),
        constants=constants(p.activation),
    )
    launcher(arguments, zeros(m, p.k, dtype=dtype))
