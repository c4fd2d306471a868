"""What one compiled kernel is: tile, warps, pipeline and machine resources. Plain numbers; needs no CuTe DSL."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Shape"]

BLOCK = 64  # rows and columns of a block of the fragment layout
SUBTILE_BYTES = 576  # of 16 rows: 512 bytes of codes, then 64 of scales
CODE_BYTES = 512
BLOCK_BYTES = 4 * SUBTILE_BYTES
PIECE_BYTES = 16  # what one thread copies at a time
VALUE_BYTES = 2  # of x and out
PAD_BYTES = 16  # behind the rows of a token on the way out: neighbouring tokens meet other banks
REGISTERS_PER_SM = 65536
MAX_REGISTERS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything that the machine code depends on; two configs of equal shape share it."""

    encoding: str  # of the weights: "bf16", "fp16" or "nib"
    float16: bool  # of x and out; else bfloat16
    hopper: bool  # sm_90 and newer: programmatic dependent launch, multiplication of bfloat16
    rows: int  # of W per tile: 64, 128 or 256
    tokens: int  # per tile
    warps: int  # per block
    warp_tokens: int  # of them along the tokens; the others along the rows
    block_k: int  # per stage: 64 or 128
    stages: int  # of the ring in shared memory
    split: int  # blocks that share a tile's K
    store_values: int  # that are stored at a time: 8, 4, 2 or 1, which divides N
    blocks_per_sm: int  # that the registers have to suffice for

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def row_blocks(self) -> int:
        """Blocks of 64 rows in a tile."""
        return self.rows // BLOCK

    @property
    def k_blocks(self) -> int:
        """Blocks of 64 k in a stage."""
        return self.block_k // BLOCK

    @property
    def steps(self) -> int:
        """Of 16 k in a stage."""
        return self.block_k // 16

    @property
    def subtiles(self) -> int:
        """Of 16 rows, that one warp multiplies."""
        return self.rows * self.warp_tokens // (16 * self.warps)

    @property
    def own_tokens(self) -> int:
        """That one warp multiplies."""
        return self.tokens // self.warp_tokens

    @property
    def octets(self) -> int:
        """Of tokens, that one warp multiplies: one instruction for each and 16 rows."""
        return self.own_tokens // 8

    # ---- shared memory: [x: stages][weights: stages], later [out], then [scale, bias: rows][a word] ----

    @property
    def x_pitch(self) -> int:
        """Bytes of a token in a stage."""
        return self.block_k * VALUE_BYTES

    @property
    def x_bytes(self) -> int:
        """Of a stage."""
        return self.tokens * self.x_pitch

    @property
    def run_bytes(self) -> int:
        """What lies together in the weights: a block of 64 rows, as deep as a stage."""
        return self.k_blocks * BLOCK_BYTES

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return self.row_blocks * self.run_bytes

    @property
    def weight_offset(self) -> int:
        """Where the stages of weights start."""
        return self.stages * self.x_bytes

    @property
    def out_pitch(self) -> int:
        """Bytes of a token on the way out."""
        return self.rows * VALUE_BYTES + PAD_BYTES

    @property
    def edge_offset(self) -> int:
        """Where the rows' global scales start, and then their biases: behind the ring and out, which share memory."""
        return max(self.stages * (self.x_bytes + self.weight_bytes), self.tokens * self.out_pitch)

    @property
    def order_offset(self) -> int:
        """Where a block tells all its threads how many blocks of its tile were done before."""
        return self.edge_offset + 8 * self.rows

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.order_offset + 16

    # ---- registers ----

    @property
    def launch_registers(self) -> int:
        """What ptxas may give every thread so that blocks_per_sm blocks fit."""
        return min(REGISTERS_PER_SM // (self.blocks_per_sm * self.threads) // 8 * 8, MAX_REGISTERS)

    @property
    def needed_registers(self) -> int:
        """Accumulators, two steps of x, words, a fragment, and what ptxas was seen to add; without them it spills."""
        words = (4 + 5 * self.k_blocks) * self.subtiles
        return 4 * self.subtiles * self.octets + 4 * self.octets + words + 40
