"""What one compiled product of experts is. Plain numbers, importable without CuTe DSL."""

from __future__ import annotations

from dataclasses import dataclass

from ...gemm._cutedsl_wgmma.shape import Shape

__all__ = ["RESULTS", "ExpertShape"]

RESULTS = ("out", "activated", "summand")
LIST_BYTES = 8  # per token: its pair and its factor
PRODUCER_REGISTERS = 40  # with 24 the producer's addresses did not always fit
LIST_REGISTERS = 16  # that ptxas was seen to add for tiles from a list: its next entry, more addresses, tokens' factors
MANY_PIECES_REGISTERS = 8  # with three or four; without them it waits after every wgmma
PADDED_ROW_BYTES = 272  # of 64 float32 of a token: 16 more, so that no two threads of a warp meet in a bank


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
        """Tokens of one piece: rows of a TMA copy."""
        return self.tokens // self.pieces

    @property
    def chunk_tokens(self) -> int:
        """As in `Shape`; float32 take twice the room."""
        return 32 if self.tokens % 32 == 0 and self.result != "summand" else 16

    @property
    def chunk_bytes(self) -> int:
        """Of a chunk: 64 values of 16 bits a token, half as many behind a gate, or float32."""
        row = PADDED_ROW_BYTES if self.result == "summand" else 64 if self.gated else 128
        return self.chunk_tokens * row

    @property
    def out_bytes(self) -> int:
        """Of a warpgroup on the way out: chunks, and the list of tokens."""
        return self.chunks * self.chunk_bytes + self.tokens * LIST_BYTES

    @property
    def needed_registers(self) -> int:
        """As in `Shape`, and what lists take."""
        base: int = Shape.needed_registers.__get__(self)
        return base + LIST_REGISTERS + (MANY_PIECES_REGISTERS if self.pieces > 2 else 0)

    @property
    def producer_registers(self) -> int:
        """As in `Shape`."""
        return PRODUCER_REGISTERS
