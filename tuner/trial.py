"""What a candidate is put through on one problem, whatever the op: its results are checked and its launches made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.kernel import Kernel, Launcher
from .outcome import Step, Wrong
from .output import Output
from .timing import Launch

__all__ = ["Trial", "gate_ms"]

SMALL_ROWS = 160  # up to this M every element is compared


def gate_ms(ms: Sequence[int], valid: Callable[[int], bool]) -> tuple[int, ...]:
    """Where numerics are checked: the smallest M, and one short of the largest small M, so that a tile has a tail."""
    small = [m for m in ms if m <= SMALL_ROWS]
    if not small:
        return (min(ms),)
    ragged = max(small) - 1
    return tuple(sorted({min(small), ragged if ragged >= 1 and valid(ragged) else max(small)}))


class Trial(ABC):
    """Made once per problem, released by `close`.

    Parameters
    ----------
    sync
        Waits for the device; raises what went wrong there.
    """

    routings: tuple[str, ...]  # with which it is timed

    def __init__(self, output: Output, sync: Callable[[], None]) -> None:
        self._output, self._sync = output, sync

    @abstractmethod
    def gate(self, kernel: Kernel, launcher: Launcher, ms: Sequence[int], step: Step) -> None:
        """Check everything that a call may have, element by element. Raises Wrong."""

    @abstractmethod
    def check(self, launcher: Launcher, layout: str, m: int, routing: str) -> float:
        """Run what will be timed once; its relative error. Raises Wrong when that is too large."""

    @abstractmethod
    def launches(self, launcher: Launcher, layout: str, m: int, routing: str) -> list[Launch]:
        """At least two calls to be timed in turn, which together read more than the cache holds."""

    @abstractmethod
    def baseline(self, m: int) -> tuple[list[Launch], float]:
        """The same for what users have today, and its relative error."""

    @abstractmethod
    def unchanged(self, layout: str) -> bool:
        """Whether all inputs still hold what was put there."""

    @abstractmethod
    def close(self) -> None:
        """Give all memory back."""

    def require_unchanged(self, layout: str) -> None:
        """Raise Wrong unless `unchanged`."""
        if not self.unchanged(layout):
            raise Wrong("wrong", "it changed x or the weights", tainted=True)

    def _into_poison(self, m: int, call: Callable[[Tensor], None], nan_rows: Sequence[int] = ()) -> Tensor:
        """Run once into a poisoned output and return that. NaN is expected in some rows, and wrong in all others."""
        out = self._output.out(m)
        call(out)
        self._sync()
        if not self._output.guards_intact(m):
            raise Wrong("wrong", f"m={m}: it wrote outside its output", tainted=True)
        nan = torch.isnan(out)
        if nan_rows:
            nan[list(nan_rows)] = False
        if bool(nan.any()):
            first = [int(i) for i in nan.nonzero()[0]]
            raise Wrong("nan", f"m={m}: {int(nan.sum())} NaN or elements never written, the first at {first}")
        return out
