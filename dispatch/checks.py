"""What the ops accept: every check of an argument, and its message.

They run once per combination of shapes, dtypes and the like, not at every call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import InvalidInput, message
from ..kernels.weights.codec import GROUP
from ..kernels.weights.layouts import family
from ..kernels.weights.layouts import layout as get_layout
from ..kernels.weights.weight import is_aligned, validate

__all__ = [
    "DTYPE_NAMES",
    "LOW",
    "check_aligned",
    "check_blob",
    "check_device",
    "check_dtype",
    "check_gemm",
    "check_inner",
    "check_memory",
    "check_out",
    "check_overlap",
    "check_x",
    "have_memory",
    "refuse_grad",
    "refuse_tracked",
]

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

# A freed storage begins at 0, so its views seem to begin at their offset in it: whatever lies above this has memory.
# What lies below may have some too (Windows), and `have_memory` looks closer.
LOW = 1 << 40


def check_gemm(
    x: Tensor,  # [..., K] bfloat16 or float16
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor,
    bias: Tensor | None,
    pre_quant_scale: Tensor | None,
    layout: str,
    out_features: int | None,
    *,
    addresses: bool = True,
) -> tuple[int, int]:
    """N and K of a gemm whose arguments belong together.

    Parameters
    ----------
    addresses
        Also look where the weight and its scales begin: fake tensors and those on the meta device lie nowhere.

    Raises
    ------
    InvalidInput
        They do not; the message says which, what was got and what was expected.
    """
    k = check_x(x)
    if layout == "checkpoint":
        n = _check_checkpoint(x, weight, weight_scale, weight_scale_2, out_features)
    else:
        n = _check_blob(x, weight, weight_scale, weight_scale_2, layout, out_features)
    if addresses:
        check_aligned(weight=weight, weight_scale=weight_scale)
    _check_vector("bias", bias, x, n, "N", (x.dtype, torch.float32))
    _check_vector("pre_quant_scale", pre_quant_scale, x, k, "K", (x.dtype,))
    return n, k


def check_dtype(dtype: torch.dtype) -> None:
    """Whether x may have this dtype."""
    if dtype not in DTYPE_NAMES:
        raise InvalidInput(message("wrong dtype", got=dtype, expected="torch.bfloat16 or torch.float16"))


def check_x(x: Tensor) -> int:
    """K of an acceptable x: [..., K], bfloat16 or float16, last dimension contiguous."""
    if x.dtype not in DTYPE_NAMES:
        raise InvalidInput(
            message(
                "wrong dtype of x",
                got=x.dtype,
                expected="torch.bfloat16 or torch.float16",
                do="cast x, or run under torch.autocast",
            )
        )
    if x.ndim == 0:
        raise InvalidInput(message("x has no dimensions", got="a scalar", expected="[..., K]"))
    if x.stride(-1) != 1 and x.shape[-1] != 1 and x.numel():
        raise InvalidInput(
            message(
                "the last dimension of x is not contiguous",
                got=f"shape {tuple(x.shape)}, strides {x.stride()}",
                expected="stride 1 there; rows may be strided",
                do="call .contiguous()",
            )
        )
    return x.shape[-1]


def check_inner(x: Tensor, weight: Tensor) -> None:
    """Whether x [..., K] has the K of a checkpoint's weight [N, K/2]."""
    k = 2 * weight.shape[-1]
    if x.shape[-1] != k:
        raise InvalidInput(
            message(
                "x and weight do not fit",
                got=f"x of shape {tuple(x.shape)} and weight of shape {tuple(weight.shape)}",
                expected=f"x of shape (..., {k}): a byte of weight holds two elements",
            )
        )


