"""Which accesses to shared memory are ordered, whatever the timing: vector clocks, one per thread of a block.

Threads are ordered by their own code, by barriers of a block or a warp, and by an mbarrier: what a thread did before it
arrived comes before what others do after they have waited. That a warp's lanes run side by side orders nothing.

wgmma reads through the async proxy, bulk copies write through it; all others go through the generic one. What that
wrote wgmma may read when its thread has had the write before it, and then a fence between the two proxies. A fence of
the writer's, which would do as well, is not counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Barrier", "Order"]

Array = NDArray[Any]

WORD = 4  # bytes whose accesses are told apart
UNDER_WAY = np.iinfo(np.int32).max  # the time of a write that nobody has waited for yet


class Order:
    """Clocks of a block's threads, and who used which word of shared memory last; of 0 bytes: nothing is checked."""

    def __init__(self, threads: int, smem_bytes: int) -> None:
        words = -(-smem_bytes // WORD)
        self.now = np.eye(threads, dtype=np.int32)  # [thread, what it knows of the others' time]
        self._read = np.zeros((words, threads), np.int32)  # when each thread read it last
        self._added: Array | None = None  # the same for atomic additions, once there is one
        self._writer = np.zeros(words, np.int32)
        self._written = np.zeros(words, np.int32)
        self._generic = np.zeros(words, bool)  # whether that went through the generic proxy
        self._fenced = np.zeros((threads, threads), np.int32)  # what each knew at its last fence between the proxies

    def meet(self, threads: Array) -> None:
        """They pass a barrier together."""
        self.now[threads] = self.now[threads].max(0, initial=0)
        self.now[threads, threads] += 1

    def release(self, threads: Array) -> Array:
        """What `acquire` makes known: all that they have done so far."""
        known = self.now[threads].max(0)
        self.now[threads, threads] += 1
        return np.asarray(known)

    def acquire(self, threads: Array, known: Array) -> None:
        """They have waited for those who released this."""
        self.now[threads] = np.maximum(self.now[threads], known)

    def read(self, threads: Array, where: Array) -> None:
        """Threads read bytes [threads, bytes]; AssertionError unless the writes before are ordered."""
        if not len(self._written):
            return
        words = where[:, ::WORD] // WORD
        self._after_writes(threads, words, "reads")
        self._after_additions(threads, words, "reads")
        self._read[words, threads[:, None]] = self.now[threads, threads][:, None]

    def fence_proxies(self, threads: Array) -> None:
        """What they know to be written may now be read through the async proxy."""
        self._fenced[threads] = self.now[threads]

    def read_async(self, threads: Array, where: Array) -> None:
        """The same as `read` through the async proxy."""
        self.read(threads, where)
        if not len(self._written):
            return
        words = where[:, ::WORD] // WORD
        late = self._generic[words] & (self._written[words] > self._fenced[threads[:, None], self._writer[words]])
        if late.any():
            lane, word = np.argwhere(late)[0]
            writer, at = self._writer[words[lane, word]], int(words[lane, word]) * WORD
            raise AssertionError(f"no fence between the proxies that thread {writer} wrote and wgmma reads by, at {at}")

    def write(self, threads: Array, where: Array, *, under_way: bool = False, generic: bool = True) -> None:
        """The same for writes, and for reads before them; those under way are done when `landed` says so."""
        if not len(self._written):
            return
        words = where[:, ::WORD] // WORD
        self._after_writes(threads, words, "overwrites")
        self._after_additions(threads, words, "overwrites")
        self._after_reads(threads, words)
        self._writer[words] = threads[:, None]
        self._generic[words] = generic
        self._written[words] = UNDER_WAY if under_way else self.now[threads, threads][:, None]

    def add(self, threads: Array, where: Array) -> None:
        """The same for atomic additions, which no order among themselves needs."""
        if not len(self._written):
            return
        words = where[:, ::WORD] // WORD
        self._after_writes(threads, words, "adds to")
        self._after_reads(threads, words)
        if self._added is None:
            self._added = np.zeros_like(self._read)
        self._added[words, threads[:, None]] = self.now[threads, threads][:, None]

    def landed(self, where: Array, times: Array) -> None:
        """Copies are complete: writes of their threads at these times."""
        if len(self._written):
            self._written[where[:, ::WORD] // WORD] = times[:, None]

    def _after_reads(self, threads: Array, words: Array) -> None:
        self._after(self._read, threads, words, "overwrites", "reading")

    def _after_additions(self, threads: Array, words: Array, verb: str) -> None:
        if self._added is not None:
            self._after(self._added, threads, words, verb, "adding to")

    def _after(self, times: Array, threads: Array, words: Array, verb: str, doing: str) -> None:
        late = times[words] > self.now[threads][:, None]
        if late.any():
            lane, word, other = np.argwhere(late)[0]
            at = int(words[lane, word]) * WORD
            raise AssertionError(f"thread {threads[lane]} {verb} what thread {other} may be {doing}, at {at}")

    def _after_writes(self, threads: Array, words: Array, verb: str) -> None:
        late = self._written[words] > self.now[threads[:, None], self._writer[words]]
        if late.any():
            lane, word = np.argwhere(late)[0]
            writer, at = self._writer[words[lane, word]], int(words[lane, word]) * WORD
            raise AssertionError(f"thread {threads[lane]} {verb} what thread {writer} may be writing, at {at}")


class Barrier:
    """An mbarrier."""

    def __init__(self, arrivals: int, threads: int) -> None:
        self.arrivals = self.missing = arrivals
        self.bytes = 0  # announced and not here yet
        self.phase = 0
        self.known = np.zeros(threads, np.int32)  # from those who arrived in the phase before
        self._gathered = np.zeros(threads, np.int32)

    def arrive(self, known: Array, *, count: int = 0, announced: int = 0) -> None:
        """Arrivals, bytes that are announced, or (negative) bytes that have come."""
        assert count <= self.missing, "more arrivals than the barrier was made for"
        self.missing -= count
        self.bytes += announced
        self._gathered = np.maximum(self._gathered, known)
        if self.missing == self.bytes == 0:
            self.missing, self.phase, self.known = self.arrivals, self.phase + 1, self._gathered

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over."""
        return self.phase % 2 != parity
