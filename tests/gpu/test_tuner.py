"""The tuner on a CUDA device: graphs, events, memory, and a small tuning from end to end."""

import gc

import pytest
import torch
from nvfp4.cache.routings import routings_of
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Problem
from nvfp4.tuner.messages import Entrant, Pace, Race, Row, Screen
from nvfp4.tuner.run import tune

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROBLEM = Problem(n=1024, k=2048)
EXPERTS = (
    Problem(op="moe", n=256, k=512, experts=16, top_k=4, activation="swiglu"),
    Problem(op="grouped_gemm", n=512, k=256, experts=16),
)
MS = (1, 16, 64, 256, 1024)
PACE = Pace(rounds=9)


@pytest.fixture
def timer():
    from nvfp4.tuner.timing import make_timer

    before = torch.cuda.current_stream()
    yield make_timer(torch.device("cuda", 0))
    torch.cuda.set_stream(before)


def multiply(size):
    a = torch.randn(size, size, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(a)

    def launch():
        torch.mm(a, a, out=out)

    return launch


def test_a_graph_of_more_launches_takes_as_long_per_launch(timer):
    launch = multiply(2048)
    launch()
    few, many = timer.replay([launch], 4), timer.replay([launch], 40)
    short, long = min(timer.repeat(few, 9)), min(timer.repeat(many, 9))
    assert 5.0 < short < 5000.0
    assert long == pytest.approx(short, rel=0.2)
    few.close()
    many.close()


def test_a_round_ranks_a_small_and_a_large_product_and_reads_the_clock(timer):
    launches = [multiply(512), multiply(4096)]
    for launch in launches:
        launch()
    replays = [timer.replay([launch], 8) for launch in launches]
    for start in (0, 1):
        turn = timer.round(replays, start)
        assert turn.times_us[0] < turn.times_us[1]
        assert turn.clock_mhz is None or 100 < turn.clock_mhz < 5000
    for replay in replays:
        replay.close()


def default_entrant(problem):
    device = describe("cuda:0")
    for kernel in registry.kernels(problem.op):
        if kernel.supports(device, problem):
            served = [m for m in MS if kernel.is_valid(device, problem, kernel.default_config(device, problem, m), m)]
            if served:
                config = kernel.default_config(device, problem, served[0])
                ms = tuple(m for m in MS if kernel.is_valid(device, problem, config, m))
                return device, Entrant(kernel=kernel.name, config=config.to_json()), ms
    pytest.skip("no kernel supports this device")


@pytest.mark.parametrize("problem", [PROBLEM, *EXPERTS], ids=lambda problem: problem.op)
def test_measuring_gives_all_memory_back(problem):
    from nvfp4.tuner.measure import Measurer

    device, entrant, ms = default_entrant(problem)
    before_stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    gc.collect()
    measurer = Measurer("cuda:0")
    left = []
    for _ in range(2):  # the first time, libraries and kernels take what they keep: cuBLAS workspaces, counters
        said = []
        screen = Screen(device=device, problem=problem, entrant=entrant, ms=ms, all_ms=MS, pace=PACE)
        assert measurer.screen(screen, said.append).tainted == ""
        race = Race(device=device, problem=problem, entrants=(entrant,), m=ms[0], all_ms=MS, pace=PACE)
        assert measurer.race(race, said.append).tainted == ""
        rows = [body for body in said if isinstance(body, Row)]
        assert {row.status for row in rows} == {"ok"}, [row.detail for row in rows]
        assert {row.routing for row in rows} == set(routings_of(problem))
        measurer.close()
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert left[1] == left[0]
    torch.cuda.set_stream(before_stream)


@pytest.mark.slow
@pytest.mark.parametrize("problem", EXPERTS, ids=lambda problem: problem.op)
def test_a_small_tuning_of_experts_finds_a_plan(tmp_path, problem):
    result = tune((problem,), (1, 16, 256), store_path=tmp_path / "t.db", quick=True, budget_s=60.0)
    assert result.exit_code == 0, result.failures
    plan = result.plans[problem]
    assert plan.intervals()[0].m_lo == 1 and plan.intervals()[-1].m_hi is None


@pytest.mark.slow
def test_a_small_tuning_finds_a_plan_and_its_repetition_measures_nothing(tmp_path):
    path = tmp_path / "t.db"
    result = tune((PROBLEM,), MS, store_path=path, quick=True, budget_s=60.0)
    assert result.exit_code == 0, result.failures
    plan = result.plans[PROBLEM]
    assert plan.intervals()[0].m_lo == 1 and plan.intervals()[-1].m_hi is None
    if not result.unexplored:
        assert tune((PROBLEM,), MS, store_path=path, quick=True).measured == 0


def test_a_replay_keeps_what_it_reads(timer):
    """Ids that only a launch held were freed once, and others' numbers were routed: less work was timed."""
    out = torch.zeros(1 << 16, device="cuda")

    def launches():
        source = torch.ones(1 << 16, device="cuda")
        return [lambda: out.copy_(source)] * 2

    for launch in launches():
        launch()
    replay = timer.replay(launches(), 2)
    other = [torch.full((1 << 16,), 7.0, device="cuda") for _ in range(64)]
    timer.repeat(replay, 1)
    assert bool((out == 1).all()) and len(other) == 64
    replay.close()
