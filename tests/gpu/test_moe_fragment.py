"""Kernels of experts that read the fragment layouts, on this machine's GPU: skew, graphs, chains, sizes beyond 32 bits.

Conformance of all kernels is in test_moe.py.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.moe.activations import ACTIVATIONS
from nvfp4.kernels.moe.arguments import MoeArguments
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.layouts import first_layout, layout
from nvfp4.testing import conformance
from nvfp4.testing.experts import MoeCase, experts_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda")
NAMES = {"moe": "marlin_moe", "grouped_gemm": "marlin_grouped"}
QWEN = Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="swiglu")
SKEWED = Problem(op="moe", n=352, k=512, experts=16, top_k=2, activation="swiglu")


def kernel_of(problem):
    return registry.get(NAMES[problem.op])


def problems():
    """Each with its Ms: with a list of tiles or without, several tiles an expert, a number of parts of every size."""
    for i, entry in enumerate(ACTIVATIONS):
        dtype = ("bfloat16", "float16")[i % 2]
        yield replace(SKEWED, activation=entry.name, dtype=dtype, top_k=4, n=352 - 16 * i), (1, 3, 16, 17, 64, 300)
        yield replace(SKEWED, activation=entry.name, dtype=dtype, top_k=1, experts=3, k=1040), (1, 2, 64, 65)
    yield replace(QWEN, experts=32), (1, 8, 64)
    yield Problem(op="grouped_gemm", n=1000, k=1040, experts=20), (1, 8, 64, 300, 600)
    yield Problem(op="grouped_gemm", n=129, k=2048, experts=3, dtype="float16"), (7, 200)


def cases():
    if not torch.cuda.is_available():
        return []
    device = describe("cuda")
    return [
        (problem, config, m)
        for problem, ms in problems()
        for m in ms
        for config in conformance.candidates(kernel_of(problem), device, problem, m, sampled=2, seed=problem.n + m)
    ]


CASES = cases()


def build(case):
    problem, config = case
    kernel_of(problem).build(describe("cuda"), problem, config)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Everything, by all cores, into the compilers' caches."""
    distinct = list({(problem, config) for problem, config, _ in CASES})
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build, distinct))


def launcher_of(problem, m):
    kernel, device = kernel_of(problem), describe("cuda")
    return kernel.build(device, problem, kernel.default_config(device, problem, m))


def case_of(problem, m, seed, **options):
    kernel = kernel_of(problem)
    layout_id = kernel.layout(describe("cuda"), problem)
    if problem.op == "moe":
        return MoeCase.random(problem, m, seed, GPU, layout_id=layout_id, **options)
    return experts_case(problem, m, seed, GPU, layout_id=layout_id)


def run(launcher, case):
    out = torch.full(case.shape, torch.nan, dtype=case.x.dtype, device=GPU)
    case.launch(launcher, out)
    return out


@pytest.mark.parametrize(("problem", "config", "m"), CASES, ids=lambda v: getattr(v, "label", None))
def test_random_cases(problem, config, m):
    """Workspaces are NaN; two runs give the same bits; no input is changed."""
    for seed in (m, m + 13, m + 50):  # the options of the input
        conformance.check(kernel_of(problem), describe("cuda"), GPU, problem, config, m, seed=seed)


@pytest.mark.parametrize("m", [1, 20, 32, 33, 300, 2000])
@pytest.mark.parametrize("seed", [0, 27])
def test_one_expert_gets_everything(m, seed):
    case = case_of(SKEWED, m, seed, nan=False)
    case.ids.fill_(3)
    case.compare(run(launcher_of(SKEWED, m), case))


def test_a_config_for_few_tokens_is_right_for_many():
    case = case_of(SKEWED, 1500, 31, nan=False)
    case.compare(run(launcher_of(SKEWED, 1), case))


