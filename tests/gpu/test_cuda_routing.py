"""Routing and sums in CUDA C++ on this machine's GPU, against `routing.route`: results, repeats, graphs, time."""

import pytest
import torch
from nvfp4.kernels.device import describe
from nvfp4.kernels.moe import routing
from nvfp4.kernels.moe.cuda_routing import CudaRouting
from nvfp4.kernels.moe.cuda_sum import CudaSum
from nvfp4.testing.experts import poisoned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda")


def random_ids(tokens, top_k, experts, seed, dtype):
    """Ids of which some are negative or too large, with duplicates; with odd seeds one expert gets most."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), generator=g)
    if seed & 1:
        ids[torch.rand(tokens, top_k, generator=g) < 0.8] = experts // 2
    return ids.to(dtype)


def check(got, ids, experts, expert_map, tile_rows):
    offsets, pairs = (part.tolist() for part in routing.route(ids, experts, expert_map))
    assert got.offsets.tolist() == offsets
    assert got.pairs[: offsets[-1]].tolist() == pairs[: offsets[-1]]
    wanted = [
        [expert, at, min(tile_rows, offsets[expert + 1] - at), 0]
        for expert in range(experts)
        for at in range(offsets[expert], offsets[expert + 1], tile_rows)
    ]
    assert got.count.tolist() == [len(wanted), 0, 0]
    assert got.tiles.tolist() == wanted + [[-1, 0, 0, 0]] * (got.most_tiles - len(wanted))


SIZES = [
    (1, 8, 128),
    (7, 2, 5),
    (64, 8, 128),
    (64, 22, 512),
    (256, 8, 128),
    (300, 8, 256),
    (4096, 8, 128),
    (20000, 8, 128),
    (33, 4, 2048),
    (900, 4, 2048),
    (9, 1, 1),
]


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_sorts_as_the_host_does(tokens, top_k, experts, seed):
    dtype = torch.int64 if seed & 2 else torch.int32
    ids, expert_map = random_ids(tokens, top_k, experts, seed, dtype), None
    if seed == 3:
        expert_map = torch.randperm(experts + 2, generator=torch.Generator().manual_seed(tokens)).to(torch.int32)
        expert_map[expert_map >= experts] = -1
    route = CudaRouting(describe("cuda"), experts)
    given = ids.to(GPU), None if expert_map is None else expert_map.to(GPU), 8 << seed
    with poisoned():
        got, again = route(*given), route(*given)
    check(got, ids, experts, expert_map, 8 << seed)
    check(again, ids, experts, expert_map, 8 << seed)


@pytest.mark.parametrize("tokens", [64, 4096])
def test_a_graph_follows_new_ids(tokens):
    route = CudaRouting(describe("cuda"), 128)
    ids = random_ids(tokens, 8, 128, 0, torch.int32).to(GPU)
    route(ids, None, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = route(ids, None, 16)
    for seed in range(4):
        other = random_ids(tokens, 8, 128, seed, torch.int32)
        ids.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        check(got, other, 128, None, 16)


@pytest.mark.parametrize("n", [1536, 99])
@pytest.mark.parametrize("offsets", [[0, 500, 500, 3000], [7, 9, 2700, 2801], [0, 0, 0, 0], [3000] * 4])
def test_groups(offsets, n):
    out = torch.full((3000, n), torch.nan, dtype=torch.bfloat16, device=GPU)
    ends = torch.tensor(offsets, dtype=torch.int32, device=GPU)
    with poisoned():
        got = CudaRouting(describe("cuda"), 3).groups(ends, out, 32)
    tiles = [
        [expert, at, min(32, offsets[expert + 1] - at), 0]
        for expert in range(3)
        for at in range(offsets[expert], offsets[expert + 1], 32)
    ]
    assert got.count.tolist() == [len(tiles), 0, 0]
    assert got.tiles.tolist() == tiles + [[-1, 0, 0, 0]] * (got.most_tiles - len(tiles))
    inside = slice(offsets[0], offsets[-1])
    assert out[inside].isnan().all()
    out[inside] = 0
    assert (out == 0).all()


@pytest.mark.parametrize("offsets", [[0, 30, 0, 30], [-5, 40, 1 << 30, -1], [30, 0, 0, 30]])
def test_wrong_offsets_lead_to_no_other_memory(offsets):
    around = torch.full((90, 8), torch.nan, dtype=torch.bfloat16, device=GPU)
    ends = torch.tensor(offsets, dtype=torch.int32, device=GPU)
    got = CudaRouting(describe("cuda"), 3).groups(ends, around[30:60], 4)
    for expert, first, rows, _ in got.tiles.tolist():
        assert (expert, first, rows) == (-1, 0, 0) or (0 <= expert < 3 and 0 <= first < first + rows <= 30)
    assert around[:30].isnan().all() and around[60:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "top_k", "n"), [(1, 8, 2048), (70, 22, 1024), (9, 40, 7168), (2, 3, 16), (3001, 8, 2048)]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_sums(dtype, tokens, top_k, n, weighted):
    """Weights are powers of two, so that products are exact; beside a slot that is left out there may be any."""
    ids = random_ids(tokens, top_k, 16, 0, torch.int32).to(GPU)
    keep = (ids >= 0) & (ids < 16)
    results = torch.randn(tokens, top_k, n, device=GPU)
    router = 2.0 ** torch.randint(-3, 3, (tokens, top_k), device=GPU) if weighted else None
    wanted = torch.zeros(tokens, n, device=GPU)
    for slot in range(top_k):
        summand = results[:, slot] if router is None else results[:, slot] * router[:, slot, None]
        wanted += summand.where(keep[:, slot, None], 0)
    results[~keep] = torch.nan
    if router is not None:
        router[~keep] = torch.inf
    out = torch.full((tokens, n), torch.nan, dtype=dtype, device=GPU)
    CudaSum(describe("cuda"), str(dtype).removeprefix("torch."), pdl=True)(results, ids, None, 16, out, router)
    assert torch.equal(out, wanted.to(dtype))


@pytest.mark.parametrize(
    ("pairs", "experts", "limit_us"), [(512, 128, 40), (4096, 128, 40), (32768, 128, 80), (1408, 512, 80)]
)
def test_time(pairs, experts, limit_us):
    """Of a node in a graph; the limits only catch what has gone wrong, on a GPU that others use too."""
    route = CudaRouting(describe("cuda"), experts)
    ids = torch.randint(0, experts, (pairs // 8, 8), dtype=torch.int32, device=GPU)
    route(ids, None, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            route(ids, None, 16)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    spent_us = start.elapsed_time(end) * 1000 / 500
    print(f"{pairs} pairs, {experts} experts: {spent_us:.2f} us")
    assert spent_us < limit_us
