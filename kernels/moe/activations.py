"""What stands between the two products of an expert: names, constants, and the formula on tensors of any dtype.

g are the results of w13's first half of rows (gate), u those of its second half (up); without a gate there is only g.
The reference applies these formulas in float64, CPU kernels in float32; `_triton_activation_device` has them again for
Triton.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import InvalidInput, message

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ACTIVATIONS", "Activation", "Constants", "activate", "activation", "constants"]

Constants = tuple[float, float, float]  # limit (infinite: none), alpha, beta


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """One activation. `defaults` has the constants that it takes, and what they are unless they are given."""

    name: str
    formula: str
    gated: bool = True
    defaults: Mapping[str, float]  # of limit, alpha, beta
    aliases: tuple[str, ...] = ()


ACTIVATIONS = (
    Activation(
        name="swiglu",
        formula="silu(min(g, limit)) * clamp(u, -limit, limit)",
        defaults={"limit": math.inf},
        aliases=("silu",),
    ),
    Activation(
        name="swigluoai",
        formula="g' * sigmoid(alpha * g') * (u' + beta); g' = min(g, limit), u' = clamp(u, -limit, limit)",
        defaults={"limit": 7.0, "alpha": 1.702, "beta": 1.0},
    ),
    Activation(
        name="swiglustep",
        formula="min(silu(g), limit) * clamp(u, -limit, limit)",
        defaults={"limit": math.inf},
    ),
    Activation(name="geglu", formula="g * (1 + erf(g / sqrt(2))) / 2 * u", defaults={}, aliases=("gelu",)),
    Activation(
        name="geglu_tanh",
        formula="g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3))) / 2 * u",
        defaults={},
        aliases=("gelu_tanh",),
    ),
    Activation(name="relu2", formula="max(g, 0)^2, no u", gated=False, defaults={}),
    Activation(
        name="situ",
        formula="beta * tanh(g / beta) * sigmoid(g) * limit * tanh(u / limit)",
        defaults={"limit": 25.0, "beta": 4.0},
    ),
)

_BY_NAME = {name: entry for entry in ACTIVATIONS for name in (entry.name, *entry.aliases)}


def activation(name: str) -> Activation:
    """The activation of that name or alias.

    Raises
    ------
    InvalidInput
        There is none; the message lists the known ones.
    """
    found = _BY_NAME.get(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidInput(message("unknown activation", got=repr(name), expected=f"one of {', '.join(_BY_NAME)}"))
    return found


def constants(
    name: str, *, limit: float | None = None, alpha: float | None = None, beta: float | None = None
) -> Constants:
    """The constants of one activation; None takes its own, and a limit of 0 or less means that there is none.

    Raises
    ------
    InvalidInput
        A constant that this activation does not have, or one that is not finite; a beta of `situ` that is not above 0.
    """
    entry = activation(name)
    found = {"limit": math.inf, "alpha": 1.0, "beta": 1.0} | dict(entry.defaults)
    for constant, value in (("limit", limit), ("alpha", alpha), ("beta", beta)):
        if value is None:
            continue
        if constant not in entry.defaults:
            takes = ", ".join(entry.defaults) or "no constants"
            raise InvalidInput(message(f"activation {entry.name} has no {constant}", got=value, expected=takes))
        if math.isnan(value) or (math.isinf(value) and constant != "limit"):
            raise InvalidInput(message(f"wrong {constant} of activation {entry.name}", got=value, expected="a number"))
        found[constant] = float(value) if constant != "limit" or value > 0 else math.inf
    if entry.name == "situ" and found["beta"] <= 0:
        raise InvalidInput(message("wrong beta of activation situ", got=found["beta"], expected="above 0"))
    return found["limit"], found["alpha"], found["beta"]


def activate(name: str, g: Tensor, u: Tensor | None, values: Constants) -> Tensor:
    """The activation's result, in the dtype of g.

    Parameters
    ----------
    g, u
        Gate and up, one shape; u is None for an activation without a gate.
    values
        What `constants` returned.
    """
    import torch
    from torch.nn.functional import gelu, silu

    name, (limit, alpha, beta) = activation(name).name, values
    if name == "relu2":
        return torch.relu(g).square()
    assert u is not None, "a gated activation needs both halves"
    if name == "swiglu":
        return silu(g.clamp_max(limit)) * u.clamp(-limit, limit)
    if name == "swigluoai":
        g = g.clamp_max(limit)
        return g * torch.sigmoid(alpha * g) * (u.clamp(-limit, limit) + beta)
    if name == "swiglustep":
        return silu(g).clamp_max(limit) * u.clamp(-limit, limit)
    if name == "situ":
        bounded = u if math.isinf(limit) else limit * torch.tanh(u / limit)
        return beta * torch.tanh(g / beta) * torch.sigmoid(g) * bounded
    return gelu(g, approximate="tanh" if name == "geglu_tanh" else "none") * u
