"""The path of a call of grouped_gemm and moe.

`moe` serves a call that is like an earlier one, as `call.gemm` does: the address of w13 names guards, and one of them
compares all properties of all tensors at once. What is left is the number of tokens, where tensors lie, a bisect, the
output and the launcher.

Everything else is checked: one key of plain values over everything that was checked finds what was bound; what depends
on the number of tokens is looked at in every call. Launchers get what `kernels.moe.arguments` says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..kernels.kernel import Launcher
from ..kernels.moe.activations import Constants, constants
from ..kernels.moe.activations import activation as get_activation
from ..kernels.moe.arguments import MoeArguments
from ..kernels.problem import Problem
from ..kernels.weights.weight import check_tensors, is_aligned
from . import table
from .call import as_rows
from .checks import DTYPE_NAMES, LOW, have_memory, refuse_grad
from .expert_checks import check_grouped, check_moe, check_places, check_tokens
from .expert_recent import ABSENT, Recent, fit, recent, remember
from .expert_zeros import run_on_zeros

__all__ = ["grouped_gemm", "moe", "warm"]

# by every property that was checked: what runs, and what it is recognised by
_calls: dict[tuple[Any, ...], tuple[Problem, Constants, list[Recent]]] = {}
table.on_clear(_calls.clear)


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor,
    expert_offsets: Tensor,
    *,
    layout: str = "checkpoint",
    out_features: int | None = None,
) -> Tensor:
    """`nvfp4.grouped_gemm` on tensors; the implementation of the op on every device."""
    check_tensors(x=x)
    _refuse_grad(x)
    large = {"weight": weight, "weight_scale": weight_scale}
    small = {"weight_scale_2": weight_scale_2, "expert_offsets": expert_offsets}
    key = ("grouped_gemm", *_key(x, large, small), layout, out_features)
    if key not in _calls:
        n, k, experts = check_grouped(x, weight, weight_scale, weight_scale_2, expert_offsets, layout, out_features)
        problem = Problem(op="grouped_gemm", n=n, k=k, dtype=DTYPE_NAMES[x.dtype], experts=experts)
        _calls[key] = problem, (0.0, 0.0, 0.0), []
    problem, *_ = _calls[key]
    check_places(x, large, small)
    out = x.new_empty((x.shape[0], problem.n))
    if not x.shape[0]:
        return out
    launcher = _launcher(problem, x.device, layout, x.shape[0])
    factors = _factors(weight_scale_2)
    launcher(as_rows(x), weight, _bytes(weight_scale), factors, _ready(expert_offsets), out)
    return out


def moe(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w13_scale_2: Tensor,
    w2: Tensor,
    w2_scale: Tensor | None,
    w2_scale_2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    activation: str = "swiglu",
    inter: int | None = None,
    pre_quant_scale: Tensor | None = None,
    w2_pre_quant_scale: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w13_layout: str = "checkpoint",
    w2_layout: str = "checkpoint",
) -> Tensor:
    """`nvfp4.moe` on tensors; the implementation of the op on every device."""
    options = (activation, inter, apply_router_weight_on_input, limit, alpha, beta, w13_layout, w2_layout)
    try:
        address = w13.data_ptr()
    except AttributeError:
        check_tensors(w13=w13)  # torch passes None on
        raise
    for is_like, its_options, look, dtype, empty, call in recent.get(address, ()):
        # The guard compares every tensor's type, dtype, device, shape and strides with those of a call that passed all
        # checks, and sees that x needs no gradient. It does not read numbers of tokens, addresses (that of w13 is
        # aligned, and no freed one's, for only such are found) and what is no tensor.
        if (
            is_like(
                x,
                topk_ids,
                topk_weights,
                w13,
                w13_scale_2,
                w2,
                w2_scale_2,
                ABSENT[0] if w13_scale is None else w13_scale,
                ABSENT[1] if w2_scale is None else w2_scale,
                ABSENT[2] if w13_bias is None else w13_bias,
                ABSENT[3] if w2_bias is None else w2_bias,
                ABSENT[4] if pre_quant_scale is None else pre_quant_scale,
                ABSENT[5] if w2_pre_quant_scale is None else w2_pre_quant_scale,
                ABSENT[6] if expert_map is None else expert_map,
            )
            and options == its_options
            and (m := x.shape[0])
            and m == topk_ids.shape[0] == topk_weights.shape[0]
            and not (
                (a := x.data_ptr())
                | (b := topk_ids.data_ptr())
                | (c := topk_weights.data_ptr())
                | (d := w13_scale_2.data_ptr())
                | (e := w2.data_ptr())
                | (f := w2_scale_2.data_ptr())
            )
            & 15
            and (min(a, b, c, d, e, f) > LOW or have_memory(x, topk_ids, topk_weights, w13_scale_2, w2, w2_scale_2))
            and not (
                look
                and not fit(w13_scale, w2_scale, w13_bias, w2_bias, pre_quant_scale, w2_pre_quant_scale, expert_map)
            )
        ):
            hidden, uppers, launchers, values = call
            out = empty((m, hidden), (hidden, 1), dtype)
            arguments = MoeArguments(
                x=x,
                w13=w13,
                w13_scale=_bytes(w13_scale),
                w13_scale_2=w13_scale_2,
                w2=w2,
                w2_scale=_bytes(w2_scale),
                w2_scale_2=w2_scale_2,
                topk_ids=topk_ids,
                topk_weights=topk_weights,
                constants=values,
                w13_bias=w13_bias,
                w2_bias=w2_bias,
                pre_quant_scale=pre_quant_scale,
                w2_pre_quant_scale=w2_pre_quant_scale,
                expert_map=expert_map,
                weights_on_input=apply_router_weight_on_input,
            )
            launchers[bisect_left(uppers, m)](arguments, out)
            return out
    vectors = {
        "w13_bias": w13_bias,
        "w2_bias": w2_bias,
        "pre_quant_scale": pre_quant_scale,
        "w2_pre_quant_scale": w2_pre_quant_scale,
        "expert_map": expert_map,
    }
    return _moe(x, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, topk_ids, topk_weights, vectors, options)


def _moe(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w13_scale_2: Tensor,
    w2: Tensor,
    w2_scale: Tensor | None,
    w2_scale_2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    vectors: dict[str, Tensor | None],
    options: tuple[Any, ...],
) -> Tensor:
    """A call that is like none before it at this address of w13."""
    activation, inter, apply_router_weight_on_input, limit, alpha, beta, w13_layout, w2_layout = options
    check_tensors(x=x, topk_ids=topk_ids, topk_weights=topk_weights)
    _refuse_grad(x)
    large = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
    small = {"w13_scale_2": w13_scale_2, "w2_scale_2": w2_scale_2, **vectors}
    key = ("moe", *_key(x, large, small), topk_ids.shape[-1:], *options)
    found = _calls.get(key)
    if found is None:
        its_inter, hidden, experts, top_k = check_moe(
            x, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, topk_ids, topk_weights, activation=activation,
            inter=inter, apply_router_weight_on_input=apply_router_weight_on_input, w13_layout=w13_layout,
            w2_layout=w2_layout, **vectors,
        )  # fmt: skip
        values = constants(activation, limit=limit, alpha=alpha, beta=beta)
        name = get_activation(activation).name
        problem = Problem(
            op="moe", n=its_inter, k=hidden, dtype=DTYPE_NAMES[x.dtype], experts=experts, top_k=top_k, activation=name
        )
        found = _calls[key] = problem, values, []
    problem, values, guards = found
    check_tokens(x, topk_ids, topk_weights)
    tokens = {"topk_ids": topk_ids, "topk_weights": topk_weights}
    check_places(x, large, {**small, **tokens})
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return out
    rows = as_rows(x)
    uppers, launchers = _bound(problem, x.device, w2_layout)  # that of w13 follows from it
    tensors = (x, topk_ids, topk_weights), (w13, w13_scale_2, w2, w2_scale_2), (w13_scale, w2_scale, *vectors.values())
    remember((problem.k, uppers, launchers, values), guards, options, *tensors)
    ready = {name: None if tensor is None else _ready(tensor) for name, tensor in vectors.items()}
    arguments = MoeArguments(
        x=rows,
        w13=w13,
        w13_scale=_bytes(w13_scale),
        w13_scale_2=_factors(w13_scale_2),
        w2=w2,
        w2_scale=_bytes(w2_scale),
        w2_scale_2=_factors(w2_scale_2),
        topk_ids=_ready(topk_ids if topk_ids.ndim == 2 else topk_ids.reshape(-1, problem.top_k)),
        topk_weights=_ready(topk_weights if topk_weights.ndim == 2 else topk_weights.reshape(-1, problem.top_k)),
        constants=values,
        weights_on_input=apply_router_weight_on_input,
        **ready,
    )
    launchers[bisect_left(uppers, rows.shape[0])](arguments, out if out.ndim == 2 else out.view(-1, problem.k))
    return out


def warm(problem: Problem, device: torch.device, layout: str, ms: tuple[int, ...]) -> None:
    """Bind a problem of experts and run its kernels, on tensors of zeros that hold one expert's weight only."""
    for m in ms:
        run_on_zeros(_launcher(problem, device, layout, m), problem, device, layout, m)


