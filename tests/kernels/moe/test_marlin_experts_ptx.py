"""`marlin_moe` and `marlin_grouped` run on NumPy: the PTX that NVRTC makes, through their launchers, all of a chain."""

from dataclasses import replace

import pytest
import torch
from nvfp4.kernels.cuda.launch import CudaLaunch
from nvfp4.kernels.moe import marlin_grouped, marlin_moe
from nvfp4.kernels.moe._marlin_experts import sizes, tile
from nvfp4.kernels.moe.activations import ACTIVATIONS
from nvfp4.kernels.moe.marlin_grouped import MarlinGroupedConfig
from nvfp4.kernels.moe.marlin_moe import MarlinMoeConfig
from nvfp4.kernels.problem import Device, Problem
from nvfp4.kernels.weights.fragment import padded
from nvfp4.testing.close import assert_gemm_close
from nvfp4.testing.experts import experts_case
from nvfp4.testing.ptx_launch import simulated

SMEM_BYTES = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448}
CPU = torch.device("cpu")
KERNELS = {"moe": marlin_moe.KERNEL, "grouped_gemm": marlin_grouped.KERNEL}


def card(capability):
    return Device(kind="cuda", name="card", capability=capability, units=8, smem_bytes=SMEM_BYTES[capability])


def tiles_of(device, config):
    if isinstance(config, MarlinMoeConfig):
        return marlin_moe.tiles(device, config)
    return (tile(device, config.tokens, config.shape, config.split),)


def run(capability, problem, config, m, seed, order=0, changes=(), case=None, out=None):
    """The case, its result, and the kernels that were launched."""
    device, kernel = card(capability), KERNELS[problem.op]
    for size, c in zip(sizes(problem), tiles_of(device, config), strict=True):
        assert padded(size.k) // 64 % c.chunk == 0, "not a config that is valid anywhere"
    case = case or experts_case(problem, m, seed, CPU, layout_id=kernel.layout(device, problem))
    out = torch.full(case.shape, torch.nan, dtype=case.x.dtype) if out is None else out
    before = [tensor.clone() for tensor in case.tensors()]
    with simulated([*case.tensors(), out], seed=order, changes=changes) as launched:
        case.launch(kernel.build(device, problem, config), out)
    for tensor, copy in zip(case.tensors(), before, strict=True):
        assert torch.equal(tensor.nan_to_num(7), copy.nan_to_num(7)), "an input was changed"
    return case, out, launched


def moe(activation, dtype="bfloat16", *, experts=6, top_k=2, inter=48, hidden=96):
    return Problem(op="moe", n=inter, k=hidden, experts=experts, top_k=top_k, activation=activation, dtype=dtype)


def config(tokens, first, second):
    (first, first_split), (second, second_split) = first, second
    return MarlinMoeConfig(
        tokens=tokens, first=first, first_split=first_split, second=second, second_split=second_split
    )


SMALL = ("2x4x1x1x2", 1)
DIRECT, SORTED = ["experts", "experts", "sum"], ["route", "experts", "experts", "sum"]

