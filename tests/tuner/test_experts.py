"""moe and grouped_gemm in the tuner: routings, checks that see what is wrong, a time per routing, and a plan."""

import itertools
from dataclasses import replace

import msgspec
import pytest
import torch
from nvfp4.cache.layouts import layout_report
from nvfp4.cache.records import ROUTINGS, TIMING, Environment, Measurement
from nvfp4.cache.store import Store
from nvfp4.dispatch.layout import choose_layout
from nvfp4.kernels import reference, registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.moe import cpu_grouped, cpu_moe
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.layouts import first_layout
from nvfp4.testing.fakes import fake_device
from nvfp4.tuner.candidates import Known
from nvfp4.tuner.experts_trial import ExpertsTrial
from nvfp4.tuner.experts_weights import ExpertWeights
from nvfp4.tuner.inputs import least_bytes
from nvfp4.tuner.measure import Measurer
from nvfp4.tuner.messages import Done, Entrant, Race, Recorded, Row, Screen
from nvfp4.tuner.outcome import Wrong
from nvfp4.tuner.run import tune

MOE = Problem(op="moe", n=48, k=64, experts=4, top_k=2, activation="swiglu")
GROUPED = Problem(op="grouped_gemm", n=40, k=64, experts=4)
BOTH = pytest.mark.parametrize("problem", [MOE, GROUPED], ids=lambda problem: problem.op)
DEVICE, CPU, MS = replace(fake_device(), l2_bytes=64 << 10), torch.device("cpu"), (1, 2, 33)
MODULES = {"moe": cpu_moe, "grouped_gemm": cpu_grouped}


FRAGMENT = "fragment1-bf16"  # what the fake kernels read


@pytest.fixture
def fakes(monkeypatch):
    """Kernels that read the fragment layout beside those that are there."""
    monkeypatch.setenv("NVFP4_KERNELS", "nvfp4.testing.fake_experts")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    registry.refresh()
    yield
    monkeypatch.delenv("NVFP4_KERNELS")
    registry.refresh()


def fake_of(problem):
    return registry.get("fake_fragment_moe" if problem.op == "moe" else "fake_fragment_grouped")


def kernel_of(problem):
    return registry.get("cpu_moe" if problem.op == "moe" else "cpu_grouped")


def entrant(problem, rows=16, kernel=None):
    kernel = kernel or kernel_of(problem)
    return Entrant(kernel=kernel.name, config=kernel.config_type(block_rows=rows, threads=0).to_json())


@pytest.fixture
def measurer():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    measurer = Measurer("cpu")
    yield measurer
    measurer.close()
    torch.set_num_threads(threads)


@pytest.fixture
def wrap(monkeypatch):
    """wrap(problem, change): the CPU kernel's launcher runs, and `change(arguments, out)` after it."""

    def wrap(problem, change):
        launch = MODULES[problem.op]._Launch
        whole = launch.__call__

        def call(self, *arguments):
            whole(self, *arguments)
            change(arguments[:-1], arguments[-1])

        monkeypatch.setattr(launch, "__call__", call)

    return wrap


def screen(measurer, pace, problem, ms=MS, **fields):
    said = []
    request = Screen(device=DEVICE, problem=problem, entrant=entrant(problem), ms=ms, all_ms=MS, pace=pace, **fields)
    done = measurer.screen(request, said.append)
    return [body for body in said if isinstance(body, Row)], done


@BOTH
def test_every_m_is_timed_with_every_routing(measurer, pace, problem):
    rows, done = screen(measurer, pace, problem)
    assert done == Done()
    assert [(row.m, row.routing) for row in rows] == [(m, routing) for m in (1, 33, 2) for routing in ROUTINGS]
    assert all(row.status == "ok" and row.relative_error < 5e-3 and row.p50_us > 0 for row in rows)


@BOTH
def test_exact_results_take_one_pass_over_the_experts(monkeypatch, problem):
    """Of a layer of 11 billion weights one takes seconds; a further M, as a crossover brings it, takes another."""
    passes = []
    whole = getattr(reference, problem.op)
    monkeypatch.setattr(reference, problem.op, lambda *args, **kwargs: passes.append(1) or whole(*args, **kwargs))
    trial = ExpertsTrial(DEVICE, CPU, problem, MS, lambda: None)
    kernel = kernel_of(problem)
    launcher = kernel.build(DEVICE, problem, kernel.default_config(DEVICE, problem, 33))
    for m, routing in itertools.product(MS, ROUTINGS):
        assert trial.check(launcher, "checkpoint", m, routing) < 5e-3
    assert len(passes) == 1
    assert trial.check(launcher, "checkpoint", 20, "random") < 5e-3
    assert len(passes) == 2


