"""Which candidate serves which M."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4.dispatch.segments import decide
from nvfp4.errors import Unsupported
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import YES, Problem, Verdict

PROBLEM = Problem(n=32, k=64)


def table_of(decision):
    return [(s.m_lo, s.m_hi, s.kernel.name, s.config.tile) for s in decision.segments]


def choose(plan=None, layout="checkpoint", broken=None):
    return decide(describe("cpu"), PROBLEM, layout, plan, broken)


def test_plan_is_taken_as_it_is(install, fake, set_plan):
    install(fake("a"), fake("b"))
    rows = [(1, 4, "a", 16), (5, 64, "b", 32), (65, None, "a", 64)]
    decision = choose(set_plan(PROBLEM, checkpoint=rows))
    assert table_of(decision) == rows
    assert decision.tuned and not decision.ignored


def test_untuned_runs_the_kernel_made_for_the_narrowest_range(install, fake):
    install(
        fake("general"),
        fake("one", made_for=((1, 1),)),
        fake("small", made_for=((1, 64),)),
        fake("large", made_for=((256, None),)),
    )
    decision = choose()
    assert [(lo, hi, name) for lo, hi, name, _ in table_of(decision)] == [
        (1, 1, "one"),
        (2, 64, "small"),
        (65, 255, "general"),
        (256, None, "large"),
    ]
    assert not decision.tuned


def test_ties_go_by_name(install, fake):
    install(fake("b"), fake("a"))
    assert {name for *_, name, _ in table_of(choose())} == {"a"}


def test_default_configs_change_at_anchors_and_m_is_rounded_up(install, fake):
    """M = 40 runs what suits 48, as in a plan: tiles for 32 tokens would take two turns."""
    install(fake("a", default_tile=lambda m: 16 if m < 48 else 64))
    assert table_of(choose()) == [(1, 32, "a", 16), (33, None, "a", 64)]


def test_no_range_contains_m_takes_the_nearest(install, fake):
    install(fake("far", made_for=((1024, None),)), fake("near", made_for=((64, 128),)))
    decision = choose()
    assert table_of(decision)[0][2] == "near"
    assert table_of(decision)[-1][2] == "far"


def test_kernel_that_refuses_large_m_gives_way(install, fake):
    install(fake("a", m_max=100), fake("b", made_for=((4096, None),)))
    assert [(lo, hi, name) for lo, hi, name, _ in table_of(choose())] == [(1, 96, "a"), (97, None, "b")]


@pytest.mark.parametrize(
    ("kernel", "config", "reason"),
    [
        ("gone", '{"tile":16}', "not installed"),
        ("a", '{"tile":999}', "no config"),
        ("a", '{"tile":"16"}', "no config"),
        ("a", "{", "no config"),
        ("small", '{"tile":16}', "refuses M = 64"),
        ("other_layout", '{"tile":16}', "reads weight layout"),
        ("refusing", '{"tile":16}', "needs a moon"),
    ],
)
def test_foreign_entries_are_replaced_by_defaults(install, fake, set_plan, kernel, config, reason):
    install(
        fake("a"),
        fake("small", m_max=63, made_for=((4096, None),)),
        fake("other_layout", layout="mirrored"),
        fake("refusing", refuses="needs a moon"),
    )
    plan = set_plan(PROBLEM, checkpoint=[(1, 8, "a", 64), (9, 64, kernel, config), (65, None, "a", 32)])
    decision = choose(plan)
    assert table_of(decision) == [(1, 8, "a", 64), (9, 64, "a", 16), (65, None, "a", 32)]
    assert len(decision.ignored) == 1 and reason in decision.ignored[0]


def test_an_entry_that_goes_on_for_ever_must_be_valid_far_beyond_its_beginning(install, fake, set_plan):
    install(fake("a"), fake("small", m_max=1024, made_for=((4096, None),)))
    decision = choose(set_plan(PROBLEM, checkpoint=[(1, None, "small", 64)]))
    assert {name for *_, name, _ in table_of(decision)} == {"a"}
    assert "refuses M = 1536: takes at most 1024" in decision.ignored[0]


def test_an_entry_must_be_valid_inside_its_range_too(install, fake, set_plan):
    holed = fake("holed", made_for=((4096, None),))
    holed.is_valid = lambda device, problem, config, m: Verdict.no("not 30 to 40") if 30 <= m <= 40 else YES
    install(fake("a"), holed)
    rows = [(1, 64, "holed", 64), (65, None, "holed", 32)]
    decision = choose(set_plan(PROBLEM, checkpoint=rows))
    assert table_of(decision) == [(1, 64, "a", 16), (65, None, "holed", 32)]
    assert "refuses M = 32: not 30 to 40" in decision.ignored[0]


def test_a_default_that_goes_on_for_ever_must_be_valid_far_beyond_its_beginning(install, fake):
    install(fake("a"), fake("small", m_max=100_000, made_for=((4096, None),)))
    assert table_of(choose()) == [(1, 4095, "a", 16), (4096, 8192, "small", 16), (8193, None, "a", 16)]


@pytest.mark.parametrize("bounds", [[(1, 8), (5, None)], [(1, None), (5, None)], [(1, 0), (1, None)], [(0, None)]])
def test_intervals_that_overlap_are_not_used(install, fake, set_plan, bounds):
    install(fake("a"))
    decision = choose(set_plan(PROBLEM, checkpoint=[(lo, hi, "a", 64) for lo, hi in bounds]))
    assert table_of(decision) == [(1, None, "a", 16)]
    assert decision.ignored == ("its intervals overlap",)


@pytest.mark.parametrize(
    ("bounds", "table"),
    [
        ([(2, None)], [(1, 1, "a", 16), (2, None, "a", 64)]),
        ([(1, 4), (6, None)], [(1, 4, "a", 64), (5, 5, "a", 16), (6, None, "a", 64)]),
        ([(3, 9)], [(1, 2, "a", 16), (3, 9, "a", 64), (10, None, "a", 16)]),
    ],
    ids=str,
)
def test_gaps_between_intervals_run_defaults(install, fake, set_plan, bounds, table):
    install(fake("a"))
    decision = choose(set_plan(PROBLEM, checkpoint=[(lo, hi, "a", 64) for lo, hi in bounds]))
    assert table_of(decision) == table
    assert decision.tuned and not decision.ignored


def test_layout_without_measurements_runs_defaults(install, fake, set_plan):
    install(fake("a"), fake("m", layout="mirrored"))
    plan = set_plan(PROBLEM, checkpoint=[(1, None, "a", 64)])
    decision = choose(plan, layout="mirrored")
    assert table_of(decision) == [(1, None, "m", 16)] and not decision.tuned


def test_unsupported_lists_every_reason(install, fake):
    install(fake("a", refuses="needs sm_90"), fake("b", layout="mirrored"), fake("c", m_max=0), fake("d"))
    with pytest.raises(Unsupported) as error:
        choose(broken={"d": "cannot be built: no compiler"})
    for text in ("a: needs sm_90", "b: reads weight layout 'mirrored'", "c: takes at most 0", "d: cannot be built"):
        assert text in str(error.value)


RANGES = st.lists(st.tuples(st.integers(1, 300), st.none() | st.integers(0, 300)), min_size=1, max_size=3).map(
    lambda pairs: tuple((lo, None if span is None else lo + span) for lo, span in pairs)
)


@settings(max_examples=40, deadline=None)
@given(ranges=st.lists(RANGES, min_size=1, max_size=4))
def test_segments_always_cover_every_m_once(fake, ranges):
    kernels = {f"k{i}": fake(f"k{i}", made_for=made_for) for i, made_for in enumerate(ranges)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_all", lambda: kernels)
        segments = choose().segments
    assert segments[0].m_lo == 1 and segments[-1].m_hi is None
    assert all(a.m_hi + 1 == b.m_lo for a, b in itertools.pairwise(segments))
    for m in (1, 2, 7, 64, 100, 255, 256, 300, 5000):  # the winner's range is the narrowest around m
        winner = next(s.kernel for s in segments if s.m_lo <= m and (s.m_hi is None or m <= s.m_hi))
        widths = {
            name: min(((hi or 1 << 31) - lo for lo, hi in kernel.made_for if lo <= m <= (hi or 1 << 31)), default=None)
            for name, kernel in kernels.items()
        }
        inside = [width for width in widths.values() if width is not None]
        if inside:
            assert widths[winner.name] == min(inside)
