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

from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict
from ._triton_host import SplitKLaunch, supports_triton, valid_split

GROUP_ROW_TILES = 8  # row tiles that share x in L2 while token tiles advance


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonFusedConfig(Config):
    """One compiled tile shape and how it is launched."""

    block_m: int  # tokens per tile
    block_n: int  # weight rows per tile
    words: int  # words of 16 k per step
    split: int  # blocks along K
    stages: int  # loop iterations in flight, plus one
    warps: int


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
        low, high = {16: (1, 32), 32: (9, 128), 64: (33, 1024), 128: (65, None)}[c.block_m]
        if m < low or (high is not None and m > high):
            return Verdict.no(f"tiles of {c.block_m} tokens serve M = {low}..{high or 'any'}, not {m}")
        if (need := smem_bytes(c)) > device.smem_bytes:
            return Verdict.no(f"needs {need} bytes of shared memory, the device has {device.smem_bytes}")
        rows = c.block_n // c.warps  # weight rows per warp
        if rows > 16 and not (rows == 32 and c.block_m == 16 and c.words == 32):
            return Verdict.no(f"{rows} weight rows per warp with {c.block_m} tokens spill registers")
        if rows < 8 or (rows == 8 and c.stages == 2):
            return Verdict.no(f"{rows} weight rows per warp and {c.stages} stages leave the warps too little to do")
        return valid_split(device, problem, c, m)

    def space(self, device: Device, problem: Problem) -> Space[TritonFusedConfig]:
        """Tile shapes, splits, stages and warps."""
        return Space(
            TritonFusedConfig,
            {
                "block_m": (16, 32, 64, 128),
                "block_n": (32, 64, 128),
                "words": (16, 32),
                "split": (1, 2, 4, 8, 16),
                "stages": (2, 3, 4),
                "warps": (4, 8),
            },
        )

    def default_config(self, device: Device, problem: Problem, m: int) -> TritonFusedConfig:
        """The smallest token tile that holds m, and the split that fills the device once."""
        block_m = next((b for b in (16, 32, 64, 128) if m <= b), 128)
        block_n, words, stages, warps = {
            16: (64, 32, 3, 4),
            32: (64, 16, 3, 4),
            64: (64, 16, 3, 4),
            128: (128, 16, 2, 8),
        }[block_m]
        configs = [
            TritonFusedConfig(
                block_m=block_m, block_n=block_n, words=words, split=split, stages=stages, warps=warps
            )
            for split in (16, 8, 4, 2, 1)
        ]
        tiles = -(-problem.n // block_n) * -(-m // block_m)
        return next(
            (c for c in configs if tiles * c.split <= 2 * device.units and self.is_valid(device, problem, c, m)),
            configs[-1],
        )

    def build(self, device: Device, problem: Problem, config: TritonFusedConfig) -> Launcher:
        """Compile for the device, for this K's alignment and x's dtype; N, K, M and the split stay run-time values."""
        from ._triton_fused_device import fused_gemm

        return SplitKLaunch(
            fused_gemm,
            device,
            problem,
            config,
            extra={"group_size": GROUP_ROW_TILES},
            SWAP=config.block_m >= 64,
        )

    def source_files(self) -> tuple[Path, ...]:
        """Device code and its shared functions."""
        here = Path(__file__).parent
        return (here / "_triton_fused_device.py", here / "_triton_decode.py")


def smem_bytes(c: TritonFusedConfig) -> int:
    """What Triton allocates, to within 4 KiB: copies in flight (words, scales, x), the decoded x of swapped tiles, and
    the tile's way out."""
    stage = c.words * (9 * c.block_n + 32 * c.block_m)
    planes = 8 * c.words * c.block_m if c.block_m >= 64 else 0
    return max((c.stages - 1) * stage + planes, 4 * c.block_m * c.block_n) + 4096


KERNEL: Kernel = TritonFused()
