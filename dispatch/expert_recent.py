"""What earlier calls of moe were like: guards, found by the address of w13, as `recent` has them for gemm.

Nothing is believed because of an address or an identity, and nothing here keeps a tensor alive.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..kernels.kernel import Launcher
from ..kernels.moe.activations import Constants
from . import table
from .checks import LOW, have_memory
from .guard import Empty, Guard, make_empty, make_guard
from .recent import ADDRESSES_MAX, AT_ADDRESS_MAX, GUARDS_MAX

__all__ = ["ABSENT", "Call", "Recent", "fit", "recent", "remember"]

# hidden, upper ends of M, launchers, constants of the activation
Call: TypeAlias = tuple[int, tuple[int, ...], tuple[Launcher, ...], Constants]

# guard, options, whether there are block scales or vectors, dtype of x, allocator of the output, what runs
Recent: TypeAlias = tuple[Guard, tuple[Any, ...], bool, torch.dtype, Empty, Call]

ROWS = 3  # x, topk_ids, topk_weights

recent: dict[int, tuple[Recent, ...]] = {}  # by the address of w13
table.on_clear(recent.clear)

# In the place of absent tensors, because guards compare tensors. No accepted tensor is like one of them. Two block
# scales and five vectors: each has its own, because guards refuse one tensor given twice.
ABSENT = tuple(torch.empty((), dtype=torch.bool, device="cpu") for _ in range(7))


def fit(*tensors: Tensor | None) -> bool:
    """Whether launchers may have all of them as they lie: on 16-byte boundaries, and with memory."""
    for tensor in tensors:
        if tensor is not None and ((at := tensor.data_ptr()) & 15 or (at < LOW and not have_memory(tensor))):
            return False
    return True


def remember(
    call: Call,
    guards: list[Recent],
    options: tuple[Any, ...],
    rows: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    optional: tuple[Tensor | None, ...],
) -> None:
    """Let calls like this one, which passed all checks, be recognised, if launchers can have its tensors as they are.

    Parameters
    ----------
    call, guards
        What runs it, and all that was made here for it before.
    options
        Whatever was given beside tensors.
    rows
        x, topk_ids, topk_weights.
    weights
        w13 and w2, each with its global scales.
    optional
        Block scales of w13 and w2, and vectors, in the order of `experts.moe`.
    """
    x, (w13, w13_scale_2, _, w2_scale_2) = rows[0], weights
    factors = w13_scale_2, w2_scale_2
    if (
        x.requires_grad  # guards see that, but not the grad mode
        or any(one.ndim != 2 or not one.is_contiguous() or one.stride(0) != one.shape[1] for one in rows)
        or any(one.ndim != 2 or one.dtype != torch.float32 or not one.is_contiguous() for one in factors)
        or any(one is not None and not one.is_contiguous() for one in optional)
        or not fit(*rows, *factors, *optional)
    ):
        return
    given = (absent if one is None else one for one, absent in zip(optional, ABSENT, strict=True))
    tensors = (*rows, *weights, *given)
    found = next((known for known in guards if known[0](*tensors)), None)
    if found is None:
        guard = make_guard(*tensors, rows=ROWS) if len(guards) < GUARDS_MAX else None
        if guard is None:
            return
        look = any(one is not None for one in optional)
        found = (guard, options, look, x.dtype, make_empty(x.device), call)
        guards.append(found)
    address = w13.data_ptr()
    there = recent.get(address, ())
    if not any(known is found for known in there):
        if len(recent) >= ADDRESSES_MAX:
            recent.clear()
        recent[address] = (found, *there[: AT_ADDRESS_MAX - 1])
