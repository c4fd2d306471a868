"""Which experts tokens go to while a problem is timed: the same in every run, for `cache.records.ROUTINGS` by name."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["relabel", "relabelings", "routed_ids"]

SEED = 20


def routed_ids(routing: str, experts: int, tokens: int, top_k: int) -> Tensor:
    """Distinct experts of every token; the first M tokens are a routing of the same kind for any M.

    A token with more slots than there are experts has all of them, and -1 in the other slots: so it is on a rank that
    holds few of a layer's experts.

    - balanced: one expert after another, so that their numbers of tokens differ by at most 1.
    - random: every token independent, all experts alike.
    - skewed: every token independent; the r-th expert weighs 1/r (Zipf).

    Parameters
    ----------
    routing
        One of ROUTINGS.
    top_k
        Slots of a token.

    Returns
    -------
    int32 [tokens, top_k], on the CPU.
    """
    slots = min(top_k, experts)
    if routing == "balanced":
        return _padded((torch.arange(tokens * slots) % experts).view(tokens, slots), top_k)
    g = torch.Generator().manual_seed(SEED)
    # The largest of log weight + Gumbel noise are a draw without replacement with those weights.
    score = -torch.empty(tokens, experts).exponential_(generator=g).log()
    if routing == "skewed":
        score -= torch.arange(1, experts + 1).log()
    return _padded(score.topk(slots, dim=1).indices, top_k)


def _padded(ids: Tensor, top_k: int) -> Tensor:
    return torch.nn.functional.pad(ids.int(), (0, top_k - ids.shape[1]), value=-1)


def relabelings(experts: int, count: int) -> Tensor:
    """int32 [count, experts]: orders of the experts; the first is their own. The same routing, on other weights."""
    g = torch.Generator().manual_seed(SEED)
    others = [torch.randperm(experts, generator=g) for _ in range(count - 1)]
    return torch.stack([torch.arange(experts), *others]).int()


def relabel(ids: Tensor, order: Tensor) -> Tensor:
    """int32: the same ids with every expert e replaced by order[e]; -1 stays."""
    return order[ids.clamp_min(0).long()].where(ids >= 0, -1)
