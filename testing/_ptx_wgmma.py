"""What only Hopper has: wgmma, copies by TMA and stmatrix; a part of `_ptx_warp.Warp`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ._ptx_async import POISON, Asynchronous, names
from ._ptx_values import LANES, Array, fragment, halves, of_lanes, sums, to_floats

if TYPE_CHECKING:
    from ._ptx_order import Barrier

__all__ = ["Hopper", "moved_map", "tensor_map"]

LANE = np.arange(LANES)
ROW_BYTES = 128  # of matrices in the swizzle of as many bytes, which is the only one known here
MAP = struct.Struct("<QiiiI")
MAP_BYTES = 128


def tensor_map(address: int, rows: int, columns: int, stride: int, box_rows: int) -> bytes:
    """A tensor map as `run` reads it: of 16-bit values, in boxes of 64 columns; `stride` values from row to row."""
    return MAP.pack(address, rows, columns, stride, box_rows).ljust(MAP_BYTES, b"\0")


def moved_map(tensor_map: bytes, address: Callable[[int], int]) -> bytes:
    """The same map of a matrix that lies elsewhere."""
    pointer, *rest = MAP.unpack(tensor_map[: MAP.size])
    return MAP.pack(address(pointer), *rest).ljust(MAP_BYTES, b"\0")


def swizzled(addresses: Array) -> Array:
    """Where bytes lie that would lie at these addresses without the swizzle."""
    return np.asarray(addresses ^ ((addresses >> 7 & 7) << 4))


class Hopper(Asynchronous):
    """Sums are made when a wgmma is issued; what it reads of shared memory stays in use until it is waited for."""

    _mbarrier_at: Callable[..., Barrier]

    def __init__(self) -> None:
        super().__init__()
        self.wgmmas: list[list[Array]] = [[]]  # groups of what each reads; the last is open

    @property
    def in_use(self) -> list[tuple[str, Array]]:
        """Loads and wgmmas that may still read shared memory."""
        return self.loads + [("a wgmma", where) for group in self.wgmmas for where in group]

    def _setmaxnreg(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert run.all()

    def _prefetch(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert kinds == ["tensormap"]

    def _wgmma(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert run.all(), "wgmma needs all lanes"
        if kinds[0] == "commit_group":
            self.wgmmas.append([])
        elif kinds[0] == "wait_group":
            closed = self.wgmmas[:-1]
            self.wgmmas = [*closed[max(0, len(closed) - int(ops[0])) :], self.wgmmas[-1]]
            self.block.order.meet(self.clock)  # lanes of a warp go on together
        elif kinds[0] == "mma_async":
            self._multiply(kinds, ops, run)
        else:
            assert kinds[0] == "fence"

    def _fence(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        """Those between the proxies; all others change nothing here, where one block runs at a time."""
        if kinds in (["proxy", "async", "shared::cta"], ["proxy", "async", "shared::cluster"], ["proxy", "async"]):
            self.block.order.fence_proxies(self.clock[run])

    def _spare_wgmmas(self, where: Array) -> None:
        """AssertionError if one that may not be done reads any of these bytes."""
        first, last = where.min(), where.max()
        for group in (group for warp in self.block.warps for group in warp.wgmmas):
            for read in group:
                near = read.min() <= last and read.max() >= first
                assert not (near and np.isin(read, where).any()), "a wgmma may still read what is overwritten"

    def _multiply(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        """This warp's 16 rows."""
        accumulators, registers, descriptor, accumulate, *signs = ops
        n, kind = int(kinds[3].split("n")[1].split("k")[0]), kinds[-1]
        assert kinds[3].startswith("m64") and kinds[3].endswith("k16") and signs[:2] == ["1", "1"], "not known"
        assert len(names(accumulators)) == n // 2
        (word,) = set(self._get(descriptor, 64).tolist())
        assert word >> 62 == 1, "a swizzle that is not known"
        start, stride = (word & 0x3FFF) << 4, (word >> 32 & 0x3FFF) << 4
        row = np.arange(n)[:, None]
        where = swizzled(start + row // 8 * stride + row % 8 * ROW_BYTES + np.arange(32))
        assert self.block.owns(int(where.min()), int(where.max()) + 1), "outside of shared memory"
        self.block.order.read_async(self.clock[:1], where.reshape(1, -1))
        self.wgmmas[-1].append(where.reshape(1, -1))
        b = to_floats(self.block.smem[where].view(np.uint16), kind).astype(np.float64)  # [n, 16]
        d = fragment(self._words(registers), kind) @ b.T
        if self.registers[accumulate].all():
            d += sums(self._words(accumulators).view(np.float32))
        for name, value in zip(names(accumulators), of_lanes(d.astype(np.float32)).view(np.uint32), strict=True):
            self._put(name, value, run)

    def _stmatrix(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert run.all() and kinds[:3] == ["sync", "aligned", "m8n8"] and "trans" in kinds
        count = int(kinds[3][1:])
        used = 8 * count > LANE
        where = self._shared(ops[0], 16, used)
        assert len(names(ops[1])) == count
        values = halves(self._words(ops[1])).reshape(count, 8, 8).transpose(0, 2, 1).reshape(8 * count, 8)
        self.block.order.write(self.clock[used], where)
        self.block.smem[where] = values.view(np.uint8)

    def _copy_tensor(self, ops: tuple[str, ...], run: Array) -> None:
        """A box of a matrix; zeros outside of it."""
        order, block = self.block.order, self.block
        assert run.sum() == 1
        start = int(self._address(ops[0], 32)[run][0])
        place, column, row = (part.strip("{} ") for part in ops[1].strip("[]").split(","))
        at = int(self._get(place, 64)[run][0])
        pointer, rows, columns, stride, box_rows = MAP.unpack(block.parameters[at : at + MAP.size].tobytes())
        first = [int(self._get(name)[run].view(np.int32)[0]) for name in (row, column)]
        assert start % 1024 == 0 and block.owns(start, start + box_rows * ROW_BYTES), "outside of shared memory"
        assert first[1] % 8 == 0 and stride % 8 == 0 and pointer % 16 == 0
        where = swizzled(start + np.arange(box_rows * ROW_BYTES)).reshape(1, -1)
        for targets, loaded in (load for warp in block.warps for load in warp.in_use):
            overtaken = np.isin(loaded, where).any()
            assert not overtaken, f"{targets} may still read what is overwritten"
        values = np.zeros((box_rows, 64), np.uint16)
        r, c = np.meshgrid(first[0] + np.arange(box_rows), first[1] + np.arange(64), indexing="ij")
        inside = (r >= 0) & (r < rows) & (c >= 0) & (c < columns)
        sources = pointer + 2 * (r[inside].astype(np.int64) * stride + c[inside])
        values[inside] = block.memory.data[block.memory.where(sources, 2)].view(np.uint16)[:, 0]
        barrier = self._mbarrier_at(ops[2], run)
        order.write(self.clock[run], where, under_way=True, generic=False)
        block.smem[where] = POISON
        times = order.now[self.clock[run], self.clock[run]]
        known = order.release(self.clock[run])

        def land() -> None:
            block.smem[where] = values.view(np.uint8).reshape(1, -1)
            order.landed(where, times)
            barrier.arrive(known, announced=-where.size)

        block.under_way.append((-1, land))
