"""Arithmetic on the bits of registers, for the instructions of `testing.ptx`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from itertools import product
from operator import and_
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ARITHMETIC",
    "COMPARE",
    "INTEGERS",
    "LANES",
    "UNSIGNED",
    "Array",
    "compared",
    "fragment",
    "halves",
    "joined",
    "lookup",
    "of_lanes",
    "sums",
    "to_bits",
    "to_floats",
    "wrapped",
]

Array = NDArray[Any]

LANES = 32
INTEGERS = {f"{sign}{8 * size}": np.dtype(f"{'iu'[sign != 's']}{size}") for sign in "sub" for size in (1, 2, 4, 8)}
UNSIGNED = {8 * size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}

ARITHMETIC: dict[str, Callable[..., Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "min": np.minimum,
    "max": np.maximum,
    "mad": lambda a, b, c: a * b + c,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "div": lambda a, b: a / b if a.dtype == np.float32 else np.trunc(a / np.where(b == 0, 1, b)).astype(np.int64),
    "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "abs": np.abs,
    "ex2": np.exp2,
    "rcp": np.reciprocal,
    "copysign": lambda a, b: np.copysign(b, a),
}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def compared(name: str, a: Array, b: Array) -> Array:
    """ "geu" is true of NaN, "ge" is not."""
    nan = np.isnan(a) | np.isnan(b)
    if name in ("nan", "num"):
        return np.asarray(nan == (name == "nan"))
    return np.asarray(COMPARE[name[:2]](a, b) | nan if name.endswith("u") else COMPARE[name](a, b) & ~nan)


def wrapped(values: Array, kind: str) -> Array:
    """As many low bits of them as an integer of this kind has."""
    dtype = UNSIGNED[int(kind[1:])]
    same = values.dtype.itemsize == dtype.itemsize
    return np.asarray(values.view(dtype) if same else values.astype(np.int64).astype(dtype))


@cache
def _terms(table: int) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """Products that together are true where the table is: of which of (a, b, c), and whether of their bits as they are.

    Those of few factors come first, so that there are few.
    """
    left, found = table, []
    for factors in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
        for signs in product((False, True), repeat=len(factors)):
            term = tuple(zip(factors, signs, strict=True))
            where = sum(1 << i for i in range(8) if all(bool(i & 4 >> factor) == sign for factor, sign in term))
            if where & ~table == 0 and where & left:
                left &= ~where
                found.append(term)
    return tuple(found)


def lookup(table: int, *words: Array) -> Array:
    """Bit 4 a + 2 b + c of the table, for bits of a, b and c each."""
    value = np.zeros_like(words[0])
    for term in _terms(table):
        value = value | reduce(and_, (words[factor] if sign else ~words[factor] for factor, sign in term))
    return value


def halves(words: Array) -> Array:
    """Uint16 [..., 2 x] of uint32 [..., x], the low one first."""
    return np.ascontiguousarray(words).view(np.uint16)


def joined(halves: Array) -> Array:
    """The way back, to one dimension."""
    return halves.reshape(-1).view(np.uint32)


def to_floats(bits: Array, kind: str) -> Array:
    """16 bits of bfloat16 or float16 each, as float32."""
    if kind.startswith("bf16"):
        return np.asarray((bits.astype(np.uint32) << 16).view(np.float32))
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def to_bits(values: Array, kind: str) -> Array:
    """The way back, as uint16: to nearest, ties to even."""
    values = values.astype(np.float32, copy=False)
    if not kind.startswith("bf16"):
        return values.astype(np.float16).view(np.uint16)
    word = values.view(np.uint32)
    rounded = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


# Of matrices that lanes of a warp hold together; lane 4 g + q is in row g of the 8 x 8 parts.


def fragment(words: Array, kind: str) -> Array:
    """Float64 [16, 16] of words [4, lane]: a lane has of word 2 h + r row 8 r + g, columns 8 h + 2 q and the next."""
    parts = to_floats(halves(words), kind).reshape(2, 2, 8, 4, 2)  # [h, r, g, q, two]
    return parts.transpose(1, 2, 0, 3, 4).reshape(16, 16).astype(np.float64)


def sums(values: Array) -> Array:
    """[16, N] of float32 [N / 2, lane]: a lane has at 4 i + 2 r + p row 8 r + g, column 8 i + 2 q + p."""
    return values.reshape(-1, 2, 2, 8, 4).transpose(1, 3, 0, 4, 2).reshape(16, -1)


def of_lanes(matrix: Array) -> Array:
    """The way back."""
    n = matrix.shape[1]
    return matrix.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, LANES)
