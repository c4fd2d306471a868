"""The fragment layouts: codes in the order in which tensor-core instructions take them from registers.

A weight [N, K], padded to multiples of 64 with zeros, is cut into blocks of 64 x 64, a block into four subtiles of 16
rows. A subtile is 576 consecutive bytes: 512 of codes, then 64 of scales. Its codes are 32 lanes of four 32-bit words;
word j of a lane holds what that lane multiplies in the j-th step of 16 along k: the eight codes of four registers of
two halves each. Register h + 2 e, half p is row g + 8 h, k = 2 q + 8 e + p of the step, for lane 4 g + q.

The three layouts differ in where a word keeps the bits of each code: so that a few shifts and masks make bfloat16 or
float16 bit patterns of them ("bf16", "fp16"), or in plain nibbles, for hardware that converts those itself ("nib").

Scales are stored with sign bit and lowest exponents gone (see `scale_codes`); a negative one has its sign moved to its
16 codes, and the codes under a zero are zero.

Packing and its inverse look whole words up by 16 bits at a time and pass over memory few times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from ...errors import InvalidInput, message
from ..problem import DTYPES
from .codec import GROUP
from .layouts import Layout
from .weight import Weight, is_aligned

__all__ = [
    "BLOCK_BYTES",
    "CODE_BYTES",
    "LAYOUTS",
    "SUBTILE_BYTES",
    "blob_shape",
    "fragment_id",
    "pack",
    "padded",
    "scale_codes",
    "to_checkpoint",
]

TILE = 64  # rows and columns of a block
CODE_BYTES = 512  # of a subtile of 16 rows
SUBTILE_BYTES = CODE_BYTES + 64
BLOCK_BYTES = 4 * SUBTILE_BYTES

# Where a word keeps the bits (sign, exponent, exponent, mantissa) of the low half of registers 0 to 3. The high half's
# are 16 bits further on, around the end of the word.
LOW_HALVES = {
    "bf16": ((15, 8, 7, 6), (11, 4, 3, 2), (21, 14, 13, 12), (17, 10, 9, 0)),
    "fp16": ((15, 11, 10, 7), (13, 14, 8, 12), (9, 5, 4, 3), (22, 18, 17, 16)),
}

TABLE = 1 << 16
SIGN_BITS = -0x7777777777777778  # the sign bits of 16 codes, as int64
SCALE_FACTOR = 2.0**7  # puts every e4m3 where the upper nine bits of a float16 hold it

# Codes converted at a time: few launches on a GPU, temporaries that stay in a CPU's cache. Never more than a
# CHUNKS_MIN-th of the weight, because the temporaries of a chunk are five times its size.
CHUNK_BYTES = {"cpu": 1 << 18}
CHUNK_BYTES_ELSEWHERE = 1 << 25
CHUNKS_MIN = 6


def padded(n: int) -> int:
    """The next multiple of 64."""
    return -(-n // TILE) * TILE


def blob_shape(n: int, k: int) -> tuple[int, int, int]:
    """Shape of the data of a weight [n, k]."""
    return padded(n) // TILE, padded(k) // TILE, BLOCK_BYTES


def fragment_id(capability: tuple[int, int], dtype: str) -> str:
    """The fragment layout for a device and the dtype of x.

    Parameters
    ----------
    capability
        Compute capability; (0, 0) for a CPU.
    dtype
        "bfloat16" or "float16".

    Raises
    ------
    InvalidInput
        Another dtype.
    """
    if dtype not in DTYPES:
        raise InvalidInput(message("no fragment layout for this dtype", got=repr(dtype), expected=" or ".join(DTYPES)))
    if capability[0] >= 10:  # converts e2m1 in hardware
        return "fragment1-nib"
    return "fragment1-bf16" if dtype == "bfloat16" else "fragment1-fp16"


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


def pack(encoding: str, weight: Tensor, weight_scale: Tensor, global_scale: Tensor) -> Weight:
    """Validated tensors of a checkpoint as a blob; works where they are.

    Beside the blob it takes less memory than the weight has (half a MiB of tables apart).

    Parameters
    ----------
    encoding
        "bf16", "fp16" or "nib".
    weight, weight_scale, global_scale
        uint8 [N, K/2], uint8 [N, K/16] without NaN, float32 [1] or [N].

    Returns
    -------
    Weight
        data uint8 [ceil(N/64), ceil(K/64), 2304]; scale None.
    """
    n, k = weight.shape[0], 2 * weight.shape[1]
    data = torch.empty(blob_shape(n, k), dtype=torch.uint8, device=weight.device)
    _pack_scales(weight_scale, data)
    table = _encode_table(encoding, data.device)
    words = _words(data)
    # Bytes 4 to 7 of every 8 are of registers 2 and 3.
    offsets = (torch.arange(data.shape[1] * TILE // 2, dtype=torch.int32, device=data.device) & 4) * (TABLE // 4)
    # As int8, NaN apart: negative scales are below zero.
    plain = int(weight_scale.view(torch.int8).amin()) > 0
    for rows, columns in _chunks(data):
        part = _codes(weight, weight_scale, rows, columns, plain=plain)
        part = torch.unflatten(part, 0, (-1, 4, 2, 8))
        index = torch.add(offsets[: part.shape[-1]], part[:, :, 1], alpha=256)
        index += part[:, :, 0]
        del part
        found = table.index_select(0, index.view(-1)).view(-1, 4, 8, columns.stop - columns.start, 4, 2, 4)
        del index
        found = found.permute(5, 0, 3, 1, 2, 6, 4)  # e, then as in the blob: n64, k64, w, g, q, j
        torch.bitwise_or(found[0], found[1], out=words[rows, columns])
        del found  # before the next chunk allocates
    return Weight(
        data=data,
        scale=None,
        global_scale=global_scale if is_aligned(global_scale) else global_scale.clone(),
        layout=f"fragment1-{encoding}",
        out_features=n,
        in_features=k,
    )


def to_checkpoint(encoding: str, weight: Weight) -> tuple[Tensor, Tensor, Tensor]:
    """Undo `pack`: weight uint8 [N, K/2], weight_scale float8_e4m3fn [N, K/16], and the global scale itself."""
    n, k, data = weight.out_features, weight.in_features, weight.data
    scale = _unpack_scales(data)[:n, : k // GROUP].contiguous()
    codes = torch.empty((n, k // 2), dtype=torch.uint8, device=data.device)
    table = _decode_table(encoding, data.device)
    offsets = (torch.arange(CODE_BYTES // 2, dtype=torch.int32, device=data.device) & 1) * TABLE + TABLE // 2
    halves = torch.unflatten(data.view(torch.int16), -1, (4, SUBTILE_BYTES // 2))[..., : CODE_BYTES // 2]
    for rows, columns in _chunks(data):
        index = torch.add(offsets, halves[rows, columns])
        found = table.index_select(0, index.view(-1)).view(*index.shape[:3], 8, 4, 4, 2)
        del index
        nibbles = torch.unflatten((found[..., 0] | found[..., 1]).view(torch.uint8), -1, (4, 2, 2))
        del found
        # n64, k64, w, g, q, j, e, h as rows (n64, w, h, g) of bytes (k64, j, e, q)
        part = nibbles.permute(0, 2, 7, 3, 1, 5, 6, 4).flatten(4).flatten(0, 3)
        target = codes[rows.start * TILE : rows.stop * TILE, columns.start * TILE // 2 : columns.stop * TILE // 2]
        target.copy_(part[: target.shape[0], : target.shape[1]])
        del nibbles, part
    return codes, scale, weight.global_scale


def _words(data: Tensor) -> Tensor:
    """The words of codes in a blob: int32 [Np/64, Kp/64, 4, 8, 4, 4], dimensions n64, k64, w, g, q, j."""
    assert sys.byteorder == "little"
    subtiles = torch.unflatten(data.view(torch.int32), -1, (4, SUBTILE_BYTES // 4))
    return torch.unflatten(subtiles[..., : CODE_BYTES // 4], -1, (8, 4, 4))


def _scales(data: Tensor) -> Tensor:
    """The scale codes in a blob, seen as a checkpoint has them: uint8, rows (n64, w, h, g), groups (k64, J, o)."""
    stored = torch.unflatten(data, -1, (4, SUBTILE_BYTES))[..., CODE_BYTES:]
    return torch.unflatten(stored, -1, (8, 2, 2, 2)).permute(0, 2, 5, 3, 1, 4, 6)


def _pack_scales(scale: Tensor, data: Tensor) -> None:
    target = _scales(data)
    n64, _, _, _, k64, _, _ = target.shape
    coded = scale_codes(scale)
    if scale.shape != (n64 * TILE, k64 * 4):
        whole = coded.new_zeros((n64 * TILE, k64 * 4))
        whole[: scale.shape[0], : scale.shape[1]] = coded
        coded = whole
    # The cast drops the sign. The two groups of a pair stay together.
    target.view(torch.int16).copy_(coded.to(torch.uint8).view(target.shape).view(torch.int16))


def _unpack_scales(data: Tensor) -> Tensor:
    """Scales of all rows and groups, those of the padding too: float8_e4m3fn [Np, Kp/16]."""
    stored = _scales(data)
    bits = stored.to(torch.int16, memory_format=torch.contiguous_format).bitwise_left_shift_(7)
    values = bits.view(torch.float16).mul_(1 / SCALE_FACTOR)
    return values.to(torch.float8_e4m3fn).flatten(4).flatten(0, 3)


def _codes(weight: Tensor, scale: Tensor, rows: slice, columns: slice, *, plain: bool) -> Tensor:
    """Codes of whole blocks, uint8 [rows, bytes]: padded, and as they must be for scales without sign.

    A view of `weight` where nothing must be changed, that is where all scales are positive (`plain`).
    """
    at = slice(rows.start * TILE, rows.stop * TILE)
    part = weight[at, columns.start * TILE // 2 : columns.stop * TILE // 2]
    size = ((rows.stop - rows.start) * TILE, (columns.stop - columns.start) * TILE // 2)
    if plain and part.shape == size:
        return part
    whole = weight.new_zeros(size)
    whole[: part.shape[0], : part.shape[1]] = part
    if not plain:
        signed = scale[at, columns.start * 4 : columns.stop * 4].view(torch.int8)
        groups = whole.view(torch.int64)[: signed.shape[0], : signed.shape[1]]  # 16 codes each
        groups ^= (signed >> 7).to(torch.int64).bitwise_and_(SIGN_BITS)
        groups &= ((signed & 0x7F) != 0).to(torch.int64).neg_()
    return whole


def _chunks(data: Tensor) -> Iterator[tuple[slice, slice]]:
    """Ranges of blocks, along N and K, that are converted at a time."""
    n64, k64, _ = data.shape
    most = CHUNK_BYTES.get(data.device.type, CHUNK_BYTES_ELSEWHERE) // (4 * CODE_BYTES)
    blocks = max(1, min(n64 * k64 // CHUNKS_MIN, most))
    high, wide = max(1, blocks // k64), min(blocks, k64)
    for row in range(0, n64, high):
        for column in range(0, k64, wide):
            yield slice(row, min(n64, row + high)), slice(column, min(k64, column + wide))


@dataclass(frozen=True, slots=True)
class _Move:
    """One bit of a code: its place in plain nibbles (byte r is register r), and in an encoded word."""

    nibbles: int
    word: int


@cache
def _moves(encoding: str) -> tuple[_Move, ...]:
    moves = []
    for register in range(4):
        for bit in range(4):  # sign first
            at = 8 * register + 3 - bit
            if encoding == "nib":
                moves += [_Move(at, at), _Move(at + 4, at + 4)]
            else:
                low = LOW_HALVES[encoding][register][bit]
                moves += [_Move(at, low), _Move(at + 4, (low + 16) % 32)]
    return tuple(moves)


@cache
def _encode_table(encoding: str, device: torch.device) -> Tensor:
    """int32 [2 * 65536]: what two bytes of codes (registers 2 e and 2 e + 1) add to a word; e = 1 from 65536 on."""
    return _table(tuple((move.nibbles, move.word) for move in _moves(encoding)), 0, device)


@cache
def _decode_table(encoding: str, device: torch.device) -> Tensor:
    """int32 [2 * 65536]: what half a word, as int16 + 32768, adds to plain nibbles; high halves from 65536 on."""
    return _table(tuple((move.word, move.nibbles) for move in _moves(encoding)), TABLE // 2, device)


def _table(moves: tuple[tuple[int, int], ...], flip: int, device: torch.device) -> Tensor:
    """Moves (from bit, to bit) of a word, as one table for each half of it; entry i is for the bits of i ^ flip."""
    bits = torch.arange(TABLE, dtype=torch.int64) ^ flip
    table = torch.zeros((2, TABLE), dtype=torch.int64)
    for source, target in moves:
        half, at = divmod(source, 16)
        table[half] |= (bits >> at & 1) << target
    return table.view(-1).to(torch.int32).to(device)  # bit 31 becomes the sign


LAYOUTS = tuple(
    Layout(
        id=f"fragment1-{encoding}",
        pack=partial(pack, encoding),
        to_checkpoint=partial(to_checkpoint, encoding),
        data_shape=blob_shape,
        dtypes=dtypes,
    )
    for encoding, dtypes in (("bf16", ("bfloat16",)), ("fp16", ("float16",)), ("nib", DTYPES))
)
