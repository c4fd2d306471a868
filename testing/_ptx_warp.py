"""The instructions of `testing.ptx`: 32 lanes at a time, registers as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ._ptx_async import LANES, POISON
from ._ptx_lanes import Lanes
from ._ptx_parse import Instruction
from ._ptx_values import ARITHMETIC, COMPARE, Array, compared, halves, joined, to_bits, to_floats, wrapped
from ._ptx_wgmma import Hopper

if TYPE_CHECKING:
    from .ptx import Block

__all__ = ["LANES", "POISON", "Warp"]

LANE = np.arange(LANES)
G, Q = LANE // 4, LANE % 4  # rows and columns of the 8 x 8 matrices that a warp holds
IGNORED = ("fence", "membar", "griddepcontrol")  # one block runs at a time, and one kernel
PAUSES = (
    "barrier",
    "mbarrier",
    "cp",
    "bar",
    "vote",
    "ldmatrix",
    "stmatrix",
    "wgmma",
    "atom",
)  # others may run after these
PAUSE = 1 / 8  # the probability
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


class Warp(Hopper, Lanes):
    """One warp of a block. It runs until all its lanes meet a barrier or have returned, or others get a turn."""

    def __init__(self, block: Block, number: int) -> None:
        super().__init__()
        self.block, self.number = block, number
        self.thread = LANE + LANES * number
        self.clock = self.thread + block.first_thread
        self.registers: dict[str, Array] = {}
        self.at = np.zeros(LANES, np.int64)  # every lane's next instruction
        self.live = np.ones(LANES, bool)
        self.waits = False  # at a barrier of the block
        self.rank = block.rng.random()  # of those who can run, the highest does

    @property
    def done(self) -> bool:
        """Whether all lanes have returned."""
        return not self.live.any()

    def run(self) -> None:
        """The lanes that are behind run first, so that those which took different branches meet again."""
        program, self.waits_for = self.block.program, None
        while self.live.any():
            at = int(self.at[self.live].min())
            here = self.live & (self.at == at)
            one = program.code[at]
            run = here if not one.guard else here & (self.registers[one.guard] ^ one.negated)
            if one.name.startswith("bar.sync") and len(one.operands) == 1:
                assert here.all(), "a barrier that some lanes of a warp do not reach"
                self.waits = True
                return
            self.at[here] = at + 1
            if one.name.startswith("bra"):
                self.at[run] = program.labels[one.operands[0]]
            elif one.name == "ret":
                self.live &= ~run
            else:
                try:
                    self._execute(one, run)
                except AssertionError as error:
                    raise AssertionError(f"{one}: {error}") from error
                if self.waits_for is not None:
                    return
                if one.name.startswith(PAUSES) and self.block.rng.random() < PAUSE:
                    self.rank = self.block.rng.random()
                    return

    def pass_barrier(self) -> None:
        """Go on behind it."""
        self.waits = False
        self.at += 1

    def _execute(self, one: Instruction, run: Array) -> None:
        op, *kinds = one.name.split(".")
        if op in IGNORED:
            return
        special = getattr(self, f"_{op}", None)
        if special is not None:
            special(kinds, one.operands, run)
        else:
            assert op in ARITHMETIC, "not an instruction that this knows"
            self._put(one.operands[0], self._compute(ARITHMETIC[op], kinds[-1], one.operands[1:]), run)

    # ---- operands: registers hold unsigned integers, or bool for predicates ----

    def _get(self, operand: str, bits: int = 32) -> Array:
        """As they are; what is narrower or wider than `bits` is converted."""
        kind = f"u{max(bits, 8) // 8}"
        if operand in self.registers:
            self._returned(operand)
            value = self.registers[operand]
            return value if value.dtype == bool else value.astype(kind)
        if operand == "%tid.x":
            return self.thread.astype(kind)
        if operand == "%ntid.x":
            return np.full(LANES, LANES * len(self.block.warps), kind)
        if operand.startswith("%ctaid."):
            return np.full(LANES, self.block.index["xyz".index(operand[-1])], kind)
        if operand.startswith("%nctaid."):
            return np.full(LANES, self.block.grid["xyz".index(operand[-1])], kind)
        if operand in self.block.symbols:
            return np.full(LANES, self.block.symbols[operand], kind)
        assert operand[0] not in "%$" and "@" not in operand, f"{operand} was never written"
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand.rstrip("U"), 0)
        return np.full(LANES, number & ((1 << bits) - 1), np.uint64).astype(kind)

    def _put(self, operand: str, values: Array, run: Array) -> None:
        old = self.registers.get(operand)
        if old is None or old.dtype != values.dtype:
            old = np.zeros(LANES, values.dtype)
        self.registers[operand] = np.where(run, values, old)

    def _integer(self, operand: str, kind: str) -> Array:
        """Of "s32", "u64" and so on, with its sign."""
        values = self._get(operand, int(kind[1:]))
        return values.view(f"i{values.dtype.itemsize}") if kind[0] == "s" else values

    def _float(self, operand: str) -> Array:
        return self._get(operand).view(np.float32)

    def _address(self, operand: str, bits: int) -> Array:
        base, _, offset = operand.strip("[]").partition("+")
        return self._get(base.strip(), bits).astype(np.int64) + int(offset or "0", 0)

    def _compute(self, function: Callable[..., Array], kind: str, operands: tuple[str, ...]) -> Array:
        with np.errstate(all="ignore"):
            if kind == "f32":
                return function(*map(self._float, operands)).astype(np.float32).view(np.uint32)
            if kind in ("bf16x2", "f16x2"):
                words = [halves(self._get(operand)) for operand in operands]
                low, high = (to_bits(function(*(to_floats(word[i], kind) for word in words)), kind) for i in range(2))
                return joined(low, high)
            if kind == "pred":
                return function(*(self.registers[operand] for operand in operands))
            if kind[0] == "b":
                return function(*(self._get(operand, int(kind[1:])) for operand in operands))
            return wrapped(function(*(self._integer(operand, kind).astype(np.int64) for operand in operands)), kind)

    # ---- integers, predicates, conversions ----

    def _mul(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        kind = kinds[-1]
        if kinds[0] in ("wide", "hi"):
            product = self._integer(ops[1], kind).astype(np.int64) * self._integer(ops[2], kind).astype(np.int64)
            bits = int(kind[1:])
            value = wrapped(product, f"u{2 * bits}") if kinds[0] == "wide" else wrapped(product >> bits, kind)
        else:
            value = self._compute(ARITHMETIC["mul"], kind, ops[1:])
        self._put(ops[0], value, run)

    def _shl(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        values = self._get(ops[1], 64) << self._get(ops[2], 64)
        self._put(ops[0], values.astype(f"u{int(kinds[-1][1:]) // 8}"), run)

    def _shr(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        values = self._integer(ops[1], kinds[-1])
        self._put(ops[0], wrapped(values.astype(np.int64) >> self._get(ops[2]).astype(np.int64), kinds[-1]), run)

    def _shf(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert kinds == ["l", "wrap", "b32"]
        low, high, by = (self._get(operand, 64) for operand in ops[1:])
        self._put(ops[0], (((high << 32 | low) << (by & 31)) >> 32).astype(np.uint32), run)

    def _lop3(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        a, b, c = (self._get(operand) for operand in ops[1:4])
        table, value = int(ops[4], 0), np.zeros(LANES, np.uint32)
        for i in range(8):
            if table >> i & 1:
                value |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        self._put(ops[0], value, run)

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
        (low, high), bytes_, add = halves(self._get(ops[1])), self._get(ops[2]), self._get(ops[3])
        self._put(ops[0], low * (bytes_ & 0xFF) + high * (bytes_ >> 8 & 0xFF) + add, run)

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
        targets, sources = _parts(ops[0]), _parts(ops[1])
        each = bits // len(sources)
        value = np.zeros(LANES, np.uint64)
        for i, source in enumerate(sources):
            value |= (self._get(source, each).astype(np.uint64)) << np.uint64(i * each)
        each = bits // len(targets)
        for i, target in enumerate(targets):
            part = value >> np.uint64(i * each) & np.uint64((1 << each) - 1)
            self._put(target, part.astype(f"u{each // 8}"), run)

    def _cvta(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert kinds in (["to", "global", "u64"], ["param", "u64"])
        self._put(ops[0], self._get(ops[1], 64), run)

    def _cvt(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        to, of = kinds[-2:]
        if of == "e2m1x2":
            byte = self._get(ops[1], 8).astype(int)
            value = joined(*(to_bits(E2M1[n & 7] * np.where(n & 8, -1.0, 1.0), to) for n in (byte & 15, byte >> 4)))
        elif to in ("bf16x2", "f16x2"):
            value = joined(to_bits(self._float(ops[2]), to), to_bits(self._float(ops[1]), to))
        elif to == "f32":
            value = to_floats(self._get(ops[1], 16), of).view(np.uint32)
        else:
            value = wrapped(self._integer(ops[1], of).astype(np.int64), to)
        self._put(ops[0], value, run)

    # ---- between lanes ----

    def _ldmatrix(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert run.all() and kinds[3] == "x4"
        where = self._shared(ops[1], 16, run)
        self._loads(where, ops[0], self.clock)
        rows = self.block.smem[where].view(np.uint32)  # [8 of each matrix, 4]
        for j, target in enumerate(_parts(ops[0])):
            self._put(target, rows[8 * j + G, Q], run)

    def _movmatrix(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert run.all() and "trans" in kinds
        matrix = np.stack(halves(self._get(ops[1])), 1).reshape(8, 8)
        self._put(ops[0], joined(matrix[2 * Q, G], matrix[2 * Q + 1, G]), run)

    def _mma(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        assert run.all() and kinds[2] == "m16n8k16"
        a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for r, name in enumerate(_parts(ops[1])):
            for p, half in enumerate(halves(self._get(name))):
                a[G + 8 * (r % 2), 2 * Q + 8 * (r // 2) + p] = to_floats(half, kinds[-2])
        for r, name in enumerate(_parts(ops[2])):
            for p, half in enumerate(halves(self._get(name))):
                b[2 * Q + 8 * r + p, G] = to_floats(half, kinds[-2])
        places = [(G + 8 * (r // 2), 2 * Q + r % 2) for r in range(4)]
        for place, name in zip(places, _parts(ops[3]), strict=True):
            c[place] = self._float(name)
        with np.errstate(all="ignore"):
            d = (a @ b + c).astype(np.float32)
        for place, name in zip(places, _parts(ops[0]), strict=True):
            self._put(name, np.ascontiguousarray(d[place]).view(np.uint32), run)

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
        size, targets = int(kinds[-1][1:]) // 8, _parts(ops[0])
        if run.any():
            memory, where = self._place(kinds[0], ops[1], size * len(targets), run)
            if kinds[0] == "shared":
                self._loads(where, ops[0], self.clock[run])
            values = memory[where].view(f"u{size}")
            for i, target in enumerate(targets):
                lanes = np.zeros(LANES, values.dtype)
                lanes[run] = values[:, i]
                self._put(target, lanes, run)

    def _st(self, kinds: list[str], ops: tuple[str, ...], run: Array) -> None:
        if kinds[0] == "async":
            self._store_async(ops, run)
        elif run.any():
            bits = int(kinds[-1][1:])
            values = np.stack([self._get(source, bits)[run] for source in _parts(ops[1])], 1).view(np.uint8)
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


def _parts(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]
