"""What earlier calls were like: guards, found by the address of the weight.

Nothing is believed because of an address or an identity: the address only says which guards to try. So memory may be
freed, reused, exchanged or reshaped between two calls; and nothing here keeps a tensor alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ..kernels.kernel import Launcher
from ..kernels.weights.weight import is_aligned
from . import table
from .checks import have_memory
from .guard import Empty, Guard, make_guard

__all__ = ["NO_BIAS", "NO_PRE_QUANT_SCALE", "NO_SCALE", "Call", "Prepare", "Recent", "recent", "remember", "unfit"]

# (weight_scale, global_scale, bias, pre_quant_scale) as they came -> as launchers take them
Prepare: TypeAlias = Callable[
    [Tensor | None, Tensor, Tensor | None, Tensor | None], tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]
]

# N, upper ends of M, launchers, Prepare or None when all tensors can pass as they are, allocator of the output
Call: TypeAlias = tuple[int, tuple[int, ...], tuple[Launcher, ...], Prepare | None, Empty]

# guard, layout, out_features, dtype of x, whether `unfit` has something to look at, what runs
Recent: TypeAlias = tuple[Guard, str, int | None, torch.dtype, bool, Call]

GUARDS_MAX = 8  # per Call: one for each set of dispatch modes and of tensor types that it meets
AT_ADDRESS_MAX = 4  # the same weight with its scale in two dtypes, say; the oldest are of weights that are gone
ADDRESSES_MAX = 1 << 16  # far more than a model has

recent: dict[int, tuple[Recent, ...]] = {}  # by the address of the weight
table.on_clear(recent.clear)

# In the place of absent tensors, because guards compare tensors. No accepted tensor is like one of them.
NO_SCALE, NO_BIAS, NO_PRE_QUANT_SCALE = (torch.empty((), dtype=torch.bool, device="cpu") for _ in range(3))


def unfit(global_scale: Tensor, bias: Tensor | None, pre_quant_scale: Tensor | None) -> bool:
    """Whether one of these needs a copy before a launcher may have it, or bias or pre_quant_scale has no memory."""
    return not (
        (global_scale.numel() == 1 or is_aligned(global_scale))
        and (bias is None or (is_aligned(bias) and have_memory(bias)))
        and (pre_quant_scale is None or (is_aligned(pre_quant_scale) and have_memory(pre_quant_scale)))
    )


def remember(
    call: Call,
    guards: list[Recent],
    rows: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_scale_2: Tensor,
    bias: Tensor | None,
    pre_quant_scale: Tensor | None,
    layout: str,
    out_features: int | None,
) -> None:
    """Let calls like this one, which passed all checks, be recognised.

    Parameters
    ----------
    call, guards
        What runs it, and all that was made here for it before.
    rows
        [M, K], contiguous.
    """
    # Guards see whether x requires grad, but not the grad mode. What else is left out would need a copy at every call.
    if rows.requires_grad or unfit(weight_scale_2, bias, pre_quant_scale):
        return
    tensors = (
        rows,
        weight,
        NO_SCALE if weight_scale is None else weight_scale,
        weight_scale_2,
        NO_BIAS if bias is None else bias,
        NO_PRE_QUANT_SCALE if pre_quant_scale is None else pre_quant_scale,
    )
    found = next((known for known in guards if known[0](*tensors)), None)
    if found is None:
        guard = make_guard(*tensors) if len(guards) < GUARDS_MAX else None
        if guard is None:
            return
        look = weight_scale_2.numel() > 1 or bias is not None or pre_quant_scale is not None
        found = (guard, layout, out_features, rows.dtype, look, call)
        guards.append(found)
    address = weight.data_ptr()
    there = recent.get(address, ())
    if not any(known is found for known in there):
        if len(recent) >= ADDRESSES_MAX:
            recent.clear()
        recent[address] = (found, *there[: AT_ADDRESS_MAX - 1])