def check_blob(
    weight: Tensor,
    weight_scale: Tensor | None,
    layout: str,
    out_features: int | None,
    in_features: int,
    *,
    dtype: torch.dtype | None = None,
) -> int:
    """N of a packed weight whose tensors are what its layout makes of [out_features, in_features].

    A blob tells its sizes only up to their padding: the rest is the caller's word.

    Parameters
    ----------
    dtype
        Of the x that it meets; None: of none.

    Raises
    ------
    InvalidInput
        The layout is unknown or not for x's dtype, or the tensors have other dtypes, shapes or strides.
    """
    target = get_layout(layout)
    if target.gated:
        raise InvalidInput(
            message("weight is in a layout for experts", got=repr(layout), expected=f"{family(layout)!r}, or nvfp4.moe")
        )
    if dtype is not None and DTYPE_NAMES.get(dtype) not in target.dtypes:
        raise InvalidInput(
            message(
                f'weight layout "{layout}" is not for this x',
                got=f"x in {dtype}",
                expected=" or ".join(f"torch.{name}" for name in target.dtypes),
                do="cast x, or pack the checkpoint's weight with the dtype of x",
            )
        )
    if out_features is None or out_features < 1:
        raise InvalidInput(
            message("wrong out_features", got=repr(out_features), expected=f'N of the weight, for layout "{layout}"')
        )
    if in_features < 1 or in_features % GROUP:
        raise InvalidInput(
            message("x and weight do not fit", got=f"K = {in_features}", expected=f"K a multiple of {GROUP}, above 0")
        )
    shape = target.data_shape(out_features, in_features)
    if weight.dtype != torch.uint8 or tuple(weight.shape) != shape or not weight.is_contiguous():
        raise InvalidInput(
            message(
                f'weight is not one in layout "{layout}" with N = {out_features}, K = {in_features}',
                got=f"{weight.dtype} {tuple(weight.shape)}, strides {weight.stride()}",
                expected=f"contiguous torch.uint8 {shape}",
                do="pass data, layout and out_features of one Weight from nvfp4.pack, and x with its K",
            )
        )
    if target.scale_shape is None:
        if weight_scale is not None:
            raise InvalidInput(
                message(
                    f'weight_scale was given beside a weight in layout "{layout}"',
                    got=f"{weight_scale.dtype} {tuple(weight_scale.shape)}",
                    expected="None: the weight contains its block scales",
                )
            )
        return out_features
    shape = target.scale_shape(out_features, in_features)
    if weight_scale is None:
        raise InvalidInput(message("weight_scale is missing", expected=f'e4m3 {shape} for layout "{layout}"'))
    if (
        weight_scale.dtype not in (torch.uint8, torch.float8_e4m3fn)
        or tuple(weight_scale.shape) != shape
        or not weight_scale.is_contiguous()
    ):
        raise InvalidInput(
            message(
                "wrong weight_scale",
                got=f"{weight_scale.dtype} {tuple(weight_scale.shape)}, strides {weight_scale.stride()}",
                expected=f"contiguous e4m3 or its uint8 view, {shape}, as nvfp4.pack returns it",
            )
        )
    return out_features


def check_device(x: Tensor, called: str = "x", /, **tensors: Tensor | None) -> None:
    """Whether all are on the device of x, which messages call `called`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise InvalidInput(message(f"{name} is not where {called} is", got=tensor.device, expected=x.device))


def have_memory(*tensors: Tensor | None) -> bool:
    """Whether none of them has elements in a storage that was freed (`untyped_storage().resize_(0)`, as FSDP does)."""
    for tensor in tensors:
        if (
            tensor is not None
            and (address := tensor.data_ptr()) < LOW
            and address == tensor.storage_offset() * tensor.itemsize
            and tensor.numel()
        ):
            return False
    return True


def check_memory(**tensors: Tensor | None) -> None:
    """Whether all have memory: kernels would read from address 0 on."""
    for name, tensor in tensors.items():
        if not have_memory(tensor):
            raise InvalidInput(
                message(f"{name} has no memory", got="a storage that was freed", do="restore it before the call")
            )


def check_overlap(out: Tensor, **tensors: Tensor | None) -> None:
    """Whether `out`, contiguous, shares no memory with what is read while it is written.

    Addresses tell, whatever the storages: two of them may be of one memory. From the first element of a tensor to its
    last everything counts as its own, gaps between rows too.
    """
    start = out.data_ptr()
    end = start + out.nbytes
    for name, tensor in tensors.items():
        if tensor is None or (address := tensor.data_ptr()) >= end:
            continue
        if start < address + _extent_bytes(tensor):
            raise InvalidInput(
                message(
                    f"out overlaps {name}",
                    got="the same memory",
                    expected=f"memory of its own: {name} is read while out is written",
                    do="pass another tensor as out",
                )
            )


def _extent_bytes(tensor: Tensor) -> int:
    """From the first byte of a tensor to behind its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def check_out(out: Tensor, x: Tensor, n: int) -> None:
    """Whether the result of x may be written into `out`."""
    expected = (*x.shape[:-1], n)
    if (out.dtype, out.device, tuple(out.shape)) != (x.dtype, x.device, expected):
        raise InvalidInput(
            message(
                "out does not fit",
                got=f"{out.dtype} {tuple(out.shape)} on {out.device}",
                expected=f"{x.dtype} {expected} on {x.device}",
            )
        )
    check_memory(out=out)
    if not out.is_contiguous() or not is_aligned(out):
        raise InvalidInput(
            message(
                "out must be contiguous and 16-byte aligned",
                got=f"strides {out.stride()}, address modulo 16 = {out.data_ptr() % 16}",
                do="pass a whole tensor",
            )
        )


