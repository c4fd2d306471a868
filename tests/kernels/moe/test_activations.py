"""Activations against formulas written out with Python's floats: in float64, float32, and Triton's when interpreted."""

import math

import pytest
import torch
from nvfp4.errors import InvalidInput
from nvfp4.kernels.moe.activations import ACTIVATIONS, activate, activation, constants


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def clamp(x, limit):
    return max(-limit, min(x, limit))


INF = math.inf
BY_HAND = [  # activation, constants, formula
    ("swiglu", {}, lambda g, u: g * sigmoid(g) * u),
    ("swiglu", {"limit": 1.5}, lambda g, u: min(g, 1.5) * sigmoid(min(g, 1.5)) * clamp(u, 1.5)),
    ("swiglu", {"limit": 0.0}, lambda g, u: g * sigmoid(g) * u),
    ("swiglu", {"limit": -1.0}, lambda g, u: g * sigmoid(g) * u),
    ("swigluoai", {}, lambda g, u: min(g, 7) * sigmoid(1.702 * min(g, 7)) * (clamp(u, 7) + 1)),
    (
        "swigluoai",
        {"limit": 2.0, "alpha": 1.3, "beta": 0.5},
        lambda g, u: min(g, 2) * sigmoid(1.3 * min(g, 2)) * (clamp(u, 2) + 0.5),
    ),
    ("swigluoai", {"limit": 0.0}, lambda g, u: g * sigmoid(1.702 * g) * (u + 1)),
    ("swiglustep", {}, lambda g, u: g * sigmoid(g) * u),
    ("swiglustep", {"limit": 1.5}, lambda g, u: min(g * sigmoid(g), 1.5) * clamp(u, 1.5)),
    ("geglu", {}, lambda g, u: g / 2 * (1 + math.erf(g / math.sqrt(2))) * u),
    (
        "geglu_tanh",
        {},
        lambda g, u: g / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
    ),
    ("relu2", {}, lambda g, u: max(g, 0) ** 2),
    ("situ", {}, lambda g, u: 4 * math.tanh(g / 4) * sigmoid(g) * 25 * math.tanh(u / 25)),
    (
        "situ",
        {"limit": 2.0, "beta": 3.0},
        lambda g, u: 3 * math.tanh(g / 3) * sigmoid(g) * 2 * math.tanh(u / 2),
    ),
    ("situ", {"limit": 0.0}, lambda g, u: 4 * math.tanh(g / 4) * sigmoid(g) * u),
]
IDS = [f"{name}-{given}" for name, given, _ in BY_HAND]
VALUES = (-30.0, -9.0, -7.5, -2.5, -1.0, -0.25, -1e-3, 0.0, 1e-4, 0.03, 0.5, 1.0, 2.0, 6.5, 8.0, 30.0)
PAIRS = [(g, u) for g in VALUES for u in VALUES]


def grid(dtype):
    g, u = torch.tensor(PAIRS, dtype=dtype).unbind(1)
    return g.contiguous(), u.contiguous()


@pytest.mark.parametrize(("name", "given", "formula"), BY_HAND, ids=IDS)
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-12, 1e-15), (torch.float32, 1e-5, 1e-5)])
def test_formula(name, given, formula, dtype, rtol, atol):
    g, u = grid(dtype)
    got = activate(name, g, u if activation(name).gated else None, constants(name, **given))
    right = torch.tensor([formula(*pair) for pair in PAIRS], dtype=torch.float64)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), right, rtol=rtol, atol=atol)


def test_every_activation_is_tested():
    assert {name for name, *_ in BY_HAND} == {entry.name for entry in ACTIVATIONS}


@pytest.mark.parametrize(("alias", "name"), [("silu", "swiglu"), ("gelu", "geglu"), ("gelu_tanh", "geglu_tanh")])
def test_aliases(alias, name):
    assert activation(alias) is activation(name)
    g, u = grid(torch.float64)
    assert torch.equal(activate(alias, g, u, constants(alias)), activate(name, g, u, constants(name)))


def test_an_unknown_activation_lists_the_known_ones():
    with pytest.raises(InvalidInput, match=r"unknown activation; got 'swish'; expected one of swiglu, silu, swigluoai"):
        activation("swish")


@pytest.mark.parametrize("name", [None, 3, ["swiglu"]])
def test_what_is_no_name_is_no_activation(name):
    with pytest.raises(InvalidInput, match=r"unknown activation; got .*; expected one of swiglu"):
        activation(name)


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("swiglu", {"alpha": 1.7}, "activation swiglu has no alpha; got 1.7; expected limit"),
        ("swiglu", {"beta": 1.0}, "has no beta"),
        ("relu2", {"limit": 7.0}, "relu2 has no limit; got 7.0; expected no constants"),
        ("geglu", {"limit": 7.0}, "geglu has no limit"),
        ("situ", {"alpha": 1.0}, "situ has no alpha"),
        ("situ", {"beta": 0.0}, "wrong beta of activation situ"),
        ("swigluoai", {"alpha": math.nan}, "wrong alpha"),
        ("swigluoai", {"beta": math.inf}, "wrong beta"),
        ("swiglu", {"limit": math.nan}, "wrong limit"),
    ],
)
def test_wrong_constants(name, given, text):
    with pytest.raises(InvalidInput, match=text):
        constants(name, **given)


@pytest.mark.parametrize("name", [entry.name for entry in ACTIVATIONS])
def test_zero_stays_zero_and_nan_stays_nan(name):
    g = torch.tensor([0.0, math.nan], dtype=torch.float64)
    u = g if activation(name).gated else None
    got = activate(name, g, u, constants(name))
    assert got[0] == 0 and got[1].isnan()
