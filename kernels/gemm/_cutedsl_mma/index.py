"""Who copies, reads and writes what: pure arithmetic on ints, the kernel's own or, in tests, Python's.

Offsets in shared memory are bytes from the start of a stage or of the tile on its way out.

x in shared memory: a row of block_k values per token, in pieces of 16 bytes. Piece p of token t is where p ^ (t % 8)
would be, so that neither copies nor `ldmatrix`, which reads one piece of eight tokens, meet a bank twice.
"""

from typing import Any

from .shape import BLOCK, BLOCK_BYTES, CODE_BYTES, PIECE_BYTES, SUBTILE_BYTES, VALUE_BYTES, Shape

__all__ = [
    "code_offset",
    "k_range",
    "out_read",
    "out_written",
    "scale_offset",
    "warp_place",
    "weight_copies",
    "x_copied",
    "x_copies",
    "x_read",
    "x_step",
]

Int = Any  # Python's or CuTe DSL's


def k_range(rank: Int, split: Int, k_tiles: Int) -> tuple[Int, Int]:
    """(first k-tile, k-tile behind the last) of one of the blocks that share a tile."""
    return k_tiles * rank // split, k_tiles * (rank + 1) // split


def warp_place(warp: Int, c: Shape) -> tuple[Int, Int]:
    """(first subtile, first token) of a warp in its tile."""
    return warp // c.warp_tokens * c.subtiles, warp % c.warp_tokens * c.own_tokens


# ---- copies into a stage ----


def x_copied(thread: Int, c: Shape) -> tuple[Int, Int, Int]:
    """(token, k, offset) of a thread's first piece of x; the next ones are a number of whole tokens further on."""
    pieces = c.block_k // 8
    token, piece = thread // pieces, thread % pieces
    return token, piece * 8, token * c.x_pitch + (piece ^ (token % 8)) * PIECE_BYTES


def x_copies(c: Shape) -> tuple[int, int]:
    """(how many pieces of x a thread copies, how many tokens lie between them)."""
    together = c.threads * 8 // c.block_k
    return c.tokens // together, together


def weight_copies(c: Shape) -> tuple[int, ...]:
    """Where, in pieces, the threads' copies of a run of blocks start; some threads have none in the last one."""
    return tuple(range(0, c.run_bytes // PIECE_BYTES, c.threads))


# ---- what a warp reads ----


def code_offset(lane: Int, first: Int, c: Shape) -> Int:
    """Of a lane's four words of the first subtile; the next ones are SUBTILE_BYTES and BLOCK_BYTES (k) further on."""
    return first // 4 * c.run_bytes + first % 4 * SUBTILE_BYTES + lane * 16


def scale_offset(lane: Int, first: Int, c: Shape) -> Int:
    """Of a lane's two words of scale codes, likewise."""
    return first // 4 * c.run_bytes + first % 4 * SUBTILE_BYTES + CODE_BYTES + lane // 4 * 8


def x_read(lane: Int, token: Int, c: Shape) -> Int:
    """What a lane tells `ldmatrix` for 16 tokens from `token` on at the first step: one row of one of four matrices.

    Matrices 0 and 1 are the lower and upper 8 k of tokens 0 to 7, 2 and 3 those of 8 to 15; `token` is a
    multiple of 16.
    """
    row, half = lane % 8, lane // 8 % 2
    return (token + lane // 16 * 8 + row) * c.x_pitch + (half ^ row) * PIECE_BYTES


def x_step(offset: Int, step: int) -> Int:
    """The same at another step: pieces 2 step and 2 step + 1."""
    return (offset ^ (step % 4 * 2 * PIECE_BYTES)) + step // 4 * (BLOCK * VALUE_BYTES)


# ---- the way out ----


def out_written(lane: Int, subtile: Int, token: Int, c: Shape) -> Int:
    """Where a lane puts two rows' values of one token: rows 2 q, 2 q + 1 of the first eight, for token g.

    The next eight rows are 16 bytes, the next eight tokens 8 * out_pitch bytes further on.
    """
    return (token + lane // 4) * c.out_pitch + (subtile * 16 + lane % 4 * 2) * VALUE_BYTES


def out_read(index: Int, c: Shape) -> tuple[Int, Int, Int]:
    """(token, first row, offset) of the index-th group of values that is stored at once."""
    groups = c.rows // c.store_values
    token, row = index // groups, index % groups * c.store_values
    return token, row, token * c.out_pitch + row * VALUE_BYTES


assert BLOCK_BYTES % PIECE_BYTES == 0
