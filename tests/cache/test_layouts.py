"""The choice of a layout as records: the plan's own figures, at every M and on average."""

import msgspec
import pytest
from nvfp4.cache.layouts import LayoutReport, layout_report
from nvfp4.cache.plan import make_plan
from nvfp4.cache.store import Store

FRAGMENT = "fragment1-bf16"


@pytest.fixture
def kernels(fake):
    return {
        "a": fake.Kernel("a"),
        "packed": fake.Kernel("packed", layout=FRAGMENT),
        "small": fake.Kernel("small", layout="small", max_m=8),
    }


@pytest.fixture
def compared(db, fake, kernels):
    """compared(rows, **options of make_plan): the report, with the plan that the rows support when `plan` is true."""

    def compare(rows, *, plan=True, installed=kernels, **options) -> LayoutReport:
        with Store.open(db) as store:
            store.add(rows)
            if plan:
                made = make_plan(
                    fake.device, fake.problem, rows, kernels=kernels, environment=fake.environment, **options
                )
                assert made is not None
                store.save_plan(made)
            return layout_report(store, fake.device, fake.problem, installed)

    return compare


def times(report, layout):
    """(M, time, where it was measured, what it costs) of one layout."""
    cells = [(row.m, cell) for row in report.rows for cell in row.layouts if cell.layout == layout]
    return [(m, cell.p50_us, cell.measured_at, cell.costs) for m, cell in cells]


def sums(report):
    return [(one.layout, one.traffic_us, one.planned_us, one.costs, one.reason) for one in report.layouts]


def test_every_layout_at_every_m_and_the_mean_of_the_traffic(compared, fake, kernels):
    m, a, packed = fake.measurement, kernels["a"], kernels["packed"]
    found = compared([m(a, 1, 10.0), m(a, 64, 30.0), m(packed, 1, 8.0), m(packed, 64, 20.0)])
    assert (found.marked, found.would_mark, found.traffic) == (FRAGMENT, FRAGMENT, "decode-heavy")
    assert times(found, FRAGMENT) == [(1, 8.0, 1, None), (64, 20.0, 64, None)]
    assert times(found, "checkpoint") == [(1, 10.0, 1, 0.25), (64, 30.0, 64, 0.5)]
    # Half of the calls have M up to 8, 0.4 up to 64, and there are no others: (0.5 * 8 + 0.4 * 20) / 0.9.
    (first, mean, planned, costs, _), (second, other, other_planned, other_costs, _) = sums(found)
    assert (first, second, costs) == (FRAGMENT, "checkpoint", None)
    assert mean == planned == pytest.approx(12 / 0.9) and other == other_planned == pytest.approx(17 / 0.9)
    assert other_costs == pytest.approx(17 / 12 - 1)
    assert not found.stale and not found.gone and found.superseded == 0


def test_the_traffic_is_the_plan_s(compared, fake, kernels):
    m, a, packed = fake.measurement, kernels["a"], kernels["packed"]
    rows = [m(a, 1, 10.0), m(a, 1024, 100.0), m(packed, 1, 9.0), m(packed, 1024, 120.0)]
    found = compared(rows, traffic="uniform")
    assert (found.traffic, found.marked) == ("uniform", "checkpoint")
    assert sums(found)[0][1] == pytest.approx(55.0) and sums(found)[1][1] == pytest.approx(64.5)
    assert [cost for *_, cost in times(found, FRAGMENT)] == pytest.approx([-0.1, 0.2])


def test_the_checkpoint_layout_is_marked_within_3_percent(compared, fake, kernels):
    m = fake.measurement
    found = compared([m(kernels["a"], 1, 10.3), m(kernels["packed"], 1, 10.0)])
    assert (found.marked, found.would_mark) == ("checkpoint", "checkpoint")
    assert sums(found)[1][3] == pytest.approx(10 / 10.3 - 1)


def test_a_layout_is_served_by_the_anchor_above(compared, fake, kernels):
    m, a, packed = fake.measurement, kernels["a"], kernels["packed"]
    found = compared([m(a, 64, 30.0), m(packed, 1, 8.0), m(packed, 64, 20.0)])
    assert times(found, "checkpoint") == [(1, 30.0, 64, 2.75), (64, 30.0, 64, 0.5)]


def test_a_layout_that_was_not_measured_so_far_up_says_so(compared, fake, kernels):
    m, a, packed = fake.measurement, kernels["a"], kernels["packed"]
    found = compared([m(a, 1, 2.0), m(packed, 1, 8.0), m(packed, 64, 20.0)])
    assert times(found, "checkpoint") == [(1, 2.0, 1, -0.75), (64, None, None, None)]
    assert found.rows[1].layouts[1].reason == "not measured"
    assert sums(found)[1] == ("checkpoint", None, None, None, "not measured at the largest M")
    assert found.marked == FRAGMENT


