"""What `nvfp4.nn.Linear` and `FusedMoE` share: loading, moving, deriving into the memory that captured graphs read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, message
from .checkpoint.files import listed

__all__ = ["NAN", "as_integers", "check_loaded", "into", "loading_problems"]

NAN = 0x7F  # an e4m3 NaN: what no loaded layer holds


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


def loading_problems(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Load tensors, called as in the state dict, into a module; what is wrong with them."""
    missing: list[str] = []
    unknown: list[str] = []
    problems: list[str] = []
    module._load_from_state_dict(tensors, "", {}, True, missing, unknown, problems)
    return problems + [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in unknown]


@contextmanager
def as_integers(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Buffers of a module seen as integers: casts are for floating point, so these move and keep their bits."""
    held = {name: tensor for name in names if (tensor := module._buffers[name]) is not None}
    for name, tensor in held.items():
        module._buffers[name] = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
    try:
        yield
    finally:
        for name, tensor in held.items():
            moved = module._buffers[name]
            assert moved is not None
            module._buffers[name] = moved.view(tensor.dtype)


def into(old: Tensor | None, new: Tensor) -> Tensor:
    """`new`, in the memory of `old` where that fits."""
    if old is None or (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        return new
    with torch.inference_mode():  # where both kinds of tensors may be written
        return old.copy_(new)
