"""The op gemm under CUDA graphs and torch.compile on a GPU."""

import os
import subprocess
import sys

import nvfp4
import pytest
import torch

from .gemm_case import Case, poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("untuned"),
    pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def run_in_fresh_process(code):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def capture(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("m", [1, 5, 16, 64, 300])
def test_a_replay_reads_the_new_x(m):
    c = Case(m, 256, 4096)
    nvfp4.gemm(c.x, c.packed)
    poison()
    graph, out = capture(lambda: nvfp4.gemm(c.x, c.packed))
    for seed in range(3):
        torch.manual_seed(seed)
        c.x.copy_(torch.randn(m, c.k))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        c.check(out)


def test_graph_with_checkpoint_tensors_sees_a_new_global_scale():
    c = Case(4, 256, 4096)
    for gs in (c.gs.clone(), c.gs.clone().view(1)):  # 0-dim and 1-dim
        nvfp4.gemm(c.x, c.weight, c.scale, gs)
        graph, out = capture(lambda gs=gs: nvfp4.gemm(c.x, c.weight, c.scale, gs))
        for factor in (1.0, 3.0, 0.125):
            gs.copy_(c.gs * factor)
            graph.replay()
            torch.cuda.synchronize()
            c.check(out, gs=gs)


def test_two_graphs_on_two_streams_at_once_are_right():
    # Small N and large K: what splits K and needs counters.
    for m in (1, 8, 32):
        first, second = Case(m, 128, 16384), Case(m, 256, 16384)
        for c in (first, second):
            nvfp4.gemm(c.x, c.packed)
        # Several in a row, so that the two replays overlap.
        graph_1, out_1 = capture(lambda c=first: [nvfp4.gemm(c.x, c.packed) for _ in range(40)])
        graph_2, out_2 = capture(lambda c=second: [nvfp4.gemm(c.x, c.packed) for _ in range(40)])
        torch.cuda.synchronize()
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        for _ in range(20):
            for y in out_1 + out_2:
                y.fill_(float("nan"))
            torch.cuda.synchronize()
            for stream, graph in zip(streams, (graph_1, graph_2), strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            with torch.cuda.stream(torch.cuda.Stream()):
                eager = nvfp4.gemm(first.x, first.packed)
            torch.cuda.synchronize()
            for outs, c in ((out_1, first), (out_2, second)):
                assert all(torch.equal(y, outs[0]) for y in outs)
                c.check(outs[0])
            first.check(eager)


def test_graphs_may_share_a_pool():
    c = Case(8, 256, 8192)
    nvfp4.gemm(c.x, c.packed)
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = nvfp4.gemm(c.x, c.packed)
        graphs.append((graph, out))
    for graph, out in graphs:
        graph.replay()
        torch.cuda.synchronize()
        c.check(out)


SETUP = """
import torch, nvfp4
w, s, g = nvfp4.quantize(torch.randn(256, 4096, device="cuda"))
p = nvfp4.pack(w, s, g)
x = torch.randn(64, 4096, device="cuda").bfloat16()
def capture(m):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = nvfp4.gemm(x[:m], p)
    return graph, y
"""


def test_first_call_inside_a_capture_raises():
    code = """
try:
    capture(4)
except nvfp4.NotWarm as error:
    assert "nvfp4.warmup" in str(error), error
else:
    raise SystemExit("no error")
y = nvfp4.gemm(x[:4], p)
graph, again = capture(4)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(again, y)
"""
    run_in_fresh_process(SETUP + code)


def test_after_warmup_every_m_can_be_captured():
    code = """
assert nvfp4.warmup(p) == 1
for m in (1, 2, 17, 64):
    graph, y = capture(m)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, nvfp4.gemm(x[:m], p)), m
"""
    run_in_fresh_process(SETUP + code)


def test_after_one_eager_call_every_m_can_be_captured():
    code = """
nvfp4.gemm(x[:1], p)
for m in (2, 17, 64):
    graph, y = capture(m)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, nvfp4.gemm(x[:m], p)), m
"""
    run_in_fresh_process(SETUP + code)


def test_problems_that_were_warmed_up_can_be_captured():
    assert nvfp4.warmup([nvfp4.Problem(n=208, k=304), nvfp4.Problem(n=208, k=304, dtype="float16")]) == 2
    c = Case(3, 208, 304)
    graph, out = capture(lambda: nvfp4.gemm(c.x, c.packed))
    graph.replay()
    torch.cuda.synchronize()
    c.check(out)


def test_it_compiles_into_one_graph_for_every_m():
    c = Case(300, 256, 512)
    torch._dynamo.reset()
    step = torch.compile(
        lambda x: nvfp4.gemm(x, c.packed, bias=torch.zeros(c.n, device="cuda")),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for m in (300, 1, 5, 0):
        x = c.x[:m].clone()
        y = step(x)
        assert y.shape == (m, c.n)
        if m:
            c.check(y, x=x)


@pytest.mark.slow
def test_it_runs_in_the_graphs_of_reduce_overhead():
    c = Case(8, 256, 8192)
    nvfp4.warmup(c.packed)
    torch._dynamo.reset()
    step = torch.compile(lambda x: nvfp4.gemm(x + 0, c.packed) * 1, fullgraph=True, mode="reduce-overhead")
    with torch.inference_mode():
        for _ in range(5):  # eager warm-up, recording, replays
            y = step(c.x).clone()
            c.check(y)