def test_a_layout_whose_candidates_end_below_the_largest_m_says_so(compared, fake, kernels):
    m = fake.measurement
    found = compared([m(kernels["a"], 1, 2.0), m(kernels["a"], 64, 5.0), m(kernels["small"], 1, 1.0)])
    assert times(found, "small") == [(1, 1.0, 1, -0.5), (64, None, None, None)]
    assert found.rows[1].layouts[1].reason == "not measured"
    assert sums(found)[1] == ("small", None, None, None, "not measured at the largest M")


def test_a_gap_of_a_layout_runs_untuned_and_counts_as_what_comes_next(compared, fake, kernels):
    m, a = fake.measurement, kernels["a"]
    early, late = fake.Kernel("early", layout=FRAGMENT, max_m=16), fake.Kernel("late", layout=FRAGMENT, min_m=65)
    kernels |= {"early": early, "late": late}
    rows = [m(a, at, us) for at, us in ((16, 30.0), (64, 40.0), (96, 50.0))]
    found = compared([*rows, m(early, 16, 10.0), m(late, 96, 20.0)])
    assert found.marked == FRAGMENT
    assert times(found, FRAGMENT) == [(16, 10.0, 16, None), (64, 20.0, 96, None), (96, 20.0, 96, None)]
    cells = [row.layouts[0] for row in found.rows]
    assert [(cell.kernel, cell.reason) for cell in cells] == [("early", ""), ("", "untuned"), ("late", "")]
    assert sums(found)[0][1] == pytest.approx((0.4 * 15 + 0.08 * 20) / 0.48)


def test_rows_of_another_implementation_explain_the_plan_and_are_named(compared, fake, kernels):
    m, a, packed = fake.measurement, kernels["a"], kernels["packed"]
    old = {"implementation": "0123456789abcdef"}
    rows = [m(a, 1, 10.0), m(packed, 1, 8.0, **old), m(packed, 1, status="timeout", tile=32, **old)]
    found = compared(rows, implementation_by_kernel={"a": rows[0].implementation, "packed": "0123456789abcdef"})
    assert found.marked == FRAGMENT and found.stale == {"packed": 2}
    assert times(found, FRAGMENT) == [(1, 8.0, 1, None)]
    assert [cell.stale for cell in found.rows[0].layouts] == [True, False]


def test_once_measured_again_earlier_implementations_are_left_out(compared, fake, kernels):
    m, a, packed = fake.measurement, kernels["a"], kernels["packed"]
    old = m(packed, 1, 8.0, implementation="0123456789abcdef")
    assert compared([m(a, 1, 10.0), old, m(packed, 1, 12.0)], plan=False).superseded == 1
    found = compared([], plan=False)
    assert (found.stale, found.plan_id, found.marked, found.would_mark) == ({}, "", "", "checkpoint")
    assert times(found, FRAGMENT) == [(1, 12.0, 1, pytest.approx(0.2))]


def test_a_plan_that_the_measurements_do_not_support_any_more(compared, fake, kernels):
    m, a, packed = fake.measurement, kernels["a"], kernels["packed"]
    compared([m(a, 1, 10.0), m(packed, 1, 8.0)])
    found = compared([m(packed, 1, status="wrong")], plan=False)
    assert (found.marked, found.would_mark) == (FRAGMENT, "checkpoint")
    assert sums(found)[0] == (FRAGMENT, None, 8.0, None, "no measurement of it counts")


def test_a_kernel_that_is_not_installed(compared, fake, kernels):
    m, a, packed = fake.measurement, kernels["a"], kernels["packed"]
    found = compared([m(a, 1, 10.0), m(packed, 1, 8.0), m(fake.baseline, 1, 9.0)], installed={"a": a})
    assert (found.marked, found.would_mark, found.gone) == (FRAGMENT, "checkpoint", {"packed": 1})
    assert times(found, FRAGMENT) == [(1, None, None, None)]


def test_kernels_that_differ_from_run_to_run_count_if_the_plan_has_them(compared, fake, kernels):
    kernels["atomic"] = atomic = fake.Kernel("atomic", layout=FRAGMENT, deterministic=False)
    rows = [fake.measurement(kernels["a"], 1, 10.0), fake.measurement(atomic, 1, 5.0)]
    assert [one.layout for one in compared(rows, plan=False).layouts] == ["checkpoint"]
    assert compared(rows, allow_nondeterministic=True).would_mark == FRAGMENT


def test_it_is_json(compared, fake, kernels):
    found = compared([fake.measurement(kernels["a"], 1, 10.0)])
    assert msgspec.json.decode(msgspec.json.encode(found), type=LayoutReport) == found
