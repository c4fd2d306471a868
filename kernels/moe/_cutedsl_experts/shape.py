"""What one compiled product of experts is. Plain numbers, importable without CuTe DSL."""

from __future__ import annotations

from dataclasses import dataclass

from ...gemm._cutedsl_wgmma.shape import Shape

__all__ = ["RESULTS", "ExpertShape"]

RESULTS = ("out", "activated", "summand")
MAX_BOX_TOKENS = 96
SLOT_BYTES = 16  # what the producer says of a tile
LIST_BYTES = 4  # per token: its pair or its factor
PRODUCER_REGISTERS = 40  # with 24 the producer's addresses did not always fit
LIST_REGISTERS = 16  # that ptxas was seen to add for tiles from a list: its next entry, more addresses, tokens' factors
MANY_PIECES_REGISTERS = 8  # with three or four; without them it waits after every wgmma


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape(Shape):
    """A `Shape` whose tiles come from a list, one expert each.

    A tile with fewer rows of x than it has room for is multiplied as the smallest whole number of `pieces`-ths that
    holds them: an expert's last tile costs what it has.
    """

    result: str  # "out": [M, N]; "activated": the activation's, by position; "summand": float32, by pair
    activation: str = ""  # of "activated"
    gated: bool = False  # "activated" of interleaved gate and up
    pieces: int = 1

    @property
    def step_tokens(self) -> int:
        """Tokens of one piece."""
        return self.tokens // self.pieces

    @property
    def box_tokens(self) -> int:
        """Rows of a TMA copy. The fewer copies a stage takes the sooner they are issued; some rows are not needed."""
        return max(rows for rows in range(8, MAX_BOX_TOKENS + 1, 8) if self.tokens % rows == 0)

    @property
    def chunk_tokens(self) -> int:
        """As in `Shape`; twice as many behind a gate, for a token then has half as many values."""
        most = 64 if self.halved else 32
        return max(tokens for tokens in range(16, most + 1, 16) if self.tokens % tokens == 0)

    @property
    def chunk_bytes(self) -> int:
        """Of a chunk: 64 values of 16 bits a token, half as many behind a gate."""
        return self.chunk_tokens * (64 if self.halved else 128)

    @property
    def halved(self) -> bool:
        """Whether two rows of W make one value."""
        return self.gated and self.result == "activated"

    @property
    def out_bytes(self) -> int:
        """Of a warpgroup on the way out: chunks, and the list of tokens. Summands go straight from registers."""
        chunks = 0 if self.result == "summand" else self.chunks * self.chunk_bytes
        return chunks + (0 if self.result == "out" else self.tokens * LIST_BYTES)

    @property
    def smem_bytes(self) -> int:
        """As in `Shape`, and the slots in which the producer says what a tile is."""
        base: int = Shape.smem_bytes.__get__(self)
        return base + (self.stages + 1) * SLOT_BYTES

    @property
    def needed_registers(self) -> int:
        """As in `Shape`, and what lists take."""
        base: int = Shape.needed_registers.__get__(self)
        return base + LIST_REGISTERS + (MANY_PIECES_REGISTERS if self.pieces > 2 else 0)

    @property
    def producer_registers(self) -> int:
        """As in `Shape`."""
        return PRODUCER_REGISTERS
