"""Parts of a size over ranks: whole units, nothing lost, nothing twice."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvfp4.dispatch.checkpoint import Shard, expert_range, shard_range
from nvfp4.errors import InvalidInput

GROUP = 16


# sizes of real models that an even division would cut within a group of 16
@pytest.mark.parametrize(("inter", "size"), [(1856, 8), (2880, 8), (704, 8), (2112, 8), (10944, 8)])
def test_a_group_is_not_cut(inter, size):
    with pytest.raises(InvalidInput, match=rf"layer a cannot be divided over {size} ranks; got {inter}, or"):
        shard_range(inter, 0, size, unit=GROUP, what="layer a")
    ranges = [shard_range(inter, rank, size, unit=GROUP, uneven=True, what="layer a") for rank in range(size)]
    assert [part.start % GROUP for part in ranges] == [0] * size
    assert ranges[0].start == 0 and ranges[-1].stop == inter
    assert all(left.stop == right.start for left, right in itertools.pairwise(ranges))
    # what divides the rows of one layer is what divides the columns of the next
    for rank, part in enumerate(ranges):
        rows = Shard(rank=rank, size=size, how="column", uneven=True).range(inter, 64, "a")[0]
        columns = Shard(rank=rank, size=size, how="row", uneven=True).range(64, inter, "b")[1]
        assert rows == columns == part


@pytest.mark.parametrize("unit", [8, 24, 72, 80, 128])
@pytest.mark.parametrize("uneven", [True, False])
def test_heads_are_not_cut_and_rows_meet_the_columns_of_the_next_layer(unit, uneven):
    size, whole = 3, math.lcm(unit, GROUP)
    total = (7 if uneven else 6) * whole
    for rank, length in enumerate((3, 2, 2) if uneven else (2, 2, 2)):
        rows = Shard(rank=rank, size=size, how="column", unit=unit, uneven=uneven).range(total, 64, "a")[0]
        columns = Shard(rank=rank, size=size, how="row", unit=unit, uneven=uneven).range(64, total, "b")[1]
        assert rows == columns and rows.start % whole == 0 and rows.stop - rows.start == length * whole
    # without uneven, what has no next layer may have odd heads
    assert Shard(rank=1, size=3, how="column", unit=unit).range(3 * unit, 64, "a")[0] == slice(unit, 2 * unit)


@given(units=st.integers(1, 200), unit=st.integers(1, 64), size=st.integers(1, 16))
def test_ranges_follow_each_other_and_differ_by_one_unit(units, unit, size):
    if units < size:
        with pytest.raises(InvalidInput, match="use fewer ranks"):
            shard_range(units * unit, 0, size, unit=unit, uneven=True, what="a")
        return
    ranges = [shard_range(units * unit, rank, size, unit=unit, uneven=True, what="a") for rank in range(size)]
    lengths = [part.stop - part.start for part in ranges]
    assert sum(lengths) == units * unit and max(lengths) - min(lengths) in (0, unit)
    assert all(left.stop == right.start for left, right in itertools.pairwise(ranges))


def test_even_division_is_the_default():
    assert [shard_range(64, rank, 4, unit=16, what="a") for rank in range(4)] == [
        slice(0, 16),
        slice(16, 32),
        slice(32, 48),
        slice(48, 64),
    ]
    with pytest.raises(InvalidInput, match="use fewer ranks, or uneven=True"):
        shard_range(48, 0, 2, unit=16, what="a")
    with pytest.raises(InvalidInput, match=r"expected a multiple of 2 x 16; use fewer ranks$"):
        shard_range(24, 0, 2, unit=16, what="a")


@pytest.mark.parametrize(
    ("total", "unit", "text"),
    [
        (24, 16, "expected a multiple of 16, at least 2 x 16; use fewer ranks$"),
        (16, 16, "got 16, or 8 a rank; expected a multiple of 16, at least 2 x 16"),
        (1, 1, "expected at least 2; use fewer ranks$"),
    ],
)
def test_uneven_division_says_what_it_needs(total, unit, text):
    with pytest.raises(InvalidInput, match=text):
        shard_range(total, 0, 2, unit=unit, uneven=True, what="a")


def test_rows_are_divided_one_by_one_and_one_rank_has_them_all():
    assert [Shard(rank=r, size=3, how="column").range(3, 16, "a") for r in range(3)] == [
        (slice(r, r + 1), slice(0, 16)) for r in range(3)
    ]
    for how in ("column", "row"):
        assert Shard(rank=0, size=1, how=how).range(7, 48, "a") == (slice(0, 7), slice(0, 48))


def test_experts_are_consecutive():
    assert [expert_range(10, rank, 4) for rank in range(4)] == [range(3), range(3, 6), range(6, 8), range(8, 10)]
    with pytest.raises(InvalidInput, match="wrong rank; got 4 of 4"):
        expert_range(10, 4, 4)
    with pytest.raises(InvalidInput, match="number of experts cannot be divided over 4 ranks"):
        expert_range(3, 0, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"rank": 2}, {"rank": -1}, {"size": 0}, {"how": "both"}, {"unit": 0}),
        *({"rank": "0"}, {"rank": 0.0}, {"rank": None}, {"size": 2.0}, {"unit": 1.5}, {"unit": None}),
    ],
)
def test_what_is_no_shard_is_refused(wrong):
    with pytest.raises(InvalidInput, match="wrong Shard"):
        Shard(**{"rank": 0, "size": 2, "how": "row"} | wrong)
