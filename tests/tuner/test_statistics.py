import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvfp4.tuner.statistics import (
    Timing,
    beats,
    hopeless,
    percentile,
    spread,
    summarise,
    throttled,
)


def timing(p50, p80=None):
    return Timing(p20_us=p50, p50_us=p50, p80_us=p80 or p50, samples=9)


def test_percentiles_interpolate():
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([10.0], 0.2) == 10.0
    assert percentile([0.0, 10.0], 0.8) == pytest.approx(8.0)


def test_a_round_below_nine_tenths_of_the_others_clock_is_dropped():
    clocks = [1980, 1980, 1700, 1965, 1980]
    assert throttled(clocks) == (False, False, True, False, False)
    assert throttled([1000, 1000, 900]) == (False, False, False)
    assert throttled([1000, 1000, 899]) == (False, False, True)
    timed = summarise([10.0, 10.2, 99.0, 10.1, 10.3], clocks)
    assert timed.samples == 4
    assert timed.p50_us == pytest.approx(10.15)
    assert timed.clock_mhz == 1980


def test_a_timing_is_the_median_and_the_percentiles_around_it():
    timed = summarise([7.0, 1.0, 6.0, 2.0, 5.0, 3.0, 4.0, 8.0, 9.0, 10.0, 11.0])
    assert (timed.p20_us, timed.p50_us, timed.p80_us, timed.samples) == (3.0, 6.0, 9.0, 11)


def test_without_clocks_nothing_is_dropped():
    assert throttled([None, None]) == (False, False)
    assert throttled([1500]) == (False,)
    timed = summarise([3.0, 1.0, 2.0])
    assert (timed.p50_us, timed.samples, timed.clock_mhz) == (2.0, 3, None)


@given(st.lists(st.integers(200, 2000) | st.none(), min_size=1, max_size=12))
def test_some_round_is_always_kept(clocks):
    assert not all(throttled(clocks))
    assert summarise([1.0] * len(clocks), clocks).samples >= 1


def test_a_challenger_wins_by_two_percent_outside_the_noise():
    assert beats(timing(98.0), timing(100.0))
    assert not beats(timing(98.5), timing(100.0))
    assert beats(timing(100.0), timing(102.0))
    assert not beats(timing(95.0, p80=101.0), timing(100.0))
    assert not beats(timing(95.0, p80=100.0), timing(100.0))


def test_the_ends_and_every_fourth_m_come_first():
    assert spread([16, 1, 2, 4, 8]) == (1, 16, 2, 4, 8)
    assert spread([1, 2, 4, 8, 16, 32]) == (1, 16, 32, 2, 4, 8)
    assert spread([7]) == (7,)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=25, unique=True))
def test_spread_is_a_permutation(ms):
    assert sorted(spread(ms)) == sorted(ms)
    assert {min(ms), max(ms)} <= set(spread(ms)[: (len(ms) + 3) // 4 + 1])


MS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # probes: 1, 16, 256


def test_between_two_hopeless_neighbours_nothing_is_measured():
    assert hopeless(4, MS, {1: 5.0, 16: 4.0, 256: 1.0})
    assert not hopeless(64, MS, {1: 5.0, 16: 4.0, 256: 1.0})
    assert not hopeless(4, MS, {1: 3.0, 16: 4.0})  # more than 3 times, on both sides
    assert not hopeless(4, MS, {1: 4.0, 16: 3.0})


def test_probes_are_always_measured():
    assert not hopeless(16, MS, {1: 50.0, 256: 50.0})
    assert not hopeless(1, MS, {})
    for count in range(1, 12):
        ms = range(10, 10 * count + 1, 10)
        slow = {1: 50.0, 1000: 50.0}  # from a run with other M
        probes = {m for m in ms if not hopeless(m, ms, slow)}
        assert probes == {*ms[::4], ms[-1]}


def test_the_nearest_measured_neighbour_counts():
    assert not hopeless(4, MS, {1: 9.0, 2: 1.0, 16: 9.0})
    assert hopeless(8, MS, {1: 1.0, 4: 9.0, 16: 9.0})


@given(st.dictionaries(st.sampled_from(MS), st.floats(1.0, 10.0)), st.sampled_from(MS), st.floats(1.0, 5.0))
def test_what_is_hopeless_stays_so_when_others_get_faster(slowdown, m, factor):
    if hopeless(m, MS, slowdown):
        assert hopeless(m, MS, {known: ratio * factor for known, ratio in slowdown.items()})