def _bound(problem: Problem, device: torch.device, layout: str) -> table.Bound:
    def load(launcher: Launcher, m: int) -> None:
        run_on_zeros(launcher, problem, device, layout, m)

    return table.bind(device, problem, layout, load if device.type == "cuda" else None)


def _launcher(problem: Problem, device: torch.device, layout: str, m: int) -> Launcher:
    uppers, launchers = _bound(problem, device, layout)
    return launchers[bisect_left(uppers, m)]


def _refuse_grad(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        refuse_grad()


def _key(x: Tensor, large: Mapping[str, Tensor | None], small: Mapping[str, Tensor | None]) -> tuple[Any, ...]:
    """What checks read of the tensors, but for the number of tokens and for addresses."""
    parts: list[Any] = [x.dtype, x.get_device(), x.shape[-1:], x.ndim]
    for tensor in (*large.values(), *small.values()):
        if tensor is None:
            parts.append(None)
        else:
            parts += (tensor.dtype, tensor.shape, tensor.get_device(), tensor.is_contiguous())
    return tuple(parts)


def _ready(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is not contiguous or begins off a 16-byte boundary. For small ones."""
    if tensor.is_contiguous():
        return tensor if is_aligned(tensor) else tensor.clone()
    return tensor.clone(memory_format=torch.contiguous_format)


def _bytes(scale: Tensor | None) -> Tensor | None:
    return scale if scale is None or scale.dtype == torch.uint8 else scale.view(torch.uint8)


def _factors(global_scale: Tensor) -> Tensor:
    """float32 [E, 1] or [E, 2] of any accepted form."""
    if global_scale.ndim == 1:
        global_scale = global_scale.unsqueeze(1)
    return _ready(global_scale if global_scale.dtype == torch.float32 else global_scale.to(torch.float32))