@BOTH
@pytest.mark.parametrize("experts", [1, 4, 64])
def test_exact_results_of_one_pass_are_those_of_every_call(problem, experts):
    """Experts without rows, ids of -1 in a record, and an M that comes later."""
    problem = replace(problem, experts=experts)
    record = torch.tensor([[0, -1], [-1, -1], [experts - 1, 0]], dtype=torch.int32)
    recorded = Recorded(name="recorded-0123456789ab", ids=record.numpy().tobytes(), top_k=2)
    trial = ExpertsTrial(DEVICE, CPU, problem, (2, 33, 100), lambda: None, recorded)
    assert recorded.name in trial.routings
    for m, routing in itertools.product((33, 2, 100, 57), trial.routings):
        at, exact, _ = trial._known(m, routing)
        ids, x, w = trial.ids[routing][:m], trial.x[:m], trial.weights.plain
        if problem.op == "moe":
            whole = reference.moe(x, *w, ids, trial.router[:m], activation="swiglu", round_output=False)
        else:
            counts = torch.bincount(ids.flatten(), minlength=experts)
            whole = reference.grouped_gemm(x, *w, torch.cat([counts[:1] * 0, counts.cumsum(0)]), round_output=False)
        torch.testing.assert_close(exact, whole[at], rtol=1e-9, atol=1e-9)


@BOTH
def test_a_race_times_all_entrants_with_every_routing(measurer, pace, problem):
    said = []
    entrants = (entrant(problem), entrant(problem, 32))
    request = Race(device=DEVICE, problem=problem, entrants=entrants, m=8, all_ms=(8,), pace=pace)
    assert measurer.race(request, said.append) == Done()
    rows = [(row.routing, row.config, row.status) for row in said if isinstance(row, Row)]
    assert rows == [(routing, one.config, "ok") for routing in ROUTINGS for one in entrants]


def negate_last(arguments, out):
    out[-1] *= -1


def scale_all(arguments, out):
    out *= 1.02


def nan_at_the_end(arguments, out):
    out[-1, -1] = float("nan")


def zero_behind(arguments, out):
    m, n = out.shape
    out.as_strided((m + 1, n), (n, 1)).select(0, m).zero_()


def change_weights(arguments, out):
    weight = arguments[0].w13 if len(arguments) == 1 else arguments[1]
    weight[0, 0, 0] += 1


@BOTH
@pytest.mark.parametrize(
    ("change", "status", "detail"),
    [
        (negate_last, "wrong", "random options: "),
        (scale_all, "wrong", "random options: relative error"),
        (nan_at_the_end, "nan", "NaN or elements never written"),
        (zero_behind, "wrong", "wrote outside its output"),
        (change_weights, "wrong", "changed x or the weights"),
    ],
)
def test_what_is_wrong_is_seen(measurer, pace, wrap, problem, change, status, detail):
    wrap(problem, change)
    rows, _ = screen(measurer, pace, problem)
    assert [row.status for row in rows] == [status] and detail in rows[0].detail


def test_an_error_at_a_larger_m_with_one_routing_only_is_seen(measurer, pace, wrap):
    def change(arguments, out):
        local = arguments[0].topk_ids
        if out.shape[0] == 33 and bool((local >= 0).all()) and int(torch.bincount(local.flatten()).max()) > 22:
            out *= 1.02  # of 66 pairs in balance an expert has 16 or 17

    wrap(MOE, change)
    rows, _ = screen(measurer, pace, MOE, ms=(33,))
    assert rows[-1].status == "wrong" and rows[-1].detail.startswith("m=33, skewed: relative error")
    assert [row.routing for row in rows[:-1]] == ["balanced", "random"]


@pytest.mark.parametrize(
    "dropped", ["w13_bias", "w2_bias", "pre_quant_scale", "w2_pre_quant_scale", "expert_map", "constants"]
)
def test_a_kernel_that_ignores_an_option_is_wrong(measurer, pace, monkeypatch, dropped):
    whole = cpu_moe._Launch.__call__
    plain = cpu_moe._Launch  # for its name

    def call(self, arguments, out):
        ignored = (float("inf"), 1.0, 1.0) if dropped == "constants" else None
        whole(self, replace(arguments, **{dropped: ignored}), out)

    monkeypatch.setattr(plain, "__call__", call)
    rows, _ = screen(measurer, pace, MOE)
    assert [row.status for row in rows][-1] == "wrong"
    assert "random options" in rows[-1].detail


