"""The ops nvfp4::grouped_gemm and nvfp4::moe, and the Python functions in front of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import InvalidInput, message
from ..kernels.moe.activations import activation as get_activation
from ..kernels.moe.activations import constants
from ..kernels.weights.weight import Weight, check_tensors
from . import experts
from .checks import refuse_grad, refuse_tracked
from .expert_checks import check_grouped, check_moe
from .ops import LIBRARY, register

__all__ = ["grouped_gemm", "moe"]

LIBRARY.define(
    "grouped_gemm(Tensor x, Tensor weight, Tensor? weight_scale, Tensor weight_scale_2, Tensor expert_offsets, *, "
    'str layout="checkpoint", int? out_features=None) -> Tensor'
)
LIBRARY.define(
    "moe(Tensor x, Tensor w13, Tensor? w13_scale, Tensor w13_scale_2, Tensor w2, Tensor? w2_scale, Tensor w2_scale_2, "
    'Tensor topk_ids, Tensor topk_weights, *, str activation="swiglu", int? inter=None, '
    "Tensor? pre_quant_scale=None, Tensor? w2_pre_quant_scale=None, Tensor? expert_map=None, "
    "bool apply_router_weight_on_input=False, float? limit=None, float? alpha=None, float? beta=None, "
    'Tensor? w13_bias=None, Tensor? w2_bias=None, str w13_layout="checkpoint", str w2_layout="checkpoint") -> Tensor'
)


def _grouped_fake(x: Tensor, *args: Any, **options: Any) -> Tensor:
    check_tensors(x=x)
    _refuse_grad(x)
    n, _, _ = check_grouped(x, *args, **options)
    return x.new_empty((x.shape[0], n))


def _moe_fake(
    x: Tensor,
    *args: Any,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    **options: Any,
) -> Tensor:
    check_tensors(x=x)
    _refuse_grad(x)
    check_moe(x, *args, **options)
    constants(options.get("activation", "swiglu"), limit=limit, alpha=alpha, beta=beta)
    return x.new_empty(x.shape)


def _refuse_grad(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        refuse_grad()


register("grouped_gemm", experts.grouped_gemm, _grouped_fake)
register("moe", experts.moe, _moe_fake)


def grouped_gemm(
    x: Tensor,
    w: Weight | Tensor,
    weight_scale: Tensor | None = None,
    weight_scale_2: Tensor | None = None,
    expert_offsets: Tensor | None = None,
    *,
    layout: str = "checkpoint",
    out_features: int | None = None,
) -> Tensor:
    """Each expert's weight on its own rows of x.

    Rows [expert_offsets[e], expert_offsets[e + 1]) are multiplied by the transposed weight of expert e: products are
    accumulated in float32, times the global scale, and rounded once. Rows of no expert give zeros. Offsets are read by
    the kernels only: wrong ones give wrong results. No gradient, as `gemm`.

    Parameters
    ----------
    x
        [M, K] bfloat16 or float16; the last dimension is contiguous. Without rows nothing runs.
    w
        A Weight of experts from `nvfp4.pack` (then scales and layout are not given), or the weights
        [E, N, K/2] uint8.
    weight_scale
        [E, N, K/16] float8_e4m3fn or its uint8 view.
    weight_scale_2
        The global scales, factors: float32 [E] or [E, 1], or [E, 2]: one for each half of an expert's rows.
    expert_offsets
        int32 [E + 1], ascending, from 0 to at most M.
    layout
        Layout id of the weights: "checkpoint", or that of blobs [E, …], which have no `weight_scale`.
    out_features
        N. A Weight knows it, and the shape tells it in "checkpoint"; of other blobs it has to be given.

    Returns
    -------
    [M, N] in x's dtype.

    Raises
    ------
    InvalidInput
        The arguments do not belong together.
    Unsupported
        No kernel can run this problem here.
    NotWarm
        First use of the problem, within a CUDA graph capture.
    """
    weight, scale, scale_2, own_layout = _parts("weight", w, weight_scale, weight_scale_2)
    if isinstance(w, Weight) and own_layout != "checkpoint":
        out_features = w.out_features if out_features is None else out_features
        _check_size(x, "weight", w, out_features, _width(x))
    if getattr(x, "requires_grad", False) or forward_ad._current_level >= 0:
        refuse_tracked(x)
    return torch.ops.nvfp4.grouped_gemm.default(  # type: ignore[no-any-return]
        x, weight, scale, scale_2, _given("expert_offsets", expert_offsets), layout=own_layout or layout,
        out_features=out_features,
    )  # fmt: skip


def moe(
    x: Tensor,
    w13: Weight | Tensor,
    w13_scale: Tensor | None = None,
    w13_scale_2: Tensor | None = None,
    w2: Weight | Tensor | None = None,
    w2_scale: Tensor | None = None,
    w2_scale_2: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
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
    """A layer of experts: for every token the weighted sum of its experts' results. `docs/moe.md` has the formula.

    Sums are float32. Rounded to x's dtype are x * pre_quant_scale, the activation's result (once more after
    w2_pre_quant_scale), and the sum over a token's experts. No gradient, as `gemm`: topk_weights and biases that
    require one count as constants.

    Parameters
    ----------
    x
        [..., hidden] bfloat16 or float16; the last dimension is contiguous. Without tokens nothing runs.
    w13
        First weights of the experts: a Weight from `nvfp4.pack` (then its scales are not given), or
        [E, F, hidden/2] uint8. F = 2 * inter: gate, then up; F = inter for an activation without a gate.
    w13_scale, w2_scale
        Block scales, float8_e4m3fn or its uint8 view: [E, F, hidden/16] and [E, hidden, inter/16].
    w13_scale_2, w2_scale_2
        Global scales, factors: float32 [E] or [E, 1]; for w13 also [E, 2]: gate, up.
    w2
        Second weights: a Weight, or [E, hidden, inter/2] uint8.
    topk_ids
        int32 or int64 [..., top_k]: each token's experts. Ids outside [0, E) are skipped; an expert that a token names
        twice counts twice.
    topk_weights
        float32 [..., top_k].
    activation
        "swiglu" ("silu"), "swigluoai", "swiglustep", "geglu" ("gelu"), "geglu_tanh" ("gelu_tanh"), "relu2", "situ".
    inter
        Columns of w2. Weights know it, and the shapes tell it in "checkpoint"; of other blobs it has to be given.
    pre_quant_scale, w2_pre_quant_scale
        In x's dtype: [hidden], for x; [inter] or [E, inter], for the activation's result.
    expert_map
        int32 or int64 [global experts]: the local expert of each, or -1 for those that are elsewhere. Then topk_ids
        are global.
    apply_router_weight_on_input
        topk_weights multiply the first product (with its bias), before the activation, instead of the second. Only for
        top_k = 1.
    limit, alpha, beta
        Constants of the activation; None takes its own. A limit of 0 or less is none.
    w13_bias, w2_bias
        [E, F] and [E, hidden], in x's dtype or float32.
    w13_layout, w2_layout
        Layout ids of weights that are no Weight: both "checkpoint"; or blobs [E, …] without block scales, w2 in a
        fragment layout, and w13 in the same, with "-glu" for gate and up rows.

    Returns
    -------
    [..., hidden] in x's dtype.

    Raises
    ------
    InvalidInput
        The arguments do not belong together, or the activation is unknown.
    Unsupported
        No kernel can run this problem here.
    NotWarm
        First use of the problem, within a CUDA graph capture.
    """
    first, first_scale, first_scale_2, first_layout = _parts("w13", w13, w13_scale, w13_scale_2)
    second, second_scale, second_scale_2, second_layout = _parts("w2", w2, w2_scale, w2_scale_2)
    packed_13 = w13 if isinstance(w13, Weight) and first_layout != "checkpoint" else None
    packed_2 = w2 if isinstance(w2, Weight) and second_layout != "checkpoint" else None
    if packed_13 is not None or packed_2 is not None:
        hidden, halves = _width(x), 2 if get_activation(activation).gated else 1
        if inter is None and packed_2 is not None:
            inter = packed_2.in_features
        elif inter is None:
            assert packed_13 is not None, "one of them is packed"
            inter = packed_13.out_features // halves
        if packed_13 is not None:
            _check_size(x, "w13", packed_13, halves * inter, hidden)
        if packed_2 is not None:
            _check_size(x, "w2", packed_2, hidden, inter)
    # What is as the op has it by default is not passed: every argument costs the dispatcher up to a microsecond.
    options: dict[str, Any] = {}
    if activation != "swiglu":
        get_activation(activation)
        options["activation"] = activation
    if inter is not None:
        options["inter"] = inter
    if (w13_layout := first_layout or w13_layout) != "checkpoint":
        options["w13_layout"] = w13_layout
    if (w2_layout := second_layout or w2_layout) != "checkpoint":
        options["w2_layout"] = w2_layout
    if not (
        (pre_quant_scale is w2_pre_quant_scale is expert_map is w13_bias is w2_bias is None)
        and (limit is alpha is beta is None)
        and apply_router_weight_on_input is False
    ):
        options |= {
            "pre_quant_scale": pre_quant_scale,
            "w2_pre_quant_scale": w2_pre_quant_scale,
            "expert_map": expert_map,
            "apply_router_weight_on_input": apply_router_weight_on_input,
            "limit": limit,
            "alpha": alpha,
            "beta": beta,
            "w13_bias": w13_bias,
            "w2_bias": w2_bias,
        }
    if getattr(x, "requires_grad", False) or forward_ad._current_level >= 0:
        refuse_tracked(x)
    return torch.ops.nvfp4.moe.default(  # type: ignore[no-any-return]
        x,
        first,
        first_scale,
        first_scale_2,
        second,
        second_scale,
        second_scale_2,
        _given("topk_ids", topk_ids),
        _given("topk_weights", topk_weights),
        **options,
    )


def _parts(
    name: str, w: Weight | Tensor | None, scale: Tensor | None, scale_2: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, str]:
    """Weight, block scales, global scale, and the layout if a Weight says it."""
    if isinstance(w, Weight):
        if scale is not None or scale_2 is not None:
            raise InvalidInput(message(f"scales of {name} were given beside a Weight", do="a Weight contains them"))
        return w.data, w.scale, w.global_scale, w.layout
    if scale_2 is None:
        raise InvalidInput(
            message(f"the global scales of {name} are missing", do="pass them, or pass a Weight from nvfp4.pack")
        )
    return _given(name, w), scale, scale_2, ""


def _width(x: Tensor) -> int:
    """K of x."""
    check_tensors(x=x)
    if not x.ndim:
        raise InvalidInput(message("x has no dimensions", got="a scalar", expected="[..., K]"))
    return x.shape[-1]


def _check_size(x: Tensor, name: str, w: Weight, n: int, k: int) -> None:
    """Whether a Weight has the N and K that x and the others ask for: padded blobs do not tell."""
    if w.out_features != n or w.in_features != k:
        raise InvalidInput(
            message(f"{name} does not fit", got=f"{w}, x of shape {tuple(x.shape)}", expected=f"{n} x {k}")
        )


def _given(name: str, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise InvalidInput(message(f"{name} is missing", expected="a tensor"))
    return tensor
