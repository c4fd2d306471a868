"""Runs PTX on NumPy, so that a kernel's results, addresses and waits can be tested without a GPU.

It knows the instructions that the kernels here for mma.sync consist of, and no more; an unknown one raises. What a GPU
may hide is made as bad as it may be: warps, of several blocks, run one at a time, in an order drawn at random; shared
memory starts as NaNs; copies leave NaNs from when they are asked for until they arrive, which is when a thread waits
for its own, or at random before an mbarrier completes. A read or write outside of a buffer, or at an odd one, raises.

Accesses to shared memory are also compared with what orders them (`_ptx_order`), so a fault is seen whatever the timing
of the run. A bulk copy may overtake loads that were issued before it: it must not overwrite what they read before
something has used the last of them. wgmma must not read what others than bulk copies wrote without a fence between the
two proxies behind the wait for it. What is not seen: fences between blocks, order in global memory, bank conflicts, and
how ptxas moves instructions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._ptx_async import POISON
from ._ptx_decode import Step, decode
from ._ptx_order import Barrier, Order
from ._ptx_parse import Program, parse
from ._ptx_values import LANES
from ._ptx_warp import Warp
from ._ptx_wgmma import moved_map, tensor_map

__all__ = ["GlobalMemory", "moved_map", "run", "tensor_map"]

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


class Cluster:
    """Blocks that see each other's shared memory, which is one after the other here."""

    def __init__(self, blocks: int, threads: int, smem_bytes: int, *, ordered: bool) -> None:
        self.stride = -(-smem_bytes // ALIGN) * ALIGN
        self.smem = np.full(blocks * self.stride, POISON, np.uint8)
        self.order = Order(blocks * threads, len(self.smem) if ordered else 0)
        self.barriers: dict[int, Barrier] = {}
        self.barrier = Barrier(blocks * threads // LANES, blocks * threads)  # of its warps
        self.blocks: list[Block] = []


class Block:
    """One block while it runs."""

    def __init__(
        self,
        program: Program,
        steps: tuple[Step, ...],
        parameters: NDArray[np.uint8],
        memory: GlobalMemory,
        cluster: Cluster,
        grid: tuple[int, int, int],
        index: tuple[int, int, int],
        threads: int,
        smem_bytes: int,
        rng: random.Random,
    ) -> None:
        self.steps, self.parameters, self.memory, self.rng = steps, parameters, memory, rng
        self.cluster, self.smem, self.order = cluster, cluster.smem, cluster.order
        self.rank = len(cluster.blocks)
        self.first_thread = self.rank * threads
        self._begin = self.rank * cluster.stride
        self._end = self._begin + smem_bytes
        values = dict(program.symbols) | dict.fromkeys(program.shared, self._begin) | {"%ntid.x": threads}
        for axis, i, size in zip("xyz", index, grid, strict=True):
            values |= {f"%ctaid.{axis}": i, f"%nctaid.{axis}": size}
        self.constants = {name: np.full(LANES, value, np.uint64) for name, value in values.items()}
        # Copies: those of a warp arrive in its order, those of "warp -1" at any time.
        self.under_way: list[tuple[int, Callable[[], None]]] = []
        self.named: dict[int, Barrier] = {}  # barriers of the hardware, by their numbers
        self.warps = [Warp(self, number) for number in range(threads // LANES)]
        self._eager = rng.choice((0.02, 0.5, 0.98))  # how soon copies land

    def owns(self, begin: int, end: int) -> bool:
        """Whether these bytes of shared memory are the block's."""
        return bool(self._begin <= begin and end <= self._end)

    @property
    def done(self) -> bool:
        """Whether all warps have returned."""
        return all(warp.done for warp in self.warps)

    def step(self) -> bool:
        """A warp runs on, or a copy lands; False when all warps wait for other blocks."""
        left = [warp for warp in self.warps if not warp.done]
        if all(warp.waits for warp in left):
            self.order.meet(np.concatenate([warp.clock[warp.live] for warp in left]))
            for warp in left:
                warp.pass_barrier()
        ready = [w for w in left if not w.waits and (w.waits_for is None or Barrier.passed(*w.waits_for))]
        if self.under_way and (not ready or self.rng.random() < self._eager):
            warps = [warp for warp, _ in self.under_way]
            first = [i for i, warp in enumerate(warps) if warp < 0 or warp not in warps[:i]]
            self.under_way.pop(self.rng.choice(first))[1]()
        elif ready:
            max(ready, key=lambda warp: warp.rank).run()
        else:
            return False
        return True


@lru_cache(maxsize=8)
def _decoded(text: str, entry: str) -> tuple[Program, tuple[Step, ...]]:
    program = parse(text, entry)
    return program, decode(program)


@np.errstate(all="ignore")  # as GPUs do: infinities, NaNs
def run(
    text: str,
    values: Sequence[int | bytes],
    memory: GlobalMemory,
    *,
    grid: tuple[int, int, int],
    threads: int,
    smem_bytes: int = 0,
    cluster: int = 1,
    seed: int = 0,
    ordered: bool = True,
    entry: str = "",
) -> None:
    """Run a kernel.

    Parameters
    ----------
    text
        PTX.
    values
        Of its parameters, which are integers, addresses of `memory`, or the bytes of a struct.
    memory
        What it reads and writes.
    grid, threads
        Blocks, and threads (a multiple of 32) of a block along x.
    smem_bytes
        Dynamic shared memory of a block.
    cluster
        Blocks of a cluster, along x.
    seed
        Decides the order of blocks and warps, and when copies arrive.
    ordered
        Whether accesses to shared memory that nothing orders raise. Kernels that load ahead what they never use, and
        overwrite it, need False.
    entry
        Name of the kernel, if the text has several.

    Raises
    ------
    AssertionError
        Reads or writes outside of buffers or at odd addresses, accesses to shared memory that nothing orders, warps
        that wait for ever, a barrier that only some lanes of a warp reach, a register that is read before it is
        written, or an instruction that this module does not know.
    """
    (program, steps), rng = _decoded(text, entry), random.Random(seed)
    parameters = np.zeros(program.parameters[-1], np.uint8)
    for start, value in zip(program.parameters[:-1], values, strict=True):
        content = value if isinstance(value, bytes) else (value & (1 << 64) - 1).to_bytes(8, "little")
        room = len(parameters) - start
        parameters[start : start + len(content)] = np.frombuffer(content[:room], np.uint8)
    waiting = [(x, y, z) for x in range(0, grid[0], cluster) for y in range(grid[1]) for z in range(grid[2])]
    rng.shuffle(waiting)
    resident: list[Block] = []
    while waiting or resident:
        while waiting and len(resident) < RESIDENT:
            x, y, z = waiting.pop()
            group = Cluster(cluster, threads, smem_bytes, ordered=ordered)
            for i in range(cluster):
                at = (x + i, y, z)
                group.blocks.append(
                    Block(program, steps, parameters, memory, group, grid, at, threads, smem_bytes, rng)
                )
            resident += group.blocks
        moved = any(block.step() for block in rng.sample(resident, len(resident)))
        assert moved, "all warps wait, and nothing is under way"
        for block in [block for block in resident if block.done]:
            assert not block.under_way, "a block ends before its copies"
            resident.remove(block)
