"""`triton_fused_fragment`: dequantises in registers and feeds the tensor cores, from a fragment layout.

out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias), float32 accumulation, one rounding; sm_80 and newer.

A thread's words are the codes of the very registers that it has to hand to the tensor core, in that order
(`_triton_fragment_device`), so nothing moves between threads, rows and k keep their order, and x is read as it is:
unlike `triton_fused` this is one launch. The weights are the dot's first operand. Small grids split K; the last block
of a tile adds the partials in order, so results do not change from run to run.

On Hopper a step's wgmmas are done before the next one decodes (see `waited`); other blocks fill the gap. A weight takes
(counted in sm_90 code of Triton 3.7, 3.6) 3.0, 2.9 instructions with 256 k a step, 3.6, 3.4 with 128, 4.4, 4.3 with 64.
The defaults follow from registers and shared memory; they were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict
from ..weights.fragment import TILE, fragment_id, padded
from ._triton_host import SplitKLaunch, scaled_x, supports_triton, valid_split

if TYPE_CHECKING:
    from torch import Tensor

HOPPER = (9, 0)
GROUP_ROW_TILES = 8  # row tiles that share x in L2 while token tiles advance
ROWS_PER_WARP = 16  # the warps of a warpgroup are one wgmma
MS = {16: (1, 32), 32: (9, 128), 64: (33, None), 128: (65, None)}  # tokens per tile: which M it serves

# Tokens per tile: rows, k, stages, and blocks that a Hopper multiprocessor's registers hold at once.
DEFAULTS = {16: (64, 256, 3, 4), 32: (64, 128, 3, 5), 64: (128, 128, 3, 2), 128: (128, 64, 3, 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonFusedFragmentConfig(Config):
    """One compiled tile shape, and how many blocks share its K."""

    block_m: int  # tokens per tile
    block_n: int  # weight rows per tile; a warp for every 16
    block_k: int  # per step
    split: int  # blocks along K
    stages: int  # copies of words and scales in flight, plus one


class TritonFusedFragment(Kernel):
    """See the module."""

    name = "triton_fused_fragment"
    config_type = TritonFusedFragmentConfig
    packages = ("triton",)
    made_for = ((65, 192),)  # any M is valid

    def layout(self, device: Device, problem: Problem) -> str:
        """The fragment layout for the device and x's dtype."""
        return fragment_id(device.capability, problem.dtype)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """CUDA, sm_80 and newer."""
        return supports_triton(device, problem)

    def is_valid(self, device: Device, problem: Problem, config: TritonFusedFragmentConfig, m: int) -> Verdict:
        """Tiles that suit M, N and K and fit in shared memory, and splits that all have work."""
        low, high = MS[config.block_m]
        if m < low or (high is not None and m > high):
            return Verdict.no(f"tiles of {config.block_m} tokens serve M = {low}..{high or 'any'}, not {m}")
        if config.block_n > padded(problem.n) or config.block_k > padded(problem.k):
            return Verdict.no(f"tiles of {config.block_n} rows, {config.block_k} k: more than {problem.n}x{problem.k}")
        if config.block_k == 256 and config.block_m >= 64 and device.capability != HOPPER:
            return Verdict.no(f"steps of 256 k with tiles of {config.block_m} tokens spill registers on {device.arch}")
        if (need := smem_bytes(config, device.capability)) > device.smem_bytes:
            return Verdict.no(f"needs {need} bytes of shared memory, the device has {device.smem_bytes}")
        return valid_split(device, problem, m, config, step=config.block_k)

    def space(self, device: Device, problem: Problem) -> Space[TritonFusedFragmentConfig]:
        """Tile shapes, splits and stages."""
        return Space(
            TritonFusedFragmentConfig,
            {
                "block_m": tuple(MS),
                "block_n": (64, 128),
                "block_k": (64, 128, 256),
                "split": (1, 2, 4, 8, 16),
                "stages": (2, 3, 4),
            },
        )

    def default_config(self, device: Device, problem: Problem, m: int) -> TritonFusedFragmentConfig:
        """The smallest token tile that holds m, and the finest split that every multiprocessor has room for."""
        block_m = next((b for b in (16, 32, 64) if m <= b), 128)
        block_n, block_k, stages, room = DEFAULTS[block_m]
        if block_n > padded(problem.n):
            block_n = 64
        while block_k > padded(problem.k):
            block_k //= 2
        tiles = -(-problem.n // block_n) * -(-m // block_m)
        for split in (16, 8, 4, 2, 1):
            config = TritonFusedFragmentConfig(
                block_m=block_m, block_n=block_n, block_k=block_k, split=split, stages=stages
            )
            enough = problem.k // split >= 512 and tiles * split <= room * device.units
            if split == 1 or (enough and self.is_valid(device, problem, config, m)):
                break
        return config

    def build(self, device: Device, problem: Problem, config: TritonFusedFragmentConfig) -> Launcher:
        """Compile for the device and x's dtype; N, K, M and the split stay run-time values."""
        from ._triton_fragment_device import fused_fragment_gemm

        return _Launch(
            fused_fragment_gemm,
            device,
            problem,
            config,
            warps=config.block_n // ROWS_PER_WARP,
            stages=config.stages,
            ENCODING=self.layout(device, problem).rpartition("-")[2],
            BLOCKS=config.block_k // TILE,
            GROUP=GROUP_ROW_TILES,
            WGMMA=device.capability == HOPPER,
        )

    def source_files(self) -> tuple[Path, ...]:
        """Device code, its shared functions, and this file: its constants are compiled in."""
        here = Path(__file__).parent
        return (Path(__file__), here / "_triton_fragment_device.py", here / "_triton_decode.py")


def smem_bytes(c: TritonFusedFragmentConfig, capability: tuple[int, int]) -> int:
    """At most what Triton allocates: copies in flight of blocks and of x, or the tile's way out; 6 KiB of slack.

    Where tensor cores read x in place, one more copy of it is held. Where warps share rows (all but Hopper), decoded
    weights pass through shared memory.
    """
    blocks, x = c.block_n * c.block_k * 9 // 16, 2 * c.block_m * c.block_k
    decoded = 0 if capability == HOPPER else 2 * c.block_n * c.block_k
    return max((c.stages - 1) * (blocks + x) + max(x, decoded), 4 * c.block_m * c.block_n) + 6144


class _Launch(SplitKLaunch):
    EXTRA = "x_stride8"
    BLOB = True

    def prepare(self, x: Tensor, pre_quant_scale: Tensor | None) -> tuple[Tensor, int]:
        x = scaled_x(x, pre_quant_scale)
        if x.shape[0] == 1:
            return x, self.k // 8
        if x.stride(0) % 8:
            x = x.contiguous()
        return x, x.stride(0) // 8


KERNEL: Kernel = TritonFusedFragment()
