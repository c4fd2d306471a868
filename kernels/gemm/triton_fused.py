"""`triton_fused`: dequantises in registers and feeds the tensor cores, straight from the checkpoint layout.

out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias), float32 accumulation, one rounding; sm_80 and newer.

A tile of 64-bit words (16 codes, one scale each) becomes 16 planes of decoded weights, exact in 16 bits, in the very
registers the tensor core reads (`_triton_decode`). Up to 32 tokens the weights are the second operand of a warp-level
mma; above, the operands swap, so that weights stay in registers while wgmma reads x from shared memory. Small grids
split K; the last block of a tile adds the partials in order, so results do not change from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict
from ..triton_launch import TRITON_TYPES, TritonLaunch
from ._triton_host import SplitKLaunch, supports_triton, valid_split

if TYPE_CHECKING:
    from torch import Tensor

GROUP_ROW_TILES = 8  # row tiles that share x in L2 while token tiles advance
PERMUTE_TOKENS = 4  # tokens per block of the kernel that orders x; divides every token tile


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonFusedConfig(Config):
    """One compiled tile shape and how it is launched."""

    block_m: int  # tokens per tile
    block_n: int  # weight rows per tile
    words: int  # words of 16 k per step
    split: int  # blocks along K
    stages: int  # loop iterations in flight, plus one
    warps: int
    swap: bool  # weights are the first operand of the dot


class TritonFused(Kernel):
    """See the module."""

    name = "triton_fused"
    config_type = TritonFusedConfig
    packages = ("triton",)
    made_for = ((1, 255),)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """CUDA, sm_80 and newer."""
        return supports_triton(device, problem)

    def is_valid(self, device: Device, problem: Problem, config: TritonFusedConfig, m: int) -> Verdict:
        """Tiles that suit m, fit in shared memory and registers, and splits that all have work."""
        c = config
        low, high = {16: (1, 32), 32: (9, 128), 64: (33, None), 128: (65, None)}[c.block_m]
        if m < low or (high is not None and m > high):
            return Verdict.no(f"tiles of {c.block_m} tokens serve M = {low}..{high or 'any'}, not {m}")
        if c.block_m >= 64 and not c.swap:
            return Verdict.no(f"{c.block_m} tokens need the weights as first operand (swap)")
        if (need := smem_bytes(c)) > device.smem_bytes:
            return Verdict.no(f"needs {need} bytes of shared memory, the device has {device.smem_bytes}")
        # What ptxas gives for sm_90a without spilling, of all combinations.
        rows = c.block_n // c.warps
        if rows != 16 and not (rows == 32 and c.words == 32 and c.block_m <= 32):
            return Verdict.no(f"{rows} weight rows per warp, {c.block_m} tokens and {c.words} words spill or idle")
        if c.words == 16 and not c.swap:
            return Verdict.no("16 words as second operand leave half of every mma's registers empty")
        return valid_split(device, problem, c, m)

    def space(self, device: Device, problem: Problem) -> Space[TritonFusedConfig]:
        """Tile shapes, splits, stages, warps and the order of the operands."""
        return Space(
            TritonFusedConfig,
            {
                "block_m": (16, 32, 64, 128),
                "block_n": (64, 128),
                "words": (16, 32),
                "split": (1, 2, 4, 8, 16),
                "stages": (2, 3, 4),
                "warps": (4, 8),
                "swap": (False, True),
            },
        )

    def default_config(self, device: Device, problem: Problem, m: int) -> TritonFusedConfig:
        """The smallest token tile that holds m, and the split that fills the device about twice."""
        block_m = next((b for b in (16, 32, 64, 128) if m <= b), 128)
        shapes = [(block_m, 64, 4, 3), (block_m, 64, 4, 2)]
        if block_m == 128:
            shapes = [(128, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2)]
        configs = [
            TritonFusedConfig(
                block_m=tokens, block_n=rows, words=16, split=split, stages=stages, warps=warps, swap=True
            )
            for tokens, rows, warps, stages in shapes
            for split in (16, 8, 4, 2, 1)
            if split == 1 or -(-problem.n // rows) * -(-m // tokens) * split <= 4 * device.units
        ]
        return next((c for c in configs if self.is_valid(device, problem, c, m)), configs[-1])

    def build(self, device: Device, problem: Problem, config: TritonFusedConfig) -> Launcher:
        """Compile for the device, for this K's alignment and x's dtype; N, K, M and the split stay run-time values."""
        return _Launch(device, problem, config)

    def source_files(self) -> tuple[Path, ...]:
        """Device code and its shared functions."""
        here = Path(__file__).parent
        return (here / "_triton_fused_device.py", here / "_triton_decode.py")


def smem_bytes(c: TritonFusedConfig) -> int:
    """At most what Triton allocates: copies in flight of words and scales, and of x (one more where wgmma reads it in
    place, that is, swapped), or the tile's way out; 4 KiB of slack."""
    weights, x = 9 * c.words * c.block_n, 32 * c.words * c.block_m
    loop = (c.stages - 1) * weights + (c.stages if c.swap else c.stages - 1) * x
    return max(loop, 4 * c.block_m * c.block_n) + 4096


class _Launch(SplitKLaunch):
    EXTRA = "group_size"

    def __init__(self, device: Device, problem: Problem, config: TritonFusedConfig) -> None:
        from ._triton_fused_device import fused_gemm, permute_x

        super().__init__(fused_gemm, device, problem, config, SWAP=config.swap)
        x = f"*{TRITON_TYPES[problem.dtype]}"
        pointers = dict.fromkeys(("x_ptr", "pre_quant_scale_ptr", "out_ptr"), x)
        self._permute = TritonLaunch(
            permute_x,
            device,
            signature=pointers | dict.fromkeys(("M", "K", "x_stride", "has_pqs"), "i32"),
            constants={"WORDS": config.words, "TOKENS": PERMUTE_TOKENS},
            divisible=("K",),
        )
        self._steps = -(-problem.k // (16 * config.words))

    def prepare(self, x: Tensor, pre_quant_scale: Tensor | None) -> tuple[Tensor, int]:
        m, tile = x.shape[0], self.config.block_m
        padded = -(-m // tile) * tile
        planes = x.new_empty((padded, self._steps * 16 * self.config.words))
        self._permute.launch(
            (self._steps, padded // PERMUTE_TOKENS, 1),
            x,
            x if pre_quant_scale is None else pre_quant_scale,
            planes,
            m,
            self.k,
            x.stride(0) if m > 1 else self.k,
            0 if pre_quant_scale is None else 1,
        )
        return planes, GROUP_ROW_TILES


KERNEL: Kernel = TritonFused()
