"""`cutedsl_grouped` and `cutedsl_moe` on a GPU: all kinds of config, skewed routing, graphs, streams, real sizes."""

import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from nvfp4.kernels.device import describe
from nvfp4.kernels.gemm.cutedsl_wgmma import fits
from nvfp4.kernels.moe import _cutedsl_config as configs
from nvfp4.kernels.moe import cutedsl_grouped, cutedsl_moe
from nvfp4.kernels.moe.activations import ACTIVATIONS
from nvfp4.kernels.problem import Problem
from nvfp4.testing import conformance
from nvfp4.testing.experts import MoeCase, experts_case

pytest.importorskip("cutlass")

READY = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason="needs a Hopper GPU")]

GPU = torch.device("cuda")
GROUPED, MOE = cutedsl_grouped.KERNEL, cutedsl_moe.KERNEL
SMALL = Problem(op="moe", n=352, k=512, experts=16, top_k=4, activation="swiglu")
QWEN = Problem(op="moe", n=768, k=2048, experts=32, top_k=8, activation="swiglu")


def fitting(problem, seed, count):
    """Random configs that fit, also where `is_valid` finds tiles too large or too small for an expert's rows."""
    device, found = describe("cuda"), list(configs.space(describe("cuda"), problem))
    random.Random(seed).shuffle(found)
    usable = (
        c
        for c in found
        if (c.rows, c.warpgroups) in configs.TILES
        and c.pieces in configs.PIECES[c.tokens]
        and all(fits(device, shape, configs.RING_BYTES) for shape in configs.shapes(problem, c))
    )
    return [next(usable) for _ in range(count)]


def layout(problem):
    return MOE.layout(describe("cuda"), problem)


def cases():
    """(problem, config, m, seed): every activation, and tails of every kind."""
    if not READY:
        return
    for m in (1, 7, 40, 300, 1500):
        for seed, (n, k, dtype) in enumerate([(360, 1056, "bfloat16"), (101, 208, "float16"), (1000, 80, "bfloat16")]):
            problem = Problem(op="grouped_gemm", n=n, k=k, experts=12, dtype=dtype)
            for config in fitting(problem, m + seed, 3):
                yield problem, config, m, m + seed
    for turn, entry in enumerate(ACTIVATIONS):
        for seed, m in ((0, 3), (1, 33), (2, 200), (3, 1000), (4, 3000)):
            problem = replace(
                SMALL,
                activation=entry.name,
                dtype="float16" if (seed + turn) % 2 else "bfloat16",
                top_k=1 if (seed + turn) % 3 == 2 else 4,
                n=80 if seed == 2 else 352,
            )
            for config in fitting(problem, 5 * turn + seed, 1 if seed else 2):
                yield problem, config, m, 37 * m + seed


def others():
    """Problems and configs of the tests below."""
    device = describe("cuda")
    for problem, ms, count in ((SMALL, (2, 129, 1100), 2), (QWEN, (64, 512, 2000), 5)):
        for m in ms:
            yield problem, configs.best(device, problem, m)
            yield from ((problem, config) for config in fitting(problem, m, count))


def build(pair):
    problem, config = pair
    (GROUPED if problem.op == "grouped_gemm" else MOE).build(describe("cuda"), problem, config)


CASES = list(cases())


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Everything, by all cores, into the compiler's cache."""
    pairs = [(problem, config) for problem, config, _, _ in CASES] + list(others())
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build, dict.fromkeys(pairs)))


@pytest.mark.parametrize(("problem", "config", "m", "seed"), CASES, ids=lambda v: getattr(v, "label", None))
def test_conforms(problem, config, m, seed):
    """Configs that no plan would take too."""
    kernel = GROUPED if problem.op == "grouped_gemm" else MOE
    conformance.check(kernel, describe("cuda"), GPU, problem, config, m, seed=seed)


def skewed(problem, m, ids):
    case = MoeCase.random(problem, m, 28, GPU, nan=False, layout_id=layout(problem))
    return replace(case, ids=ids(case.ids))


SKEWS = {
    "all tokens to one expert": lambda ids: torch.full_like(ids, 3),
    "one token elsewhere": lambda ids: torch.full_like(ids, 3).index_put_(
        (torch.tensor(0, device=GPU), torch.tensor(0, device=GPU)), torch.tensor(9, dtype=ids.dtype, device=GPU)
    ),
    "no expert at all": lambda ids: torch.full_like(ids, -1),
    "two experts": lambda ids: (ids & 1) * 15,
}


@pytest.mark.parametrize("name", SKEWS)
@pytest.mark.parametrize("m", [2, 129, 1100])
def test_skew(name, m):
    case = skewed(SMALL, m, SKEWS[name])
    for config in [configs.best(describe("cuda"), SMALL, m), *fitting(SMALL, m, 2)]:
        out = torch.full(case.shape, torch.nan, dtype=case.x.dtype, device=GPU)
        case.launch(MOE.build(describe("cuda"), SMALL, config), out)
        case.compare(out)


