"""What modules derive from their stored tensors: always into the memory that captured graphs read."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["into"]


def into(old: Tensor | None, new: Tensor) -> Tensor:
    """`new`, in the memory of `old` where that fits."""
    if old is None or (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        return new
    with torch.inference_mode():  # where both kinds of tensors may be written
        return old.copy_(new)
