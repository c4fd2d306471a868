"""Copies that arrive later, and barriers: a part of `_ptx_warp.Warp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._ptx_order import Barrier

if TYPE_CHECKING:
    from .ptx import Block

__all__ = ["LANES", "POISON", "Asynchronous"]

Array = NDArray[Any]

LANES = 32
POISON = 0xFF  # bytes of shared memory that nobody has written: NaNs
PIECE = 16  # bytes of an asynchronous copy
BARRIER_BYTES = 8


class Asynchronous:
    """What the copies and barriers of a warp need of it, and what they do."""

    block: Block
    number: int
    thread: Array  # of its lanes
    live: Array
    at: Array
    _get: Callable[..., Array]
    _put: Callable[..., None]
    _address: Callable[[str, int], Array]
    _shared: Callable[[str, int, Array], Array]

    def __init__(self) -> None:
        self.waits_for: tuple[Barrier, int] | None = None  # and the parity of its phase
        # Groups of (where, bytes, threads); the last one is open.
        self.copies: list[list[tuple[Array, Array, Array]]] = [[]]

    def _cp(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        """Bytes of the source are taken at once and arrive as late as they may; until then there are NaNs."""
        order = self.block.order
        if kinds[1] == "commit_group":
            self.copies.append([])
        elif kinds[1] == "wait_group":
            while len(self.copies) - 1 > int(ops[0]):
                for where, values, threads in self.copies.pop(0):
                    self.block.smem[where] = values
                    order.landed(where, order.now[threads, threads])
        elif kinds[1] == "mbarrier":
            self._arrive_later(ops, run)
        elif run.any():
            if kinds[1] == "bulk":
                self._copy_bulk(ops, run)
                return
            where = self._shared(ops[0], PIECE, run)
            size = self._get(ops[3])[run] if len(ops) > 3 else np.full(len(where), PIECE)
            assert np.isin(size, (0, PIECE)).all()
            read = size > 0
            values = np.zeros(where.shape, np.uint8)
            values[read] = self.block.memory.data[self.block.memory.where(self._address(ops[1], 64)[run][read], PIECE)]
            order.write(self.thread[run], where, under_way=True)
            self.block.smem[where] = POISON
            self.copies[-1].append((where, values, self.thread[run]))

    def _arrive_later(self, ops: tuple[str, ...], run: Array) -> None:
        """All copies of these lanes, then their arrivals, in the order in which the warp asked for them."""
        assert (run == self.live).all(), "lanes of a warp that arrive for their copies one by one"
        order, copies, self.copies = self.block.order, self.copies.pop(), [*self.copies, []]
        barrier = self._barrier(ops[0], run)
        times = order.now.diagonal().copy()
        known = order.release(self.thread[run])

        def land() -> None:
            for where, values, threads in copies:
                self.block.smem[where] = values
                order.landed(where, times[threads])
            barrier.arrive(known, count=int(run.sum()))

        self.block.under_way.append((self.number, land))

    def _copy_bulk(self, ops: tuple[str, ...], run: Array) -> None:
        order, size = self.block.order, int(self._get(ops[2])[run][0])
        assert run.sum() == 1 and size % PIECE == 0
        start, source = int(self._address(ops[0], 32)[run][0]), int(self._address(ops[1], 64)[run][0])
        pieces = np.arange(0, size, PIECE)
        assert start % PIECE == 0 and 0 <= start <= len(self.block.smem) - size, "outside of shared memory"
        where = start + np.arange(size)[None]
        values = self.block.memory.data[self.block.memory.where(source + pieces, PIECE)].reshape(1, size)
        barrier = self._barrier(ops[3], run)
        order.write(self.thread[run], where, under_way=True)
        self.block.smem[where] = POISON
        times = order.now[self.thread[run], self.thread[run]]
        known = order.release(self.thread[run])

        def land() -> None:
            self.block.smem[where] = values
            order.landed(where, times)
            barrier.arrive(known, announced=-size)

        self.block.under_way.append((-1, land))

    def _mbarrier(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        if not run.any():
            return
        order, threads = self.block.order, self.thread[run]
        if kinds[0] == "init":
            where = self._shared(ops[0], BARRIER_BYTES, run)
            order.write(threads, where)
            for (start, *_), arrivals in zip(where, self._get(ops[1])[run], strict=True):
                self.block.barriers[int(start)] = Barrier(int(arrivals), len(order.now))
            return
        at = ops[1] if kinds[0] == "arrive" else ops[0 if len(ops) == 2 else 1]
        barrier = self._barrier(at, run)
        if kinds[0] == "arrive":
            announced = int(self._get(ops[2])[run].sum()) if kinds[1] == "expect_tx" else 0
            barrier.arrive(order.release(threads), count=len(threads), announced=announced)
        else:
            assert kinds[0] in ("test_wait", "try_wait") and kinds[1] == "parity"
            (parity,) = set(self._get(ops[2])[run].tolist())
            if barrier.passed(parity):
                order.acquire(threads, barrier.known)
                self._put(ops[0], np.ones(LANES, bool), run)
            else:  # it is tried again when it is
                self.waits_for = barrier, parity
                self.at[run] -= 1

    def _barrier(self, operand: str, run: Array) -> Barrier:
        """The one that all these lanes mean."""
        where = self._shared(operand, BARRIER_BYTES, run)
        (start,) = set(where[:, 0].tolist())
        assert start in self.block.barriers, "a barrier that nobody has initialised"
        self.block.order.read(self.thread[run], where)
        return self.block.barriers[start]

    def _bar(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert kinds == ["warp", "sync"] and (run == self.live).all(), "a barrier that some lanes do not reach"
        self.block.order.meet(self.thread[run])

    def _elect(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert (run == self.live).all()
        self._put(ops[0].partition("|")[2], np.arange(LANES) == np.flatnonzero(run)[0], run)
