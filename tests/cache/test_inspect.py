"""The database as records: what `nvfp4 inspect` shows."""

import msgspec
import pytest
from nvfp4.cache.inspect import Limits, ProblemReport, Summary, report, roofline_us, summary
from nvfp4.cache.plan import make_plan
from nvfp4.cache.store import Store
from nvfp4.cache.why import Why, why
from nvfp4.kernels.problem import Problem


@pytest.fixture
def kernels(fake):
    return {
        "a": fake.Kernel("a"),
        "b": fake.Kernel("b", max_m=64),
        "packed": fake.Kernel("packed", layout="fragment1-bf16"),
        "atomic": fake.Kernel("atomic", deterministic=False),
        "new": fake.Kernel("new", supported=False),
    }


@pytest.fixture
def store(db, fake, kernels):
    """One problem, tuned at M = 1 and 128."""
    m, bf16 = fake.measurement, fake.baseline
    rows = [
        m(bf16, 1, 20.0, protocol="final"),
        m(bf16, 1, 18.0, protocol="burst"),
        m(bf16, 128, 40.0, protocol="screen"),
        m(kernels["a"], 1, 8.0, p20_us=7.5, p80_us=8.5, protocol="final"),
        m(kernels["a"], 128, 25.0),
        m(kernels["a"], 1, 6.0, tile=32),
        m(kernels["a"], 1, 16.0, tile=64, num_warps=8),
        m(kernels["a"], 1, status="wrong", tile=64, relative_error=0.25),
        m(kernels["b"], 1, 5.0, protocol="final"),
        m(kernels["b"], 1, status="timeout", tile=32, detail="no answer in 10 s"),
        m(kernels["b"], 128, 1.0),
        m(kernels["b"], 1, 1.0, implementation="0123456789abcdef", tile=64),
        m(kernels["packed"], 1, 2.0),
        m(kernels["packed"], 128, 20.0),
        m("gone", 1, 1.0),
    ]
    plan = make_plan(fake.device, fake.problem, rows, kernels=kernels, environment=fake.environment)
    with Store.open(db) as store:
        store.add(rows)
        store.save_plan(plan)
        yield store


def test_summary_of_a_tuned_problem(store, fake, kernels):
    (line,) = summary(store, kernels)
    assert (line.device, line.problem, line.measurements) == (fake.device, fake.problem, 15)
    assert line.layout == "fragment1-bf16"
    assert [(entry.m_lo, entry.m_hi, entry.kernel) for entry in line.intervals] == [(1, None, "packed")]
    assert line.failures == {"timeout": 1, "wrong": 1}
    assert line.retired == 2
    assert line.over_bf16 == {1: 10.0, 128: 2.0}
    assert any(change.startswith("driver 580.1 -> ") for change in line.changed)


def test_summary_of_a_problem_that_was_only_measured(store, fake, kernels):
    other = Problem(n=16, k=16)
    store.add([fake.measurement(kernels["a"], 1, status="oom", problem=other)])
    line = next(line for line in summary(store, kernels) if line.problem == other)
    assert (line.layout, line.intervals, line.over_bf16, line.changed) == ("", (), {}, ())
    assert line.failures == {"oom": 1}


def test_summary_of_an_empty_database(db, kernels):
    with Store.open(db) as store:
        assert summary(store, kernels) == ()


def test_report_of_a_problem(store, fake, kernels):
    found = report(store, fake.device, fake.problem, kernels)
    assert found.plan == store.load_plan(fake.device, fake.problem)
    assert found.plan_id == found.plan.id
    assert [(at.layout, at.m, at.kernel) for at in found.anchors] == [
        ("fragment1-bf16", 1, "packed"),
        ("fragment1-bf16", 128, "packed"),
        ("checkpoint", 1, "b"),
        ("checkpoint", 128, "a"),
    ]
    at = found.anchors[2]
    assert (at.p50_us, at.protocol) == (5.0, "final")
    assert at.runner_up == f"a {fake.Tile().to_json()}"
    assert at.margin == pytest.approx(0.6)
    assert (at.bf16_us, at.over_bf16) == (20.0, 4.0)
    assert (at.roofline_us, at.of_roofline) == (None, None)
    # Without a final of the baseline its screen is what there is.
    assert (found.anchors[3].bf16_us, found.anchors[3].over_bf16) == (40.0, 1.6)


def test_the_default_is_the_kernel_made_for_the_narrowest_range(store, fake, kernels):
    """Of the layout that is taken untuned: on this GPU the fragment layout, if there are kernels for it."""
    kernels["a"].made_for = ((1, 16),)
    kernels["packed"].made_for = ((1, 1024),)
    kernels["b"].made_for = ((2, 4),)
    found = report(store, fake.device, fake.problem, kernels)
    ratios = {(at.layout, at.m): (at.default_us, at.over_default) for at in found.anchors}
    assert ratios["checkpoint", 1] == (2.0, 0.4)
    assert ratios["fragment1-bf16", 128] == (20.0, 1.0)
    del kernels["packed"]
    (at, _) = report(store, fake.device, fake.problem, kernels).anchors
    assert (at.m, at.default_us, at.over_default) == (1, 8.0, 1.6)


