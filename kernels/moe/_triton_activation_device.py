"""Device code of the activations: the formulas of `activations` in float32, with NaN kept.

Comparisons instead of minimum and maximum, which would drop NaN.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Right in relative terms near 0 too, where 1 - exp(-2x) cancels: the first terms of the series below 1/4."""
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -far, far))


@triton.jit
def clamp(x, limit):
    """x within [-limit, limit]."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def activate(g, u, limit, alpha, beta, ACTIVATION: tl.constexpr):
    """float32 result of gate g and up u; u is not looked at without a gate."""
    if ACTIVATION == "relu2":
        result = tl.where(g < 0, 0.0, g * g)
    elif ACTIVATION == "swiglu":
        g = tl.where(g > limit, limit, g)
        result = g * tl.sigmoid(g) * clamp(u, limit)
    elif ACTIVATION == "swigluoai":
        g = tl.where(g > limit, limit, g)
        result = g * tl.sigmoid(alpha * g) * (clamp(u, limit) + beta)
    elif ACTIVATION == "swiglustep":
        step = g * tl.sigmoid(g)
        result = tl.where(step > limit, limit, step) * clamp(u, limit)
    elif ACTIVATION == "geglu":
        result = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476)) * u
    elif ACTIVATION == "geglu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        result = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * u
    else:
        tl.static_assert(ACTIVATION == "situ")
        bounded = tl.where(limit == float("inf"), u, limit * tanh(u / limit))
        result = beta * tanh(g / beta) * tl.sigmoid(g) * bounded
    return result
