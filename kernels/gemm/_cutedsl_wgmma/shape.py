"""What one compiled kernel is: tile, pipeline and machine resources. Plain numbers, importable without CuTe DSL."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Shape"]

BLOCK = 64  # rows and columns of a block of the fragment layout
BLOCK_BYTES = 2304
WARPGROUP = 128  # threads
BARRIER_BYTES = 8
ALIGN_BYTES = 1024  # of buffers with a 128-byte swizzle
REGISTERS_PER_SM = 65536
MAX_REGISTERS = 255
PRODUCER_REGISTERS = 24  # setmaxnreg's smallest
SM_SMEM_BYTES = 233472  # of a Hopper multiprocessor; every block in it takes RESERVED_BYTES besides its own
RESERVED_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything that the machine code depends on; two configs of equal shape share it."""

    float16: bool  # of x and out; else bfloat16
    rows: int  # of W per tile: 64 or 128 per warpgroup
    tokens: int  # per tile: wgmma's n
    block_k: int  # per stage: 64 or 128
    warpgroups: int  # that multiply
    stages: int  # of the ring in shared memory
    schedule: str  # see `waits`
    blocks_per_sm: int
    multicast: int  # blocks of a cluster that share x
    stream_k: bool
    wide_stores: bool  # rows of out are 16-byte aligned

    @property
    def threads(self) -> int:
        """Of a block: the producer's warpgroup comes last."""
        return WARPGROUP * (self.warpgroups + 1)

    @property
    def row_blocks(self) -> int:
        """Blocks of 64 rows in a tile."""
        return self.rows // BLOCK

    @property
    def k_blocks(self) -> int:
        """Blocks of 64 k in a stage."""
        return self.block_k // BLOCK

    @property
    def own_blocks(self) -> int:
        """Blocks of 64 rows that one warpgroup multiplies."""
        return self.row_blocks // self.warpgroups

    # ---- shared memory: [x: stages][out: chunks][weights: stages][barriers: full, empty] ----

    @property
    def x_bytes(self) -> int:
        """Of a stage."""
        return self.tokens * self.block_k * 2

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return self.row_blocks * self.k_blocks * BLOCK_BYTES

    @property
    def chunk_tokens(self) -> int:
        """Tokens that a warpgroup turns around at a time on the way out."""
        return 32 if self.tokens % 32 == 0 else 16

    @property
    def chunks(self) -> int:
        """Buffers of a warpgroup for that: with two, one barrier a chunk is enough."""
        return 2 if self.tokens > self.chunk_tokens or self.own_blocks > 1 else 1

    @property
    def chunk_bytes(self) -> int:
        """Of one such buffer: rows of 64 values, swizzled as x is."""
        return self.chunk_tokens * BLOCK * 2

    @property
    def out_bytes(self) -> int:
        """All that a warpgroup has of them."""
        return self.chunks * self.chunk_bytes

    @property
    def out_offset(self) -> int:
        """Where they start."""
        return self.stages * self.x_bytes

    @property
    def weight_offset(self) -> int:
        """Where the stages of weights start."""
        return self.out_offset + self.warpgroups * self.out_bytes

    @property
    def barrier_offset(self) -> int:
        """Where the barriers start: one per stage for "full", then one per stage for "empty"."""
        return self.weight_offset + self.stages * self.weight_bytes

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.barrier_offset + 2 * self.stages * BARRIER_BYTES

    # ---- registers ----

    @property
    def launch_registers(self) -> int:
        """What ptxas may give every thread so that blocks_per_sm blocks fit."""
        return min(REGISTERS_PER_SM // (self.blocks_per_sm * self.threads) // 8 * 8, MAX_REGISTERS)

    @property
    def needed_registers(self) -> int:
        """Of a multiplying thread: accumulators, fragments and words of a stage, and what ptxas was seen to add."""
        words = 6 * self.k_blocks  # four of codes, two of scales
        fragments = 4 * self.block_k // 16
        held = 2 * words if self.prefetch else words
        return self.own_blocks * (self.tokens // 2 + fragments + held) + 44

    @property
    def producer_registers(self) -> int:
        """After setmaxnreg."""
        return PRODUCER_REGISTERS

    @property
    def consumer_registers(self) -> int:
        """After setmaxnreg; 0 where the launch gives enough.

        Only what the block was launched with can be handed over: asking for more waits for ever.
        """
        if self.needed_registers <= self.launch_registers:
            return 0
        spare = self.launch_registers * (self.warpgroups + 1) - self.producer_registers
        return min(spare // self.warpgroups // 8 * 8, 240)

    # ---- the order of decoding and waiting ----

    @property
    def prefetch(self) -> bool:
        """Whether the next stage's words are read while this one's last wgmma runs."""
        return self.schedule == "ends-prefetch"

    @property
    def steps(self) -> int:
        """wgmma groups per stage and block of 64 rows: one per 16 k."""
        return self.block_k // 16

    @property
    def waits(self) -> tuple[tuple[int | None, ...], int]:
        """For every step the groups that stay in flight after it (None: no wait), and the step that frees a stage.

        Registers of a step's fragment are written again a stage later, so at most steps - 1 groups may be in flight.
        After the freeing step no wgmma of the stage before is in flight.

        "each": two stay in flight all the time. "ends": one after the first and the last step, any number between.
        """
        if self.schedule == "each":
            return (2,) * self.steps, 1
        return (1, *(None,) * (self.steps - 2), 1), 0
