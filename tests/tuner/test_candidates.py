import msgspec
import pytest
from nvfp4.cache.plan import make_plan
from nvfp4.cache.records import (
    BASELINE,
    ROUTINGS,
    Environment,
    Interval,
    LayoutPlan,
    Measurement,
    Plan,
    with_gaps,
)
from nvfp4.dispatch.offline import TYPICAL
from nvfp4.dispatch.segments import decide
from nvfp4.kernels import registry
from nvfp4.kernels.kernel import implementation_hash
from nvfp4.kernels.problem import Problem
from nvfp4.testing.conformance import H200
from nvfp4.testing.fakes import FakeConfig, Good, Trouble, fake_device
from nvfp4.tuner.candidates import PROMISING, Known, candidates_of, default_at, neighbours, ordered, promising
from nvfp4.tuner.messages import Entrant

DEVICE = fake_device()
PROBLEM = Problem(n=48, k=64)
MS = (1, 8, 16, 64)
ENVIRONMENT = Environment(nvfp4="0", torch="2")
GOOD = Good()


def good(delay_us, small_m=False):
    return Entrant(kernel="fake_good", config=FakeConfig(delay_us=delay_us, small_m=small_m).to_json())


def row(entrant, m, *, status="ok", us=10.0, protocol="screen", **changes):
    fields = {
        "device": DEVICE,
        "environment": ENVIRONMENT,
        "problem": PROBLEM,
        "kernel": entrant.kernel,
        "config": entrant.config,
        "layout": "checkpoint",
        "implementation": "now",
        "m": m,
        "status": status,
        "protocol": protocol,
        "p50_us": us if status == "ok" else None,
    }
    return Measurement(**{**fields, **changes})


@pytest.fixture
def candidates():
    return candidates_of(DEVICE, PROBLEM, MS, [GOOD])[0]


@pytest.fixture
def known():
    return Known({"fake_good": "now", BASELINE: "now"})


def test_a_candidate_serves_the_m_it_is_valid_at(candidates):
    assert len(candidates) == 6
    assert candidates[good(0)].ms == MS
    assert candidates[good(0, True)].ms == (1, 8)


def test_kernels_without_candidates_give_their_reason():
    cuda = fake_device()
    cuda = type(cuda)(kind="cuda", name="Fake GPU")
    assert candidates_of(cuda, PROBLEM, MS, [GOOD]) == ({}, ("fake_good: fakes run on the CPU",))


def test_defaults_and_hints_go_first_and_kernels_take_turns():
    candidates, _ = candidates_of(DEVICE, PROBLEM, MS, [GOOD, Trouble()])
    queue, certain = ordered(DEVICE, PROBLEM, candidates, [good(3000), Entrant(kernel="gone", config="{}")])
    names = [candidate.entrant for candidate in queue]
    assert certain == 3
    assert names[:3] == [good(300), Entrant(kernel="fake_trouble", config='{"what":"zeros"}'), good(3000)]
    assert sorted(names, key=str) == sorted(candidates, key=str)
    assert {queue[3].kernel.name, queue[4].kernel.name} == {"fake_good", "fake_trouble"}
    assert [c.entrant for c in ordered(DEVICE, PROBLEM, candidates, [good(3000)])[0]] == names


class Foreseen(Good):
    """Predicts that a long delay is quick at M = 1 and slow elsewhere."""

    def predicted_us(self, device, problem, config, m):
        return -config.delay_us if m == 1 else config.delay_us


def test_what_a_kernel_foresees_is_promising_in_that_order():
    candidates, _ = candidates_of(DEVICE, PROBLEM, MS, [Foreseen()])
    found = promising(DEVICE, PROBLEM, candidates)
    assert len(found) == len({c.entrant for c, _ in found}) == 6 <= PROMISING  # all of a small space
    at_one = [c.config.delay_us for c, m in found if m == 1]
    assert at_one == sorted(at_one, reverse=True)
    at_eight = [c.config.delay_us for c, m in found if m == 8]
    assert at_eight == sorted(at_eight)
    assert {m for _, m in found} >= {1, 8}


def test_of_other_kernels_the_neighbours_of_the_default_are_promising(candidates):
    found = promising(DEVICE, PROBLEM, candidates)
    default = FakeConfig(delay_us=300)
    for candidate, m in found:
        assert m in candidate.ms
        differs = [f for f in ("delay_us", "small_m") if getattr(candidate.config, f) != getattr(default, f)]
        assert len(differs) == 1
    assert good(0) in {c.entrant for c, _ in found}
    queue, certain = ordered(DEVICE, PROBLEM, candidates, ())
    assert [c.entrant for c in queue[certain : certain + len(found)]] == [c.entrant for c, _ in found]


def test_untuned_runs_the_default_of_the_narrowest_kernel(candidates):
    assert default_at(DEVICE, PROBLEM, 16, candidates) == good(300)
    assert default_at(DEVICE, PROBLEM, 16, {}) is None


