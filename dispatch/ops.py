"""The ops nvfp4::gemm, gemm.out and dequantize, and the Python functions in front of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import InvalidInput, message
from ..kernels.weights import codec
from ..kernels.weights.layouts import layout as get_layout
from ..kernels.weights.weight import Weight, check_tensors, normalize_global_scale, validate
from . import call
from .checks import check_blob, check_device, check_gemm, refuse_grad, refuse_tracked

__all__ = ["LIBRARY", "dequantize", "gemm", "register"]

_torch_library: Any = torch.library  # untyped
LIBRARY = _torch_library.Library("nvfp4", "DEF")  # its life is the ops' life

_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? weight_scale, Tensor weight_scale_2, *, Tensor? bias=None, "
    'Tensor? pre_quant_scale=None, str layout="checkpoint", int? out_features=None'
)
LIBRARY.define(f"gemm({_ARGUMENTS}) -> Tensor")
# Returns nothing: torch.compile can only functionalise ops that do not return what they write into.
LIBRARY.define(f"gemm.out({_ARGUMENTS}, Tensor(a!) out) -> ()")
LIBRARY.define(
    "dequantize(Tensor weight, Tensor? weight_scale, Tensor weight_scale_2, ScalarType dtype, *, "
    'str layout="checkpoint", int? out_features=None, int? in_features=None) -> Tensor'
)


def _gemm_out(
    x: Tensor, weight: Tensor, weight_scale: Tensor | None, weight_scale_2: Tensor, *, out: Tensor, **options: Any
) -> None:
    call.gemm(x, weight, weight_scale, weight_scale_2, out=out, **options)
    if not out.is_inference():  # inference tensors have no version
        torch.autograd.graph.increment_version(out)


def _gemm_fake(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor,
    *,
    bias: Tensor | None = None,
    pre_quant_scale: Tensor | None = None,
    layout: str = "checkpoint",
    out_features: int | None = None,
) -> Tensor:
    check_tensors(x=x, weight=weight, weight_scale_2=weight_scale_2)
    if x.requires_grad and torch.is_grad_enabled():
        refuse_grad()
    # A real tensor beside one on the meta device comes here too, and would get a result that nobody wrote.
    check_device(x, weight=weight, weight_scale=weight_scale, weight_scale_2=weight_scale_2)
    check_device(x, bias=bias, pre_quant_scale=pre_quant_scale)
    n, _ = check_gemm(
        x, weight, weight_scale, weight_scale_2, bias, pre_quant_scale, layout, out_features, addresses=False
    )
    return x.new_empty((*x.shape[:-1], n))


def _gemm_out_fake(x: Tensor, *args: Any, out: Tensor, **options: Any) -> None:
    _gemm_fake(x, *args, **options)  # for its checks
    check_device(x, out=out)


def _dequantize(
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor,
    dtype: torch.dtype,
    *,
    layout: str = "checkpoint",
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    if layout == "checkpoint":
        if weight_scale is None:
            raise InvalidInput(message("weight_scale is missing", expected='[N, K/16] e4m3 for layout "checkpoint"'))
        checkpoint = validate(weight, weight_scale, weight_scale_2, values=False)
        _check_size("out_features", out_features, weight.shape[0])
        _check_size("in_features", in_features, 2 * weight.shape[1])
    else:
        if out_features is None or in_features is None:
            raise InvalidInput(
                message(
                    "the size of the weight is missing",
                    got=f"out_features={out_features}, in_features={in_features}",
                    expected=f'both, for layout "{layout}"',
                )
            )
        check_blob(weight, weight_scale, layout, out_features, in_features)
        packed = Weight(
            data=weight,
            scale=None if weight_scale is None else codec.e4m3_bytes(weight_scale),
            global_scale=normalize_global_scale(weight_scale_2, out_features),
            layout=layout,
            out_features=out_features,
            in_features=in_features,
        )
        checkpoint = get_layout(layout).to_checkpoint(packed)
    return codec.dequantize(*checkpoint, dtype=dtype)


def _check_size(name: str, got: int | None, expected: int) -> None:
    if got is not None and got != expected:
        raise InvalidInput(message(f"wrong {name}", got=got, expected=expected))


def _dequantize_fake(
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor,
    dtype: torch.dtype,
    *,
    layout: str = "checkpoint",
    out_features: int | None = None,
    in_features: int | None = None,
) -> Tensor:
    check_tensors(weight=weight, weight_scale_2=weight_scale_2)
    check_device(weight, "weight", weight_scale=weight_scale, weight_scale_2=weight_scale_2)
    n = weight.shape[0] if out_features is None else out_features
    k = 2 * weight.shape[1] if in_features is None else in_features
    return weight.new_empty((n, k), dtype=dtype)


def _autocast_rule(op: Callable[..., Any], device_type: str, key: torch._C.DispatchKey) -> Callable[..., Any]:
    """The Autocast rule: x in the autocast dtype, everything else as it is.

    `torch.library.register_autocast` would cast the e4m3 and fp32 scales too.
    """
    keys = torch._C.DispatchKeySet(key)

    def rule(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.is_floating_point() and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device_type))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(x, *args, **kwargs)

    return rule


def register(name: str, implementation: Callable[..., Any], fake: Callable[..., Any], *, autocast: bool = True) -> None:
    """Implement an op of LIBRARY on every device."""
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, implementation, key)
    # No gradients; the fallthrough is cheaper than the default rule, and implementations refuse x that needs one.
    LIBRARY.impl(name, _torch_library.fallthrough_kernel, "Autograd")
    _torch_library.register_fake(f"nvfp4::{name}", fake, lib=LIBRARY)
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.nvfp4, packet), overload or "default")
    for device_type in ("cpu", "cuda") if autocast else ():
        key = f"Autocast{device_type.upper()}"
        LIBRARY.impl(name, _autocast_rule(op, device_type, getattr(torch._C.DispatchKey, key)), key)


register("gemm", call.gemm, _gemm_fake)
register("gemm.out", _gemm_out, _gemm_out_fake)
register("dequantize", _dequantize, _dequantize_fake, autocast=False)
_gemm_op = torch.ops.nvfp4.gemm.default
_call_gemm_op = _gemm_op._op  # what calling it does, without the frame in between; Dynamo does not know it
_gemm_out_op = torch.ops.nvfp4.gemm.out


def gemm(
    x: Tensor,
    w: Weight | Tensor,
    weight_scale: Tensor | None = None,
    weight_scale_2: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    pre_quant_scale: Tensor | None = None,
    layout: str = "checkpoint",
    out_features: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(x * pre_quant_scale) times the transposed dequantised weight, plus bias.

    x * pre_quant_scale is rounded to x's dtype; products are accumulated in float32, times the global scale, plus
    bias, and rounded once. For inference: the result has no gradient. An x that requires one raises unless grad mode is
    off; other tensors that do, such as a bias that is a parameter, count as constants.

    Parameters
    ----------
    x
        [..., K] bfloat16 or float16; the last dimension is contiguous. Without tokens nothing runs.
    w
        A Weight (then weight_scale, weight_scale_2, layout and out_features are not given), or the weight tensor:
        [N, K/2] uint8 for layout "checkpoint".
    weight_scale
        [N, K/16] float8_e4m3fn or its uint8 view; None for layouts that contain it. NaN is looked for by `pack`, not
        here: some kernels give NaN for such a block, others take 480 for its scale.
    weight_scale_2
        The global scale, a factor: float32 with one element, or [N]. `pack` refuses what is not positive and finite.
    bias
        [N], in x's dtype or float32.
    pre_quant_scale
        [K], in x's dtype.
    layout
        Layout id of the weight tensor.
    out_features
        N; needed for layouts other than "checkpoint".
    out
        [..., N] in x's dtype, contiguous: receives the result.

    Returns
    -------
    [..., N] in x's dtype.

    Raises
    ------
    InvalidInput
        The arguments do not belong together.
    Unsupported
        No kernel can run this problem here.
    NotWarm
        First use of the problem, within a CUDA graph capture.
    """
    if isinstance(w, Weight):
        if weight_scale is not None or weight_scale_2 is not None:
            raise InvalidInput(message("scales were given beside a Weight", do="a Weight contains them"))
        weight, weight_scale, weight_scale_2 = w.data, w.scale, w.global_scale
        if w.layout != "checkpoint":
            layout, out_features = w.layout, w.out_features
            if x.shape[-1:] != (w.in_features,):  # blobs are padded: their shape does not tell K
                raise InvalidInput(
                    message(
                        "x and weight do not fit",
                        got=f"x of shape {tuple(x.shape)} and {w}",
                        expected=f"x of shape (..., {w.in_features})",
                    )
                )
    elif weight_scale_2 is None:
        raise InvalidInput(message("weight_scale_2 is missing", do="pass it, or pass a Weight from nvfp4.pack"))
    else:
        weight = w
    if getattr(x, "requires_grad", False) or forward_ad._current_level >= 0:
        refuse_tracked(x)
    if out is not None:
        _gemm_out_op(
            x,
            weight,
            weight_scale,
            weight_scale_2,
            bias=bias,
            pre_quant_scale=pre_quant_scale,
            layout=layout,
            out_features=out_features,
            out=out,
        )
        return out
    op = _gemm_op if torch.compiler.is_dynamo_compiling() else _call_gemm_op
    # An argument that is given costs more than one that is left at its default.
    if bias is None and pre_quant_scale is None:
        if layout == "checkpoint" and out_features is None:
            return op(x, weight, weight_scale, weight_scale_2)  # type: ignore[no-any-return]
        return op(  # type: ignore[no-any-return]
            x, weight, weight_scale, weight_scale_2, layout=layout, out_features=out_features
        )
    return op(  # type: ignore[no-any-return]
        x,
        weight,
        weight_scale,
        weight_scale_2,
        bias=bias,
        pre_quant_scale=pre_quant_scale,
        layout=layout,
        out_features=out_features,
    )


def dequantize(
    w: Weight | Tensor,
    weight_scale: Tensor | None = None,
    weight_scale_2: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The dense weight: code * block scale * global scale in float32, rounded once to `dtype`.

    Parameters
    ----------
    w
        A Weight, or a checkpoint's weight [N, K/2] uint8 with its scales as `gemm` takes them.
    dtype
        Of the result; with float64 nothing is rounded.

    Returns
    -------
    [N, K] in `dtype`.

    Raises
    ------
    InvalidInput
        The arguments do not belong together.
    """
    op = torch.ops.nvfp4.dequantize.default
    if isinstance(w, Weight):
        if weight_scale is not None or weight_scale_2 is not None:
            raise InvalidInput(message("scales were given beside a Weight", do="a Weight contains them"))
        return op(  # type: ignore[no-any-return]
            w.data,
            w.scale,
            w.global_scale,
            dtype,
            layout=w.layout,
            out_features=w.out_features,
            in_features=w.in_features,
        )
    if weight_scale_2 is None:
        raise InvalidInput(message("weight_scale_2 is missing", do="pass it, or pass a Weight from nvfp4.pack"))
    return op(w, weight_scale, weight_scale_2, dtype)  # type: ignore[no-any-return]
