"""What the plan chooses, and what it never chooses."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4.cache.evidence import behind, gather
from nvfp4.cache.plan import DEFAULT_ADVANTAGE, GAP, TRAFFIC, make_plan
from nvfp4.errors import InvalidInput
from nvfp4.kernels.problem import Device, Problem
from nvfp4.kernels.untuned import ANCHORS


@pytest.fixture
def plan(fake):
    def make(rows, *kernels, **options):
        return make_plan(
            fake.device,
            fake.problem,
            rows,
            kernels={kernel.name: kernel for kernel in kernels},
            environment=fake.environment,
            **options,
        )

    return make


def chosen(plan, layout=None):
    """(m_lo, m_hi, kernel, tile) of every interval."""
    return [
        (entry.m_lo, entry.m_hi, entry.kernel, msgspec.json.decode(entry.config)["tile"])
        for entry in plan.intervals(layout)
    ]


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


def test_a_candidate_serves_only_where_its_kernel_says_it_is_valid(plan, fake):
    decode, prefill = fake.Kernel("decode", max_m=64), fake.Kernel("prefill", min_m=17)
    anywhere = fake.Kernel("anywhere")
    m = fake.measurement
    rows = [m(decode, 16, 1.0), m(anywhere, 16, 9.0), m(decode, 64, 3.0), m(prefill, 64, 2.0), m(anywhere, 64, 9.0)]
    assert chosen(plan(rows, decode, prefill, anywhere)) == [(1, 16, "decode", 16), (17, None, "prefill", 16)]
    # The winner of the last anchor ends at 64: another goes on from there, if it is not much slower.
    few = [row for row in rows if row.kernel != "prefill"]
    assert chosen(plan(few, decode, anywhere)) == [(1, 64, "decode", 16)]
    assert chosen(plan([*few, m(anywhere, 64, 3.8, when=2.0)], decode, anywhere)) == [
        (1, 64, "decode", 16),
        (65, None, "anywhere", 16),
    ]
    # Prefill cannot serve from 2, where its range would begin.
    late = [m(decode, 1, 1.0), m(prefill, 64, 2.0), m(anywhere, 64, 2.5)]
    assert chosen(plan(late, decode, prefill, anywhere)) == [
        (1, 1, "decode", 16),
        (2, 16, "anywhere", 16),
        (17, None, "prefill", 16),
    ]
    # Rows that claim a time where the kernel is not valid do not count.
    assert plan([m(decode, 128, 1.0)], decode) is None
    # No candidate for M above 64: they run untuned.
    assert chosen(plan([m(decode, 1, 1.0), m(decode, 64, 1.0)], decode)) == [(1, 64, "decode", 16)]


def test_a_gap_between_two_anchors_does_not_cost_the_layout_its_plan(plan, fake):
    """A short tuning at few M: nothing that was measured in the faster layout serves M from 65 to 1000."""
    decode = fake.Kernel("decode", layout="fragment1-bf16", max_m=64)
    prefill = fake.Kernel("prefill", layout="fragment1-bf16", min_m=1001)
    anywhere = fake.Kernel("anywhere")
    m = fake.measurement
    rows = [m(anywhere, at, 10.0 * at) for at in (1, 64, 4096)]
    rows += [m(decode, 1, 1.0), m(decode, 64, 64.0), m(prefill, 4096, 4096.0)]
    found = plan(rows, decode, prefill, anywhere)
    assert found.layout == "fragment1-bf16"
    # The range of 4096 begins behind the first of the usual anchors from which prefill can serve.
    assert chosen(found) == [(1, 64, "decode", 16), (1025, None, "prefill", 16)]
    assert chosen(found, "checkpoint") == [(1, None, "anywhere", 16)]


def test_a_default_that_lacked_memory_at_one_m_leaves_gaps_elsewhere(plan, fake):
    """Failures of other kinds end the trust in defaults at every M."""
    tall, small = fake.Kernel("tall", min_m=193), fake.Kernel("small")
    rows = [fake.measurement(small, 64, 110.0), fake.measurement(tall, 512, 151.0), fake.measurement(small, 512, 241.0)]
    gap, none = [(1, 64, "small", 16), (193, None, "tall", 16)], [(1, 192, "small", 16), (193, None, "tall", 16)]
    for m, status, expected in ((8192, "oom", gap), (96, "oom", none), (8192, "crash", none)):
        assert (
            chosen(
                plan(
                    [*rows, fake.measurement(fake.Kernel("other"), m, status=status)], tall, small, fake.Kernel("other")
                )
            )
            == expected
        )


def test_the_best_of_an_anchor_serves_it_however_few_of_its_range_it_can(plan, fake):
    """Experts of Qwen3-30B-A3B tuned at 64 and 512: tiles suit some M; one suits all, at 1.6 times the time."""
    tall, middle = fake.Kernel("tall", min_m=193), fake.Kernel("middle", min_m=129)
    small, decode = fake.Kernel("small"), fake.Kernel("decode", max_m=64)
    m = fake.measurement
    rows = [m(decode, 64, 97.0), m(small, 64, 110.0), m(small, 512, 241.0), m(middle, 512, 175.0), m(tall, 512, 151.0)]
    assert chosen(plan(rows, tall, middle, small, decode)) == [
        (1, 64, "decode", 16),
        (129, 192, "middle", 16),  # 65 to 128 run untuned
        (193, None, "tall", 16),
    ]
    # A default was wrong here once: nothing runs untuned that need not.
    rows.append(m(fake.Kernel("broken"), 1, status="wrong"))
    assert chosen(plan(rows, tall, middle, small, decode, fake.Kernel("broken"))) == [
        (1, 64, "decode", 16),
        (65, 128, "small", 16),
        (129, 192, "middle", 16),
        (193, None, "tall", 16),
    ]


def test_of_two_that_are_near_the_one_that_serves_more_is_taken(plan, fake):
    first, wide = fake.Kernel("first", min_m=100), fake.Kernel("wide", default_tile=32)
    rows = [fake.measurement(first, 512, 100.0), fake.measurement(wide, 512, 101.9)]
    assert chosen(plan(rows, first, wide)) == [(1, 512, "wide", 16), (513, None, "first", 16)]
    rows = [fake.measurement(first, 512, 100.0), fake.measurement(wide, 512, 102.1)]
    assert chosen(plan(rows, first, wide)) == [(1, 128, "wide", 16), (129, None, "first", 16)]


def test_the_default_and_the_wider_one_together_cost_no_more_than_two_percent(plan, fake):
    first, default = fake.Kernel("first", min_m=64, default_tile=32), fake.Kernel("default", min_m=64)
    wide = fake.Kernel("wide", default_tile=32)
    rows = [fake.measurement(first, 64, 100.0), fake.measurement(default, 64, 101.9), fake.measurement(wide, 64, 103.8)]
    assert chosen(plan(rows, first, default, wide)) == [(1, 63, "wide", 16), (64, None, "default", 16)]


def test_a_screen_takes_nothing_from_a_final_also_where_a_default_failed(plan, fake):
    best, wide, broken = fake.Kernel("best", min_m=33), fake.Kernel("wide", default_tile=32), fake.Kernel("broken")
    m = fake.measurement
    rows = [m(best, 64, 10.0, protocol="final"), m(wide, 64, 9.5), m(broken, 1, status="wrong")]
    assert chosen(plan(rows, best, wide, broken)) == [(1, 32, "wide", 16), (33, None, "best", 16)]


def test_where_a_default_failed_what_was_measured_runs_wherever_it_can(plan, fake):
    small, large = fake.Kernel("small", max_m=256, default_tile=32), fake.Kernel("large", min_m=513)
    m = fake.measurement
    rows = [m(small, 4, 1.0), m(large, 4096, 9.0), m(small, 48, status="oom")]
    assert chosen(plan(rows, small, large)) == [(1, 4, "small", 16), (513, None, "large", 16)]
    broken = fake.Kernel("broken")
    rows.append(m(broken, 1, status="wrong"))
    assert chosen(plan(rows, small, large, broken)) == [
        (1, 32, "small", 16),
        (49, 256, "small", 16),  # it failed at 48, and cannot run 257
        (513, None, "large", 16),
    ]


def test_a_gap_can_come_first_and_the_same_candidate_on_both_sides_of_one_stays_two_intervals(plan, fake):
    late = fake.Kernel("late", min_m=40)
    assert chosen(plan([fake.measurement(late, 64, 1.0)], late)) == [(49, None, "late", 16)]
    holed = fake.Kernel("holed", hole=17)
    rows = [fake.measurement(holed, m, float(m)) for m in (16, 64)]
    assert chosen(plan(rows, holed)) == [(1, 16, "holed", 16), (25, None, "holed", 16)]


def test_a_candidate_serves_no_range_with_an_anchor_inside_that_it_cannot_run(plan, fake):
    holed, solid = fake.Kernel("holed", hole=64), fake.Kernel("solid")
    # At 64 nothing was timed that could serve below, so 128 decides 1..63 too.
    rows = [
        fake.measurement(fake.Kernel("late", min_m=64), 64, 1.0),
        fake.measurement(holed, 128, 1.0),
        fake.measurement(solid, 128, 2.0),
    ]
    found = plan(rows, holed, solid, fake.Kernel("late", min_m=64))
    assert chosen(found) == [(1, 63, "holed", 16), (64, 64, "late", 16), (65, None, "holed", 16)]


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


limits = st.fixed_dictionaries(
    {
        "min_m": st.sampled_from([1, 1, 2, 17, 33, 64, 100]),
        "max_m": st.sampled_from([2**30, 2**30, 16, 64, 512]),
        "hole": st.sampled_from([0, 0, 17, 63, 64]),
        "default_tile": st.sampled_from([16, 32]),
    }
)
rows_of_kernels = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from([1, 2, 16, 20, 64, 96, 512]),
        st.sampled_from(["screen", "final"]),
        st.sampled_from([100.0, 101.9, 103.5, 110.0, 125.0, 131.0, 200.0, 100.0, 103.5, "oom", "wrong"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(limits=st.tuples(limits, limits, limits, limits), measured=rows_of_kernels)
def test_anchors_run_their_best_and_gaps_are_where_nothing_can_run(limits, measured, fake):
    kernels = {name: fake.Kernel(name, **one) for name, one in zip("abcd", limits, strict=True)}
    rows = [
        fake.measurement(
            kernels[name], m, protocol=protocol, **({"status": got} if isinstance(got, str) else {"p50_us": got})
        )
        for name, m, protocol, got in measured
    ]
    found = make_plan(fake.device, fake.problem, rows, kernels=kernels, environment=fake.environment)
    evidence = gather(fake.device, fake.problem, rows, kernels)
    anchors = evidence.anchors("checkpoint")
    by_m = {m: evidence.times["checkpoint", m] for m in anchors}
    intervals = found.intervals() if found else ()

    def at(m):
        return next((one for one in intervals if one.m_lo <= m <= (one.m_hi or m)), None)

    for m in anchors:
        own = {timed.candidate.kernel: timed for timed in by_m[m]}[at(m).kernel]
        assert own.protocol == by_m[m][0].protocol and behind(by_m[m][0], own) <= DEFAULT_ADVANTAGE
    failed_defaults = evidence.failed_defaults("checkpoint")
    ends = sorted({m for m in (*ANCHORS, *anchors) if m <= max(anchors, default=0)})
    for low, high in zip([1, *(end + 1 for end in ends)], ends, strict=False):
        if any(at(m) for m in range(low, high + 1)):
            continue
        below = max((m for m in anchors if m < low), default=0)
        anyhow = any(below < failed <= min(m for m in anchors if m >= high) for failed in failed_defaults)
        for m, ranked in by_m.items():
            for timed in ranked:
                near = m >= high and timed.protocol == ranked[0].protocol and behind(ranked[0], timed) <= GAP
                able = all(evidence.is_valid(timed.candidate, end) for end in (low, high))
                failed = any(low <= at <= high for at in evidence.failures.get(timed.candidate, ()))
                assert failed or not able or not (near or anyhow)