def test_roofline():
    limits = Limits(copy_bytes_per_s=4e12, matrix_flops_per_s=8e14)
    problem = Problem(n=4096, k=8192)
    weight_bytes = 4096 * 8192 // 2 + 4096 * 8192 // 16
    assert roofline_us(problem, 1, limits) == pytest.approx((weight_bytes + 2 * (4096 + 8192)) / 4e6)
    assert roofline_us(problem, 8192, limits) == pytest.approx(2 * 8192 * 4096 * 8192 / 8e8)
    assert roofline_us(Problem(op="moe", n=64, k=64, experts=8, top_k=2, activation="swiglu"), 1, limits) is None


def test_report_counts_against_the_roofline(store, fake, kernels):
    limits = Limits(copy_bytes_per_s=4e12, matrix_flops_per_s=8e14)
    at = report(store, fake.device, fake.problem, kernels, limits=limits).anchors[0]
    assert at.of_roofline == pytest.approx(roofline_us(fake.problem, 1, limits) / 2.0)


def test_everything_is_json(store, fake, kernels):
    for record, kind in (
        (summary(store, kernels), tuple[Summary, ...]),
        (report(store, fake.device, fake.problem, kernels), ProblemReport),
        (why(store, fake.device, fake.problem, kernels, "a"), Why),
    ):
        assert msgspec.json.decode(msgspec.json.encode(record), type=kind) == record


def fate(store, fake, kernels, kernel, **config):
    found = why(store, fake.device, fake.problem, kernels, kernel, fake.Tile(**config).to_json())
    assert found.reason == ""
    (only,) = found.candidates
    return only


def test_why_a_candidate_lost(store, fake, kernels):
    found = fate(store, fake, kernels, "a")
    assert found.outcome == "won"
    lost, won = found.at
    assert (lost.m, lost.outcome, lost.best_us) == (1, "lost", 5.0)
    assert lost.slower == pytest.approx(0.6)
    assert lost.reason == "8.00 µs against 5.00 µs of b num_warps=4 tile=16"
    assert (won.m, won.outcome) == (128, "won")


def test_why_a_slow_candidate_lost_in_digits_that_can_be_read(tmp_path, fake, kernels):
    with Store.open(tmp_path / "slow.db") as store:
        store.add([fake.measurement(kernels["a"], 8192, 11090.4), fake.measurement(kernels["b"], 1, 1.0)])
        store.add([fake.measurement(kernels["a"], 8192, 10250.0, tile=32)])
        lost = fate(store, fake, kernels, "a").at[0]
    assert lost.reason == "11,090 µs against 10,250 µs of a num_warps=4 tile=32"


def test_the_row_added_last_is_the_newest_whatever_the_clock_said(tmp_path, fake, kernels):
    before, after = (fake.measurement(kernels["a"], 1, us, when=when) for us, when in ((5.0, 2.0), (7.0, 1.0)))
    bf16 = [fake.measurement(fake.baseline, 1, us, when=when) for us, when in ((50.0, 2.0), (70.0, 1.0))]
    with Store.open(tmp_path / "clock.db") as store:
        store.add([before, after, *bf16])
        assert fate(store, fake, kernels, "a").at[0].p50_us == 7.0
        (at,) = report(store, fake.device, fake.problem, kernels).anchors
    assert (at.p50_us, at.bf16_us) == (7.0, 70.0)


def test_why_a_screened_candidate_lost(store, fake, kernels):
    found = fate(store, fake, kernels, "a", tile=32)
    assert found.outcome == "lost"
    assert found.at[0].outcome == "screened out"
    assert "only screened" in found.reason


def test_why_a_wrong_candidate_is_out(store, fake, kernels):
    found = fate(store, fake, kernels, "a", tile=64)
    assert (found.outcome, found.reason) == ("distrusted", "wrong at M = 1: relative error 0.25")


def test_why_a_candidate_failed_is_not_valid_or_has_changed(store, fake, kernels):
    failed = fate(store, fake, kernels, "b", tile=32)
    assert (failed.outcome, failed.reason) == ("failed", "no answer in 10 s")
    limited = fate(store, fake, kernels, "b")
    assert [(at.m, at.outcome, at.reason) for at in limited.at] == [
        (1, "won", ""),
        (128, "not valid", "M must be 1 to 64"),
    ]
    assert fate(store, fake, kernels, "b", tile=64).outcome == "retired"


def test_why_of_configs_that_were_never_measured_or_do_not_exist(store, fake, kernels):
    assert fate(store, fake, kernels, "a", tile=16, num_warps=8).outcome == "never measured"
    assert fate(store, fake, kernels, "a", tile=17).outcome == "not in the space"


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [("new", "newer card"), ("gone", "no kernel of that name"), ("bf16_matmul", "baseline")],
)
def test_why_a_whole_kernel_is_out(store, fake, kernels, kernel, reason):
    found = why(store, fake.device, fake.problem, kernels, kernel)
    assert reason in found.reason
    assert found.candidates == ()


def test_why_of_a_kernel_lists_its_candidates_winners_first(store, fake, kernels):
    found = why(store, fake.device, fake.problem, kernels, "a")
    assert [entry.outcome for entry in found.candidates] == ["won", "lost", "lost", "distrusted"]
    assert "only if asked" in why(store, fake.device, fake.problem, kernels, "atomic").reason
