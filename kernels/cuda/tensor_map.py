"""Tensor maps: what TMA needs to know of a matrix, 128 bytes that the driver encodes and a kernel takes by value."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from ...errors import LaunchError, message

__all__ = ["TENSOR_MAP_BYTES", "TensorMaps"]

TENSOR_MAP_BYTES = 128
ALIGN_BYTES = 64  # where the driver wants to write one
MAX_MAPS = 4096  # that are remembered; beyond it all are forgotten

# cuda.h: CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion.
KINDS = {"float16": 6, "bfloat16": 9}
SWIZZLE_128_BYTES = 3
L2_PROMOTION_128_BYTES = 2

Pair64 = ctypes.c_uint64 * 2
Pair32 = ctypes.c_uint32 * 2


class TensorMaps:
    """Encodes maps of [rows, columns] matrices of 16-bit floats, read in boxes of 64 columns with the 128-byte swizzle.

    What is read outside a matrix is zero. Maps are remembered: activations mostly come from a few addresses.

    Parameters
    ----------
    dtype
        "bfloat16" or "float16".
    box_rows
        Rows that one copy takes, at most 256.
    """

    def __init__(self, dtype: str, box_rows: int) -> None:
        self._kind = KINDS[dtype]
        self._box = Pair32(64, box_rows)
        self._known: dict[tuple[int, int, int, int], bytes] = {}

    def get(self, pointer: int, rows: int, columns: int, stride: int) -> bytes:
        """The map of one matrix.

        Parameters
        ----------
        pointer
            Of its first element, on a multiple of 16 bytes.
        rows, columns
            Its size.
        stride
            Elements from row to row, a multiple of 8.

        Raises
        ------
        LaunchError
            The driver refused.
        """
        key = (pointer, rows, columns, stride)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_MAPS:
                self._known.clear()
            found = self._known[key] = self._encode(pointer, rows, columns, stride)
        return found

    def _encode(self, pointer: int, rows: int, columns: int, stride: int) -> bytes:
        memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + ALIGN_BYTES)
        offset = -ctypes.addressof(memory) % ALIGN_BYTES
        error = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(memory) + offset),
            self._kind,
            2,  # dimensions, the inner one first
            ctypes.c_void_p(pointer),
            Pair64(columns, rows),
            ctypes.byref(ctypes.c_uint64(2 * stride)),  # bytes
            self._box,
            Pair32(1, 1),
            0,  # not interleaved
            SWIZZLE_128_BYTES,
            L2_PROMOTION_128_BYTES,
            0,  # zeros outside
        )
        if error:
            raise LaunchError(
                message(
                    "the driver cannot make a tensor map",
                    got=f"error {error} for {rows} x {columns} at {pointer:#x}, {stride} elements from row to row",
                    expected="an address on 16 bytes and a stride of a multiple of 8 elements",
                )
            )
        return memory.raw[offset : offset + TENSOR_MAP_BYTES]


@cache
def _driver() -> Any:
    # By ctypes: cuda.bindings wants lists of objects, which cost more than the driver's work.
    return ctypes.CDLL("libcuda.so.1")
