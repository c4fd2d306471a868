"""`two_pass_fragment`: `two_pass` for weights in a fragment layout.

Only pass one differs. A block of threads reads subtiles of 16 rows and 64 k, decodes them where the words are, and
trades the values through shared memory once, so that it writes whole rows 16 bytes a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict
from ..triton_launch import TRITON_TYPES, TritonLaunch
from ..weights.fragment import BLOCK_BYTES, TILE, fragment_id
from ._triton_host import supports_triton
from .two_pass import TwoPassLaunch, valid_chunks

if TYPE_CHECKING:
    from torch import Tensor

ROWS_PER_WARP = 16  # a subtile: words and results stay within a warp until they are traded
MAX_WEIGHTS = 64 * 128  # of a block of threads of several warps; with twice as many the addresses spill


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPassFragmentConfig(Config):
    """How many rows are dequantised at a time, and by what blocks."""

    chunk_mib: int  # 16-bit weights per chunk; 0: all rows at once
    block_rows: int  # weight rows per block of threads, a warp for every 16
    block_k: int


class TwoPassFragment(Kernel):
    """See the module."""

    name = "two_pass_fragment"
    config_type = TwoPassFragmentConfig
    packages = ("triton",)
    # Kernels made for up to 192 go before it. Wider than the open range of cutedsl_wgmma, which then runs untuned if
    # it can: it won the finals at nearly every M from there on (NVIDIA H200, eight shapes, 2026-11).
    made_for = ((129, None),)

    def layout(self, device: Device, problem: Problem) -> str:
        """The fragment layout for the device and x's dtype."""
        return fragment_id(device.capability, problem.dtype)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """CUDA, sm_80 and newer."""
        return supports_triton(device, problem)

    def is_valid(self, device: Device, problem: Problem, config: TwoPassFragmentConfig, m: int) -> Verdict:
        """As `two_pass`, and no blocks of threads that would spill."""
        if config.block_rows > ROWS_PER_WARP and config.block_rows * config.block_k > MAX_WEIGHTS:
            return Verdict.no(f"blocks of {config.block_rows} rows and {config.block_k} k spill registers")
        return valid_chunks(device, problem, config.chunk_mib, m)

    def space(self, device: Device, problem: Problem) -> Space[TwoPassFragmentConfig]:
        """Chunk sizes around half of an L2, and block shapes."""
        return Space(
            TwoPassFragmentConfig,
            {"chunk_mib": (0, 16, 32, 64, 256), "block_rows": (16, 64), "block_k": (128, 256)},
        )

    def default_config(self, device: Device, problem: Problem, m: int) -> TwoPassFragmentConfig:
        """All rows at once where scratch allows."""
        configs = [TwoPassFragmentConfig(chunk_mib=mib, block_rows=64, block_k=128) for mib in (0, 256)]
        return next((c for c in configs if self.is_valid(device, problem, c, m)), configs[-1])

    def build(self, device: Device, problem: Problem, config: TwoPassFragmentConfig) -> Launcher:
        """Compile the dequantisation and the epilogue."""
        return _Launch(device, problem, config, self.layout(device, problem))

    def source_files(self) -> tuple[Path, ...]:
        """Device code, what shapes it, and the second pass, which `two_pass` shares."""
        here = Path(__file__).parent
        return (
            Path(__file__),
            here / "_triton_fragment_device.py",
            here / "two_pass.py",
            here / "_triton_dequant_device.py",
            here / "_triton_decode.py",
            here.parent / "cublas.py",
        )


class _Launch(TwoPassLaunch):
    def __init__(self, device: Device, problem: Problem, config: TwoPassFragmentConfig, layout: str) -> None:
        from ._triton_fragment_device import dequantise_fragment

        super().__init__(device, problem, config.chunk_mib)
        self.block_rows, self.block_k = config.block_rows, config.block_k
        self.dequantise = TritonLaunch(
            dequantise_fragment,
            device,
            signature={"weight_ptr": "*u8", "out_ptr": f"*{TRITON_TYPES[problem.dtype]}", "rows": "i32", "K": "i32"},
            constants={
                "ENCODING": layout.rpartition("-")[2],
                "BLOCKS": config.block_k // TILE,
                "ROWS": config.block_rows,
            },
            divisible=("K",),
            num_warps=config.block_rows // ROWS_PER_WARP,
        )

    def dequantise_rows(
        self, weight: Tensor, weight_scale: Tensor | None, first: int, last: int, dense: Tensor
    ) -> None:
        assert weight_scale is None and weight.shape[-1] == BLOCK_BYTES, "a blob contains its scales"
        blocks = weight[first // TILE : -(-last // TILE)]
        per_row_of_blocks = -(-self.k // self.block_k) * (TILE // self.block_rows)
        self.dequantise.launch((blocks.shape[0] * per_row_of_blocks, 1, 1), blocks, dense, last - first, self.k)


KERNEL: Kernel = TwoPassFragment()
