"""`triton_fused`: dequantises in registers and feeds the tensor cores, straight from the checkpoint layout.

out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias), float32 accumulation, one rounding; sm_80 and newer.

A tile of 64-bit words (16 codes, one scale each) becomes 16 planes of decoded weights, exact in 16 bits, in the very
registers the tensor core reads (`_triton_decode`): the weights are the dot's first operand, and wgmma (or mma) reads x
from shared memory. x is ordered by planes once per call, in a small kernel whose end the main one does not wait for to
start. Small grids split K; the last block of a tile adds the partials in order, so results do not change from run to
run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict
from ..triton_launch import TRITON_TYPES, TritonLaunch, interpreting
from ._triton_host import SplitKLaunch, k_align, near_rows, supports_triton, valid_split

if TYPE_CHECKING:
    from torch import Tensor

GROUP_ROW_TILES = 8  # row tiles that share x in L2 while token tiles advance
PERMUTE_TOKENS = 4  # tokens per block of the kernel that orders x; divides every token tile
WORDS = 16  # per step: 256 k. With 32, ptxas serialises the wgmmas (H200, 2026-11: 3 to 63 % slower)
# By tokens per tile: what lets one block more onto a Hopper multiprocessor without spilling in the loop.
CAPS = {16: 80, 32: 96}
ROWS_PER_WARP = 16  # with 32 the tile's words spill, with 8 a warpgroup has no whole wgmma


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonFusedConfig(Config):
    """One compiled tile shape, and how many blocks share its K."""

    block_m: int  # tokens per tile
    block_n: int  # weight rows per tile; a warp for every 16
    split: int  # blocks along K
    stages: int  # copies of words and scales in flight, plus one
    max_registers: int  # per thread; 0: as many as ptxas likes


class TritonFused(Kernel):
    """See the module."""

    name = "triton_fused"
    config_type = TritonFusedConfig
    packages = ("triton",)
    made_for = ((1, 192),)  # any M is valid; from there on two_pass is ahead (H200, 2026-11)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """CUDA, sm_80 and newer."""
        return supports_triton(device, problem)

    def is_valid(self, device: Device, problem: Problem, config: TritonFusedConfig, m: int) -> Verdict:
        """Tiles that suit m and fit in shared memory, and splits that all have work."""
        low, high = {16: (1, 32), 32: (9, 128), 64: (33, None)}[config.block_m]
        if m < low or (high is not None and m > high):
            return Verdict.no(f"tiles of {config.block_m} tokens serve M = {low}..{high or 'any'}, not {m}")
        if config.max_registers not in (0, CAPS.get(config.block_m)):
            return Verdict.no(f"{config.max_registers} registers spill, or gain no block, with {config.block_m} tokens")
        if (need := smem_bytes(config, problem.k)) > device.smem_bytes:
            return Verdict.no(f"needs {need} bytes of shared memory, the device has {device.smem_bytes}")
        return valid_split(device, problem, m, config, step=16 * WORDS)

    def space(self, device: Device, problem: Problem) -> Space[TritonFusedConfig]:
        """Tile shapes, splits and stages."""
        return Space(
            TritonFusedConfig,
            {
                "block_m": (16, 32, 64),
                "block_n": (64, 128),
                "split": (1, 2, 4, 8, 16),
                "stages": (2, 3),
                "max_registers": (0, *CAPS.values()),
            },
        )

    def default_config(self, device: Device, problem: Problem, m: int) -> TritonFusedConfig:
        """The smallest token tile that holds m, and the finest split that every multiprocessor has room for.

        The constants are those that came closest to the best config over all measurements of the tuning whose winners
        are in bench/results/2026-11-30-h200-tune.json; as a rule they were not measured again.
        """
        block_m = next((b for b in (16, 32) if m <= b), 64)
        widest = TritonFusedConfig(block_m=64, block_n=128, split=1, stages=2, max_registers=0)
        # 99 KiB of shared memory hold it only where scales can be copied asynchronously.
        block_n = 128 if block_m == 64 and smem_bytes(widest, problem.k) <= device.smem_bytes else 64
        registers = CAPS[16] if block_m == 16 and device.capability == (9, 0) else 0
        room = {16: 5.0, 32: 4.0, 64: 2.5}[block_m] * device.units
        many = {16: 8, 32: 12}.get(block_m)  # steps from which one more copy in flight pays
        tiles = -(-problem.n // block_n) * -(-m // block_m)
        for split in (16, 8, 4, 2, 1):
            steps = -(-problem.k // (16 * WORDS * split))
            stages = 3 if many is not None and steps >= many else 2
            config = TritonFusedConfig(
                block_m=block_m, block_n=block_n, split=split, stages=stages, max_registers=registers
            )
            fits = tiles * split <= room and steps >= 2 and self.is_valid(device, problem, config, m)
            if split == 1 or fits:
                break
        return config

    def build(self, device: Device, problem: Problem, config: TritonFusedConfig) -> Launcher:
        """Compile for the device, for this K's alignment and x's dtype; N, K, M and the split stay run-time values."""
        return _Launch(device, problem, config)

    def source_files(self) -> tuple[Path, ...]:
        """Device code, its shared functions, and this file: its constants are compiled in."""
        here = Path(__file__).parent
        return (Path(__file__), here / "_triton_fused_device.py", here / "_triton_decode.py")


def smem_bytes(c: TritonFusedConfig, k: int) -> int:
    """At most what Triton allocates: copies in flight of words and scales, and of x (one more, for wgmma reads it in
    place), or the tile's way out; 4 KiB of slack. Where scales cannot be copied asynchronously, decoded planes pass
    through shared memory too."""
    loop = WORDS * ((c.stages - 1) * 9 * c.block_n + c.stages * 32 * c.block_m)
    if k_align(k) < 64:
        loop += 8 * WORDS * c.block_n
    return max(loop, 4 * c.block_m * c.block_n) + 4096


class _Launch(SplitKLaunch):
    EXTRA = "group_size"

    def __init__(self, device: Device, problem: Problem, config: TritonFusedConfig) -> None:
        from ._triton_fused_device import fused_gemm, permute_x

        pdl = device.capability >= (9, 0) and not interpreting()
        super().__init__(
            fused_gemm,
            device,
            problem,
            config,
            warps=config.block_n // ROWS_PER_WARP,
            stages=config.stages,
            max_registers=config.max_registers,
            after_pdl=pdl,
            K_ALIGN=k_align(problem.k),
            WORDS=WORDS,
            PDL=pdl,
        )
        x = f"*{TRITON_TYPES[problem.dtype]}"
        pointers = dict.fromkeys(("x_ptr", "pre_quant_scale_ptr", "out_ptr"), x)
        self._permute = TritonLaunch(
            permute_x,
            device,
            signature=pointers | dict.fromkeys(("M", "K", "x_stride", "has_pqs"), "i32"),
            constants={"WORDS": WORDS, "TOKENS": PERMUTE_TOKENS, "PDL": pdl},
            divisible=("K",),
        )
        self._steps = -(-problem.k // (16 * WORDS))

    def prepare(self, x: Tensor, pre_quant_scale: Tensor | None) -> tuple[Tensor, int]:
        x, m, tile = near_rows(x), x.shape[0], self.config.block_m
        padded = -(-m // tile) * tile
        planes = x.new_empty((padded, self._steps * 16 * WORDS))
        self._permute.launch(
            (padded // PERMUTE_TOKENS, self._steps, 1),
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
