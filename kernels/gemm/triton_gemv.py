"""`triton_gemv`: decode with few tokens on the CUDA cores, straight from the checkpoint layout.

out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias), M <= 8, float32 products and sums, one rounding; sm_80 and up.

Weights arrive by 16-byte loads (two words of 16 codes), are decoded in registers and multiplied by x in float32: no
shared memory, no barrier, so it starts and ends quickly on small layers. The price is one FMA per weight and token,
which is why it is made for one or two tokens. K splits as in `triton_fused`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict
from ._triton_host import SplitKLaunch, k_align, scaled_x, supports_triton, valid_split

if TYPE_CHECKING:
    from torch import Tensor

MAX_M = 8
WORDS = 64  # of 16 k, per step


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonGemvConfig(Config):
    """One compiled tile shape and how it is launched."""

    block_m: int  # tokens per tile
    block_n: int  # weight rows per tile
    split: int  # blocks along K
    stages: int  # 1: loads go to registers; more: asynchronous copies that many steps ahead
    warps: int


class TritonGemv(Kernel):
    """See the module."""

    name = "triton_gemv"
    config_type = TritonGemvConfig
    packages = ("triton",)
    made_for = ((1, 1),)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """CUDA, sm_80 and newer."""
        return supports_triton(device, problem)

    def is_valid(self, device: Device, problem: Problem, config: TritonGemvConfig, m: int) -> Verdict:
        """One tile of tokens, registers for the words in flight, and splits that all have work."""
        c = config
        if m > MAX_M:
            return Verdict.no(f"serves M up to {MAX_M}, not {m}")
        if not m <= c.block_m < 2 * m:
            return Verdict.no(f"tiles of {c.block_m} tokens do not fit M = {m}")
        words_held = c.block_n * WORDS // (32 * c.warps)
        if not 2 <= words_held <= 16:
            return Verdict.no(f"a thread would hold {words_held} words of 16 weights; 2 to 16 fit its registers")
        if (need := (c.stages - 1) * WORDS * (9 * c.block_n + 32 * c.block_m) + 2048) > device.smem_bytes:
            return Verdict.no(f"needs {need} bytes of shared memory, the device has {device.smem_bytes}")
        return valid_split(device, problem, m, c, step=16 * WORDS)

    def space(self, device: Device, problem: Problem) -> Space[TritonGemvConfig]:
        """Tile shapes, splits, stages and warps."""
        return Space(
            TritonGemvConfig,
            {
                "block_m": (1, 2, 4, 8),
                "block_n": (4, 8, 16),
                "split": (1, 2),
                "stages": (2, 3),
                "warps": (2, 4),
            },
        )

    def default_config(self, device: Device, problem: Problem, m: int) -> TritonGemvConfig:
        """Steps of 1024 k, copied ahead; fewer rows a block where there are few. Measured on an H200 (2026-11)."""
        block_m = next((b for b in (1, 2, 4, 8) if m <= b), 8)
        block_n = 4 if problem.n <= 32 * device.units else 8
        return TritonGemvConfig(block_m=block_m, block_n=block_n, split=1, stages=3, warps=2)

    def build(self, device: Device, problem: Problem, config: TritonGemvConfig) -> Launcher:
        """Compile for the device, for this K's alignment and x's dtype; N, K, M and the split stay run-time values."""
        from ._triton_gemv_device import gemv

        return _Launch(
            gemv,
            device,
            problem,
            config,
            warps=config.warps,
            stages=config.stages,
            K_ALIGN=k_align(problem.k),
            WORDS=WORDS,
        )

    def source_files(self) -> tuple[Path, ...]:
        """Device code, its shared functions, and this file: its constants are compiled in."""
        here = Path(__file__).parent
        return (Path(__file__), here / "_triton_gemv_device.py", here / "_triton_decode.py")


class _Launch(SplitKLaunch):
    EXTRA = "x_stride"

    def prepare(self, x: Tensor, pre_quant_scale: Tensor | None) -> tuple[Tensor, int]:
        x = scaled_x(x, pre_quant_scale)
        return x, x.stride(0) if x.shape[0] > 1 else self.k


KERNEL: Kernel = TritonGemv()