# Capability, problem, M, config, seed (see MoeCase.random), launches.
MOES = [
    # all of bias, pre_quant_scale, w2_pre_quant_scale, expert_map, [E, 2] factors; with a gate and without
    ((9, 0), moe("swiglustep", "float16"), 3, config(8, SMALL, SMALL), 671, DIRECT),
    ((9, 0), moe("relu2"), 3, config(8, SMALL, SMALL), 927, DIRECT),
    # more than 32 pairs without a routing; int64 ids
    ((9, 0), moe("swiglu", experts=3, top_k=4, hidden=496), 9, config(8, ("2x1x4x2x2", 1), SMALL), 5, DIRECT),
    # K split in clusters, of either product
    ((9, 0), moe("swiglu", experts=3, hidden=512), 3, config(8, ("4x1x4x1x2", 2), SMALL), 257, DIRECT),
    ((9, 0), moe("relu2", "float16", experts=3, inter=272), 3, config(8, SMALL, ("4x2x2x1x3", 2)), 136, DIRECT),
    ((9, 0), moe("relu2", experts=3, hidden=464), 3, config(8, ("2x4x2x1x3", 4), SMALL), 408, DIRECT),
    # an expert with several tiles, found by the ids, and from the list
    ((9, 0), moe("swigluoai", experts=2), 25, config(8, SMALL, SMALL), 14, DIRECT),
    ((9, 0), moe("swiglu", experts=2, top_k=3), 25, config(16, SMALL, ("4x4x1x1x3", 1)), 27, SORTED),
    ((9, 0), moe("relu2", experts=2, hidden=144), 40, config(32, SMALL, SMALL), 12, SORTED),
    ((9, 0), moe("swiglu", "float16", experts=1, top_k=1), 70, config(64, SMALL, SMALL), 63, SORTED),
    ((9, 0), moe("geglu", "float16", experts=5, top_k=1), 9, config(8, SMALL, SMALL), 55, DIRECT),
    # copies by all lanes; K split through memory
    ((8, 0), moe("swiglu", experts=4, hidden=528), 3, config(8, ("4x1x4x1x2", 2), SMALL), 147, DIRECT),
    ((8, 0), moe("relu2", "float16", experts=4, hidden=272), 33, config(16, ("4x2x2x1x3", 2), SMALL), 30, SORTED),
    ((8, 0), moe("situ", experts=4, inter=208, hidden=64), 33, config(8, SMALL, ("4x1x4x1x3", 1)), 22, SORTED),
    # converted by hardware
    ((10, 0), moe("swiglu", experts=4, hidden=144), 5, config(8, SMALL, SMALL), 1375, DIRECT),
    ((10, 0), moe("geglu_tanh", "float16", experts=3, top_k=3), 25, config(16, SMALL, SMALL), 29, SORTED),
]


def test_cases_have_every_activation():
    assert {problem.activation for _, problem, *_ in MOES} == {entry.name for entry in ACTIVATIONS}


@pytest.mark.parametrize(("capability", "problem", "m", "chosen", "seed", "launches"), MOES, ids=str)
def test_moe(capability, problem, m, chosen, seed, launches):
    case, out, launched = run(capability, problem, chosen, m, seed, order=seed)
    case.compare(out)
    assert launched == launches
    summed = out[~out.isnan().any(1)].any(1)
    assert int(summed.sum()) > 1, "a seed that leaves hardly any token an expert"


# Capability, N, K, E, dtype; M, tokens, shape, split, seed (see GroupedCase.random).
GROUPS = [
    ((9, 0), (100, 80, 3, "bfloat16"), 20, (8, "2x4x1x1x2", 1), 1),
    ((9, 0), (70, 528, 3, "float16"), 15, (16, "4x1x4x1x2", 2), 2),
    ((9, 0), (1, 16, 1, "bfloat16"), 5, (8, "2x4x1x1x2", 1), 7),
    ((9, 0), (130, 272, 5, "bfloat16"), 6, (8, "4x2x2x1x3", 1), 4),
    ((9, 0), (64, 256, 2, "float16"), 90, (64, "2x4x2x1x3", 1), 3),
    ((9, 0), (96, 272, 2, "bfloat16"), 9, (8, "2x3x4x1x3", 1), 5),
    ((8, 0), (70, 528, 3, "bfloat16"), 18, (8, "4x1x4x1x2", 2), 5),
    ((8, 0), (96, 48, 2, "float16"), 50, (32, "4x4x1x1x3", 1), 0),
    ((10, 0), (129, 96, 4, "bfloat16"), 12, (8, "2x4x1x1x2", 1), 7),
]


ONE, LISTED = ["experts"], ["tile_groups", "experts"]


