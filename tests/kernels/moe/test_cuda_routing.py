"""Routing in CUDA C++: its PTX on NumPy against `routing.route`, and what compiled kernels need."""

from itertools import pairwise

import pytest
import torch
from nvfp4.kernels.cuda.compile import compile_cuda
from nvfp4.kernels.moe import cuda_routing, routing
from nvfp4.kernels.moe.cuda_routing import CudaRouting
from nvfp4.kernels.problem import Device
from nvfp4.testing.conformance import H200
from nvfp4.testing.ptx_launch import simulated

SMALL = Device(kind="cuda", name="card", capability=(8, 0), smem_bytes=cuda_routing.smem_bytes(300, 2))


def right_tiles(offsets, tile_rows):
    tiles = []
    for expert, (first, last) in enumerate(pairwise(offsets)):
        tiles += [[expert, at, min(tile_rows, last - at), 0] for at in range(first, last, tile_rows)]
    return tiles


def check_tiles(got, offsets, tile_rows):
    wanted = right_tiles(offsets, tile_rows)
    assert got.count.tolist() == [len(wanted), 0, 0]
    assert got.tiles.shape == (got.most_tiles, 4) and len(wanted) <= got.most_tiles
    assert got.tiles.tolist() == wanted + [[-1, 0, 0, 0]] * (got.most_tiles - len(wanted))


def random_ids(tokens, top_k, experts, seed, dtype=torch.int32):
    """Ids of which some are negative or too large, with duplicates."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-2, experts + 2, (tokens, top_k), generator=g).to(dtype)


CASES = {
    "several of each": (random_ids(33, 4, 8, 0), 8, None),
    "int64": (random_ids(33, 4, 8, 1, torch.int64), 8, None),
    "more pairs than each of two warps asks for at a time": (random_ids(100, 3, 300, 5), 300, None),
    "one expert for all": (torch.full((40, 2), 3, dtype=torch.int32), 5, None),
    "none at all": (torch.full((7, 2), -1, dtype=torch.int32), 5, None),
    "one token": (torch.tensor([[5, 0]], dtype=torch.int32), 6, None),
    "more experts than tokens": (random_ids(3, 2, 300, 2), 300, None),
    "a single expert": (random_ids(9, 1, 1, 3), 1, None),
    "ids beyond 32 bits": (torch.tensor([[1 << 32, 1], [-(1 << 32), 2], [(1 << 33) + 1, 0]]), 3, None),
    "a map": (random_ids(20, 3, 6, 4), 2, torch.tensor([-1, 1, -1, 0, -1, 1], dtype=torch.int32)),
    "a map of int64": (random_ids(20, 3, 6, 4), 2, torch.tensor([-1, 1, 1 << 40, 0, 5, 1])),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", [H200, SMALL], ids=["32 warps", "2 warps and more"])
def test_sorts_as_the_other_does(name, device):
    ids, experts, expert_map = CASES[name]
    tile_rows = 8 if len(name) % 2 else 3
    with simulated([ids] if expert_map is None else [ids, expert_map], seed=len(name)):
        got = CudaRouting(device, experts)(ids, expert_map, tile_rows)
    offsets, pairs = routing.route(ids, experts, expert_map)
    assert got.offsets.tolist() == offsets.tolist()
    assert got.pairs[: offsets[-1]].tolist() == pairs[: offsets[-1]].tolist()
    check_tiles(got, offsets.tolist(), tile_rows)


MORE_CASES = {**CASES, "more pairs than the counting kernel asks for at a time": (random_ids(400, 8, 60, 5), 60, None)}


@pytest.mark.parametrize("name", MORE_CASES)
def test_several_blocks_sort_as_one_does(name, monkeypatch):
    """Of 64 pairs each, or as many as there may be blocks for."""
    monkeypatch.setattr(cuda_routing, "ONE_BLOCK_PAIRS", 0)
    monkeypatch.setattr(cuda_routing, "PART_PAIRS", 64)
    monkeypatch.setattr(cuda_routing, "MAX_PARTS", 3)
    ids, experts, expert_map = MORE_CASES[name]
    with simulated([ids] if expert_map is None else [ids, expert_map], seed=len(name)) as launched:
        got = CudaRouting(SMALL, experts)(ids, expert_map, 8)
    assert launched == (["route"] if ids.numel() <= 64 else ["count", "route"])
    offsets, pairs = routing.route(ids, experts, expert_map)
    assert got.offsets.tolist() == offsets.tolist()
    assert got.pairs[: offsets[-1]].tolist() == pairs[: offsets[-1]].tolist()
    check_tiles(got, offsets.tolist(), 8)


def test_parts_cover_all_pairs_and_none_is_empty():
    for count in (1, 2048, 2049, 2080, 4096, 32768, 65535, 65537, 1000003):
        blocks, share = cuda_routing.parts(count)
        assert (blocks - 1) * share < count <= blocks * share
        assert blocks <= cuda_routing.MAX_PARTS and (blocks == 1) == (count <= cuda_routing.ONE_BLOCK_PAIRS)


@pytest.mark.parametrize("n", [24, 7])
@pytest.mark.parametrize("offsets", [[0, 5, 5, 30], [3, 9, 27, 28], [0, 0, 0, 0], [30, 30, 30, 30], [0, 30, 30, 30]])
def test_groups(offsets, n):
    out = torch.full((30, n), torch.nan, dtype=torch.bfloat16)
    ends = torch.tensor(offsets, dtype=torch.int32)
    with simulated([out, ends]):
        got = CudaRouting(H200, 3).groups(ends, out, 8)
    check_tiles(got, offsets, 8)
    belongs = torch.zeros(30, dtype=torch.bool)
    belongs[offsets[0] : offsets[-1]] = True
    assert out[belongs].isnan().all() and (out[~belongs] == 0).all()


@pytest.mark.parametrize("offsets", [[0, 30, 0, 30], [-5, 40, 1 << 30, -1], [30, 0, 0, 30], [29, -(1 << 31), 99, 3]])
def test_wrong_offsets_lead_to_no_other_memory(offsets):
    """What the simulation would notice; and tiles stay within the rows."""
    out = torch.full((30, 8), torch.nan, dtype=torch.bfloat16)
    ends = torch.tensor(offsets, dtype=torch.int32)
    with simulated([out, ends]):
        got = CudaRouting(H200, 3).groups(ends, out, 4)
    for expert, first, rows, _ in got.tiles.tolist():
        assert (expert, first, rows) == (-1, 0, 0) or (0 <= expert < 3 and 0 <= first < first + rows <= 30)
    assert 0 <= int(got.count[0]) <= got.most_tiles


@pytest.mark.parametrize(
    ("entry", "capability"),
    [
        *(("route", capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))),
        ("count", (9, 0)),
        ("tile_groups", (9, 0)),
    ],
)
def test_compiles_without_spills(entry, capability, tmp_path, monkeypatch):
    """For each architecture the kernel that needs most; all of the source is compiled for any of them."""
    monkeypatch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path))
    code = compile_cuda(cuda_routing.ROUTE, capability, entry=entry)
    assert code.spill_bytes == code.stack_bytes == code.static_smem_bytes == 0
    assert code.registers <= 64  # 1024 threads


def test_shared_memory_is_enough_for_very_many_experts():
    for smem_bytes, experts in ((101376, 2048), (232448, 8000)):
        device = Device(kind="cuda", name="card", capability=(9, 0), smem_bytes=smem_bytes)
        with simulated([]):
            launch = CudaRouting(device, experts)._route
        assert launch.smem_bytes == cuda_routing.smem_bytes(experts, launch.block // 32) <= smem_bytes
