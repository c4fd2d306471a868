"""Runs PTX on NumPy, so that a kernel's results, addresses and waits can be tested without a GPU.

It knows the instructions that the kernels here for mma.sync consist of, and no more; an unknown one raises. What a GPU
may hide is made as bad as it may be: warps, of several blocks, run one at a time from barrier to barrier, in an order
drawn at random; shared memory starts as NaNs; copies by cp.async arrive when the thread that asked for them waits, and
leave NaNs until then; a read or write outside of a buffer, or at an odd address, raises.

It does not see what depends on time or caches: fences between blocks, bank conflicts, copies that overtake reads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._ptx_parse import Program, parse
from ._ptx_warp import LANES, POISON, Warp

__all__ = ["GlobalMemory", "run"]

BASE = 1 << 32  # an address that does not fit in 32 bits
ALIGN = 256  # of buffers, and at least as much between them
RESIDENT = 4  # blocks at once


class GlobalMemory:
    """Buffers at made-up addresses."""

    def __init__(self) -> None:
        self.data = np.zeros(0, np.uint8)
        self._inside = np.zeros(0, bool)

    def add(self, array: NDArray[Any]) -> int:
        """Copy an array in; the address of its first byte."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = len(self.data) + ALIGN
        room = ALIGN + -(-content.size // ALIGN) * ALIGN
        self.data = np.concatenate([self.data, np.zeros(room, np.uint8)])
        self._inside = np.concatenate([self._inside, np.zeros(room, bool)])
        self.data[start : start + content.size] = content
        self._inside[start : start + content.size] = True
        return BASE + start

    def read(self, address: int, dtype: Any, count: int) -> NDArray[Any]:
        """A copy of what is there."""
        start = address - BASE
        return np.array(self.data[start : start + count * np.dtype(dtype).itemsize].view(dtype))

    def where(self, addresses: NDArray[Any], size: int) -> NDArray[Any]:
        """Indices [addresses, size] into `data`; raises AssertionError for what is in no buffer, or not aligned."""
        assert not (addresses % size).any(), f"global memory is not read or written at a multiple of {size}"
        index = addresses[:, None] - BASE + np.arange(size)
        assert index.min(initial=0) >= 0 and index.max(initial=0) < len(self.data), "outside of all buffers"
        assert self._inside[index].all(), "outside of all buffers"
        return np.asarray(index)


class Block:
    """One block while it runs."""

    def __init__(
        self,
        program: Program,
        parameters: dict[str, int],
        memory: GlobalMemory,
        index: tuple[int, int, int],
        threads: int,
        smem_bytes: int,
    ) -> None:
        self.program, self.parameters, self.memory, self.index = program, parameters, memory, index
        self.smem = np.full(smem_bytes, POISON, np.uint8)
        self.warps = [Warp(self, number) for number in range(threads // LANES)]

    def runnable(self) -> list[Warp]:
        """Warps that can go on; where all that are left wait at a barrier, it is passed."""
        left = [warp for warp in self.warps if not warp.done]
        if all(warp.waits for warp in left):
            for warp in left:
                warp.pass_barrier()
        return [warp for warp in left if not warp.waits]


def run(
    text: str,
    values: Sequence[int],
    memory: GlobalMemory,
    *,
    grid: tuple[int, int, int],
    threads: int,
    smem_bytes: int = 0,
    seed: int = 0,
) -> None:
    """Run a kernel.

    Parameters
    ----------
    text
        PTX with one entry.
    values
        Of its parameters, which are integers and addresses of `memory`.
    memory
        What it reads and writes.
    grid, threads
        Blocks, and threads (a multiple of 32) of a block along x.
    smem_bytes
        Dynamic shared memory of a block.
    seed
        Decides the order of blocks and warps.

    Raises
    ------
    AssertionError
        Reads or writes outside of buffers or at odd addresses, a barrier that only some lanes of a warp reach, a
        register that is read before it is written, or an instruction that this module does not know.
    """
    program, rng = parse(text), random.Random(seed)
    parameters = dict(zip(program.parameters, values, strict=True))
    waiting = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
    rng.shuffle(waiting)
    resident: list[Block] = []
    while waiting or resident:
        while waiting and len(resident) < RESIDENT:
            resident.append(Block(program, parameters, memory, waiting.pop(), threads, smem_bytes))
        block = rng.choice(resident)
        warps = block.runnable()
        if warps:
            rng.choice(warps).run()
        else:
            resident.remove(block)