@pytest.mark.parametrize("launches", [ONE, LISTED], ids=["by offsets", "listed"])
@pytest.mark.parametrize(("capability", "size", "m", "chosen", "seed"), GROUPS, ids=str)
def test_grouped(capability, size, m, chosen, seed, launches, monkeypatch):
    n, k, experts, dtype = size
    problem = Problem(op="grouped_gemm", n=n, k=k, experts=experts, dtype=dtype)
    tokens, shape, split = chosen
    chosen = MarlinGroupedConfig(tokens=tokens, shape=shape, split=split)
    if launches == LISTED:
        monkeypatch.setattr(marlin_grouped, "DIRECT_ROWS", m - 1)
    case, out, launched = run(capability, problem, chosen, m, seed, order=seed)
    case.compare(out)
    assert launched == launches


@pytest.mark.parametrize(("more", "launches"), [(0, ONE), (1, LISTED)])
def test_launches_of_grouped(more, launches):
    m = marlin_grouped.DIRECT_ROWS + more
    problem = Problem(op="grouped_gemm", n=16, k=16, experts=3)
    case, out, launched = run((9, 0), problem, MarlinGroupedConfig(tokens=64, shape="2x4x1x1x2", split=1), m, 0)
    case.compare(out)
    assert launched == launches


def test_the_first_call_of_grouped_loads_what_later_ones_launch(monkeypatch):
    """Nothing may be loaded within a graph capture."""
    problem = Problem(op="grouped_gemm", n=16, k=16, experts=3)
    kernel, device, loaded = KERNELS["grouped_gemm"], card((9, 0)), []
    case = experts_case(problem, 5, 0, CPU, layout_id=kernel.layout(device, problem))
    out = torch.full(case.shape, torch.nan, dtype=case.x.dtype)
    with simulated([*case.tensors(), out]):
        launcher = kernel.build(device, problem, MarlinGroupedConfig(tokens=8, shape="2x4x1x1x2", split=1))
        monkeypatch.setattr(CudaLaunch, "load", lambda self, index: loaded.append(self))
        for _ in range(2):
            case.launch(launcher, out)
        monkeypatch.undo()
    assert loaded == [launcher.routing._groups, *launcher.product.launches.values()]
    assert len(set(loaded)) == 3


def cut(experts, m, seed, first=0, last=None):
    """Ascending offsets, some equal."""
    g = torch.Generator().manual_seed(seed)
    last = m if last is None else last
    return [first, *torch.randint(first, last + 1, (experts - 1,), generator=g).sort().values.tolist(), last]


