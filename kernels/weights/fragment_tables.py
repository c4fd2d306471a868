"""Where the words of the fragment layouts keep the bits of each code, and tables that move them there and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = ["LOW_HALVES", "TABLE", "decode_table", "encode_table"]

# Where a word keeps the bits (sign, exponent, exponent, mantissa) of the low half of registers 0 to 3. The high half's
# are 16 bits further on, around the end of the word.
LOW_HALVES = {
    "bf16": ((15, 8, 7, 6), (11, 4, 3, 2), (21, 14, 13, 12), (17, 10, 9, 0)),
    "fp16": ((15, 11, 10, 7), (13, 14, 8, 12), (9, 5, 4, 3), (22, 18, 17, 16)),
}

TABLE = 1 << 16  # entries for half a word


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
def encode_table(encoding: str, device: torch.device) -> Tensor:
    """int32 [2 * 65536]: what two bytes of codes (registers 2 e and 2 e + 1) add to a word; e = 1 from 65536 on."""
    return _table(tuple((move.nibbles, move.word) for move in _moves(encoding)), 0, device)


@cache
def decode_table(encoding: str, device: torch.device) -> Tensor:
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
