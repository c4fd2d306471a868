"""What one compiled product of experts is. Plain numbers, importable without CuTe DSL."""

from __future__ import annotations

from dataclasses import dataclass

from ...gemm._cutedsl_wgmma.shape import WARPGROUP, Shape

__all__ = ["RESULTS", "ExpertShape"]

RESULTS = ("out", "activated", "summand")
MAX_BOX_TOKENS = 96
SLOT_BYTES = 16  # what the producer says of a tile
LIST_BYTES = 4  # per token: its pair, its factor, or where its row begins
QUAD_TOKENS = 64  # of which a thread of the producer reads four places at a time: see `gather`
PRODUCER_REGISTERS = 40  # with 24 the producer's addresses did not always fit
LIST_REGISTERS = 16  # that ptxas was seen to add for tiles from a list: more addresses, what the tokens' list holds
GATHER_REGISTERS = 16  # more than are needed, or two values were spilled
MANY_PIECES_REGISTERS = 8  # with three and more; without them it waits after every wgmma


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
    gathered: bool = False  # "activated": x is read by token, not by position, and there are no factors

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
    def listed(self) -> bool:
        """Whether a warpgroup needs to know something of every token."""
        return self.result != "out" and not self.gathered

    @property
    def out_bytes(self) -> int:
        """Of a warpgroup on the way out: chunks, and the list of tokens. Summands go straight from registers."""
        chunks = 0 if self.result == "summand" else self.chunks * self.chunk_bytes
        return chunks + (self.tokens * LIST_BYTES if self.listed else 0)

    @property
    def places_offset(self) -> int:
        """Where in shared memory the producer lists the rows of a tile, behind the slots that say what tiles are."""
        base: int = Shape.smem_bytes.__get__(self)
        return base + (self.stages + 1) * SLOT_BYTES

    @property
    def places_bytes(self) -> int:
        """Of that list, with room for whole quads."""
        return -(-self.tokens // QUAD_TOKENS) * QUAD_TOKENS * LIST_BYTES

    @property
    def smem_bytes(self) -> int:
        """As in `Shape`, the slots, and the list with the number of the next tile."""
        return self.places_offset + (self.places_bytes + SLOT_BYTES if self.gathered else 0)

    @property
    def full_arrivals(self) -> int:
        """At the barrier of a stage: of who announces bytes, and of every thread that copies rows."""
        return 1 + (WARPGROUP if self.gathered else 0)

    @property
    def waiting_threads(self) -> int:
        """That must know of the ring's barriers: all who multiply, and of the producer's warpgroup those who load."""
        return WARPGROUP * self.warpgroups + (WARPGROUP if self.gathered else 32)

    @property
    def needed_registers(self) -> int:
        """As in `Shape`, and what lists take."""
        base: int = Shape.needed_registers.__get__(self)
        return base + LIST_REGISTERS + (MANY_PIECES_REGISTERS if self.pieces > 2 else 0)

    @property
    def consumer_registers(self) -> int:
        """As in `Shape`; where rows are gathered also if the launch gives hardly more than enough."""
        base: int = Shape.consumer_registers.__get__(self)
        if base or not self.gathered or self.needed_registers + GATHER_REGISTERS <= self.launch_registers:
            return base
        spare = self.launch_registers * (self.warpgroups + 1) - self.producer_registers
        most = min(spare // self.warpgroups // 8 * 8, 240)
        return most if most > self.launch_registers else 0

    @property
    def producer_registers(self) -> int:
        """As in `Shape`."""
        return PRODUCER_REGISTERS
