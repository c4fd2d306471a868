"""`marlin_moe` and `marlin_grouped` run on NumPy: the PTX that NVRTC makes, through their launchers, all of a chain."""

import pytest
import torch
from nvfp4.kernels.moe import marlin_grouped, marlin_moe
from nvfp4.kernels.moe._marlin_experts import sizes, tile
from nvfp4.kernels.moe.activations import ACTIVATIONS
from nvfp4.kernels.moe.marlin_grouped import MarlinGroupedConfig
from nvfp4.kernels.moe.marlin_moe import MarlinMoeConfig
from nvfp4.kernels.problem import Device, Problem
from nvfp4.kernels.weights.fragment import padded
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


def run(capability, problem, config, m, seed, order=0, changes=(), case=None):
    """The case, its result, and the kernels that were launched."""
    device, kernel = card(capability), KERNELS[problem.op]
    for size, c in zip(sizes(problem), tiles_of(device, config), strict=True):
        assert padded(size.k) // 64 % c.chunk == 0, "not a config that is valid anywhere"
    case = case or experts_case(problem, m, seed, CPU, layout_id=kernel.layout(device, problem))
    out = torch.full(case.shape, torch.nan, dtype=case.x.dtype)
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


@pytest.mark.parametrize(("capability", "size", "m", "chosen", "seed"), GROUPS, ids=str)
def test_grouped(capability, size, m, chosen, seed):
    n, k, experts, dtype = size
    problem = Problem(op="grouped_gemm", n=n, k=k, experts=experts, dtype=dtype)
    tokens, shape, split = chosen
    chosen = MarlinGroupedConfig(tokens=tokens, shape=shape, split=split)
    case, out, launched = run(capability, problem, chosen, m, seed, order=seed)
    case.compare(out)
    assert launched == ["tile_groups", "experts"]


def test_a_fault_in_the_order_is_seen():
    """Threads that go on before the first warp has found their tile."""
    found = "find(a.ids, a.count, token_tile, base, threadIdx.x);\n        __syncthreads();"
    changes = ((found, found.replace("__syncthreads();", "")),)
    with pytest.raises(AssertionError, match="may be"):
        run((9, 0), moe("swiglu"), config(8, SMALL, SMALL), 3, 0, changes=changes)
