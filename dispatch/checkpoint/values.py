"""What the values of a layer's tensors must be, whatever file they come from, and the global scale as a factor."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InvalidInput, message
from .modules import CT

__all__ = ["check_finite", "check_pre_quant_scale", "check_scale", "global_factor", "same_pre_quant_scale"]

EQUAL = 1e-5  # relative: vectors that one averaged and rounded vector was written as


def check_scale(name: str, scale: Tensor, *, repair_nan: bool) -> None:
    """Raise for NaN block scales (uint8 view), or write 448 over them."""
    nan = (scale & 0x7F) == 0x7F
    if not bool(nan.any()):
        return
    if repair_nan:
        scale[nan] = 0x7E
        return
    at = tuple(int(i) for i in nan.nonzero()[0])
    raise InvalidInput(
        message(
            f"{name} holds {int(nan.sum())} NaN",
            got=f"byte 0x{int(scale[at]):02X} at {list(at)}",
            expected="finite block scales",
            do="the checkpoint is damaged or an old export; repair_nan=True takes 448 for them",
        )
    )


def check_finite(name: str, values: Tensor) -> None:
    """Raise for NaN or Inf."""
    wrong = ~torch.isfinite(values)
    if bool(wrong.any()):
        at = [int(i) for i in wrong.nonzero()[0]]
        raise InvalidInput(
            message(f"{name} is not finite", got=f"{float(values[tuple(at)])} at {at}", do="the checkpoint is damaged")
        )


def check_pre_quant_scale(name: str, values: Tensor) -> None:
    """Raise for what is not positive and finite."""
    wrong = ~(torch.isfinite(values) & (values > 0))
    if bool(wrong.any()):
        at = [int(i) for i in wrong.nonzero()[0]]
        raise InvalidInput(
            message(
                f"{name} is wrong", got=f"{float(values[tuple(at)])} at {at}", expected="positive and finite values"
            )
        )


def global_factor(name: str, stored: Tensor, dialect: str) -> Tensor:
    """The factor that weights are multiplied by, float32 1-D.

    ModelOpt's value keeps its bits; compressed-tensors stores a divisor, and this is the one place where it is turned
    over.

    Raises
    ------
    InvalidInput
        The value or its reciprocal is not positive and finite.
    """
    factor = stored.reshape(-1).to(torch.float32)
    if dialect == CT:
        factor = factor.reciprocal()
    wrong = ~(torch.isfinite(factor) & (factor > 0))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise InvalidInput(
            message(
                f"{name} is wrong",
                got=f"{float(stored.reshape(-1)[at])}",
                expected="positive and finite" + (", its reciprocal too" if dialect == CT else " as float32"),
                do="the checkpoint is damaged or not calibrated",
            )
        )
    return factor


def same_pre_quant_scale(names: list[str], vectors: list[Tensor | None], what: str) -> Tensor | None:
    """The pre_quant_scale that parts which read one x share; None when none of them has any.

    Raises
    ------
    InvalidInput
        Some have one and some do not, or they differ by more than rounding.
    """
    there = [(name, vector) for name, vector in zip(names, vectors, strict=True) if vector is not None]
    if not there:
        return None
    without = [name for name, vector in zip(names, vectors, strict=True) if vector is None]
    if without:
        raise InvalidInput(
            message(
                f"{what}: pre_quant_scale is incomplete",
                got=f"one for {there[0][0]}, none for {without[0]}",
                expected="one for each of them, or none",
            )
        )
    first_name, first = there[0]
    for name, vector in there[1:]:
        if not torch.allclose(first.float(), vector.float(), rtol=EQUAL, atol=0):
            raise InvalidInput(
                message(
                    f"{what}: pre_quant_scale differs",
                    got=f"other values in {name} than in {first_name}",
                    expected="equal ones: these parts read the same x",
                    do="load the parts one by one" if "expert" not in what else "",
                )
            )
    return first