# M, N and offsets. 128 threads look at 512 experts a turn; N = 19 is zeroed one by one.
OFFSETS = {
    "experts without rows": (40, 16, [0, 0, 17, 17, 26, 40]),
    "one of few has all rows": (25, 16, [0, 0, 0, 25, 25, 25]),
    "one of many has all rows": (25, 16, [0] * 217 + [25] * 84),
    "rows of no expert": (40, 16, cut(5, 40, 1, 7, 31)),
    "rows of no expert, one by one": (40, 19, cut(5, 40, 2, 7, 31)),
    "hardly any row has an expert": (33, 1, [15, 15, 15, 16, 16, 16]),
    "no row has an expert": (33, 16, [9] * 6),
    "no row has an expert, they begin behind": (33, 19, [33] * 6),
    "outside": (30, 16, [-5, 4, 4, 1 << 30]),
    "all outside": (30, 16, [-(1 << 31), -1, -1, -1]),
    "a single expert": (21, 16, [0, 21]),
    "a single expert with some": (21, 16, [3, 20]),
    "a single row": (1, 16, [0, 0, 1]),
    "300 experts": (60, 16, cut(300, 60, 3, 2, 55)),
    "the last of a turn": (30, 16, [0] * 512 + [30] * 3),
    "the first of the next turn": (30, 16, [0] * 513 + [30] * 3),
    "three turns": (50, 16, cut(1100, 50, 4, 1, 48)),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_of_grouped(name, monkeypatch):
    """The result is right, and that with a list has the same bits; nothing is written before and behind out."""
    m, n, offsets = OFFSETS[name]
    problem = Problem(op="grouped_gemm", n=n, k=64, experts=len(offsets) - 1)
    chosen = MarlinGroupedConfig(tokens=8, shape="2x4x1x1x2", split=1)
    layout_id = KERNELS["grouped_gemm"].layout(card((9, 0)), problem)
    case = experts_case(problem, m, 2, CPU, layout_id=layout_id)
    x = torch.randn(m, 64, generator=torch.Generator().manual_seed(len(name))).bfloat16()
    case = replace(case, x=x, offsets=torch.tensor(offsets, dtype=torch.int32))
    found = []
    for most, launches in ((m, ONE), (m - 1, LISTED)):
        monkeypatch.setattr(marlin_grouped, "DIRECT_ROWS", most)
        whole = torch.full((m + 16, n), torch.nan, dtype=x.dtype)
        _, out, launched = run((9, 0), problem, chosen, m, 0, order=len(name), case=case, out=whole[8:-8])
        assert launched == launches
        assert whole[:8].isnan().all() and whole[-8:].isnan().all()
        found.append(out)
    direct, listed = found
    assert torch.equal(direct, listed)
    ref, magnitude = replace(case, offsets=case.offsets.clamp(0, m)).exact()
    assert_gemm_close(direct, ref, k=64, dtype=x.dtype, magnitude=magnitude)
    assert (direct[ref.abs().sum(1) == 0] == 0).all()


@pytest.mark.parametrize("offsets", [[0, 30, 0, 30], [-5, 40, 1 << 30, -1], [30, 0, 0, 30], [29, -(1 << 31), 99, 3]])
def test_descending_offsets_lead_to_no_other_memory(offsets):
    """What the simulation would notice, and what lies before and behind out."""
    problem = Problem(op="grouped_gemm", n=16, k=64, experts=3)
    case = experts_case(problem, 30, 2, CPU, layout_id=KERNELS["grouped_gemm"].layout(card((9, 0)), problem))
    case = replace(case, offsets=torch.tensor(offsets, dtype=torch.int32))
    whole = torch.full((46, 16), torch.nan, dtype=case.x.dtype)
    chosen = MarlinGroupedConfig(tokens=8, shape="2x4x1x1x2", split=1)
    _, _, launched = run((9, 0), problem, chosen, 30, 0, case=case, out=whole[8:-8])
    assert launched == ONE
    assert whole[:8].isnan().all() and whole[-8:].isnan().all()


FAULTS = {
    "sums that other warps have not written": (
        "store_shared_u32(sums + warp * 4, end);\n        __syncthreads();",
        "store_shared_u32(sums + warp * 4, end);",
    ),
    "a tile that its thread has not written": (
        "return make_int4(-1, 0, 0, 0);\n    __syncthreads();",
        "return make_int4(-1, 0, 0, 0);",
    ),
    "sums of the next turn in the same place": ("sums = 2 * (base + SUMS_OFFSET) + WARPS * 4 - sums;", ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_search_by_offsets_is_seen(name):
    problem = Problem(op="grouped_gemm", n=16, k=64, experts=1100)
    layout_id = KERNELS["grouped_gemm"].layout(card((9, 0)), problem)
    case = experts_case(problem, 20, 2, CPU, layout_id=layout_id)
    case = replace(case, offsets=torch.tensor(cut(1100, 20, 0), dtype=torch.int32))
    chosen = MarlinGroupedConfig(tokens=8, shape="2x4x1x1x2", split=1)
    with pytest.raises(AssertionError, match="may be"):
        run((9, 0), problem, chosen, 20, 0, changes=(FAULTS[name],), case=case)


def test_a_fault_in_the_order_is_seen():
    """Threads that go on before the first warp has found their tile."""
    found = "find(a.ids, a.count, token_tile, base, threadIdx.x);\n        __syncthreads();"
    changes = ((found, found.replace("__syncthreads();", "")),)
    with pytest.raises(AssertionError, match="may be"):
        run((9, 0), moe("swiglu"), config(8, SMALL, SMALL), 3, 0, changes=changes)
