"""The references of grouped_gemm and moe against sums written out token by token."""

import math
from itertools import pairwise

import pytest
import torch
from nvfp4.kernels import reference
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.codec import dequantize
from nvfp4.testing.experts import GroupedCase, MoeCase

CPU = torch.device("cpu")
DTYPES = ("bfloat16", "float16")


def dense(weight, scale, factors):
    """float64 [N, K] of one expert; factors hold for equal parts of its rows."""
    parts = weight.chunk(len(factors)), scale.chunk(len(factors)), factors
    return torch.cat([dequantize(w, s, f.reshape(1), torch.float64) for w, s, f in zip(*parts, strict=True)])


def silu(g):
    return g / (1 + math.e**-g)


@pytest.mark.parametrize("shape", ["[E]", "[E, 1]", "[E, 2]"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_gemm(dtype, shape):
    case = GroupedCase.random(Problem(op="grouped_gemm", n=10, k=48, experts=4, dtype=dtype), 13, 0, CPU)
    x, factors = case.x.nan_to_num(), torch.rand(4, 2)
    given = factors if shape == "[E, 2]" else factors[:, :1] if shape == "[E, 1]" else factors[:, 0]
    got = reference.grouped_gemm(x, case.weight, case.scale, given, case.offsets, round_output=False)
    right = torch.zeros(13, 10, dtype=torch.float64)
    for expert, (first, last) in enumerate(pairwise(case.offsets.tolist())):
        for row in range(first, last):
            w = dense(case.weight[expert], case.scale[expert], given.reshape(4, -1)[expert])
            right[row] = w @ x[row].double()
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-14)
    rounded = reference.grouped_gemm(x, case.weight, case.scale, given, case.offsets)
    assert torch.equal(rounded, reference.round_once(got, x.dtype))


def by_hand(case, gated_formula, *, parts=2):
    """Token by token, expert by expert; swiglu and relu2 only."""
    options = dict(case.options)
    w13, s13, g13, w2, s2, g2 = case.weights
    x, experts = case.x.nan_to_num(), w13.shape[0]
    pqs, pqs2 = options.get("pre_quant_scale"), options.get("w2_pre_quant_scale")
    b13, b2, known = options.get("w13_bias"), options.get("w2_bias"), options.get("expert_map")
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    for t, ids in enumerate(case.ids.tolist()):
        for j, e in enumerate(ids):
            if known is not None:
                e = known[e].item() if 0 <= e < len(known) else -1
            if not 0 <= e < experts:
                continue
            router = case.router[t, j].double()
            h = x[t] if pqs is None else x[t] * pqs
            a = dense(w13[e], s13[e], g13[e]) @ h.double()
            a = a if b13 is None else a + b13[e]
            a = a * router if options.get("apply_router_weight_on_input") else a
            m = reference.round_once(gated_formula(*a.chunk(parts)), x.dtype)
            if pqs2 is not None:
                m = m * (pqs2[e] if pqs2.ndim == 2 else pqs2)
            y = dense(w2[e], s2[e], g2[e]) @ m.double()
            y = y if b2 is None else y + b2[e]
            out[t] += y if options.get("apply_router_weight_on_input") else y * router
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 3, 9, 16, 27, 63])
def test_moe(seed, dtype):
    top_k = 1 if seed == 63 else 3
    problem = Problem(op="moe", n=32, k=48, experts=4, top_k=top_k, activation="swiglu", dtype=dtype)
    case = MoeCase.random(problem, 9, seed & ~4, CPU, nan=False)
    assert ("apply_router_weight_on_input" in case.options) == (seed == 63)
    right = by_hand(case, lambda g, u: silu(g) * u)
    torch.testing.assert_close(case.reference(), right, rtol=1e-9, atol=1e-10)


def test_moe_without_a_gate():
    problem = Problem(op="moe", n=48, k=64, experts=8, top_k=2, activation="relu2")
    case = MoeCase.random(problem, 9, 8, CPU, nan=False)
    assert case.weights[0].shape == (8, 48, 32)
    right = by_hand(case, lambda a: torch.relu(a) ** 2, parts=1)
    torch.testing.assert_close(case.reference(), right, rtol=1e-9, atol=1e-10)


def test_the_bias_comes_before_the_clamp():
    problem = Problem(op="moe", n=16, k=16, experts=1, top_k=1, activation="swigluoai")
    case = MoeCase.random(problem, 1, 0, CPU, nan=False)
    w13, s13, g13, *second = case.weights
    ids, router = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    bias = torch.full((1, 32), 100.0)
    rest = (torch.zeros_like(w13), s13, g13, *second, ids, router)
    got = reference.moe(case.x, *rest, activation="swigluoai", w13_bias=bias, round_output=False)
    m = reference.round_once(torch.full((16,), 7 / (1 + math.exp(-1.702 * 7)) * 8, dtype=torch.float64), case.x.dtype)
    w2, s2, g2 = (part[0] for part in second)
    torch.testing.assert_close(got[0], dense(w2, s2, g2) @ m.double(), rtol=1e-12, atol=1e-12)


def test_ids_that_are_left_out_and_duplicates():
    problem = Problem(op="moe", n=16, k=32, experts=3, top_k=2, activation="swiglu")
    case = MoeCase.random(problem, 4, 0, CPU, nan=False)
    rest = (case.x[:1].expand(4, -1), *case.weights)

    def run(ids, router):
        return reference.moe(*rest, torch.tensor(ids), torch.tensor(router), round_output=False)

    once = run([[1, -1], [-1, 1], [3, 1], [1, 7]], [[0.5, 9.0], [9.0, 0.5], [9.0, 0.5], [0.5, 9.0]])
    assert all(torch.equal(once[0], row) for row in once)
    twice = run([[1, 1], [-1, -1], [1, 1], [1, 1]], [[0.25, 0.25]] * 4)
    torch.testing.assert_close(twice[0], once[0])
    assert not twice[1].any()


def test_permuted_experts_give_the_same_bits():
    problem = Problem(op="moe", n=32, k=32, experts=5, top_k=2, activation="swiglu")
    case = MoeCase.random(problem, 6, 0, CPU, nan=False)
    order = torch.tensor([3, 0, 4, 1, 2])
    ids = torch.where((case.ids >= 0) & (case.ids < 5), order.argsort()[case.ids.clamp(0, 4)], -1)
    args = [part[order] for part in case.weights]
    got = reference.moe(case.x, *args, ids, case.router)
    assert torch.equal(got, reference.moe(case.x, *case.weights, case.ids, case.router))


@pytest.mark.parametrize(("gate", "up"), [(3.85e-5, 4.83e-5), (4e-4, 4e-5), (4e-5, 4e-4), (1e-4, 1e-4)])
def test_gate_and_up_have_their_own_global_scales(gate, up):
    problem = Problem(op="moe", n=32, k=64, experts=4, top_k=2, activation="swiglu")
    case = MoeCase.random(problem, 7, 0, CPU, nan=False)
    w13, s13, _, *second = case.weights
    factors = torch.tensor([[gate, up]]).expand(4, 2) * 1e3
    options = {"w13": w13, "w13_scale": s13, "w13_scale_2": factors}
    args = (*second, case.ids, case.router)
    got = reference.moe(case.x, *options.values(), *args, round_output=False)
    wrong = reference.moe(case.x, w13, s13, factors[:, 0], *args, round_output=False)
    ratio = (wrong.norm() / got.norm()).item()
    assert ratio == pytest.approx(gate / up, rel=1e-2)
