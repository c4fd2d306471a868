"""The 128x4 order of block scales that tensor-core instructions read, and its inverse.

Tiles of 128 rows and 4 scales are 512 consecutive bytes; within one, row r and column c lie at
(r % 32) * 16 + (r // 32) * 4 + c. Rows are padded to 128 and columns to 4 with zero bytes. Checkpoints are linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InvalidInput, message
from .codec import e4m3_bytes

__all__ = ["swizzle", "swizzled_shape", "unswizzle"]

TILE_ROWS = 128
TILE_GROUPS = 4


def swizzled_shape(n: int, groups: int) -> tuple[int, int]:
    """Padded rows and columns of [n, groups] scales."""
    return -(-n // TILE_ROWS) * TILE_ROWS, -(-groups // TILE_GROUPS) * TILE_GROUPS


def swizzle(scale: Tensor) -> Tensor:
    """Linear to swizzled.

    Parameters
    ----------
    scale
        [N, G] float8_e4m3fn or uint8, G = K/16.

    Returns
    -------
    1-D, of pad128(N) * pad4(G) elements, in scale's dtype; padding is zero.
    """
    n, groups = scale.shape
    rows, columns = swizzled_shape(n, groups)
    padded = torch.zeros((rows, columns), dtype=torch.uint8, device=scale.device)
    padded[:n, :groups] = e4m3_bytes(scale)
    tiles = padded.view(rows // TILE_ROWS, 4, 32, columns // TILE_GROUPS, TILE_GROUPS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scale.dtype)


def unswizzle(swizzled: Tensor, n: int, groups: int) -> Tensor:
    """Swizzled to linear.

    Parameters
    ----------
    swizzled
        Any shape, contiguous, of pad128(n) * pad4(groups) elements: float8_e4m3fn or uint8.
    n, groups
        Size of the linear scales.

    Returns
    -------
    [n, groups], contiguous, in swizzled's dtype.

    Raises
    ------
    InvalidInput
        The number of elements does not fit, or the dtype is another one.
    """
    rows, columns = swizzled_shape(n, groups)
    if swizzled.numel() != rows * columns:
        raise InvalidInput(
            message(
                "swizzled scales have the wrong size",
                got=f"{swizzled.numel()} elements {tuple(swizzled.shape)}",
                expected=f"{rows} * {columns} for {n} rows of {groups} scales",
                do='pass scale_layout="linear" if they are not swizzled',
            )
        )
    tiles = e4m3_bytes(swizzled).reshape(rows // TILE_ROWS, columns // TILE_GROUPS, 32, 4, TILE_GROUPS)
    linear = tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)[:n, :groups]
    return linear.contiguous().view(swizzled.dtype)
