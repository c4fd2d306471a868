"""Arithmetic on the bits of registers, for the instructions of `testing.ptx`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ARITHMETIC", "COMPARE", "Array", "compared", "halves", "joined", "to_bits", "to_floats", "wrapped"]

Array = NDArray[Any]

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
    return np.asarray(values.astype(np.int64).astype(f"u{int(kind[1:]) // 8}"))


def halves(words: Array) -> tuple[Array, Array]:
    return words & 0xFFFF, words >> 16


def joined(low: Array, high: Array) -> Array:
    return np.asarray((low | high << 16).astype(np.uint32))


def to_floats(bits: Array, kind: str) -> Array:
    """16 bits of bfloat16 or float16 each, as float32."""
    if kind.startswith("bf16"):
        return np.asarray((bits.astype(np.uint32) << 16).view(np.float32))
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def to_bits(values: Array, kind: str) -> Array:
    """The way back: to nearest, ties to even."""
    values = values.astype(np.float32)
    if not kind.startswith("bf16"):
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    word = values.view(np.uint32).astype(np.uint64)
    rounded = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint32)
