"""Filling the blobs of fragment layouts, and reading them back: one weight or many experts, in torch operations.

`fill` writes the whole blob of weights [E, N, K/2]; E is 1 for a weight that is no stack. Rows of a gated weight are
two halves, gate and up, which lie in turns of eight rows. Whole words are looked up by 16 bits at a time, in chunks of
blocks, so that memory is passed over few times and temporaries stay small.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from .codec import GROUP
from .fragment_tables import TABLE, decode_table, encode_table

__all__ = ["BLOCK_BYTES", "CODE_BYTES", "SUBTILE_BYTES", "TILE", "fill", "read", "scale_codes"]

TILE = 64  # rows and columns of a block
TURN = 8  # rows of a half that lie together in a gated weight
CODE_BYTES = 512  # of a subtile of 16 rows
SUBTILE_BYTES = CODE_BYTES + 64
BLOCK_BYTES = 4 * SUBTILE_BYTES

SIGN_BITS = -0x7777777777777778  # the sign bits of 16 codes, as int64
SCALE_FACTOR = 2.0**7  # puts every e4m3 where the upper nine bits of a float16 hold it

# Codes converted at a time: few launches on a GPU, temporaries that stay in a CPU's cache. Never more than a
# CHUNKS_MIN-th of the weight, because the temporaries of a chunk are five times its size.
CHUNK_BYTES = {"cpu": 1 << 18}
CHUNK_BYTES_ELSEWHERE = 1 << 25
CHUNKS_MIN = 6

_Chunk = tuple[slice, slice, slice]  # experts, and blocks along N and K


def scale_codes(scale: Tensor) -> Tensor:
    """The byte that stands for each scale's magnitude: the upper bits of |s| * 2^7 as float16, its sign bit dropped.

    Five bits of exponent, three of mantissa; no finite e4m3 loses anything.

    Parameters
    ----------
    scale
        uint8 view of finite e4m3, any shape.

    Returns
    -------
    int16 of the same shape, whose low byte is the code; the sign is the bit above.
    """
    values = scale.view(torch.float8_e4m3fn).to(torch.float16).mul_(SCALE_FACTOR)
    return values.view(torch.int16).bitwise_right_shift_(7)


def fill(encoding: str, weight: Tensor, scale: Tensor, data: Tensor, *, gated: bool = False) -> None:
    """Write every byte of a blob.

    Parameters
    ----------
    encoding
        "bf16", "fp16" or "nib".
    weight, scale
        uint8 [E, N, K/2] and the uint8 view of finite e4m3 [E, N, K/16], contiguous; they may begin at any address.
    data
        uint8 [E, n64, k64, 2304], contiguous, on the same device.
    gated
        Rows are two halves, each of a multiple of 8 rows, that are laid in turns; each half is padded to n64 * 32.
    """
    table = encode_table(encoding, data.device)
    words, scales = _words(data), _scales(data)
    codes, stored = _parts(weight, gated), _parts(scale, gated)
    # Bytes 4 to 7 of every 8 are of registers 2 and 3.
    offsets = (torch.arange(data.shape[2] * TILE // 2, dtype=torch.int32, device=data.device) & 4) * (TABLE // 4)
    # As int8, NaN apart: negative scales are below zero.
    plain = int(scale.view(torch.int8).amin()) > 0
    for chunk in _chunks(data):
        experts, rows, columns = chunk
        signed = _take(stored, chunk, TILE // GROUP)
        to = scales[experts, rows, :, :, :, columns]
        # The cast drops the sign. The two groups of a pair stay together.
        to.view(torch.int16).copy_(scale_codes(signed).to(torch.uint8).reshape(to.shape).view(torch.int16))
        part = _take(codes, chunk, TILE // 2)
        if not plain:
            part = _without_signs(part, signed.view(torch.int8))
        part = torch.unflatten(part, 1, (-1, 4, 2, 8))
        index = torch.add(offsets[: part.shape[-1]], part[:, :, :, 1], alpha=256)
        index += part[:, :, :, 0]
        del part, signed
        shape = (*index.shape[:4], columns.stop - columns.start, 4, 2, 4)
        found = table.index_select(0, index.view(-1)).view(shape)  # expert, n64, w, g, k64, j, e, q
        del index
        found = found.permute(6, 0, 1, 4, 2, 3, 7, 5)  # e, then as in the blob
        torch.bitwise_or(found[0], found[1], out=words[experts, rows, columns])
        del found  # before the next chunk allocates


def read(encoding: str, data: Tensor, n: int, k: int, *, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Undo `fill`: uint8 [E, N, K/2] and float8_e4m3fn [E, N, K/16], contiguous."""
    count = data.shape[0]
    weight = torch.empty((count, n, k // 2), dtype=torch.uint8, device=data.device)
    scale = torch.empty((count, n, k // GROUP), dtype=torch.uint8, device=data.device)
    codes, stored, scales = _parts(weight, gated), _parts(scale, gated), _scales(data)
    table = decode_table(encoding, data.device)
    offsets = (torch.arange(CODE_BYTES // 2, dtype=torch.int32, device=data.device) & 1) * TABLE + TABLE // 2
    halves = torch.unflatten(data.view(torch.int16), -1, (4, SUBTILE_BYTES // 2))[..., : CODE_BYTES // 2]
    for chunk in _chunks(data):
        experts, rows, columns = chunk
        index = torch.add(offsets, halves[experts, rows, columns])
        found = table.index_select(0, index.view(-1)).view(*index.shape[:4], 8, 4, 4, 2)
        del index
        nibbles = torch.unflatten((found[..., 0] | found[..., 1]).view(torch.uint8), -1, (4, 2, 2))
        del found
        # expert, n64, k64, w, g, q, j, e, h as rows (n64, w, h, g) of bytes (k64, j, e, q)
        _give(codes, chunk, TILE // 2, nibbles.permute(0, 1, 3, 8, 4, 2, 6, 7, 5).flatten(5).flatten(1, 4))
        del nibbles
        bits = scales[experts, rows, :, :, :, columns].to(torch.int16, memory_format=torch.contiguous_format)
        values = bits.bitwise_left_shift_(7).view(torch.float16).mul_(1 / SCALE_FACTOR)
        values = values.to(torch.float8_e4m3fn).view(torch.uint8)
        _give(stored, chunk, TILE // GROUP, values.flatten(5).flatten(1, 4))
    return weight, scale.view(torch.float8_e4m3fn)


def _words(data: Tensor) -> Tensor:
    """The words of codes in a blob: int32, dimensions expert, n64, k64, w, g, q, j."""
    assert sys.byteorder == "little"
    subtiles = torch.unflatten(data.view(torch.int32), -1, (4, SUBTILE_BYTES // 4))
    return torch.unflatten(subtiles[..., : CODE_BYTES // 4], -1, (8, 4, 4))


def _scales(data: Tensor) -> Tensor:
    """The scale codes in a blob as a checkpoint has them: uint8, expert, rows (n64, w, h, g), groups (k64, J, o)."""
    stored = torch.unflatten(data, -1, (4, SUBTILE_BYTES))[..., CODE_BYTES:]
    return torch.unflatten(stored, -1, (8, 2, 2, 2)).permute(0, 1, 3, 6, 4, 2, 5, 7)


def _parts(tensor: Tensor, gated: bool) -> Tensor:
    """[E, N, C] as [E, 1, N, C], or [E, 2, N/2, C] if gated."""
    return torch.unflatten(tensor, 1, (2 if gated else 1, -1))


def _take(parts: Tensor, chunk: _Chunk, width: int) -> Tensor:
    """Rows of a chunk in the order of the blob, [experts, rows, columns], padded with zeros; a view where it can be.

    `width` is how many elements of `parts` [E, P, N/P, C] a block has along K.
    """
    _, rows, columns = chunk
    part = _some(parts, chunk, width)
    size = (part.shape[0], (rows.stop - rows.start) * TILE, (columns.stop - columns.start) * width)
    if parts.shape[1] == 1 and part[:, 0].shape == size:
        return part[:, 0]
    full = (size[0], parts.shape[1], size[1] // parts.shape[1], size[2])
    whole = parts.new_empty(size) if part.shape == full else parts.new_zeros(size)
    _in_turns(whole, part).copy_(part if parts.shape[1] == 1 else torch.unflatten(part, 2, (-1, TURN)))
    return whole


def _give(parts: Tensor, chunk: _Chunk, width: int, rows: Tensor) -> None:
    """Undo `_take`: copy [experts, rows, columns] without their padding to where they belong in `parts`."""
    part = _some(parts, chunk, width)
    (part if parts.shape[1] == 1 else torch.unflatten(part, 2, (-1, TURN))).copy_(_in_turns(rows, part))


def _some(parts: Tensor, chunk: _Chunk, width: int) -> Tensor:
    """What there is of a chunk in [E, P, N/P, C]."""
    experts, rows, columns = chunk
    high = TILE // parts.shape[1]
    return parts[experts, :, rows.start * high : rows.stop * high, columns.start * width : columns.stop * width]


def _in_turns(rows: Tensor, part: Tensor) -> Tensor:
    """The places of `part` [e, P, n, c] among padded rows [e, N, C]: [e, 1, n, c], or [e, 2, n/8, 8, c] of halves."""
    count, n, c = part.shape[1:]
    if count == 1:
        return rows[:, None, :n, :c]
    return torch.unflatten(rows, 1, (-1, count, TURN)).transpose(1, 2)[:, :, : n // TURN, :, :c]


def _without_signs(codes: Tensor, signed: Tensor) -> Tensor:
    """A copy of codes [e, rows, bytes] as they must be for scales [e, rows, groups], int8, that lose their sign."""
    codes = codes.clone(memory_format=torch.contiguous_format)
    groups = codes.view(torch.int64)  # 16 codes each
    groups ^= (signed >> 7).to(torch.int64).bitwise_and_(SIGN_BITS)
    groups &= ((signed & 0x7F) != 0).to(torch.int64).neg_()
    return codes


def _chunks(data: Tensor) -> Iterator[_Chunk]:
    """Ranges of experts and blocks that are converted at a time: whole experts, or parts of one."""
    count, n64, k64, _ = data.shape
    most = CHUNK_BYTES.get(data.device.type, CHUNK_BYTES_ELSEWHERE) // (4 * CODE_BYTES)
    blocks = max(1, min(count * n64 * k64 // CHUNKS_MIN, most))
    many, high, wide = max(1, blocks // (n64 * k64)), max(1, min(n64, blocks // k64)), min(blocks, k64)
    for expert in range(0, count, many):
        for row in range(0, n64, high):
            for column in range(0, k64, wide):
                yield (
                    slice(expert, min(count, expert + many)),
                    slice(row, min(n64, row + high)),
                    slice(column, min(k64, column + wide)),
                )
