"""`marlin` on a GPU: all kinds of config, races, streams and graphs, dependent launches, the host cost of a launch."""

import random
import threading
import time

import pytest
import torch
from nvfp4.kernels.device import describe
from nvfp4.kernels.gemm._marlin_model import TOKENS, fits, token_tile
from nvfp4.kernels.gemm.marlin import KERNEL, MarlinConfig
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.layouts import to_layout
from nvfp4.testing import conformance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def any_config(device, problem, m, rng):
    """A config that fits, from more than the space: copies by all threads, clusters of every size, either meeting."""
    for _ in range(2000):
        split = rng.choice((1, 2, 4, 8))
        config = MarlinConfig(
            tokens=token_tile(m),
            subtiles=rng.choice((1, 2, 3, 4, 8)),
            row_groups=rng.choice((1, 2, 3, 5, 7)),
            k_groups=rng.choice((1, 2, 4, 8, 16)),
            chunk=rng.choice((1, 2)),
            stages=rng.choice((2, 3)),
            split=split,
            meet="memory" if split == 1 else rng.choice(("cluster", "memory")),
            copy=rng.choice(("bulk", "async")),
        )
        if fits(device, problem, config):
            return config
    return None


def test_configs_beyond_the_space_conform():
    device, rng, ran = describe("cuda"), random.Random(0), 0
    for seed in range(60):
        problem = Problem(
            n=rng.choice((1, 40, 64, 200, 1000, 2688)),
            k=rng.choice((16, 80, 208, 512, 1104, 4096)),
            dtype=rng.choice(("bfloat16", "float16")),
        )
        m = rng.choice((1, 3, 8, 9, 17, 31, 33, 64))
        config = any_config(device, problem, m, rng)
        if config is not None:
            conformance.check(KERNEL, device, torch.device("cuda"), problem, config, m, seed=seed)
            ran += 1
    assert ran > 40


class Case:
    """Weights in fragment order, and a launcher."""

    def __init__(self, n, k, m, config=None):
        device, self.problem = describe("cuda"), Problem(n=n, k=k)
        weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scale = torch.randint(0x30, 0x40, (n, k // 16), dtype=torch.uint8, device="cuda")
        self.one = torch.full((1,), 0.01, device="cuda")
        layout = KERNEL.layout(device, self.problem)
        self.data = to_layout(weight, scale, self.one, layout_id=layout).data
        self.config = config or KERNEL.default_config(device, self.problem, m)
        self.launcher = KERNEL.build(device, self.problem, self.config)
        self.x = torch.randn(m, k, device="cuda").bfloat16()

    def run(self, x=None, out=None):
        x = self.x if x is None else x
        out = x.new_full((x.shape[0], self.problem.n), float("nan")) if out is None else out
        self.launcher(x, self.data, None, self.one, None, None, out)
        return out


def memory_config(tokens=16):
    return MarlinConfig(tokens=tokens, subtiles=2, row_groups=2, k_groups=2, chunk=1, stages=2, split=4, meet="memory")


@pytest.mark.parametrize("k_groups", [4, 1])
def test_many_small_stages_do_not_race(k_groups):
    """Bulk copies once overtook the loads of what they overwrite: 16 rows a warp, one block a stage, all SMs full."""
    config = MarlinConfig(
        tokens=16, subtiles=1, row_groups=4 // k_groups, k_groups=k_groups, chunk=1, stages=2, split=1, meet="memory"
    )
    case = Case(28672, 4096, 16, config)
    right = case.run()
    for _ in range(50):
        assert torch.equal(case.run(), right)
    other = Case(28672, 4096, 16)
    other.data = case.data
    torch.testing.assert_close(right.float(), other.run(case.x).float(), rtol=2e-2, atol=2e-2)


def test_two_threads_on_two_streams():
    case = Case(4096, 4096, 16, memory_config())
    xs = [torch.randn_like(case.x) for _ in range(2)]
    right = [case.run(x) for x in xs]
    torch.cuda.synchronize()
    wrong = [0, 0]

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [case.run(xs[i]) for _ in range(200)]
            torch.cuda.current_stream().synchronize()
        wrong[i] = sum(not torch.equal(out, right[i]) for out in outs)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]


def test_two_graphs_at_once():
    """Blocks that meet in memory: each graph has counters and sums of its own, clean after every replay."""
    case = Case(4096, 4096, 16, memory_config())
    case.run()
    graphs = []
    for _ in range(2):
        x, graph = torch.randn_like(case.x), torch.cuda.CUDAGraph()
        out = torch.empty(16, 4096, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(4):
                case.run(x, out)
        graphs.append((graph, x, out, torch.cuda.Stream()))
    for _ in range(20):
        for _, x, out, _ in graphs:
            x.normal_()
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, _, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for _, x, out, _ in graphs:
            assert torch.equal(out, case.run(x))


def test_dependent_launches_change_nothing(monkeypatch):
    """Each launch reads what the one before it wrote."""
    plain = Case(2048, 2048, 8)
    plain.one.fill_(1e-3)  # values neither grow nor vanish
    right = plain.x
    for _ in range(6):
        right = plain.run(right)
    assert right.isfinite().all() and right.abs().max() > 0
    monkeypatch.setenv("NVFP4_PDL", "1")
    eager = Case(2048, 2048, 8)
    eager.data, eager.one = plain.data, plain.one
    assert eager.launcher.plain.pdl and not plain.launcher.plain.pdl
    for _ in range(20):
        x = plain.x
        for _ in range(6):
            x = eager.run(x)
        assert torch.equal(x, right)


def test_one_kernel_serves_every_m_of_its_tile():
    for tokens in TOKENS:
        case = Case(1000, 1104, tokens)
        whole = case.run()
        for m in range(1, tokens + 1, 3):
            if token_tile(m) == tokens:
                assert torch.equal(case.run(case.x[:m]), whole[:m])


def test_a_launch_costs_the_host_about_what_an_addition_costs():
    case = Case(1024, 1024, 1)
    out, y = torch.empty(1, 1024, dtype=torch.bfloat16, device="cuda"), torch.empty(64, device="cuda")

    def cost(work, count=300):
        best = float("inf")
        for _ in range(10):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                work()
            best = min(best, (time.perf_counter() - begin) / count * 1e6)
        return best

    launch = cost(lambda: case.launcher(case.x, case.data, None, case.one, None, None, out))
    add = cost(lambda: torch.add(y, y, out=y))
    print(f"a launch {launch:.2f} us, torch.add(out=) {add:.2f} us")
    assert launch < 1.3 * add
