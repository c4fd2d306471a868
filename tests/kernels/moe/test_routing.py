"""Routing against a sort written out in NumPy: on the CPU, and with Triton where TRITON_INTERPRET=1."""

import os
from itertools import pairwise

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4.kernels.moe import routing
from nvfp4.kernels.moe._triton_routing_device import find_tile
from nvfp4.testing.conformance import H200

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")


def right(ids, experts, expert_map=None):
    """Offsets and the ordered pairs, one expert after the other."""
    flat = np.asarray(ids).reshape(-1).tolist()
    known = None if expert_map is None else np.asarray(expert_map).tolist()
    if known is not None:
        flat = [known[i] if 0 <= i < len(known) else -1 for i in flat]
    groups = [[pair for pair, expert in enumerate(flat) if expert == e] for e in range(experts)]
    offsets = np.cumsum([0, *(len(group) for group in groups)])
    return offsets.tolist(), [pair for group in groups for pair in group]


def check(route, ids, experts, expert_map=None):
    offsets, pairs = route(ids, experts, expert_map)
    wanted_offsets, wanted_pairs = right(ids, experts, expert_map)
    assert offsets.dtype == pairs.dtype == torch.int32
    assert offsets.tolist() == wanted_offsets
    assert pairs[: wanted_offsets[-1]].tolist() == wanted_pairs


def triton_route(ids, experts, expert_map=None):
    return routing.TritonRouting(H200, experts)(ids, expert_map)


def random_ids(tokens, top_k, experts, seed, dtype=torch.int32):
    """Ids of which some are negative or too large, with duplicates."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-2, experts + 2, (tokens, top_k), generator=g).to(dtype)


CASES = {
    "several of each": (random_ids(33, 4, 8, 0), 8, None),
    "int64": (random_ids(33, 4, 8, 1, torch.int64), 8, None),
    "one expert for all": (torch.full((40, 2), 3, dtype=torch.int32), 5, None),
    "none at all": (torch.full((7, 2), -1, dtype=torch.int32), 5, None),
    "one token": (torch.tensor([[5, 0]], dtype=torch.int32), 6, None),
    "more experts than tokens": (random_ids(3, 2, 300, 2), 300, None),
    "a single expert": (random_ids(9, 1, 1, 3), 1, None),
    "the last expert of seven": (torch.full((3, 1), 6, dtype=torch.int64), 7, None),
    "ids beyond 32 bits": (torch.tensor([[1 << 32, 1], [-(1 << 32), 2], [(1 << 33) + 1, 0]]), 3, None),
    "a map": (random_ids(20, 3, 6, 4), 2, torch.tensor([-1, 1, -1, 0, -1, 1], dtype=torch.int32)),
    "an int64 map": (random_ids(20, 3, 6, 5, torch.int64), 2, torch.tensor([0, -1, 7, 1, -1, -1])),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_route(case):
    check(routing.route, *case)


@interpreted
@pytest.mark.parametrize("blocks", ["one block", "many blocks"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_triton_route(case, blocks, monkeypatch):
    if blocks == "many blocks":
        monkeypatch.setattr(routing, "ONE_BLOCK_PAIRS", 0)
        monkeypatch.setattr(routing, "TILE", 128)  # several steps
    check(triton_route, *case)


@interpreted
def test_the_first_call_loads_every_kernel(monkeypatch):
    router = routing.TritonRouting(H200, 4)
    ran = []
    for name in ("_one", "_count", "_sort"):
        launch = getattr(router, name).launch
        monkeypatch.setattr(
            getattr(router, name), "launch", lambda *a, name=name, launch=launch: (ran.append(name), launch(*a))
        )
    check(lambda ids, experts, known: router(ids, known), random_ids(5, 2, 4, 0), 4)
    assert sorted(ran) == ["_count", "_one", "_sort"]
    check(lambda ids, experts, known: router(ids, known), random_ids(6, 2, 4, 1), 4)
    assert sorted(ran) == ["_count", "_one", "_one", "_sort"]


@interpreted
def test_many_pairs_take_two_launches_and_give_the_same():
    ids = random_ids(1100, 2, 40, 6)
    assert ids.numel() > routing.ONE_BLOCK_PAIRS
    check(triton_route, ids, 40)


def test_no_tokens():
    offsets, pairs = routing.route(torch.empty(0, 4, dtype=torch.int32), 3)
    assert offsets.tolist() == [0, 0, 0, 0] and pairs.shape == (0,)


def test_what_is_left_out_comes_last():
    offsets, pairs = routing.route(torch.tensor([[9, 1], [-1, 0]]), 2)
    assert offsets.tolist() == [0, 1, 2]
    assert pairs.tolist() == [3, 1, 0, 2]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_route_of_anything(data):
    experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, 4))
    rows = data.draw(st.lists(st.lists(st.integers(-2, 11), min_size=top_k, max_size=top_k), max_size=12))
    ids = torch.tensor(rows, dtype=torch.int64).reshape(-1, top_k)
    mapped = data.draw(st.none() | st.lists(st.integers(-1, experts - 1), min_size=1, max_size=10))
    check(routing.route, ids, experts, None if mapped is None else torch.tensor(mapped, dtype=torch.int32))


@triton.jit
def tiles(offsets_ptr, out_ptr, experts, rows, BM: tl.constexpr):
    expert, first, last = find_tile(offsets_ptr, tl.program_id(0), experts, rows, 8, BM)
    at = out_ptr + tl.program_id(0) * 3
    tl.store(at, expert)
    tl.store(at + 1, first)
    tl.store(at + 2, last)


@interpreted
@pytest.mark.parametrize(
    "offsets",
    [[0, 3, 3, 40], [0, 0, 0, 0], [17, 20, 32, 50], [0, 60, 7, 200], [-5, 10, 20, 30], [50, 50, 50, 50]],
    ids=["ascending", "empty", "a first row", "descending", "beyond the rows", "empty at the end"],
)
def test_tiles_cover_each_expert_s_rows_and_never_others(offsets):
    rows, count = 50, 12
    out = torch.full((count, 3), -9, dtype=torch.int32)
    tiles[(count,)](torch.tensor(offsets, dtype=torch.int32), out, 3, rows, BM=16)
    wanted = []
    ends = [min(max(i, 0), rows) for i in offsets]
    for expert, (begin, end) in enumerate([(0, ends[0]), *pairwise(ends), (ends[3], rows)], start=-1):
        wanted += [(expert, first, end) for first in range(begin, end, 16)]
    assert [tuple(row) for row in out.tolist()][: len(wanted)] == wanted
    assert all(expert == 4 for expert, _, _ in out.tolist()[len(wanted) :])
