"""What grouped_gemm and moe accept: every check of an argument, and its message.

Those of shapes and dtypes hold for fake tensors too; those of addresses are in `check_places`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import InvalidInput, message
from ..kernels.moe.activations import activation as get_activation
from ..kernels.weights.weight import GLOBAL_SCALE_DTYPES, check_tensors
from .checks import check_aligned, check_device, check_inner, check_memory, check_x, have_memory
from .expert_layouts import check_blobs, check_layout, check_layouts, check_size, check_stack

__all__ = ["check_grouped", "check_moe", "check_places", "check_tokens"]

INTEGERS = (torch.int32, torch.int64)


def check_grouped(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor,
    expert_offsets: Tensor,
    layout: str = "checkpoint",
    out_features: int | None = None,
) -> tuple[int, int, int]:
    """N, K and the number of experts of a grouped_gemm whose arguments belong together.

    Raises
    ------
    InvalidInput
        They do not; the message says which, what was got and what was expected.
    """
    check_tensors(weight=weight, weight_scale_2=weight_scale_2, expert_offsets=expert_offsets)
    k = check_x(x)
    if x.ndim != 2:
        raise InvalidInput(message("wrong shape of x", got=tuple(x.shape), expected="[M, K]: offsets count its rows"))
    target = check_layout("weight", layout, x, gated=False)
    if layout == "checkpoint":
        experts, n, _ = check_stack("weight", weight, weight_scale)
        check_inner(x, weight)
        if out_features is not None and out_features != n:
            raise InvalidInput(message("wrong out_features", got=out_features, expected=f"{n}, the rows of weight"))
    else:
        n = check_size("out_features", out_features, "N of the weight", layout)
        experts = check_blobs("weight", weight, weight_scale, target, n, k)
    _check_factors("weight_scale_2", weight_scale_2, experts, halves=n % 2 == 0)
    _check_form("expert_offsets", expert_offsets, [(experts + 1,)], (torch.int32,), "[E + 1]")
    given = {"weight": weight, "weight_scale": weight_scale, "weight_scale_2": weight_scale_2}
    check_device(x, **given, expert_offsets=expert_offsets)
    return n, k, experts


def check_moe(
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
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w13_layout: str = "checkpoint",
    w2_layout: str = "checkpoint",
) -> tuple[int, int, int, int]:
    """inter, hidden, the number of experts and top_k of a moe whose arguments belong together.

    Raises
    ------
    InvalidInput
        They do not; the message says which, what was got and what was expected.
    """
    check_tensors(w13=w13, w13_scale_2=w13_scale_2, w2=w2, w2_scale_2=w2_scale_2)
    check_tensors(topk_ids=topk_ids, topk_weights=topk_weights)
    kind = get_activation(activation)
    hidden = check_x(x)
    first, second = check_layouts(w13_layout, w2_layout, kind.name, kind.gated, x)
    shapes = f"w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)}"
    if w2_layout == "checkpoint":
        experts, rows, own_hidden = check_stack("w13", w13, w13_scale)
        experts_2, rows_2, own_inter = check_stack("w2", w2, w2_scale)
        if hidden != own_hidden or hidden != rows_2:
            raise InvalidInput(
                message(
                    "x, w13 and w2 do not fit",
                    got=f"x of shape {tuple(x.shape)}, {shapes}",
                    expected=f"hidden = {own_hidden} in x [..., hidden], w13 [E, F, hidden/2] and w2 [E, hidden, "
                    "inter/2]",
                )
            )
        wanted_rows = 2 * own_inter if kind.gated else own_inter
        if rows != wanted_rows:
            halves = "2 * inter rows: gate, then up" if kind.gated else "inter rows: it has no gate"
            raise InvalidInput(
                message(
                    f"w13 does not suit activation {kind.name} and w2", got=shapes, expected=f"{wanted_rows}, {halves}"
                )
            )
        if inter is not None and inter != own_inter:
            raise InvalidInput(message("wrong inter", got=inter, expected=f"{own_inter}, the columns of w2"))
    else:
        own_inter = check_size("inter", inter, "the columns of w2", w2_layout)
        rows = 2 * own_inter if kind.gated else own_inter
        experts = check_blobs("w13", w13, w13_scale, first, rows, hidden)
        experts_2 = check_blobs("w2", w2, w2_scale, second, hidden, own_inter)
    if experts != experts_2:
        raise InvalidInput(message("w13 and w2 have different numbers of experts", got=shapes))
    _check_factors("w13_scale_2", w13_scale_2, experts, halves=kind.gated)
    _check_factors("w2_scale_2", w2_scale_2, experts, halves=False)
    bias_dtypes = (x.dtype, torch.float32)
    _check_form("w13_bias", w13_bias, [(experts, rows)], bias_dtypes, "[E, F]")
    _check_form("w2_bias", w2_bias, [(experts, hidden)], bias_dtypes, "[E, hidden]")
    _check_form("pre_quant_scale", pre_quant_scale, [(hidden,)], (x.dtype,), "[hidden]")
    vectors = [(own_inter,), (experts, own_inter)]
    _check_form("w2_pre_quant_scale", w2_pre_quant_scale, vectors, (x.dtype,), "[inter] or [E, inter]")
    if expert_map is not None and (expert_map.ndim != 1 or expert_map.shape[0] < 1 or expert_map.dtype not in INTEGERS):
        raise InvalidInput(
            message(
                "wrong expert_map",
                got=f"{expert_map.dtype} {tuple(expert_map.shape)}",
                expected="int32 or int64 [global experts]: local expert of each, or -1",
            )
        )
    top_k = topk_ids.shape[-1] if topk_ids.ndim else 0
    if apply_router_weight_on_input and top_k != 1:
        raise InvalidInput(
            message("router weights cannot be applied on the input", got=f"top_k = {top_k}", expected="top_k = 1")
        )
    check_device(x, w13=w13, w13_scale=w13_scale, w13_scale_2=w13_scale_2)
    check_device(x, w2=w2, w2_scale=w2_scale, w2_scale_2=w2_scale_2)
    check_device(x, w13_bias=w13_bias, w2_bias=w2_bias, expert_map=expert_map)
    check_device(x, pre_quant_scale=pre_quant_scale, w2_pre_quant_scale=w2_pre_quant_scale)
    check_tokens(x, topk_ids, topk_weights)
    return own_inter, hidden, experts, top_k


def check_tokens(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    """Whether there are ids and router weights for every token of x."""
    ids, weights = tuple(topk_ids.shape), tuple(topk_weights.shape)
    if topk_ids.dtype not in INTEGERS:
        raise InvalidInput(
            message("wrong dtype of topk_ids", got=topk_ids.dtype, expected="torch.int32 or torch.int64")
        )
    if topk_weights.dtype != torch.float32:
        raise InvalidInput(message("wrong dtype of topk_weights", got=topk_weights.dtype, expected="torch.float32"))
    tokens = tuple(x.shape[:-1])
    if ids[:-1] != tokens or not ids or ids[-1] < 1:
        raise InvalidInput(
            message(
                "topk_ids do not fit x",
                got=f"{ids} for x of shape {tuple(x.shape)}",
                expected=f"({', '.join(map(str, (*tokens, 'top_k')))}), top_k at least 1",
            )
        )
    if weights != ids:
        raise InvalidInput(message("topk_weights do not fit topk_ids", got=weights, expected=ids))
    check_device(x, topk_ids=topk_ids, topk_weights=topk_weights)


def check_places(x: Tensor, large: Mapping[str, Tensor | None], small: Mapping[str, Tensor | None]) -> None:
    """Whether all tensors have memory, and the large ones begin where kernels can read 16 bytes at once."""
    if not have_memory(x, *large.values(), *small.values()):
        check_memory(x=x, **large, **small)
    check_aligned(**large)


def _check_factors(name: str, factors: Tensor, experts: int, *, halves: bool) -> None:
    allowed = [(experts,), (experts, 1)] + ([(experts, 2)] if halves else [])
    if factors.dtype not in GLOBAL_SCALE_DTYPES or tuple(factors.shape) not in allowed:
        raise InvalidInput(
            message(
                f"wrong {name}",
                got=f"{factors.dtype} {tuple(factors.shape)}",
                expected=f"torch.float32 {' or '.join(map(str, allowed))}: one factor per expert"
                + (", or one for each half of its rows" if halves else ""),
            )
        )


def _check_form(
    name: str,
    tensor: Tensor | None,
    shapes: list[tuple[int, ...]],
    dtypes: tuple[torch.dtype, ...],
    letters: str,
) -> None:
    if tensor is not None and (tensor.dtype not in dtypes or tuple(tensor.shape) not in shapes):
        raise InvalidInput(
            message(
                f"wrong {name}",
                got=f"{tensor.dtype} {tuple(tensor.shape)}",
                expected=f"{letters} = {' or '.join(map(str, shapes))} in "
                f"{' or '.join(dict.fromkeys(str(dtype) for dtype in dtypes))}",
            )
        )
