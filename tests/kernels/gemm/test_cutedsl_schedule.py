"""The dealing out of work: every k-tile of every tile once, partial sums found by whom they are for, nobody stuck."""

from hypothesis import given
from hypothesis import strategies as st
from nvfp4.kernels.gemm._cutedsl_wgmma import schedule


def pieces(groups, tiles, k_tiles, stream_k):
    """Of every group, in the order of its work: (tile, first k-tile, k-tile behind the last)."""
    found = []
    for group in range(groups):
        waves, _, begin, end, segments = schedule.split(group, groups, tiles, k_tiles, stream_k)
        mine = [(index * groups + group, 0, k_tiles) for index in range(waves)]
        mine += [
            schedule.segment(index, waves, group, groups, begin, end, k_tiles, min, max)
            for index in range(waves, segments)
        ]
        found.append(mine)
    return found


@st.composite
def launches(draw):
    units, multicast = draw(st.sampled_from([1, 3, 8, 132])), draw(st.sampled_from([1, 2]))
    tiles, k_tiles = draw(st.integers(1, 700)), draw(st.integers(1, 90))
    stream_k = draw(st.booleans())
    groups = schedule.grid_groups(units * multicast, draw(st.sampled_from([1, 2])), multicast, tiles, k_tiles, stream_k)
    return groups, tiles, k_tiles, stream_k


@given(launches())
def test_every_k_tile_is_done_once(launch):
    _, tiles, k_tiles, _ = launch
    done = sorted(piece for mine in pieces(*launch) for piece in mine)
    at = (0, 0)
    for tile, first, behind in done:
        assert (tile, first) == at and first < behind <= k_tiles
        at = (tile, behind) if behind < k_tiles else (tile + 1, 0)
    assert at == (tiles, 0)


@given(launches())
def test_owners_find_what_others_publish(launch):
    groups, tiles, k_tiles, stream_k = launch
    work = pieces(*launch)
    publishers = {}
    for group, mine in enumerate(work):
        for tile, _, behind in mine:
            if behind < k_tiles:
                publishers.setdefault(tile, []).append(group)
    gathered = {}
    for group, mine in enumerate(work):
        waves, rest, *_ = schedule.split(group, groups, tiles, k_tiles, stream_k)
        for tile, first, behind in mine:
            if behind == k_tiles and first > 0:
                start = schedule.first_peer(tile, waves, groups, k_tiles, rest)
                gathered[tile] = list(range(start, group))
    assert gathered == publishers


@given(launches())
def test_a_group_publishes_once_and_before_it_waits(launch):
    """So the flags need one slot per group, and groups that start in order never wait for one that cannot run."""
    k_tiles = launch[2]
    for mine in pieces(*launch):
        published = [index for index, (_, _, behind) in enumerate(mine) if behind < k_tiles]
        waits = [index for index, (_, first, behind) in enumerate(mine) if behind == k_tiles and first > 0]
        assert len(published) <= 1 and len(waits) <= 1
        assert not waits or waits == [len(mine) - 1]
        if published and waits:
            assert published < waits


@given(launches())
def test_shares_differ_by_less_than_a_tile_and_a_k_tile(launch):
    *_, k_tiles, stream_k = launch
    shares = [sum(behind - first for _, first, behind in mine) for mine in pieces(*launch)]
    assert max(shares) - min(shares) <= (1 if stream_k else k_tiles)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16))
def test_the_raster_visits_every_tile_once(row_tiles, token_tiles, band):
    band = min(band, token_tiles)
    seen = [schedule.raster(tile, row_tiles, token_tiles, band) for tile in range(row_tiles * token_tiles)]
    assert sorted(seen) == [(row, token) for row in range(row_tiles) for token in range(token_tiles)]


def test_a_band_reads_a_row_tile_for_all_its_token_tiles_in_a_row():
    seen = [schedule.raster(tile, 3, 5, 4) for tile in range(15)]
    assert seen[:8] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert seen[12:] == [(0, 4), (1, 4), (2, 4)]


def test_few_k_tiles_make_few_groups():
    assert schedule.grid_groups(132, 1, 1, 4, 10, True) == 20
    assert schedule.grid_groups(132, 1, 1, 4, 1, True) == 4
    assert schedule.grid_groups(132, 2, 2, 1000, 64, True) == 132
    assert schedule.grid_groups(132, 1, 1, 40, 64, False) == 40
