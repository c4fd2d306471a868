// The formulas of activations.py in float32. NaN is kept: comparisons instead of minimum and maximum, which drop it.
// ACTIVATION is one of the numbers below; the launcher defines it.
#pragma once
#include "ptx.cuh"

enum Activation { SWIGLU, SWIGLUOAI, SWIGLUSTEP, GEGLU, GEGLU_TANH, RELU2, SITU };
constexpr bool GATED = ACTIVATION != RELU2;

struct Constants {
    float limit, alpha, beta;  // limit may be infinite
};

DEVICE float at_most(float v, float limit) { return v > limit ? limit : v; }
DEVICE float within(float v, float limit) { return v > limit ? limit : v < -limit ? -limit : v; }

// 1 / (1 + e^-v) to a few units in the last place; right at the ends too, where e^-v is 0 or infinite.
DEVICE float sigmoid(float v) { return 1.f / (1.f + __expf(-v)); }

// Right in relative terms near 0 too, where 1 - e^-2v cancels: the first terms of the series below 1/4.
DEVICE float hyperbolic_tangent(float v) {
    const float size = v < 0.f ? -v : v, square = v * v;
    if (size < 0.25f)
        return v + v * square * (-1.f / 3 + square * (2.f / 15 + square * (-17.f / 315 + square * (62.f / 2835))));
    const float decay = __expf(-2.f * size), far = (1.f - decay) / (1.f + decay);
    return v < 0.f ? -far : far;
}

// Of gate g and up u; without a gate u is not looked at.
DEVICE float activate(float g, float u, const Constants& c) {
    if constexpr (ACTIVATION == SWIGLU) {
        g = at_most(g, c.limit);
        return g * sigmoid(g) * within(u, c.limit);
    } else if constexpr (ACTIVATION == SWIGLUOAI) {
        g = at_most(g, c.limit);
        return g * sigmoid(c.alpha * g) * (within(u, c.limit) + c.beta);
    } else if constexpr (ACTIVATION == SWIGLUSTEP) {
        return at_most(g * sigmoid(g), c.limit) * within(u, c.limit);
    } else if constexpr (ACTIVATION == GEGLU) {
        return 0.5f * g * (1.f + erff(g * 0.70710678f)) * u;
    } else if constexpr (ACTIVATION == GEGLU_TANH) {  // (1 + tanh(z)) / 2 = sigmoid(2 z)
        return g * sigmoid(1.5957691f * (g + 0.044715f * g * g * g)) * u;
    } else if constexpr (ACTIVATION == RELU2) {
        return g < 0.f ? 0.f : g * g;
    } else {
        const float bounded = c.limit > 3e38f ? u : c.limit * hyperbolic_tangent(u / c.limit);
        return c.beta * hyperbolic_tangent(g / c.beta) * sigmoid(g) * bounded;
    }
}