def test_on_a_gpu_what_runs_untuned_goes_first_and_is_enough_for_a_plan():
    """An H200, a budget of seconds, five M far apart: once such a plan was the slowest kernel's, in another layout.

    Microseconds of defaults, measured there.
    """
    ms, times = (1, 8, 64, 512, 4096), {"marlin_moe": (14.3, 49.7, 108.5), "cutedsl_moe": (151.1, 656.3)}
    problem = Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="swiglu")
    kernels = {name: registry.get(name) for name in (*times, "triton_moe")}
    found = candidates_of(H200, problem, ms, kernels.values())[0]
    first = [default_at(H200, problem, m, found) for m in ms]
    order, _ = ordered(H200, problem, found, ())
    assert [candidate.entrant for candidate in order[: len(set(first))]] == list(dict.fromkeys(first))
    assert [entrant.kernel for entrant in first] == ["marlin_moe"] * 3 + ["cutedsl_moe"] * 2

    def measured(entrant, m, us):
        kernel = kernels[entrant.kernel]
        given = {"layout": kernel.layout(H200, problem), "implementation": implementation_hash(kernel)}
        rows = (row(entrant, m, us=us, protocol="final", routing=routing, **given) for routing in ROUTINGS)
        return [msgspec.structs.replace(one, device=H200, problem=problem) for one in rows]

    rows = []
    for entrant, m, us in zip(first, ms, (*times["marlin_moe"], *times["cutedsl_moe"]), strict=True):
        slow = Entrant(kernel="triton_moe", config=kernels["triton_moe"].default_config(H200, problem, m).to_json())
        rows += [*measured(entrant, m, us), *measured(slow, m, 3 * us)]
    plan = make_plan(H200, problem, rows, kernels=kernels, environment=ENVIRONMENT)
    assert plan.layout == kernels["marlin_moe"].layout(H200, problem)
    chosen = {m: one.kernel for m in ms for one, low, high in with_gaps(plan.intervals()) if low <= m <= (high or m)}
    assert chosen == {1: "marlin_moe", 8: "marlin_moe", 64: "marlin_moe", 512: "cutedsl_moe", 4096: "cutedsl_moe"}
    decision = decide(H200, problem, plan.layout, plan)
    assert not decision.ignored
    assert {segment.kernel.name for segment in decision.segments} == {"marlin_moe", "cutedsl_moe"}


def test_untuned_runs_what_reads_the_layout_that_is_taken_then():
    (h200,) = TYPICAL[9, 0]
    gemv, marlin = (registry.get(name) for name in ("triton_gemv", "marlin"))
    problem = Problem(n=512, k=512)
    found, _ = candidates_of(h200, problem, (1,), [gemv, marlin])
    assert default_at(h200, problem, 1, found).kernel == "marlin"
    found, _ = candidates_of(h200, problem, (1,), [gemv])
    assert default_at(h200, problem, 1, found) is None


def plan(n, k, kernel, device=DEVICE):
    interval = Interval(m_lo=1, m_hi=None, kernel=kernel, config="{}", expected_us=1.0)
    layout = LayoutPlan(layout="checkpoint", intervals=(interval,), traffic_us=1.0)
    return Plan(
        device=device,
        problem=Problem(n=n, k=k),
        layout="checkpoint",
        layouts=(layout,),
        traffic="uniform",
        environment=ENVIRONMENT,
    )


def test_winners_of_the_three_nearest_shapes_on_this_device():
    plans = [plan(4096, 64, "far"), plan(48, 128, "near"), plan(48, 80, "nearest"), plan(90, 90, "next")]
    plans.append(plan(48, 64, "elsewhere", fake_device("other")))
    assert [e.kernel for e in neighbours(plans, DEVICE, PROBLEM)] == ["nearest", "near", "next"]


def test_rows_of_other_implementations_and_protocols_are_no_evidence(known):
    known.add(row(good(0), 1, implementation="before"))
    known.add(row(good(0), 8, environment=Environment(nvfp4="0", torch="2", timing="0")))
    known.add(row(Entrant(kernel="gone", config="{}"), 8))
    assert known.best_us() == {}


def test_the_best_screen_leaves_out_the_baseline_and_what_is_not_trusted(known):
    known.add(row(Entrant(kernel=BASELINE, config="{}"), 1, us=1.0))
    known.add(row(good(0), 1, us=2.0))
    known.add(row(good(300), 1, us=3.0))
    assert known.best_us() == {1: 2.0}
    known.add(row(good(0), 63, status="wrong"))
    assert known.best_us() == {1: 3.0}
    assert known.bf16_us(1) == 1.0 and known.bf16_us(8) is None


@pytest.mark.parametrize("status", ["wrong", "nan", "crash", "timeout", "build_error", "invalid"])
def test_such_a_failure_ends_a_candidate_everywhere(known, candidates, status):
    known.add(row(good(0), 1))
    known.add(row(good(0), 64, status=status))
    assert known.given_up(good(0)) and not known.usable(good(0), 1)
    assert known.pending(candidates[good(0)], {}) == ()
    assert known.failures() == {status: 1}


def test_no_memory_at_one_m_ends_it_there_only(known, candidates):
    known.add(row(good(0), 1))
    known.add(row(good(0), 64, status="oom"))
    assert known.usable(good(0), 1) and not known.usable(good(0), 64)
    assert known.pending(candidates[good(0)], {}) == (8, 16)
    known.add(row(good(300), 63, status="launch_error"))
    assert known.given_up(good(300))  # it never ran


def test_pending_leaves_out_what_is_known_or_hopeless(known, candidates):
    assert known.pending(candidates[good(0)], {}) == (1, 64, 8, 16)
    known.add(row(good(0), 1, us=40.0))
    known.add(row(good(0), 64, us=40.0))
    assert known.pending(candidates[good(0)], {1: 40.0, 64: 40.0}) == (8, 16)
    assert known.pending(candidates[good(0)], {1: 10.0, 64: 10.0}) == ()


def test_a_run_that_is_repeated_has_the_same_implementation():
    assert implementation_hash(Good()) == implementation_hash(Good())
