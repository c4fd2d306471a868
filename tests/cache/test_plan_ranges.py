"""Which candidate serves which M of an anchor's range, and where a plan has gaps."""

from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4.cache.evidence import behind, gather
from nvfp4.cache.plan import DEFAULT_ADVANTAGE, GAP, make_plan
from nvfp4.kernels.untuned import ANCHORS

from .intervals import chosen


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
