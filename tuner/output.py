"""The output that candidates write into: NaN before each check, between rows that must not change."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GUARD_ROWS", "Output"]

GUARD_ROWS = 16  # before and after the output
POISON = 0x7FA5  # a NaN of bfloat16 and of float16, and no value a kernel writes


class Output:
    """Makes outputs in one buffer that grows; base of what a problem is measured on."""

    def __init__(self, place: torch.device, columns: int, dtype: torch.dtype) -> None:
        self.place, self.columns, self.dtype = place, columns, dtype
        self._buffer: Tensor | None = None

    def out(self, m: int, *, poison: bool = True) -> Tensor:
        """The output [m, columns] between guard rows, all of it NaN when `poison`."""
        if self._buffer is None or self._buffer.shape[0] < m + 2 * GUARD_ROWS:
            self._buffer = None
            self._buffer = torch.empty(m + 2 * GUARD_ROWS, self.columns, dtype=self.dtype, device=self.place)
        if poison:
            self._buffer[: m + 2 * GUARD_ROWS].view(torch.int16).fill_(POISON)
        return self._buffer[GUARD_ROWS : GUARD_ROWS + m]

    def guards_intact(self, m: int) -> bool:
        """Whether nothing was written just before and after the output of the last poisoned `out(m)`."""
        assert self._buffer is not None
        bits = self._buffer.view(torch.int16)
        after = bits[GUARD_ROWS + m : 2 * GUARD_ROWS + m]
        return bool(((bits[:GUARD_ROWS] == POISON) & (after == POISON)).all())