@pytest.mark.parametrize("m", [5, 300])
@pytest.mark.parametrize("kind", [15, 31])
def test_a_graph_follows_new_ids(m, kind):
    """Where the first product reads x where it lies, and (31, with pre_quant_scale) behind a launch that sorts it."""
    case = MoeCase.random(SMALL, m, kind, GPU, nan=False, layout_id=layout(SMALL))
    launch = MOE.build(describe("cuda"), SMALL, configs.best(describe("cuda"), SMALL, m))
    out = torch.empty(case.shape, dtype=case.x.dtype, device=GPU)
    arguments = case.arguments
    launch(arguments, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(arguments, out)
    for seed in range(4):
        other = MoeCase.random(SMALL, m, 32 * seed + kind, GPU, nan=False)
        case.ids.copy_(other.ids)
        case.router.copy_(other.router)
        case.x.copy_(other.x)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        case.compare(out)


def test_many_launches_behind_each_other_give_the_same_bits():
    """Kernels of a chain, and of the next one, may start while those before them run."""
    case = MoeCase.random(SMALL, 700, 8, GPU, nan=False, layout_id=layout(SMALL))
    other = MoeCase.random(SMALL, 90, 9, GPU, nan=False, layout_id=layout(SMALL))
    launch = MOE.build(describe("cuda"), SMALL, configs.best(describe("cuda"), SMALL, 700))
    outs = [torch.empty(case.shape, dtype=case.x.dtype, device=GPU) for _ in range(50)]
    between = torch.empty(other.shape, dtype=other.x.dtype, device=GPU)
    arguments, more = case.arguments, other.arguments
    for out in outs:
        launch(arguments, out)
        launch(more, between)
    torch.cuda.synchronize()
    case.compare(outs[0])
    other.compare(between)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_two_streams_at_once():
    cases = [MoeCase.random(SMALL, m, 8, GPU, nan=False, layout_id=layout(SMALL)) for m in (400, 900)]
    launch = MOE.build(describe("cuda"), SMALL, configs.best(describe("cuda"), SMALL, 900))
    outs = [[torch.empty(case.shape, dtype=case.x.dtype, device=GPU) for _ in range(20)] for case in cases]
    launch(cases[0].arguments, outs[0][0])
    torch.cuda.synchronize()
    for case, some in zip(cases, outs, strict=True):
        stream = torch.cuda.Stream()
        arguments = case.arguments
        with torch.cuda.stream(stream):
            for out in some:
                launch(arguments, out)
    torch.cuda.synchronize()
    for case, some in zip(cases, outs, strict=True):
        case.compare(some[0])
        assert all(torch.equal(out, some[0]) for out in some)


def test_parts_give_the_same_bits(monkeypatch):
    case = MoeCase.random(SMALL, 1000, 8, GPU, nan=False, layout_id=layout(SMALL))
    launch = MOE.build(describe("cuda"), SMALL, configs.best(describe("cuda"), SMALL, 1000))
    whole, parts = (torch.empty(case.shape, dtype=case.x.dtype, device=GPU) for _ in range(2))
    launch(case.arguments, whole)
    monkeypatch.setattr(cutedsl_moe, "WORKSPACE_BYTES", 130 * SMALL.top_k * (4 * SMALL.k + 2 * SMALL.n))
    launch(case.arguments, parts)
    case.compare(whole)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("m", [7, 200, 1100])
def test_sorting_x_first_changes_no_bit(m):
    """As is done for rows that begin on no 16-byte boundary."""
    case = MoeCase.random(SMALL, m, 8, GPU, nan=False, layout_id=layout(SMALL))
    wide = torch.full((m, SMALL.k + 3), torch.nan, dtype=case.x.dtype, device=GPU)
    wide[:, 3:] = case.x
    moved = replace(case, x=wide[:, 3:])
    assert cutedsl_moe.gathers(case.arguments) and not cutedsl_moe.gathers(moved.arguments)
    for config in [configs.best(describe("cuda"), SMALL, m), *fitting(SMALL, m, 2)]:
        launch = MOE.build(describe("cuda"), SMALL, config)
        outs = [torch.full(case.shape, torch.nan, dtype=case.x.dtype, device=GPU) for _ in range(2)]
        case.launch(launch, outs[0])
        moved.launch(launch, outs[1])
        case.compare(outs[0])
        assert torch.equal(*outs)


@pytest.mark.parametrize("m", [64, 512, 2000])
def test_real_sizes(m):
    case = MoeCase.random(QWEN, m, 4, GPU, nan=False, layout_id=layout(QWEN))
    exact = case.exact()
    for config in [configs.best(describe("cuda"), QWEN, m), *fitting(QWEN, m, 5)]:
        out = torch.full(case.shape, torch.nan, dtype=case.x.dtype, device=GPU)
        case.launch(MOE.build(describe("cuda"), QWEN, config), out)
        case.compare(out, exact)


@pytest.mark.parametrize("stride", [65, 68, 72])
def test_rows_of_x_with_any_stride(stride):
    problem = Problem(op="grouped_gemm", n=64, k=64, experts=4)
    case = experts_case(problem, 50, 0, GPU, layout_id=layout(problem))
    wide = torch.full((50, stride), torch.nan, dtype=case.x.dtype, device=GPU)
    wide[:, stride - 64 :] = case.x
    case = replace(case, x=wide[:, stride - 64 :])
    out = torch.full(case.shape, torch.nan, dtype=case.x.dtype, device=GPU)
    case.launch(GROUPED.build(describe("cuda"), problem, configs.best(describe("cuda"), problem, 50)), out)
    case.compare(out)
