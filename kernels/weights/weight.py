"""Weight: one weight in one layout; and `validate`, the checks that every checkpoint weight passes before use."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import InvalidInput, message
from .codec import GROUP, e4m3_bytes

__all__ = [
    "ALIGNMENT",
    "Weight",
    "check_tensors",
    "check_values",
    "check_weight",
    "is_aligned",
    "normalize_global_scale",
    "validate",
]

ALIGNMENT = 16  # bytes; what kernels may load at once

GLOBAL_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight:
    """A quantised weight, converted once and read by every call.

    Attributes
    ----------
    data
        uint8, contiguous; "checkpoint": [N, K/2], other layouts: their own blob. Of experts: [E, N, K/2], or E blobs.
    scale
        uint8 view of e4m3, contiguous [N, K/16]; None when `data` contains the scales. Of experts: [E, N, K/16].
    global_scale
        float32 [1] or [N], contiguous. Of experts: [E, 1] or [E, 2].
    layout
        Layout id, one of `layouts.layout_ids()`.
    out_features, in_features
        N and K.
    """

    data: Tensor
    scale: Tensor | None
    global_scale: Tensor
    layout: str
    out_features: int
    in_features: int

    def __repr__(self) -> str:
        scales = self.global_scale.numel()
        experts = f"{self.data.shape[0]} experts, " if self.global_scale.ndim == 2 else ""
        return (
            f"Weight({experts}{self.out_features} x {self.in_features}, layout {self.layout!r}, "
            f"{scales} global scale{'s' if scales > 1 else ''}, {self.data.device})"
        )

    def to_checkpoint(self) -> tuple[Tensor, Tensor, Tensor]:
        """(weight uint8 [N, K/2], weight_scale float8_e4m3fn [N, K/16], weight_scale_2 float32 [1] or [N]).

        Of experts [E, N, K/2], [E, N, K/16] and [E, 1] or [E, 2].
        Decoded values are identical; bytes too, unless a block scale was negative or zero.
        """
        from .layouts import layout

        return layout(self.layout).to_checkpoint(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        scale = self.scale.nbytes if self.scale is not None else 0
        return self.data.nbytes + scale + self.global_scale.nbytes


def is_aligned(tensor: Tensor) -> bool:
    """Whether the first element lies on a multiple of ALIGNMENT bytes."""
    return tensor.data_ptr() % ALIGNMENT == 0


def validate(
    weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor, *, values: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Check a checkpoint weight; return it in the form that kernels take. Copies no weight bytes.

    Parameters
    ----------
    weight
        [N, K/2] uint8, contiguous; K a multiple of 16.
    weight_scale
        [N, K/16] float8_e4m3fn or its uint8 view, contiguous, linear.
    weight_scale_2
        float32, bfloat16 or float64; shape (), (1,), (1, 1) or [N].
    values
        Also look for NaN block scales and for global scales that are not positive and finite. Waits for the device.

    Returns
    -------
    weight, weight_scale, global_scale
        uint8 [N, K/2], uint8 [N, K/16], float32 [1] or [N].

    Raises
    ------
    InvalidInput
        What is wrong and where.
    """
    check_tensors(weight=weight, weight_scale=weight_scale, weight_scale_2=weight_scale_2)
    n, k = check_weight(weight)
    scale = _check_scale(weight_scale, n, k)
    if not weight.device == weight_scale.device == weight_scale_2.device:
        raise InvalidInput(
            message(
                "weight, weight_scale and weight_scale_2 are on different devices",
                got=", ".join(str(t.device) for t in (weight, weight_scale, weight_scale_2)),
                expected="one device",
            )
        )
    global_scale = normalize_global_scale(weight_scale_2, n)
    if values:
        check_values(scale, global_scale)
    return weight, scale, global_scale


def check_values(scale: Tensor, global_scale: Tensor) -> None:
    """Look for NaN block scales, and for global scales that are not positive and finite. Waits for the device.

    Parameters
    ----------
    scale, global_scale
        As a Weight has them; of experts, rows of all of them are counted on: row e * N + n.

    Raises
    ------
    InvalidInput
        What is wrong and where.
    """
    if scale.is_meta:
        raise InvalidInput(message("the weight has no values", got="meta tensors", do="load the checkpoint, then pack"))
    rows = scale.view(-1, scale.shape[-1])
    _check_scale_values(rows)
    _check_global_values(global_scale, len(rows))


