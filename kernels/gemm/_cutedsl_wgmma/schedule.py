"""Who computes what: pure arithmetic on ints, which the kernel runs on its own integers and tests run on Python's.

A group is a cluster of blocks that share x (one block without multicast); a tile is what a group computes at once. All
groups first take whole tiles, `waves` each. What is left, between one and two tiles per group, is cut into ranges of
k-tiles of equal length (stream-K): a range begins and ends anywhere, and covers parts of one to three tiles.

A group works its range from the back. The last tile of a range, if it ends inside, is published as partial sums, and
done first. The first tile, if it began in an earlier range, belongs to this group, which adds what earlier groups
published and writes the result. So a group only ever waits for groups with lower numbers, which the hardware starts
earlier, and which publish before they wait: whatever number of blocks fits on the device at once, somebody can go on.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["first_peer", "grid_groups", "raster", "segment", "split", "token_tiles"]

# Integers are Python's or CuTe DSL's; the DSL's need its own min and max.
Int = Any
Pick = Callable[[Any, Any], Any]


def token_tiles(m: Int, tokens: int) -> Int:
    """Tiles along M."""
    return (m + tokens - 1) // tokens


def grid_groups(units: int, per_unit: int, multicast: int, tiles: int, k_tiles: int, stream_k: bool) -> int:
    """How many groups to launch: as many as fit at once, and no more than have two k-tiles each."""
    fit = units * per_unit // multicast
    return min(fit, tiles * max(1, k_tiles // 2) if stream_k else tiles)


def split(group: Int, groups: Int, tiles: Int, k_tiles: Int, stream_k: bool, maximum: Pick = max) -> tuple[Int, ...]:
    """(waves, rest, begin, end, segments) of one group.

    waves
        Whole tiles that it takes first: tiles group, group + groups, ...
    rest
        k-tiles that are left over for all groups together, counted from tile waves * groups on.
    begin, end
        Its range of them.
    segments
        How many pieces of work it has.
    """
    if not stream_k:
        waves = (tiles - group + groups - 1) // groups
        return waves, 0, 0, 0, waves
    whole = tiles // groups
    waves = maximum(2 * whole - (tiles + groups - 1) // groups, 0)  # one fewer unless they come out even
    rest = (tiles - waves * groups) * k_tiles
    begin = group * rest // groups
    end = (group + 1) * rest // groups
    # An empty range (rest = 0) begins and ends at 0 and has no segment.
    return waves, rest, begin, end, waves + (end + k_tiles - 1) // k_tiles - begin // k_tiles


def segment(
    index: Int, waves: Int, group: Int, groups: Int, begin: Int, end: Int, k_tiles: Int, lowest: Pick, highest: Pick
) -> tuple[Int, Int, Int]:
    """(tile, first k-tile, k-tile behind the last) of one piece of a group's range, index >= waves."""
    tile = (end - 1) // k_tiles - (index - waves)
    return waves * groups + tile, highest(begin - tile * k_tiles, 0), lowest(end - tile * k_tiles, k_tiles)


def first_peer(tile: Int, waves: Int, groups: Int, k_tiles: Int, rest: Int) -> Int:
    """The first group whose range reaches into the tile: it and those up to the owner publish partial sums of it."""
    start = (tile - waves * groups) * k_tiles
    return ((start + 1) * groups + rest - 1) // rest - 1


def raster(tile: Int, row_tiles: Int, tokens_tiles: Int, together: Int, lowest: Pick = min) -> tuple[Int, Int]:
    """(row tile, token tile) of a tile. Inside a band of `together` token tiles the token tile changes fastest.

    So a row tile's weights are read by all its token tiles at about the same time.
    """
    band = tile // (together * row_tiles)
    inside = tile - band * together * row_tiles
    height = lowest(tokens_tiles - band * together, together)
    row = inside // height
    return row, band * together + inside - row * height
