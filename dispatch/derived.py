"""What modules derive from their stored tensors: always into the memory that captured graphs read."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import InvalidInput, message
from .checkpoint.files import listed

__all__ = ["check_loaded", "into"]


def check_loaded(lacking: Iterable[str], global_scale: Tensor) -> None:
    """Whether a layer may derive anything when it is first used. Waits for the device.

    Parameters
    ----------
    lacking
        What was not loaded, where something was.
    global_scale
        Its stored global scale: NaN until one is loaded.
    """
    names = listed(lacking)
    if names:
        raise InvalidInput(
            message(
                "the layer holds a part of a weight",
                got=f"no {names}",
                do="load the rest, or call refresh_() if it was written in place",
            )
        )
    if bool(global_scale.isnan().all()):
        raise InvalidInput(
            message("the layer holds no weight", got="a global scale of NaN, as a new layer has", do="load one first")
        )


def into(old: Tensor | None, new: Tensor) -> Tensor:
    """`new`, in the memory of `old` where that fits."""
    if old is None or (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        return new
    with torch.inference_mode():  # where both kinds of tensors may be written
        return old.copy_(new)