def check_tensors(**tensors: object) -> None:
    """Raise InvalidInput for what was forgotten (None) or is no tensor."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            got = "None" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"
            raise InvalidInput(
                message(f"{name} is missing" if value is None else f"{name} is no tensor", got=got, expected="a tensor")
            )


def normalize_global_scale(weight_scale_2: Tensor, n: int) -> Tensor:
    """Any accepted global scale of n rows as contiguous float32 [1] or [N]; subnormal values stay exact."""
    shape = tuple(weight_scale_2.shape)
    if weight_scale_2.dtype not in GLOBAL_SCALE_DTYPES:
        raise InvalidInput(
            message(
                "wrong dtype of weight_scale_2",
                got=weight_scale_2.dtype,
                expected=", ".join(str(d) for d in GLOBAL_SCALE_DTYPES),
            )
        )
    if shape not in ((), (1,), (1, 1), (n,)):
        raise InvalidInput(
            message(
                "wrong shape of weight_scale_2",
                got=shape,
                expected=f"(), (1,), (1, 1) or ({n},)",
                do="expand one scale per fused shard to one per row",
            )
        )
    return weight_scale_2.reshape(-1).float().contiguous()


def check_weight(weight: Tensor) -> tuple[int, int]:
    """N and K of a checkpoint's weight; raises InvalidInput."""
    if weight.dtype != torch.uint8:
        raise InvalidInput(
            message(
                "wrong dtype of weight",
                got=weight.dtype,
                expected="torch.uint8, two codes a byte",
                do="if this layer is not quantised, add its name to the ignore list and use it as it is",
            )
        )
    if weight.ndim != 2:
        raise InvalidInput(
            message("weight must be [N, K/2]", got=f"shape {tuple(weight.shape)}", expected="2 dimensions")
        )
    n, k = weight.shape[0], 2 * weight.shape[1]
    if n == 0 or k == 0:
        raise InvalidInput(
            message("weight is empty", got=f"shape {tuple(weight.shape)}", expected="N and K at least 1")
        )
    if k % GROUP:
        raise InvalidInput(
            message(
                "K must be a multiple of 16",
                got=f"weight of shape {tuple(weight.shape)}, so K = {k}",
                do="when sharding along K, cut at multiples of 16",
            )
        )
    if not weight.is_contiguous():
        raise InvalidInput(
            message("weight is not contiguous", got=f"strides {weight.stride()}", do="call .contiguous() once at load")
        )
    return n, k


def _check_scale(weight_scale: Tensor, n: int, k: int) -> Tensor:
    scale = e4m3_bytes(weight_scale)
    shape = tuple(weight_scale.shape)
    if weight_scale.ndim != 2:
        raise InvalidInput(
            message(
                "weight_scale must be [N, K/16]",
                got=f"shape {shape}",
                expected=f"({n}, {k // GROUP})",
                do='if it is 128x4-swizzled, pack it with scale_layout="swizzled"',
            )
        )
    if shape == (n, k // 32):
        raise InvalidInput(
            message(
                "weight_scale has one scale per 32 weights (group size 32)",
                got=f"shape {shape}",
                expected=f"group size 16: ({n}, {k // GROUP})",
            )
        )
    if shape != (n, k // GROUP):
        raise InvalidInput(
            message(
                "weight_scale does not fit weight",
                got=f"shape {shape} for N = {n}, K = {k}",
                expected=f"({n}, {k // GROUP}): one scale per 16 weights of a row",
                do="shard and pad weight and weight_scale together",
            )
        )
    if not weight_scale.is_contiguous():
        raise InvalidInput(
            message(
                "weight_scale is not contiguous",
                got=f"strides {weight_scale.stride()}",
                do="call .contiguous() once at load",
            )
        )
    return scale


def _check_scale_values(scale: Tensor) -> None:
    nan = (scale & 0x7F) == 0x7F
    if bool(nan.any()):
        row, group = (int(i) for i in nan.nonzero()[0])
        raise InvalidInput(
            message(
                f"weight_scale holds {int(nan.sum())} NaN",
                got=f"byte 0x{int(scale[row, group]):02X} at row {row}, group {group}",
                expected="finite block scales",
                do="the checkpoint is damaged or not fully loaded; pack with repair_nan=True takes 448 for them",
            )
        )


def _check_global_values(global_scale: Tensor, rows: int) -> None:
    factors = global_scale.view(-1)
    wrong = ~(torch.isfinite(factors) & (factors > 0))
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        where = f" at row {first * (rows // len(factors))}" if global_scale.numel() > 1 else ""
        raise InvalidInput(
            message(
                "wrong global scale",
                got=f"{float(factors[first])}{where}",
                expected="positive and finite (as float32)",
                do="weight_scale_2 multiplies; for compressed-tensors it is 1 / weight_global_scale",
            )
        )
