"""Three C++ functions that torch compiles its own graphs into: all properties of several tensors compared in one call,
an allocation and a view without the way through the dispatcher.

They are private to torch. Where a torch lacks one, what is here takes the public way, and calls only get slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Empty", "Guard", "make_empty", "make_guard", "reinterpret"]

# Whether tensors are like those that the guard was made from.
Guard: TypeAlias = Callable[..., bool]

# (size, stride, dtype) -> an uninitialised tensor
Empty: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)

# (tensor, size, stride) -> an alias of the tensor's memory, from its first element on; nothing that autograd knows.
reinterpret: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor] = getattr(
    _guards, "_reinterpret_tensor", torch.as_strided
)


def make_guard(*tensors: Tensor, rows: int = 1) -> Guard | None:
    """A guard made from tensors, the first of them contiguous rows [M, K], any M; others count with their whole shape.

    It compares Python type, dtype, device, shape, strides, requires_grad, and the keys that dispatch would see in the
    current thread: one made in inference mode refuses everything outside, and the other way round, but grad mode makes
    no difference. It refuses one tensor given twice. It reads neither addresses nor values, and keeps no reference.
    None where this torch has no such thing.

    Parameters
    ----------
    rows
        How many tensors are such rows. Whether they have the same M, the guard does not see.
    """
    make = getattr(_guards, "TensorGuards", None)
    if make is None:
        return None
    first, others = tensors[:rows], tensors[rows:]
    guard: Guard = make(
        *tensors,
        dynamic_dims_sizes=[*([None, one.shape[1]] for one in first), *(list(one.shape) for one in others)],
        dynamic_dims_strides=[*([one.shape[1], 1] for one in first), *(list(one.stride()) for one in others)],
    ).check
    return guard


def make_empty(device: torch.device) -> Empty:
    """`torch.empty_strided` on one device; `device` has an index for CUDA."""

    def public(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    private: Empty | None = getattr(_guards, f"_empty_strided_{device.type}", None)
    if private is None:
        return public
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return private
    return _on_current(private, public, device.index, torch.cuda.current_device)


def _on_current(private: Empty, public: Empty, index: int, current: Callable[[], int]) -> Empty:
    """`private`, which allocates on the current device, where that is the right one."""

    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return private(size, stride, dtype) if current() == index else public(size, stride, dtype)

    return empty
