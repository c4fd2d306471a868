"""The instructions of `testing.ptx`: 32 lanes at a time, registers as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ._ptx_async import names
from ._ptx_lanes import Lanes
from ._ptx_values import (
    ARITHMETIC,
    COMPARE,
    INTEGERS,
    LANES,
    UNSIGNED,
    Array,
    compared,
    fragment,
    halves,
    joined,
    lookup,
    of_lanes,
    sums,
    to_bits,
    to_floats,
    wrapped,
)
from ._ptx_wgmma import Hopper

if TYPE_CHECKING:
    from .ptx import Block

__all__ = ["Warp"]

LANE = np.arange(LANES)
G, Q = LANE // 4, LANE % 4  # rows and columns of the 8 x 8 matrices that a warp holds
ALL = np.ones(LANES, bool)  # always this very array where all lanes run
NOWHERE = 1 << 32  # behind the last instruction of any kernel
PAUSE = 1 / 8  # the probability that others run next, after an instruction where they may
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


class Warp(Hopper, Lanes):
    """One warp of a block. It runs until all its lanes meet a barrier or have returned, or others get a turn."""

    def __init__(self, block: Block, number: int) -> None:
        super().__init__()
        self.block, self.number = block, number
        thread = LANE + LANES * number
        self.clock = thread + block.first_thread
        # Unsigned integers, or bool for predicates; no array is changed once it is here.
        self.registers: dict[str, Array] = block.constants | {"%tid.x": thread.astype(np.uint32)}
        self.at = np.zeros(LANES, np.int64)  # every lane's next instruction, while the warp does not run
        self.live = np.ones(LANES, bool)
        self.done = False  # all lanes have returned
        self.waits = False  # at a barrier of the block
        self.rank = block.rng.random()  # of those who can run, the highest does

    def run(self) -> None:
        """The lanes that are behind run first, so that those which took different branches meet again."""
        self.waits_for = None
        goes_on = True
        while goes_on and not self.done:
            at = int(self.at[self.live].min())
            here = self.live & (self.at == at)
            ahead = self.at[self.live & ~here]
            goes_on = self._run_lanes(at, _all_or(here), int(ahead.min(initial=NOWHERE)))

    def _run_lanes(self, at: int, here: Array, end: int) -> bool:
        """These lanes run until they come to where others are or go different ways (True), or others get a turn."""
        steps, registers, rng = self.block.steps, self.registers, self.block.rng
        while at < end:
            step = steps[at]
            run = _all_or(here & (registers[step.guard] ^ step.negated)) if step.guard else here
            if step.execute is None:
                if step.goes == "bar":
                    assert here is ALL, "a barrier that some lanes of a warp do not reach"
                    self.waits, self.at[:] = True, at
                    return False
                lanes = np.count_nonzero(run)
                if step.goes == "bra" and lanes == np.count_nonzero(here):
                    at = step.target
                elif lanes == 0:
                    at += 1
                else:
                    self.at[here], self.at[run] = at + 1, step.target
                    if step.goes == "ret":
                        self.live &= ~run
                        self.done = not self.live.any()
                    return True
                continue
            try:
                step.execute(self, run)
            except AssertionError as error:
                raise AssertionError(f"{step.one}: {error}") from error
            if step.pauses:
                if self.waits_for is not None:  # it is tried again
                    self.at[here], self.at[run] = at + 1, at
                    return False
                if rng.random() < PAUSE:
                    self.rank = rng.random()
                    self.at[here] = at + 1
                    return False
            at += 1
        self.at[here] = at
        return True

    def pass_barrier(self) -> None:
        """Go on behind it."""
        self.waits = False
        self.at += 1

    # ---- operands ----

    def _get(self, operand: str, bits: int = 32) -> Array:
        """As they are; what is narrower or wider than `bits` is converted."""
        value = self.registers.get(operand)
        if value is None:
            return _immediate(operand, bits)
        if self.loads:
            self._returned(operand)
        dtype = UNSIGNED[bits]
        return value if value.dtype == dtype or value.dtype == bool else value.astype(dtype)

    def _put(self, operand: str, values: Array, run: Array) -> None:
        if run is not ALL:
            old = self.registers.get(operand)
            if old is None or old.dtype != values.dtype:
                old = np.zeros(LANES, values.dtype)
            values = np.where(run, values, old)
        self.registers[operand] = values

    def _integer(self, operand: str, kind: str) -> Array:
        """Of "s32", "u64" and so on, with its sign."""
        dtype = INTEGERS[kind]
        values = self._get(operand, 8 * dtype.itemsize)
        return values.view(dtype) if kind[0] == "s" else values

    def _float(self, operand: str) -> Array:
        return self._get(operand).view(np.float32)

    def _address(self, operand: str, bits: int) -> Array:
        base, offset = _base_and_offset(operand)
        return self._get(base, bits).astype(np.int64) + offset

    def calculate(self, function: Callable[..., Array], kind: str, operands: tuple[str, ...], run: Array) -> None:
        """Put what a function of `ARITHMETIC` makes of the other operands into the first."""
        self._put(operands[0], self._compute(function, kind, operands[1:]), run)

    def _compute(self, function: Callable[..., Array], kind: str, operands: tuple[str, ...]) -> Array:
        if kind == "f32":
            return function(*map(self._float, operands)).astype(np.float32, copy=False).view(np.uint32)
        if kind in ("bf16x2", "f16x2"):
            values = (to_floats(halves(self._get(operand)), kind) for operand in operands)
            return joined(to_bits(function(*values), kind))
        if kind == "pred":
            return function(*(self.registers[operand] for operand in operands))
        return wrapped(function(*(self._integer(operand, kind) for operand in operands)), kind)

    # ---- integers, predicates, conversions ----

    def _mul(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        if kinds[0] in ("wide", "hi"):
            self._put(ops[0], self._product(kinds, ops), run)
        else:
            self.calculate(ARITHMETIC["mul"], kinds[-1], ops, run)

    def _mad(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        if kinds[0] in ("wide", "hi"):
            product = self._product(kinds, ops)
            self._put(ops[0], product + self._get(ops[3], 8 * product.itemsize), run)
        else:
            assert kinds[0] == "lo"
            self.calculate(ARITHMETIC["mad"], kinds[-1], ops, run)

    def _product(self, kinds: list[str], ops: tuple[str, ...]) -> Array:
        """All bits of the product of two integers ("wide"), or those above as many as an integer has ("hi")."""
        kind, bits = kinds[-1], int(kinds[-1][1:])
        assert bits < 64 and len(kinds) == 2, "128 bits, or more than a product"
        product = self._integer(ops[1], kind).astype(np.int64) * self._integer(ops[2], kind).astype(np.int64)
        return wrapped(product, f"u{2 * bits}") if kinds[0] == "wide" else wrapped(product >> bits, kind)

    def _shl(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        values = self._get(ops[1], 64) << self._get(ops[2], 64)
        self._put(ops[0], values.astype(UNSIGNED[int(kinds[-1][1:])]), run)

    def _shr(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        values = self._integer(ops[1], kinds[-1])
        self._put(ops[0], wrapped(values.astype(np.int64) >> self._get(ops[2]).astype(np.int64), kinds[-1]), run)

    def _shf(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert kinds == ["l", "wrap", "b32"]
        low, high, by = (self._get(operand, 64) for operand in ops[1:])
        self._put(ops[0], (((high << 32 | low) << (by & 31)) >> 32).astype(np.uint32), run)

    def _lop3(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        self._put(ops[0], lookup(int(ops[4], 0), *(self._get(operand) for operand in ops[1:4])), run)

    def _prmt(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        for operand in ops[1:3]:
            if operand[0] == "%":  # NVRTC takes registers that nobody wrote for bytes that nobody reads
                self.registers.setdefault(operand, np.full(LANES, 0xFFFFFFFF, np.uint32))
        both, selector = self._get(ops[1], 64) | self._get(ops[2], 64) << 32, self._get(ops[3], 64)
        value = np.zeros(LANES, np.uint64)
        for i in range(4):
            nibble = selector >> 4 * i & 15
            assert (nibble < 8).all(), "copies of a sign"
            value |= (both >> 8 * nibble & 0xFF) << 8 * i
        self._put(ops[0], value.astype(np.uint32), run)

    def _dp2a(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert kinds == ["lo", "u32", "u32"]
        word, bytes_, add = (self._get(operand) for operand in ops[1:])
        self._put(ops[0], (word & 0xFFFF) * (bytes_ & 0xFF) + (word >> 16) * (bytes_ >> 8 & 0xFF) + add, run)

    def _bfi(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        field, into, at, length = (self._get(operand, 64) for operand in ops[1:])
        mask = ((np.uint64(1) << length) - 1) << at
        self._put(ops[0], (into & ~mask | field << at & mask).astype(np.uint32), run)

    def _setp(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        kind = kinds[-1].replace("b", "u")
        if kind == "f32":
            self._put(ops[0], compared(kinds[0], self._float(ops[1]), self._float(ops[2])), run)
            return
        self._put(ops[0], COMPARE[kinds[0]](self._integer(ops[1], kind), self._integer(ops[2], kind)), run)

    def _selp(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        bits = int(kinds[-1][1:])
        self._put(ops[0], np.where(self.registers[ops[3]], self._get(ops[1], bits), self._get(ops[2], bits)), run)

    def _mov(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        if kinds[-1] == "pred":
            value = self.registers[ops[1]] if ops[1] in self.registers else np.full(LANES, int(ops[1]) != 0)
            self._put(ops[0], value, run)
            return
        bits = int(kinds[-1][1:])
        targets, sources = names(ops[0]), names(ops[1])
        if len(targets) == len(sources) == 1:
            self._put(ops[0], self._get(ops[1], bits), run)
            return
        whole = np.stack([self._get(source, bits // len(sources)) for source in sources], 1)
        for target, part in zip(targets, whole.view(UNSIGNED[bits // len(targets)]).T.copy(), strict=True):
            self._put(target, part, run)

    def _cvta(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert kinds in (["to", "global", "u64"], ["param", "u64"])
        self._put(ops[0], self._get(ops[1], 64), run)

    def _cvt(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        *how, to, of = kinds
        known = [] if of in ("bf16", "f16") or (to in INTEGERS and of in INTEGERS) else ["rn"]
        assert how == known, "not how this converts"
        if of == "e2m1x2":
            byte = self._get(ops[1], 8)
            code = np.stack([byte & 15, byte >> 4], 1)
            value = joined(to_bits(E2M1[code & 7] * np.where(code & 8, -1.0, 1.0), to))
        elif to in ("bf16x2", "f16x2"):
            value = joined(to_bits(np.stack([self._float(ops[2]), self._float(ops[1])], 1), to))
        elif to == "f32" and of in INTEGERS:
            value = self._integer(ops[1], of).astype(np.float32).view(np.uint32)
        elif to == "f32" and of in ("bf16", "f16"):
            value = to_floats(self._get(ops[1], 16), of).view(np.uint32)
        else:
            assert to in INTEGERS and of in INTEGERS, "not what this converts"
            value = wrapped(self._integer(ops[1], of), to)
        self._put(ops[0], value, run)

    # ---- between lanes ----

    def _ldmatrix(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert run.all() and kinds[3] == "x4"
        where = self._shared(ops[1], 16, run)
        self._loads(where, ops[0], self.clock)
        rows = self.block.smem[where].view(np.uint32)  # [8 of each matrix, 4]
        for j, target in enumerate(names(ops[0])):
            self._put(target, rows[8 * j + G, Q], run)

    def _movmatrix(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert run.all() and "trans" in kinds
        matrix = halves(self._get(ops[1])).reshape(8, 8)
        self._put(ops[0], joined(matrix.T.copy()), run)

    def _mma(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert run.all() and kinds[2] == "m16n8k16"
        a, b = (self._words(operand) for operand in ops[1:3])
        # Lane 4 g + q has of its word r two values of column g: rows 8 r + 2 q + p.
        b = to_floats(halves(b), kinds[-2]).reshape(2, 8, 4, 2).transpose(0, 2, 3, 1).reshape(16, 8)
        c = sums(self._words(ops[3]).view(np.float32))
        d = fragment(a, kinds[-2]) @ b.astype(np.float64) + c
        for name, value in zip(names(ops[0]), of_lanes(d.astype(np.float32)).view(np.uint32), strict=True):
            self._put(name, value, run)

    # ---- memory ----

    def _shared(self, operand: str, size: int, run: Array, *, of_cluster: bool = False) -> Array:
        """Bytes [lanes that run, size] of shared memory."""
        start = self._address(operand, 32)[run]
        assert not (start % size).any(), f"shared memory is not read or written at a multiple of {size}"
        owners = self.block.cluster.blocks if of_cluster else [self.block]
        for block in owners:
            mine = start[start // self.block.cluster.stride == block.rank] if of_cluster else start
            assert not mine.size or block.owns(mine.min(), mine.max() + size), "outside of shared memory"
        return np.asarray(start[:, None] + np.arange(size))

    def _place(self, space: str, operand: str, size: int, run: Array) -> tuple[Array, Array]:
        """(memory, which of its bytes)."""
        if space == "shared":
            return self.block.smem, self._shared(operand, size, run)
        if space == "param":
            return self.block.parameters, self._address(operand, 64)[run][:, None] + np.arange(size)
        memory = self.block.memory
        return memory.data, memory.where(self._address(operand, 64)[run], size)

    def _ld(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        size, targets = int(kinds[-1][1:]) // 8, names(ops[0])
        if run.any():
            memory, where = self._place(kinds[0], ops[1], size * len(targets), run)
            if kinds[0] == "shared":
                self._loads(where, ops[0], self.clock[run])
            values = np.zeros((len(targets), LANES), UNSIGNED[8 * size])
            values[:, run] = memory[where].view(values.dtype).T
            for target, value in zip(targets, values, strict=True):
                self._put(target, value, run)

    def _st(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        if kinds[0] == "async":
            self._store_async(ops, run)
        elif run.any():
            bits = int(kinds[-1][1:])
            values = np.stack([self._get(source, bits)[run] for source in names(ops[1])], 1).view(np.uint8)
            memory, where = self._place(kinds[0], ops[0], values.shape[1], run)
            if kinds[0] == "shared":
                self.block.order.write(self.clock[run], where)
            memory[where] = values

    def _atom(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert kinds[-2:] in (["inc", "u32"], ["add", "u32"])
        space = "shared" if kinds[0] == "shared" else "global"
        for lane in np.flatnonzero(run):
            only = lane == LANE
            memory, where = self._place(space, ops[1], 4, only)
            if space == "shared":
                self.block.order.add(self.clock[only], where)
            old, operand = memory[where].view(np.uint32)[0], self._get(ops[2])[lane]
            new = old + operand if kinds[-2] == "add" else np.where(old >= operand, 0, old + 1)
            memory[where] = new.astype(np.uint32).view(np.uint8)
            self._put(ops[0], np.broadcast_to(old, LANES), only)


def _all_or(run: Array) -> Array:
    return ALL if np.count_nonzero(run) == LANES else run


@cache
def _immediate(operand: str, bits: int) -> Array:
    assert operand[0] not in "%$" and "@" not in operand, f"{operand} was never written"
    number = int(operand[2:], 16) if operand.startswith("0f") else int(operand.rstrip("U"), 0)
    return np.full(LANES, number & ((1 << bits) - 1), np.uint64).astype(UNSIGNED[bits])


@cache
def _base_and_offset(operand: str) -> tuple[str, int]:
    """Of an address: "[%rd1+16]"."""
    base, _, offset = operand.strip("[]").partition("+")
    return base.strip(), int(offset or "0", 0)
