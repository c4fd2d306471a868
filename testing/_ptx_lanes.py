"""What lanes of a warp tell each other, and bits of words: a part of `_ptx_warp.Warp`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ._ptx_values import LANES, Array

__all__ = ["Lanes"]

LANE = np.arange(LANES)


class Lanes:
    """Shuffles, votes, matches; counting and finding bits. All live lanes of a warp take part, with a full mask."""

    live: Array
    registers: dict[str, Array]
    _get: Callable[..., Array]
    _put: Callable[..., None]

    def _shfl(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        target, _, valid = ops[0].partition("|")
        assert (run == self.live).all() and kinds[1] in ("idx", "up", "bfly")
        by = self._get(ops[2]).astype(np.int64) & 31
        source = by if kinds[1] == "idx" else LANE ^ by if kinds[1] == "bfly" else LANE - by
        inside = source >= 0
        source = np.where(inside, source, LANE)
        assert self.live[source[run]].all(), "a lane that has returned is asked for its value"
        self._put(target, self._get(ops[1])[source], run)
        if valid:
            self._put(valid, inside, run)

    def _vote(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert kinds[0] == "sync" and (run == self.live).all()
        said = self.registers[ops[1]] & run
        if kinds[1] == "ballot":
            self._put(ops[0], np.full(32, (said.astype(np.uint64) << LANE.astype(np.uint64)).sum(), np.uint32), run)
        else:
            assert kinds[1] in ("all", "any")
            self._put(ops[0], np.full(32, said[run].all() if kinds[1] == "all" else said.any()), run)

    def _match(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert kinds == ["any", "sync", "b32"] and (run == self.live).all()
        values = self._get(ops[1])
        same = (values[:, None] == values) & run
        self._put(ops[0], (same.astype(np.uint64) << LANE.astype(np.uint64)).sum(1).astype(np.uint32), run)

    def _popc(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        self._put(ops[0], self._bits_of(ops[1]).sum(1).astype(np.uint32), run)

    def _brev(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        bits = self._bits_of(ops[1])[:, ::-1].astype(np.uint64)
        self._put(ops[0], (bits << LANE.astype(np.uint64)).sum(1).astype(np.uint32), run)

    def _bfind(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        """How far the highest bit is from the top; all ones without any bit."""
        assert kinds == ["shiftamt", "u32"]
        bits = self._bits_of(ops[1])[:, ::-1]
        self._put(ops[0], np.where(bits.any(1), bits.argmax(1), 0xFFFFFFFF).astype(np.uint32), run)

    def _clz(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        bits = self._bits_of(ops[1])[:, ::-1]
        self._put(ops[0], np.where(bits.any(1), bits.argmax(1), 32).astype(np.uint32), run)

    def _bits_of(self, operand: str) -> Array:
        """[lane, bit], the lowest first."""
        return np.asarray(self._get(operand)[:, None] >> LANE.astype(np.uint32) & 1)
