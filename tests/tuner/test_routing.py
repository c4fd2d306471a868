"""Routings that the tuner times: seeded, of distinct experts, balanced, random and skewed."""

import pytest
import torch
from nvfp4.cache.records import ROUTINGS
from nvfp4.kernels.problem import Problem
from nvfp4.tuner.routing import relabel, relabelings, routed_ids

MOE = Problem(op="moe", n=48, k=64, experts=4, top_k=2, activation="swiglu")
GROUPED = Problem(op="grouped_gemm", n=40, k=64, experts=4)
CPU = torch.device("cpu")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("top_k", [1, 3])
def test_a_token_has_distinct_experts_and_every_run_the_same(routing, top_k):
    ids = routed_ids(routing, 8, 100, top_k)
    assert ids.shape == (100, top_k) and ids.dtype == torch.int32
    assert all(len(set(row)) == top_k and set(row) <= set(range(8)) for row in ids.tolist())
    assert torch.equal(ids, routed_ids(routing, 8, 100, top_k))


def counts(routing, experts, tokens, top_k):
    return torch.bincount(routed_ids(routing, experts, tokens, top_k).flatten(), minlength=experts)


def test_balanced_experts_differ_by_one_token_at_any_m():
    ids = routed_ids("balanced", 6, 50, 4)
    for m in range(1, 50):
        found = torch.bincount(ids[:m].flatten(), minlength=6)
        assert int(found.max() - found.min()) <= 1


def test_random_experts_are_alike_and_skewed_ones_follow_zipf():
    assert (
        0.9 * 2500 < int(counts("random", 8, 20_000, 1).min()) <= int(counts("random", 8, 20_000, 1).max()) < 1.1 * 2500
    )
    skewed = counts("skewed", 8, 20_000, 1).double()
    expected = 20_000 / torch.arange(1, 9) / (1 / torch.arange(1, 9)).sum()
    assert torch.allclose(skewed, expected.double(), rtol=0.1)


def test_slots_beyond_the_experts_are_nobodys():
    for routing in ROUTINGS:
        ids = routed_ids(routing, 3, 5, 8)
        assert (ids[:, 3:] == -1).all() and all(sorted(row) == [0, 1, 2] for row in ids[:, :3].tolist())


def test_relabelings_are_permutations_that_keep_absent_slots():
    orders = relabelings(5, 4)
    assert orders[0].tolist() == [0, 1, 2, 3, 4] and all(sorted(order) == [0, 1, 2, 3, 4] for order in orders.tolist())
    assert len({tuple(order) for order in orders.tolist()}) > 1
    assert relabel(torch.tensor([[0, -1], [4, 2]]), torch.tensor([3, 4, 0, 1, 2])).tolist() == [[3, -1], [2, 0]]
