"""grouped_gemm and moe on this machine's GPU: the conformance case, graphs, sizes beyond 32 bits."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import nvfp4
import pytest
import torch
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.moe.activations import ACTIVATIONS
from nvfp4.kernels.problem import Problem
from nvfp4.testing import assert_moe_close, conformance
from nvfp4.testing.experts import MoeCase, experts_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda")
MOE = Problem(op="moe", n=352, k=512, experts=16, top_k=4, activation="swiglu")


def problems():
    """Small awkward ones of every activation, and some of a size that fills several tiles and steps; each with its Ms.

    With 1500 tokens pairs are counted by several blocks.
    """
    for op in ("grouped_gemm", "moe"):
        yield from ((problem, (1, 33)) for problem in conformance.problems(op))
    for i, dtype in enumerate(("bfloat16", "float16")):
        yield Problem(op="grouped_gemm", n=360, k=1056, experts=20, dtype=dtype), (5, 200)
        for entry in ACTIVATIONS[i::2]:
            yield replace(MOE, activation=entry.name, dtype=dtype), (5, 200, 1500)


def cases():
    if not torch.cuda.is_available():
        return []
    device, found = describe("cuda"), []
    for problem, ms in problems():
        for kernel in registry.kernels(problem.op):
            if not kernel.supports(device, problem):
                continue
            for m in ms:
                for config in conformance.candidates(kernel, device, problem, m, sampled=1, seed=problem.n + m):
                    found.append((kernel.name, problem, config, m))
    return found


CASES = cases()


def build(case):
    name, problem, config, _ = case
    registry.get(name).build(describe("cuda"), problem, config)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Everything, by all cores, into the compilers' caches."""
    distinct = {(name, problem, config.to_json()): (name, problem, config, m) for name, problem, config, m in CASES}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build, distinct.values()))


@pytest.mark.parametrize(("name", "problem", "config", "m"), CASES, ids=lambda v: getattr(v, "label", None))
def test_conforms(name, problem, config, m):
    for seed in (m, m + 13, m + 50):  # the options of the input
        conformance.check(registry.get(name), describe("cuda"), GPU, problem, config, m, seed=seed, repeat=seed == m)


def run(case):
    options = {"activation": case.problem.activation} | case.options
    return nvfp4.moe(case.x, *case.weights, case.ids, case.router, **options)


def close(case, out):
    p = case.problem
    assert_moe_close(out, case.reference(), hidden=p.k, inter=p.n, top_k=p.top_k, dtype=case.x.dtype)


def capture(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("m", [1, 40, 700])
def test_a_graph_follows_new_ids(m):
    case = MoeCase.random(MOE, m, 31, GPU, nan=False)
    run(case)
    graph, out = capture(lambda: run(case))
    for seed in range(3):
        other = MoeCase.random(MOE, m, 32 * seed + 31, GPU, nan=False)
        case.ids.copy_(other.ids)
        case.router.copy_(other.router)
        case.x.copy_(other.x)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        close(case, out)


def test_every_number_of_tokens_can_be_captured_after_warmup():
    problem = replace(MOE, n=304, top_k=3)
    assert nvfp4.warmup(problem, layout="checkpoint") == 1
    for m in (1, 60, 3000):
        case = MoeCase.random(problem, m, 0, GPU, nan=False)
        graph, out = capture(lambda case=case: run(case))
        graph.replay()
        torch.cuda.synchronize()
        close(case, out)


def test_a_first_call_within_a_capture_raises():
    case = MoeCase.random(replace(MOE, n=320, top_k=5), 4, 0, GPU, nan=False)
    with pytest.raises(nvfp4.NotWarm, match=r"nvfp4\.warmup"):
        capture(lambda: run(case))
    torch.cuda.synchronize()
    close(case, run(case))


def test_two_graphs_on_two_streams_at_once():
    first, second = (MoeCase.random(MOE, m, 31, GPU, nan=False) for m in (8, 64))
    for case in (first, second):
        run(case)
    graphs = [capture(lambda case=case: [run(case) for _ in range(20)]) for case in (first, second)]
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(10):
        torch.cuda.synchronize()
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for case, (_, outs) in zip((first, second), graphs, strict=True):
            assert all(torch.equal(out, outs[0]) for out in outs)
            close(case, outs[0])


def test_grouped_gemm_in_a_graph():
    case = experts_case(Problem(op="grouped_gemm", n=360, k=1056, experts=20), 100, 7, GPU)
    args = (case.x, case.weight, case.scale, case.global_scale, case.offsets)
    case.compare(nvfp4.grouped_gemm(*args))
    graph, out = capture(lambda: nvfp4.grouped_gemm(*args))
    graph.replay()
    torch.cuda.synchronize()
    case.compare(out)


def test_no_tokens_launch_nothing():
    case = MoeCase.random(MOE, 3, 0, GPU, nan=False)
    out = nvfp4.moe(case.x[:0], *case.weights, case.ids[:0], case.router[:0])
    torch.cuda.synchronize()
    assert out.shape == (0, 512) and int(torch.ones(4, device="cuda").sum()) == 4


def test_weights_beyond_32_bits():
    """The last expert lies above 2^31 bytes; a copy of the first, it gives the same bits."""
    experts, inter, hidden = 896, 1536, 3584
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GiB of GPU memory")

    def weight(n, k):
        codes = torch.zeros(experts, n, k // 2, dtype=torch.uint8, device="cuda")
        scale = torch.full((experts, n, k // 16), 0x38, dtype=torch.uint8, device="cuda")
        codes[0].random_(0, 256)
        codes[-1] = codes[0]
        return codes, scale, torch.full((experts, 1), 1 / (3 * k**0.5), device="cuda")

    first, second = weight(2 * inter, hidden), weight(hidden, inter)
    assert first[0].numel() > 1 << 32
    x, router = torch.randn(40, hidden, device="cuda").bfloat16(), torch.ones(40, 1, device="cuda")
    low, high = (torch.full((40, 1), e, dtype=torch.int32, device="cuda") for e in (0, experts - 1))
    right = nvfp4.moe(x, *first, *second, low, router)
    assert right.float().std() > 0.01
    assert torch.equal(nvfp4.moe(x, *first, *second, high, router), right)


@pytest.mark.parametrize("tokens", [131200])
def test_rows_beyond_32_bits(tokens):
    """T * top_k * hidden > 2^31: the last rows equal the same rows computed alone."""
    problem = Problem(op="moe", n=64, k=4096, experts=16, top_k=8, activation="swiglu")
    assert tokens * problem.top_k * problem.k > 1 << 31
    case = MoeCase.random(problem, 512, 0, GPU, nan=False)
    repeat = tokens // 512 + 1
    many = replace(
        case,
        x=case.x.repeat(repeat, 1)[:tokens],
        ids=case.ids.repeat(repeat, 1)[:tokens],
        router=case.router.repeat(repeat, 1)[:tokens],
    )
    out = run(many)
    tail = replace(many, x=many.x[-64:], ids=many.ids[-64:], router=many.router[-64:])
    close(tail, out[-64:])