@pytest.mark.parametrize("m", [1, 32, 33, 128])
def test_a_graph_follows_new_ids(m):
    case, launcher = case_of(SKEWED, m, 31, nan=False), launcher_of(SKEWED, m)
    arguments, out = case.arguments, torch.empty(case.shape, dtype=case.x.dtype, device=GPU)
    launcher(arguments, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher(arguments, out)
    for seed in range(4):
        other = case_of(SKEWED, m, 32 * seed + 31, nan=False)
        for mine, its in ((case.ids, other.ids), (case.router, other.router), (case.x, other.x)):
            mine.copy_(its)
        if seed == 3:
            case.ids.fill_(5)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        case.compare(out)


@pytest.mark.parametrize(("m", "called"), [(20, 700), (512, 700), (513, 20)])
def test_a_graph_of_grouped_follows_new_offsets(m, called):
    """Tiles by offsets, or from a list, whichever way the call before the capture went."""
    problem = Problem(op="grouped_gemm", n=520, k=512, experts=600)
    launcher = launcher_of(problem, m)
    run(launcher, case_of(problem, called, 0))
    case = case_of(problem, m, 0)
    w, out = case.packed, torch.empty(case.shape, dtype=case.x.dtype, device=GPU)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher(case.x, w.data, w.scale, w.global_scale, case.offsets, out)
    for seed in range(4):
        case.offsets.copy_(case_of(problem, m, seed).offsets)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        case.compare(out)


def test_both_paths_can_be_captured_after_one_call():
    """With and without routing, with and without pre_quant_scale."""
    problem = replace(SKEWED, n=304)
    launcher = launcher_of(problem, 8)
    first = case_of(problem, 4, 0, nan=False)
    run(launcher, first)
    for m, seed in ((100, 0), (3, 16), (100, 16)):
        case = case_of(problem, m, seed, nan=False)
        arguments, out = case.arguments, torch.empty(case.shape, dtype=case.x.dtype, device=GPU)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launcher(arguments, out)
        graph.replay()
        torch.cuda.synchronize()
        case.compare(out)


@pytest.mark.parametrize("pdl", ["", "1"])
@pytest.mark.parametrize("m", [1, 8, 64])
def test_a_chain_of_layers_gives_the_same_bits_as_single_calls(m, pdl, monkeypatch):
    """Kernels begin while those before them end: what a layer reads must be there, and its workspace not be reused."""
    monkeypatch.setenv("NVFP4_PDL", pdl)
    problem = replace(QWEN, experts=32)
    launcher, case = launcher_of(problem, m), case_of(problem, m, 1, nan=False)
    arguments = case.arguments

    def chain(wait):
        x, found = case.x.contiguous(), []
        for step in range(30):
            out = torch.empty_like(x)
            launcher(replace(arguments, x=x, topk_ids=(arguments.topk_ids + step) % 32), out)
            if wait:
                torch.cuda.synchronize()
            x = out
            found.append(out)
        return found

    right, several = chain(True), [chain(False) for _ in range(5)]
    torch.cuda.synchronize()
    assert right[0].isfinite().all() and right[0].float().std() > 0
    for got in several:
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(got, right, strict=True))


def test_two_streams_at_once():
    problem = replace(QWEN, experts=32)
    pairs = [(case_of(problem, m, 1, nan=False), launcher_of(problem, m)) for m in (8, 64)]
    right = [run(launcher, case) for case, launcher in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for (case, launcher), stream in zip(pairs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(launcher, case))
    torch.cuda.synchronize()
    for i, out in enumerate(found):
        assert torch.equal(out, right[i % 2])


@pytest.mark.parametrize("m", [4, 40])
def test_weights_beyond_32_bits(m):
    """The last expert lies above 2^31 bytes; a copy of the first, it gives the same bits."""
    experts, inter, hidden = 750, 1536, 3584
    problem = Problem(op="moe", n=inter, k=hidden, experts=experts, top_k=1, activation="swiglu")
    kernel, device = kernel_of(problem), describe("cuda")
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GiB of GPU memory")

    def weight(rows, k, layout_id):
        codes = torch.randint(0, 256, (1, rows, k // 2), dtype=torch.uint8, device=GPU)
        scale = torch.full((1, rows, k // 16), 0x38, dtype=torch.uint8, device=GPU)
        packed = layout(layout_id).pack(codes, scale, torch.ones(1, 1, device=GPU)).data
        stack = torch.zeros((experts, *packed.shape[1:]), dtype=torch.uint8, device=GPU)
        stack[0] = stack[-1] = packed[0]
        return stack, torch.full((experts, 1), 1 / (3 * k**0.5), device=GPU)

    layout_id = kernel.layout(device, problem)
    w13, w13_scale = weight(2 * inter, hidden, first_layout(layout_id, problem))
    w2, w2_scale = weight(hidden, inter, layout_id)
    assert w13.numel() > 1 << 32 and w2.numel() > 1 << 31
    x = torch.randn(m, hidden, device=GPU).bfloat16()
    found = []
    for expert in (0, experts - 1):
        out = torch.empty_like(x)
        arguments = MoeArguments(
            x=x,
            w13=w13,
            w13_scale=None,
            w13_scale_2=w13_scale,
            w2=w2,
            w2_scale=None,
            w2_scale_2=w2_scale,
            topk_ids=torch.full((m, 1), expert, dtype=torch.int32, device=GPU),
            topk_weights=torch.ones(m, 1, device=GPU),
            constants=(float("inf"), 1.0, 1.0),
        )
        launcher_of(problem, m)(arguments, out)
        found.append(out)
    assert found[0].float().std() > 0.01
    assert torch.equal(*found)
