"""Which rows or columns of a weight one rank of tensor parallelism has; which experts one of expert parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...errors import InvalidInput, message
from .codec import GROUP

__all__ = ["Shard", "expert_range", "shard_range"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of a linear layer.

    Attributes
    ----------
    how
        "column": rows of the weight (out_features) are divided; "row": columns (in_features), in whole groups of 16.
    unit
        What must not be cut, in features: a head's size, for instance. Columns, and rows with `uneven`, are not cut
        within groups of 16 either, so that the rows of one layer meet the columns of the next.
    uneven
        Let ranks differ by one unit or group instead of raising.
    """

    rank: int
    size: int
    how: Literal["column", "row"]
    unit: int = 1
    uneven: bool = False

    def __post_init__(self) -> None:
        whole = all(type(number) is int for number in (self.rank, self.size, self.unit))
        if not whole or not 0 <= self.rank < self.size or self.unit < 1 or self.how not in ("column", "row"):
            expected = 'whole numbers, 0 <= rank < size, unit of at least 1, "column" or "row"'
            raise InvalidInput(message("wrong Shard", got=self, expected=expected))

    def range(self, n: int, k: int, what: str) -> tuple[slice, slice]:
        """(rows, columns) of an [n, k] weight; raises InvalidInput, which names `what`, when it cannot be divided."""
        whole = math.lcm(self.unit, GROUP)
        if self.how == "row":
            return slice(0, n), shard_range(k, self.rank, self.size, unit=whole, uneven=self.uneven, what=what)
        unit = whole if self.uneven else self.unit
        return shard_range(n, self.rank, self.size, unit=unit, uneven=self.uneven, what=what), slice(0, k)


def shard_range(total: int, rank: int, size: int, *, unit: int = 1, uneven: bool = False, what: str) -> slice:
    """The part of `total` that a rank has, in whole units.

    Raises
    ------
    InvalidInput
        The units cannot be divided evenly (`uneven` allows one more for the first ranks), or there are fewer than
        ranks.
    """
    units, rest = divmod(total, unit)
    if rest or units < size or (units % size and not uneven):
        whole = f"{size} x {unit}" if unit > 1 else f"{size}"
        at_least = f"a multiple of {unit}, at least {whole}" if unit > 1 else f"at least {whole}"
        raise InvalidInput(
            message(
                f"{what} cannot be divided over {size} ranks",
                got=f"{total}, or {total / size:g} a rank",
                expected=at_least if uneven else f"a multiple of {whole}",
                do="use fewer ranks" if rest or units < size else "use fewer ranks, or uneven=True",
            )
        )
    each, more = divmod(units, size)
    start = rank * each + min(rank, more)
    return slice(start * unit, (start + each + (rank < more)) * unit)


def expert_range(experts: int, rank: int, size: int) -> range:
    """The experts of one rank of expert parallelism: consecutive, the first ranks one more where it does not divide.

    Raises
    ------
    InvalidInput
        Fewer experts than ranks, or no such rank.
    """
    if not 0 <= rank < size:
        raise InvalidInput(message("wrong rank", got=f"{rank} of {size}", expected="0 <= rank < size"))
    found = shard_range(experts, rank, size, uneven=True, what="the number of experts")
    return range(found.start, found.stop)