def refuse_grad() -> None:
    """The error of a call that autograd would have to record."""
    raise InvalidInput(
        message(
            "nvfp4 ops have no gradient",
            got="x that requires grad, with grad mode on",
            do="call under torch.inference_mode() or torch.no_grad(), or pass x.detach()",
        )
    )


def refuse_tracked(x: Tensor) -> None:
    """Raise where x has a gradient to record, or a tangent, as far as the ops cannot see it.

    `torch.func.grad`, `jvp` and their like hand them what x wraps: it would count as a constant, and its derivatives
    come out as 0.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    if x.requires_grad and torch.is_grad_enabled():
        refuse_grad()
    if forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        raise InvalidInput(
            message("nvfp4 ops have no gradient", got="x with a tangent", do="pass x.detach() where x is a constant")
        )


def _check_checkpoint(
    x: Tensor, weight: Tensor, weight_scale: Tensor | None, weight_scale_2: Tensor, out_features: int | None
) -> int:
    if weight_scale is None:
        raise InvalidInput(message("weight_scale is missing", expected='[N, K/16] e4m3 for layout "checkpoint"'))
    validate(weight, weight_scale, weight_scale_2, values=False)  # reading values would wait for the device
    n = weight.shape[0]
    check_inner(x, weight)
    if out_features is not None and out_features != n:
        raise InvalidInput(message("wrong out_features", got=out_features, expected=f"{n}, the rows of weight"))
    check_device(x, weight=weight, weight_scale=weight_scale, weight_scale_2=weight_scale_2)
    return n


def _check_blob(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor,
    layout: str,
    out_features: int | None,
) -> int:
    n = check_blob(weight, weight_scale, layout, out_features, x.shape[-1], dtype=x.dtype)
    if weight_scale_2.dtype != torch.float32 or weight_scale_2.numel() not in (1, n):
        raise InvalidInput(
            message(
                "wrong weight_scale_2",
                got=f"{weight_scale_2.dtype} {tuple(weight_scale_2.shape)}",
                expected=f"torch.float32 [1] or [{n}]",
            )
        )
    check_device(x, weight=weight, weight_scale=weight_scale, weight_scale_2=weight_scale_2)
    return n


def _check_vector(
    name: str, tensor: Tensor | None, x: Tensor, size: int, letter: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor is None:
        return
    check_device(x, **{name: tensor})
    if tensor.dtype not in dtypes or tuple(tensor.shape) != (size,):
        raise InvalidInput(
            message(
                f"wrong {name}",
                got=f"{tensor.dtype} {tuple(tensor.shape)}",
                expected=f"[{letter}] = ({size},) in {' or '.join(dict.fromkeys(str(d) for d in dtypes))}",
            )
        )
    if not tensor.is_contiguous():
        raise InvalidInput(message(f"{name} is not contiguous", got=f"strides {tensor.stride()}", do="copy it once"))


def check_aligned(**tensors: Tensor | None) -> None:
    """Whether all begin where kernels can read 16 bytes at once."""
    for name, tensor in tensors.items():
        if tensor is not None and not is_aligned(tensor):
            raise InvalidInput(
                message(
                    f"{name} is not 16-byte aligned",
                    got=f"a view that begins {tensor.data_ptr() % 16} bytes after a boundary",
                    do="clone it once at load (nvfp4.pack does)",
                )
            )