def test_launches_read_three_times_the_cache():
    problem = replace(MOE, experts=64, top_k=1)  # 324 KiB of weights, 5 KiB an expert
    device = replace(DEVICE, l2_bytes=32 << 10)
    trial = ExpertsTrial(device, CPU, problem, (1, 64), lambda: None)
    seen = []
    for m in (1, 64):
        launches = trial.launches(lambda arguments, out: seen.append(arguments), "checkpoint", m, "balanced")
        for launch in launches:
            launch()
    one, many = seen[:-2], seen[-2:]
    expert_bytes = problem.weight_bytes / 64
    assert len(one) == -(-3 * (32 << 10) // int(expert_bytes))
    assert len({(a.w13.data_ptr(), int(a.topk_ids)) for a in one}) > len(one) // 2  # hardly any expert twice
    assert len({a.w13.data_ptr() for a in many}) == 2  # all experts, so two copies suffice
    assert sorted(many[1].topk_ids.flatten().tolist()) == list(range(64))
    with pytest.raises(Wrong, match="no experts in layout 'other'"):
        trial.check(None, "other", 1, "balanced")


@BOTH
def test_a_kernel_of_another_layout_gets_its_blobs(measurer, pace, fakes, problem):
    said = []
    request = Screen(
        device=DEVICE, problem=problem, entrant=entrant(problem, kernel=fake_of(problem)), ms=MS, all_ms=MS, pace=pace
    )
    assert measurer.screen(request, said.append) == Done()
    rows = [body for body in said if isinstance(body, Row)]
    assert [(row.m, row.routing) for row in rows] == [(m, routing) for m in (1, 33, 2) for routing in ROUTINGS]
    assert all(row.status == "ok" and row.relative_error < 5e-3 for row in rows)


@BOTH
def test_kernels_of_two_layouts_race(measurer, pace, fakes, problem):
    said = []
    entrants = (entrant(problem), entrant(problem, kernel=fake_of(problem)))
    request = Race(device=DEVICE, problem=problem, entrants=entrants, m=8, all_ms=(8,), pace=pace)
    assert measurer.race(request, said.append) == Done()
    rows = [(row.routing, row.kernel, row.status) for row in said if isinstance(row, Row)]
    assert rows == [(routing, one.kernel, "ok") for routing in ROUTINGS for one in entrants]


@BOTH
@pytest.mark.parametrize(
    ("change", "status", "detail"),
    [
        (negate_last, "wrong", "random options: "),
        (scale_all, "wrong", "random options: relative error"),
        (change_weights, "wrong", "changed x or the weights"),
    ],
)
def test_what_is_wrong_with_blobs_is_seen(measurer, pace, fakes, monkeypatch, problem, change, status, detail):
    kernel = fake_of(problem)
    whole = type(kernel).build

    def build(self, *arguments):
        launcher = whole(self, *arguments)

        def launch(*given):
            launcher(*given)
            change(given[:-1], given[-1])

        return launch

    monkeypatch.setattr(type(kernel), "build", build)
    said = []
    one = entrant(problem, kernel=kernel)
    measurer.screen(Screen(device=DEVICE, problem=problem, entrant=one, ms=MS, all_ms=MS, pace=pace), said.append)
    rows = [body for body in said if isinstance(body, Row)]
    assert [row.status for row in rows] == [status] and detail in rows[0].detail


@BOTH
def test_copies_in_a_layout_are_those_of_the_checkpoint(problem):
    weights = ExpertWeights(DEVICE, CPU, problem)
    for layout in (FRAGMENT, "checkpoint"):
        copies = weights.copies(layout)
        assert len(copies) >= 2 and copies is weights.copies(layout)
        for copy in copies:
            assert copy[0].layout == (first_layout(layout, problem) if problem.op == "moe" else layout)
            for i, w in enumerate(copy):
                weight, scale, factor = weights.plain[3 * i : 3 * i + 3]
                again = replace(w, data=copies[0][i].data, scale=copies[0][i].scale)
                assert torch.equal(w.data, again.data) and w.data.data_ptr() % 16 == 0
                got, got_scale, got_factor = w.to_checkpoint()
                assert torch.equal(got_factor, factor) and got.shape == weight.shape
                same = (scale > 0) & (scale < 0x80)
                assert torch.equal(got_scale.view(torch.uint8)[same], scale[same])
        assert weights.unchanged(layout)
        copies[-1][0].data.view(-1)[-1] ^= 1
        assert not weights.unchanged(layout)


def test_large_experts_have_one_copy_in_one_layout_at_a_time():
    small = replace(DEVICE, memory_bytes=3 * MOE.weight_bytes, l2_bytes=1 << 10)
    weights = ExpertWeights(small, CPU, MOE)
    assert len(weights.copies(FRAGMENT)) == 1
    checkpoint = weights.copies("checkpoint")
    assert len(checkpoint) == 1 and checkpoint[0][0].data.data_ptr() == weights.plain[0].data_ptr()
    weights.copies(FRAGMENT)
    assert list(weights._sets) == [FRAGMENT]


def test_tuning_of_two_layouts_marks_one(tmp_path, pace, fakes):
    plans = tune([MOE, GROUPED], (24,), device="cpu", store_path=tmp_path / "t.db", pace=pace, quick=True).plans
    for problem in (MOE, GROUPED):
        by_layout = {one.layout: one.intervals[0].kernel for one in plans[problem].layouts}
        assert by_layout == {"checkpoint": kernel_of(problem).name, FRAGMENT: fake_of(problem).name}
        assert plans[problem].layout in by_layout
        assert choose_layout(describe("cpu"), problem, plans[problem]) == plans[problem].layout
        with Store.open(tmp_path / "t.db", readonly=True) as store:
            installed = {kernel.name: kernel for kernel in registry.kernels(problem.op)}
            report = layout_report(store, describe("cpu"), problem, installed)
        assert {one.layout for one in report.layouts} == set(by_layout)
        assert all(one.traffic_us is not None for one in report.layouts)
        assert report.marked == report.would_mark == plans[problem].layout == report.layouts[0].layout
        assert [{one.layout: one.kernel for one in row.layouts} for row in report.rows] == [by_layout]


def measured(problem, m, routing, us, protocol="screen"):
    return Measurement(
        device=DEVICE, environment=Environment(nvfp4="0", torch="0", timing=TIMING), problem=problem, kernel="cpu_moe",
        config="{}", layout="checkpoint", implementation="i", m=m, status="ok", protocol=protocol, routing=routing,
        p50_us=us,
    )  # fmt: skip


def test_an_m_without_all_its_routings_is_still_to_be_measured():
    known, one = Known({"cpu_moe": "i"}), Entrant(kernel="cpu_moe", config="{}")
    for routing, us in (("balanced", 1.0), ("random", 8.0)):
        known.add(measured(MOE, 4, routing, us))
    assert known.screens == {} and known.best_us() == {}
    known.add(measured(MOE, 4, "skewed", 27.0))
    assert known.screens[one][4].p50_us == pytest.approx(6.0)
    assert known.best_us() == {4: pytest.approx(6.0)}


def test_screens_are_ranked_by_the_worst_case_regret():
    known, times = Known({"cpu_moe": "i"}), {"a": (10.0, 10.0, 15.0), "b": (13.0, 13.0, 10.0), "c": (20.0, 20.0, 20.0)}
    for config, own in times.items():
        for routing, us in zip(ROUTINGS, own, strict=True):
            known.add(msgspec.structs.replace(measured(MOE, 4, routing, us), config=config))
    known.add(msgspec.structs.replace(measured(MOE, 4, "random", 1.0), config="d"))  # not all of its routings
    entrants = [Entrant(kernel="cpu_moe", config=config) for config in "abcd"]
    assert [entrant.config for entrant in known.ranked(entrants, 4)] == ["b", "a", "c"]


def test_tuning_leaves_plans_and_the_next_run_measures_nothing(tmp_path, pace, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = {"device": "cpu", "store_path": tmp_path / "t.db", "pace": pace, "quick": True}
    first = tune([MOE, GROUPED], (24,), **arguments)
    assert first.exit_code == 0 and first.failures == {}
    with Store.open(tmp_path / "t.db", readonly=True) as store:
        for problem in (MOE, GROUPED):
            (interval,) = first.plans[problem].intervals()
            assert (interval.kernel, interval.m_hi) == (kernel_of(problem).name, None)
            assert store.load_plan(describe("cpu"), problem).id == first.plans[problem].id
            rows = store.measurements(describe("cpu"), problem)
            assert {row.kernel for row in rows} == {interval.kernel}
            assert {(row.protocol, row.routing) for row in rows} == {
                (protocol, routing) for protocol in ("screen", "final") for routing in ROUTINGS
            }
    assert tune([MOE, GROUPED], (24,), **arguments).measured == 0


def test_memory_that_experts_need_counts_two_copies_of_all():
    assert least_bytes(MOE, (1, 8)) > 2 * MOE.weight_bytes
    assert least_bytes(replace(MOE, experts=400), (1, 8)) > 100 * MOE.weight_bytes
