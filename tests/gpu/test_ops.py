"""The ops on a GPU: the real kernels behind them, streams, CUDA graphs and memory that is not clean."""

import os
import subprocess
import sys
import threading

import nvfp4
import pytest
import torch
from nvfp4.kernels import reference
from nvfp4.kernels.weights.fragment import fragment_id
from nvfp4.testing import assert_gemm_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

op = torch.ops.nvfp4.gemm
SHAPES = [(128, 128), (256, 4096), (4096, 1024), (80, 48), (1056, 352)]  # N, K


@pytest.fixture(scope="module", autouse=True)
def untuned(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVFP4_DB", str(tmp_path_factory.mktemp("no") / "tuning.db"))
        yield


class Case:
    def __init__(self, m, n, k, dtype=torch.bfloat16, device="cuda"):
        torch.manual_seed(m + 3 * n + 7 * k)
        self.weight, self.scale, self.gs = nvfp4.quantize(torch.randn(n, k, device=device))
        self.packed = nvfp4.pack(self.weight, self.scale, self.gs, dtype=dtype)
        self.x = torch.randn(m, k, device=device).to(dtype)
        self.n, self.k, self.dtype = n, k, dtype

    def check(self, got, x=None, gs=None, bias=None, pqs=None):
        x = self.x if x is None else x
        gs = self.gs if gs is None else gs
        ref = reference.gemm(x, self.weight, self.scale, gs, bias, pqs, round_output=False)
        assert_gemm_close(got.reshape(-1, self.n), ref.reshape(-1, self.n), k=self.k, dtype=self.dtype)


def poison():
    """Fill what the allocator will hand out next with NaN."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (64, 1024, 1 << 16, 1 << 20, 1 << 24)]
    blocks += [torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda") for size in (512, 1 << 18, 1 << 22)]
    torch.cuda.synchronize()
    del blocks


def run_in_fresh_process(code):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_values(n, k, dtype):
    for m in (1, 2, 5, 16, 31, 33, 64, 100, 257):
        c = Case(m, n, k, dtype)
        poison()
        c.check(nvfp4.gemm(c.x, c.packed))
        c.check(nvfp4.gemm(c.x, c.weight, c.scale, c.gs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_untuned_weights_are_packed_for_tensor_cores_and_may_stay_as_they_are(dtype):
    c = Case(48, 256, 512, dtype)
    name = fragment_id(torch.cuda.get_device_capability(), str(dtype).removeprefix("torch."))
    assert c.packed.layout == name
    stored = nvfp4.pack(c.weight, c.scale, c.gs, dtype=dtype, layout="checkpoint")
    for m in (1, 16, 48):
        for packed in (stored, c.packed):
            y = nvfp4.gemm(c.x[:m], packed)
            c.check(y, x=c.x[:m])


def test_bias_pre_quant_scale_and_scale_per_row():
    for m in (1, 16, 300):
        c = Case(m, 256, 512)
        bias = torch.randn(c.n, device="cuda")
        pqs = (torch.rand(c.k, device="cuda") + 0.5).bfloat16()
        gs = torch.rand(c.n, device="cuda") * 1e-2 + 1e-3
        for b in (bias, bias.bfloat16()):
            y = nvfp4.gemm(c.x, c.weight, c.scale, gs, bias=b, pre_quant_scale=pqs)
            c.check(y, gs=gs, bias=b, pqs=pqs)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_global_scale_shapes(shape):
    c = Case(4, 128, 256)
    c.check(nvfp4.gemm(c.x, c.weight, c.scale, c.gs.reshape(shape)))


def test_float16_applies_the_global_scale_before_rounding():
    k = 4096
    weight = torch.full((128, k // 2), 0x77, dtype=torch.uint8, device="cuda")
    scale = torch.full((128, k // 16), 0x7E, dtype=torch.uint8, device="cuda")
    gs = torch.tensor(1e-5, device="cuda")
    for m in (1, 16, 64, 512):
        y = nvfp4.gemm(torch.ones(m, k, dtype=torch.float16, device="cuda"), weight, scale, gs)
        torch.testing.assert_close(y, torch.full_like(y, 110.1), rtol=2**-10, atol=0)


def test_views():
    c = Case(6, 256, 512)
    y = nvfp4.gemm(c.x.view(2, 1, 3, c.k), c.packed)
    assert y.shape == (2, 1, 3, c.n)
    c.check(y)
    wide = torch.full((6, 3 * c.k), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, c.k : 2 * c.k] = c.x
    c.check(nvfp4.gemm(wide[:, c.k : 2 * c.k], c.packed))
    odd = torch.empty_strided((6, c.k), (c.k + 4, 1), dtype=torch.bfloat16, device="cuda").copy_(c.x)
    c.check(nvfp4.gemm(odd, c.packed))
    unaligned = torch.cat([c.x.new_zeros(3), c.x.flatten()])[3:].view(6, c.k)
    c.check(nvfp4.gemm(unaligned, c.packed))


@pytest.mark.parametrize("stride", [1, 3, 1 << 40])
def test_one_row_at_the_end_of_an_allocation(stride):
    c = Case(1, 256, 4096)
    block = torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda")  # 2 MiB: a whole segment
    offset = block.numel() - c.k
    block[offset:] = c.x[0]
    c.check(nvfp4.gemm(torch.as_strided(block, (1, c.k), (stride, 1), offset), c.packed))
    torch.cuda.synchronize()


def test_no_tokens_then_another_op():
    c = Case(1, 128, 256)
    y = nvfp4.gemm(c.x[:0], c.packed)
    torch.cuda.synchronize()
    assert y.shape == (0, c.n) and y.is_cuda
    assert torch.ones(4, device="cuda").sum() == 4


def test_nan_rows_stay_in_their_rows():
    for m, row in ((5, 2), (31, 30), (33, 32), (300, 7)):
        c = Case(m, 256, 512)
        c.x[row] = float("nan")
        y = nvfp4.gemm(c.x, c.packed)
        keep = [i for i in range(m) if i != row]
        assert y[row].isnan().all()
        c.check(y[keep], x=c.x[keep])


def test_rows_do_not_depend_on_m():
    c = Case(257, 256, 2048)
    full = nvfp4.gemm(c.x, c.packed)
    c.check(full)
    for m in (1, 2, 7, 16, 17, 64, 128, 200, 256):
        y = nvfp4.gemm(c.x[:m], c.packed)
        c.check(y, x=c.x[:m])
        assert (y != 0).any(1).all()


def test_runs_are_bitwise_equal():
    for m in (1, 8, 48, 300):
        c = Case(m, 256, 8192)
        first = nvfp4.gemm(c.x, c.packed)
        assert all(torch.equal(nvfp4.gemm(c.x, c.packed), first) for _ in range(20))


def test_wrong_places():
    c = Case(2, 128, 256)
    for spoilt in (
        (c.x.cpu(), c.weight, c.scale, c.gs),
        (c.x, c.weight.cpu(), c.scale, c.gs),
        (c.x, c.weight, c.scale.cpu(), c.gs),
        (c.x, c.weight, c.scale, c.gs.cpu()),
    ):
        with pytest.raises(nvfp4.InvalidInput, match=r"different devices|not where x is"):
            nvfp4.gemm(*spoilt)
    with pytest.raises(nvfp4.InvalidInput, match="bias is not where x is"):
        nvfp4.gemm(c.x, c.packed, bias=torch.zeros(c.n))
    with pytest.raises(nvfp4.InvalidInput, match="x and weight do not fit"):
        nvfp4.gemm(c.x[:, : c.k // 2].contiguous(), c.packed)


@pytest.mark.parametrize("m", [0, 1, 5])
def test_opcheck(m):
    c = Case(m, 128, 256)
    scale = c.scale.view(torch.uint8)
    torch.library.opcheck(op.default, (c.x, c.weight, scale, c.gs))
    torch.library.opcheck(op.out, (c.x, c.weight, scale, c.gs), {"out": c.x.new_zeros(m, c.n)})
    torch.library.opcheck(torch.ops.nvfp4.dequantize.default, (c.weight, scale, c.gs, torch.bfloat16))


def test_autocast():
    c = Case(4, 128, 256)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = nvfp4.gemm(c.x.float(), c.packed)
    assert y.dtype == torch.bfloat16
    c.check(y)
    with pytest.raises(nvfp4.InvalidInput, match=r"torch\.autocast"):
        nvfp4.gemm(c.x.float(), c.packed)


def test_dequantize():
    c = Case(1, 80, 96)
    exact = nvfp4.dequantize(c.weight.cpu(), c.scale.cpu(), c.gs.cpu())
    assert torch.equal(nvfp4.dequantize(c.packed).cpu(), exact)


def test_threads_that_call_first_together():
    c = Case(4, 192, 320)  # no other test has this problem
    start = threading.Barrier(8)
    results, errors = [], []

    def work():
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                y = nvfp4.gemm(c.x, c.packed)
                torch.cuda.current_stream().synchronize()
            results.append(y)
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(torch.equal(result, results[0]) for result in results) and len(results) == 8
    c.check(results[0])


def test_streams_at_once():
    cases = [Case(m, 256, 8192) for m in (1, 2, 4, 16)]
    for c in cases:
        nvfp4.gemm(c.x, c.packed)
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = [[] for _ in cases]
    for _ in range(50):
        for c, stream, kept in zip(cases, streams, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(nvfp4.gemm(c.x, c.packed))
    torch.cuda.synchronize()
    for c, kept in zip(cases, results, strict=True):
        assert all(torch.equal(y, kept[0]) for y in kept)
        c.check(kept[0])


def capture(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("m", [1, 5, 16, 64, 300])
def test_graph_replays(m):
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


def test_two_graphs_on_two_streams_at_once():
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


def test_graphs_that_share_a_pool():
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


def test_warmup_of_problems():
    assert nvfp4.warmup([nvfp4.Problem(n=208, k=304), nvfp4.Problem(n=208, k=304, dtype="float16")]) == 2
    c = Case(3, 208, 304)
    graph, out = capture(lambda: nvfp4.gemm(c.x, c.packed))
    graph.replay()
    torch.cuda.synchronize()
    c.check(out)


def test_compile_fullgraph():
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
def test_compile_reduce_overhead():
    c = Case(8, 256, 8192)
    nvfp4.warmup(c.packed)
    torch._dynamo.reset()
    step = torch.compile(lambda x: nvfp4.gemm(x + 0, c.packed) * 1, fullgraph=True, mode="reduce-overhead")
    with torch.inference_mode():
        for _ in range(5):  # eager warm-up, recording, replays
            y = step(c.x).clone()
            c.check(y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_of_another_gpu_than_the_current():
    assert torch.cuda.current_device() == 0
    for m in (1, 64):
        c = Case(m, 256, 4096, device="cuda:1")
        y = nvfp4.gemm(c.x, c.packed)
        assert y.device == torch.device("cuda:1")
        c.check(y)
    assert torch.cuda.current_device() == 0
