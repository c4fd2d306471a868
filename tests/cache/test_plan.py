"""What the plan chooses, and what it never chooses."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4.cache.plan import DEFAULT_ADVANTAGE, TRAFFIC, make_plan
from nvfp4.errors import InvalidInput
from nvfp4.kernels.problem import Device, Problem

from .intervals import chosen


def serving(plan, m):
    return next(entry for entry in plan.intervals() if entry.m_lo <= m and (entry.m_hi is None or m <= entry.m_hi))


def test_no_measurements_no_plan(plan, fake):
    assert plan([], fake.Kernel("a")) is None
    assert plan([fake.measurement("a", 1, 1.0)]) is None


def test_each_anchor_decides_the_range_below_it_and_the_last_goes_on(plan, fake):
    a, b = fake.Kernel("a"), fake.Kernel("b")
    m = fake.measurement
    rows = [m(a, 1, 1.0), m(b, 1, 2.0), m(a, 64, 3.0), m(b, 64, 2.0), m(a, 128, 9.0), m(b, 128, 3.0)]
    found = plan(rows, a, b)
    assert chosen(found) == [(1, 1, "a", 16), (2, None, "b", 16)]
    first, last = found.intervals()
    assert (first.expected_us, first.runner_up, first.margin) == (1.0, f"b {fake.Tile().to_json()}", 1.0)
    assert (last.expected_us, last.margin) == (3.0, 2.0)


def test_between_two_anchors_the_tuned_entry_above_is_used(plan, fake):
    """M = 100 between 64 and 128."""
    a, b = fake.Kernel("a"), fake.Kernel("b")
    rows = [
        fake.measurement(a, 64, 1.0),
        fake.measurement(b, 64, 2.0),
        fake.measurement(a, 128, 3.0),
        fake.measurement(b, 128, 2.0),
    ]
    found = plan(rows, a, b)
    assert serving(found, 64).kernel == "a"
    assert serving(found, 100).kernel == "b"
    # The tuner measured a crossover at 96: another anchor.
    refined = plan([*rows, fake.measurement(a, 96, 1.5), fake.measurement(b, 96, 1.9)], a, b)
    assert [serving(refined, m).kernel for m in (65, 96, 97, 128)] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("status", ["invalid", "build_error", "launch_error", "crash", "timeout", "oom"])
def test_a_failed_config_is_not_chosen_where_it_failed(plan, fake, status):
    a, b = fake.Kernel("a"), fake.Kernel("b")
    rows = [
        fake.measurement(a, 1, 1.0, when=1.0),
        fake.measurement(b, 1, 2.0),
        fake.measurement(a, 64, 1.0, when=1.0),
        fake.measurement(a, 64, status=status, when=2.0, p50_us=0.5),
        fake.measurement(b, 64, 4.0),
        fake.measurement(a, 128, 1.0),
        fake.measurement(b, 128, 9.0),
    ]
    assert chosen(plan(rows, a, b)) == [(1, 1, "a", 16), (2, 64, "b", 16), (65, None, "a", 16)]
    # Nothing was timed at 64: 128 decides 2..128, and a serves from where it did not fail.
    assert chosen(plan([row for row in rows if row.m != 64 or row.status != "ok"], a, b)) == [
        (1, 1, "a", 16),
        (2, 64, "b", 16),
        (65, None, "a", 16),
    ]
    # The range begins where it failed.
    at_65 = [row for row in rows if row.status == "ok"] + [fake.measurement(a, 65, status=status)]
    assert chosen(plan(at_65, a, b)) == [(1, 64, "a", 16), (65, 96, "b", 16), (97, None, "a", 16)]
    # A newer success at the same M counts again.
    healed = [*rows, fake.measurement(a, 64, 1.0, when=3.0)]
    assert chosen(plan(healed, a, b)) == [(1, None, "a", 16)]


@pytest.mark.parametrize("status", ["wrong", "nan"])
def test_a_candidate_that_was_wrong_once_is_planned_nowhere(plan, fake, status):
    a = fake.Kernel("a")
    rows = [
        fake.measurement(a, 1, 1.0, tile=32, when=9.0),
        fake.measurement(a, 1, 5.0, tile=16),
        fake.measurement(a, 4096, status=status, tile=32, when=1.0),
    ]
    assert chosen(plan(rows, a)) == [(1, None, "a", 16)]
    # Another implementation of it is another candidate.
    other = [*rows[:2], msgspec.structs.replace(rows[2], implementation="0123456789abcdef")]
    assert chosen(plan(other, a)) == [(1, None, "a", 32)]


def test_finals_decide_and_a_screen_cannot_beat_one(plan, fake):
    a, b, c = (fake.Kernel(name) for name in "abc")
    rows = [
        fake.measurement(a, 1, 2.0, protocol="screen"),
        fake.measurement(a, 1, 2.5, protocol="final"),
        fake.measurement(b, 1, 1.9, protocol="screen"),
        fake.measurement(b, 1, 2.6, protocol="final"),
        fake.measurement(c, 1, 1.0, protocol="screen"),
        fake.measurement(c, 1, 0.5, protocol="burst"),
    ]
    (only,) = plan(rows, a, b, c).intervals()
    assert (only.kernel, only.expected_us) == ("a", 2.5)
    assert only.runner_up.startswith("b ")
    assert only.margin == pytest.approx(0.04)


def test_a_default_with_a_screen_alone_is_not_near_a_final(plan, fake):
    a = fake.Kernel("a", default_tile=64)
    rows = [fake.measurement(a, 1, 2.0, tile=16, protocol="final"), fake.measurement(a, 1, 1.9, tile=64)]
    (only,) = plan(rows, a).intervals()
    assert (only.config, only.expected_us, only.runner_up) == (fake.Tile(tile=16).to_json(), 2.0, "")


def test_the_newest_time_of_a_candidate_counts(plan, fake):
    a, b = fake.Kernel("a"), fake.Kernel("b")
    rows = [
        fake.measurement(a, 1, 1.0, when=2.0),
        fake.measurement(a, 1, 3.0, when=1.0),  # added later, by a clock that was set back
        fake.measurement(b, 1, 2.0, when=1.0),
    ]
    assert chosen(plan(rows, a, b)) == [(1, None, "b", 16)]


@pytest.mark.parametrize(("default_us", "tile"), [(1.9, 64), (2.0, 64), (2.039, 64), (2.041, 16)])
def test_a_challenger_must_beat_the_default_by_two_percent(plan, fake, default_us, tile):
    a = fake.Kernel("a", default_tile=64)
    rows = [fake.measurement(a, 1, 2.0, tile=16), fake.measurement(a, 1, default_us, tile=64)]
    assert chosen(plan(rows, a)) == [(1, None, "a", tile)]


def test_the_baseline_is_never_planned(plan, fake):
    rows = [fake.measurement(fake.baseline, 1, 0.1), fake.measurement(fake.Kernel("a"), 1, 5.0)]
    assert chosen(plan(rows, fake.Kernel("a"), fake.Kernel(fake.baseline))) == [(1, None, "a", 16)]


@pytest.mark.parametrize(
    "fields",
    [
        {"num_warps": 64},
        {"tile": 17},
        {"config": '{"tile":16,"num_warps":4,"lies":true}'},
        {"config": '{"a":'},
        {"config": "[]"},
        {"config": "null"},
        {"kernel": "not_installed"},
        {"implementation": "0123456789abcdef"},
        {"layout": "swizzled"},
        {"problem": Problem(n=4096, k=2048, dtype="float16")},
        {"device": Device(kind="cuda", name="Fake 9001", capability=(9, 0))},
    ],
    ids=str,
)
def test_foreign_rows_are_ignored(plan, fake, fields):
    a = fake.Kernel("a")
    good = fake.measurement(a, 1, 5.0)
    assert chosen(plan([fake.measurement(a, 1, 0.001, **fields), good], a)) == [(1, None, "a", 16)]
    assert plan([fake.measurement(a, 1, 0.001, **fields)], a) is None


def test_times_of_another_timing_protocol_are_not_compared(plan, fake):
    a, b = fake.Kernel("a"), fake.Kernel("b")
    other = msgspec.structs.replace(fake.environment, timing="0")
    rows = [fake.measurement(a, 1, 0.1, environment=other), fake.measurement(b, 1, 2.0)]
    assert chosen(plan(rows, a, b)) == [(1, None, "b", 16)]


def test_a_new_driver_does_not_retire_rows(plan, fake):
    a = fake.Kernel("a")
    old = msgspec.structs.replace(fake.environment, driver="1", torch="1")
    assert chosen(plan([fake.measurement(a, 1, 1.0, environment=old)], a)) == [(1, None, "a", 16)]


def test_kernels_that_cannot_or_must_not_run_are_left_out(plan, fake):
    slow = fake.Kernel("slow")
    unsupported = fake.Kernel("unsupported", supported=False)
    atomic = fake.Kernel("atomic", deterministic=False)
    rows = [
        fake.measurement(slow, 1, 9.0),
        fake.measurement(unsupported, 1, 1.0),
        fake.measurement(atomic, 1, 2.0),
    ]
    assert chosen(plan(rows, slow, unsupported, atomic)) == [(1, None, "slow", 16)]
    allowed = plan(rows, slow, unsupported, atomic, allow_nondeterministic=True)
    assert chosen(allowed) == [(1, None, "atomic", 16)]


def layouts_of(fake, checkpoint_us, fragment_us):
    plain, packed = fake.Kernel("plain"), fake.Kernel("packed", layout="fragment1-bf16")
    rows = [fake.measurement(plain, m, us) for m, us in checkpoint_us.items()]
    rows += [fake.measurement(packed, m, us) for m, us in fragment_us.items()]
    return rows, plain, packed


@pytest.mark.parametrize(
    ("fragment_us", "layout"),
    [(98.0, "checkpoint"), (97.2, "checkpoint"), (96.9, "fragment1-bf16"), (150.0, "checkpoint")],
)
def test_the_checkpoint_layout_wins_within_three_percent(plan, fake, fragment_us, layout):
    found = plan(*layouts_of(fake, {1: 100.0}, {1: fragment_us}))
    assert found.layout == layout
    assert {entry.layout for entry in found.layouts} == {"checkpoint", "fragment1-bf16"}
    assert chosen(found, "fragment1-bf16") == [(1, None, "packed", 16)]
    assert chosen(found, "checkpoint") == [(1, None, "plain", 16)]


def test_layouts_are_compared_by_traffic(plan, fake):
    # Decode is twice as fast prepacked, prefill twice as slow.
    rows = layouts_of(fake, {1: 20.0, 4096: 100.0}, {1: 10.0, 4096: 200.0})
    decode = plan(*rows, traffic="decode-heavy")
    assert decode.layout == "fragment1-bf16"
    assert plan(*rows, traffic="uniform").layout == "checkpoint"
    means = {entry.layout: entry.traffic_us for entry in decode.layouts}
    assert means["checkpoint"] == pytest.approx((0.50 * 20 + 0.02 * 100) / 0.52)
    assert means["fragment1-bf16"] == pytest.approx((0.50 * 10 + 0.02 * 200) / 0.52)


def test_a_band_weighs_the_same_however_many_anchors_it_has(plan, fake):
    few = plan(*layouts_of(fake, {1: 20.0, 4096: 100.0}, {}))
    many = plan(*layouts_of(fake, {1: 20.0, 2: 20.0, 4: 20.0, 8: 20.0, 4096: 100.0}, {}))
    assert few.layouts[0].traffic_us == pytest.approx(many.layouts[0].traffic_us)


def test_a_layout_without_a_candidate_in_a_regime_loses(plan, fake):
    found = plan(*layouts_of(fake, {1: 50.0, 4096: 100.0}, {1: 1.0}))
    assert found.layout == "checkpoint"
    assert next(entry.traffic_us for entry in found.layouts if entry.layout == "fragment1-bf16") is None
    # Nothing at M = 1: its time at 4096 is what M = 1 would cost.
    assert plan(*layouts_of(fake, {1: 50.0, 4096: 100.0}, {4096: 90.0})).layout == "checkpoint"


def test_a_crossover_measured_in_one_layout_does_not_exclude_the_other(plan, fake):
    found = plan(*layouts_of(fake, {1: 50.0, 64: 50.0, 96: 50.0, 128: 50.0}, {1: 10.0, 64: 10.0, 128: 10.0}))
    assert found.layout == "fragment1-bf16"


def test_an_unknown_traffic_is_refused(plan, fake):
    with pytest.raises(InvalidInput, match="decode-heavy or uniform"):
        plan([], traffic="rush hour")


def test_traffic_shares_add_up():
    for bands in TRAFFIC.values():
        assert sum(share for _, share in bands) == pytest.approx(1.0)
        assert bands[-1][0] is None


def test_equal_evidence_gives_equal_plans_in_any_order(plan, fake):
    a, b = fake.Kernel("a"), fake.Kernel("b")
    rows = [fake.measurement(kernel, m, 1.0 + m, when=float(m)) for kernel in (a, b) for m in (1, 2, 4)]
    assert plan(rows, a, b).id == plan(rows[::-1], b, a).id


times = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.sampled_from([16, 32]), st.sampled_from([1, 2, 16, 64, 128, 4096])),
    st.one_of(st.floats(0.5, 100.0), st.sampled_from(["crash", "wrong", "timeout"])),
    max_size=20,
)


@settings(max_examples=120, deadline=None)
@given(measured=times, limit=st.sampled_from([1, 16, 100, 2**30]))
def test_intervals_ascend_and_never_hold_a_bad_candidate(measured, limit, fake):
    kernels = {"a": fake.Kernel("a", max_m=limit), "b": fake.Kernel("b"), "c": fake.Kernel("c", min_m=2)}
    rows = [
        fake.measurement(kernels[name], m, tile=tile, **({"status": got} if isinstance(got, str) else {"p50_us": got}))
        for (name, tile, m), got in measured.items()
    ]
    found = make_plan(fake.device, fake.problem, rows, kernels=kernels, environment=fake.environment)
    if found is None:
        return
    least = 1
    for m_lo, m_hi, name, tile in chosen(found):
        assert m_lo >= least
        last = 2**20 if m_hi is None else m_hi
        least = last + 1
        config = fake.Tile(tile=tile)
        assert all(kernels[name].is_valid(None, None, config, m) for m in (m_lo, last))
        for (other, other_tile, m), got in measured.items():
            if (other, other_tile) == (name, tile) and isinstance(got, str):
                assert got != "wrong"
                assert not m_lo <= m <= last
    assert all(entry.margin >= -DEFAULT_ADVANTAGE for entry in found.intervals())  # less than 0 for a default
