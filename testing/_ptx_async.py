"""Copies that arrive later, and barriers: a part of `_ptx_warp.Warp`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ._ptx_order import Barrier
from ._ptx_values import LANES, Array

if TYPE_CHECKING:
    from .ptx import Block

__all__ = ["POISON", "Asynchronous", "names"]

POISON = 0xFF  # bytes of shared memory that nobody has written: NaNs
PIECE = 16  # bytes of an asynchronous copy
BARRIER_BYTES = 8


class Asynchronous:
    """What the copies and barriers of a warp need of it, and what they do."""

    block: Block
    number: int
    clock: Array  # which threads of the cluster its lanes are
    live: Array
    _get: Callable[..., Array]
    _put: Callable[..., None]
    _address: Callable[[str, int], Array]
    _shared: Callable[..., Array]
    _copy_tensor: Callable[[tuple[str, ...], Array], None]
    _spare_wgmmas: Callable[[Array], None]
    registers: dict[str, Array]

    def __init__(self) -> None:
        self.cluster_parity = 0
        self.met: int | None = None  # the parity of the hardware barrier that it has arrived at and waits for
        # Loads from shared memory that may not have returned: targets, and what they read.
        self.loads: list[tuple[str, Array]] = []
        # What it waits for, with the parity of its phase, to try an instruction again.
        self.waits_for: tuple[Barrier, int] | None = None
        # Groups of (where, bytes, threads); the last one is open.
        self.copies: list[list[tuple[Array, Array, Array]]] = [[]]

    def _words(self, operand: str) -> Array:
        """[registers of the operand, lane]"""
        return np.concatenate([self._get(name) for name in names(operand)]).reshape(-1, LANES)

    def _loads(self, where: Array, targets: str, threads: Array) -> None:
        self.block.order.read(threads, where)
        self.loads.append((targets, where))

    def _returned(self, operand: str) -> None:
        """Who uses what a load brings waits for it, and so for those before it."""
        for i, (targets, _) in enumerate(self.loads):
            if operand in names(targets):
                del self.loads[: i + 1]
                return

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
                (self._copy_tensor if kinds[2] == "tensor" else self._copy_bulk)(ops, run)
                return
            where = self._shared(ops[0], PIECE, run)
            size = self._get(ops[3])[run] if len(ops) > 3 else np.full(len(where), PIECE)
            assert np.isin(size, (0, PIECE)).all()
            read = size > 0
            values = np.zeros(where.shape, np.uint8)
            values[read] = self.block.memory.data[self.block.memory.where(self._address(ops[1], 64)[run][read], PIECE)]
            self._spare_wgmmas(where)
            order.write(self.clock[run], where, under_way=True)
            self.block.smem[where] = POISON
            self.copies[-1].append((where, values, self.clock[run]))

    def _arrive_later(self, ops: tuple[str, ...], run: Array) -> None:
        """All copies of these lanes, then their arrivals, in the order in which the warp asked for them."""
        assert (run == self.live).all(), "lanes of a warp that arrive for their copies one by one"
        order, copies, self.copies = self.block.order, self.copies.pop(), [*self.copies, []]
        barrier = self._mbarrier_at(ops[0], run)
        times = order.now.diagonal().copy()
        known = order.release(self.clock[run])

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
        assert start % PIECE == 0 and self.block.owns(start, start + size), "outside of shared memory"
        where = start + np.arange(size)[None]
        for targets, loaded in (load for warp in self.block.warps for load in warp.in_use):
            overtaken = ((loaded >= start) & (loaded < start + size)).any()
            assert not overtaken, f"the load of {targets} may be on its way, and what it reads is overwritten"
        values = self.block.memory.data[self.block.memory.where(source + pieces, PIECE)].reshape(1, size)
        barrier = self._mbarrier_at(ops[3], run)
        order.write(self.clock[run], where, under_way=True, generic=False)
        self.block.smem[where] = POISON
        times = order.now[self.clock[run], self.clock[run]]
        known = order.release(self.clock[run])

        def land() -> None:
            self.block.smem[where] = values
            order.landed(where, times)
            barrier.arrive(known, announced=-size)

        self.block.under_way.append((-1, land))

    def _mbarrier(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        if not run.any():
            return
        order, threads = self.block.order, self.clock[run]
        if kinds[0] == "init":
            where = self._shared(ops[0], BARRIER_BYTES, run)
            order.write(threads, where)
            for (start, *_), arrivals in zip(where, self._get(ops[1])[run], strict=True):
                self.block.cluster.barriers[int(start)] = Barrier(int(arrivals), len(order.now))
            return
        at = ops[1] if kinds[0] == "arrive" else ops[0 if len(ops) == 2 else 1]
        barrier = self._mbarrier_at(at, run)
        if kinds[0] == "arrive":
            announced = int(self._get(ops[2])[run].sum()) if kinds[1] == "expect_tx" else 0
            barrier.arrive(order.release(threads), count=len(threads), announced=announced)
        else:
            assert kinds[0] in ("test_wait", "try_wait") and kinds[1] == "parity"
            (parity,) = set(self._get(ops[2])[run].tolist())
            if barrier.passed(parity):
                order.acquire(threads, barrier.known)
                self._put(ops[0], np.ones(LANES, bool), run)
            else:
                self.waits_for = barrier, parity

    def _mbarrier_at(self, operand: str, run: Array) -> Barrier:
        """The one that all these lanes mean."""
        where = self._shared(operand, BARRIER_BYTES, run)
        (start,) = set(where[:, 0].tolist())
        return self._mbarrier_of(start, self.clock[run])

    def _mbarrier_of(self, start: int, threads: Array) -> Barrier:
        barriers = self.block.cluster.barriers
        assert start in barriers, "a barrier that nobody has initialised"
        self.block.order.read(threads, np.broadcast_to(start + np.arange(BARRIER_BYTES), (len(threads), BARRIER_BYTES)))
        return barriers[start]

    def _store_async(self, ops: tuple[str, ...], run: Array) -> None:
        """Into any block of the cluster; these bytes complete on a barrier there."""
        if not run.any():
            return
        order, cluster, threads = self.block.order, self.block.cluster, self.clock[run]
        values = np.stack([self._get(part)[run] for part in names(ops[1])], 1).view(np.uint8)
        where = self._shared(ops[0], values.shape[1], run, of_cluster=True)
        starts = self._shared(ops[2], BARRIER_BYTES, run, of_cluster=True)[:, 0]
        order.write(threads, where, under_way=True)
        times, known = order.now[threads, threads], order.release(threads)
        for start in np.unique(starts):
            self._send(int(start), starts == start, where, values, times, known)
        assert (starts // cluster.stride == where[:, 0] // cluster.stride).all(), "a barrier of another block"

    def _send(self, start: int, lanes: Array, where: Array, values: Array, times: Array, known: Array) -> None:
        barrier = self._mbarrier_of(start, self.clock[:1])
        target = self.block.cluster.blocks[start // self.block.cluster.stride]
        assert not target.done, "the block that this is for has ended"

        def land() -> None:
            target.smem[where[lanes]] = values[lanes]
            target.order.landed(where[lanes], times[lanes])
            barrier.arrive(known, announced=-values[lanes].size)

        target.under_way.append((-1, land))

    def _mapa(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        cluster = self.block.cluster
        rank = self._get(ops[2])
        assert (rank[run] < len(cluster.blocks)).all(), "no such block in the cluster"
        self._put(ops[0], (self._get(ops[1]) % cluster.stride + rank * cluster.stride).astype(np.uint32), run)

    def _barrier(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        """Of the cluster. The fence that must come before a relaxed arrival is taken to be there."""
        assert kinds[0] == "cluster" and (run == self.live).all()
        barrier, order = self.block.cluster.barrier, self.block.order
        if kinds[1] == "arrive":
            barrier.arrive(order.release(self.clock[run]), count=1)
        elif barrier.passed(self.cluster_parity):
            order.acquire(self.clock[run], barrier.known)
            self.cluster_parity ^= 1
        else:
            self.waits_for = barrier, self.cluster_parity

    def _bar(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        """Of a warp, or one of the hardware's with the number of threads that meet there."""
        order = self.block.order
        assert (run == self.live).all(), "a barrier that some lanes do not reach"
        if kinds == ["warp", "sync"]:
            order.meet(self.clock[run])
            return
        number, threads = (int(self._get(operand)[run][0]) for operand in ops)
        barrier = self.block.named.setdefault(number, Barrier(threads // LANES, len(order.now)))
        if self.met is None:
            self.met = barrier.phase % 2
            barrier.arrive(order.release(self.clock[run]), count=1)
        if kinds == ["arrive"]:
            self.met = None
        elif barrier.passed(self.met):
            order.acquire(self.clock[run], barrier.known)
            self.met = None
        else:
            self.waits_for = barrier, self.met

    def _elect(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert (run == self.live).all()
        self._put(ops[0].partition("|")[2], np.arange(LANES) == np.flatnonzero(run)[0], run)


@cache
def names(operand: str) -> tuple[str, ...]:
    """Of the registers in "{%r1, %r2}", or of the only one."""
    return tuple(part.strip() for part in operand.strip("{}").split(","))
