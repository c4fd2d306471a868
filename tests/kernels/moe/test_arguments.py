"""A call in parts: every token once, in its place, whatever its tensors beside the tokens are."""

import pytest
import torch
from nvfp4.kernels.moe.arguments import in_parts
from nvfp4.kernels.problem import Problem
from nvfp4.testing.experts import MoeCase

PROBLEM = Problem(op="moe", n=16, k=16, experts=2, top_k=2, activation="swiglu")


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 10, 11])
def test_every_token_is_in_one_part(tokens, step):
    whole = MoeCase.random(PROBLEM, tokens, 30, torch.device("cpu"), nan=False).arguments
    out = torch.zeros(tokens, 1)
    sizes = []

    def run(part, some):
        sizes.append(len(some))
        assert len(part.x) == len(part.topk_ids) == len(part.topk_weights) == len(some)
        assert part.w13 is whole.w13 and part.expert_map is whole.expert_map
        some += 1 + part.x.float().sum(1, True) + part.topk_ids.sum(1, True) + part.topk_weights.sum(1, True)

    in_parts(whole, out, step, run)
    right = torch.zeros(tokens, 1)
    run(whole, right)
    assert torch.equal(out, right)
    assert sizes[:-1] == [step] * (tokens // step) + ([tokens % step] if tokens % step else [])
