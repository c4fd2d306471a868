"""`two_pass`: dequantise into scratch, then cuBLAS; for prefill, where the dequantisation is a small part.

`two_pass_fragment` does the same from a fragment layout; what the two share is here.

Pass one writes code * block scale, exact in 16 bits. Pass two is cuBLAS with the global scale as alpha in device memory
(`kernels.cublas`), so the float32 accumulator is scaled before its only rounding. A bias in x's dtype rides along as
beta * out. Per-row global scales and float32 biases cannot: those calls take a float32 product and a third, exact pass.

The rows can be done in chunks whose 16-bit weights stay in L2 between the passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict
from ..triton_launch import TRITON_TYPES, TritonLaunch, interpreting
from ._triton_host import scaled_x, supports_triton

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNEL", "TwoPassConfig", "TwoPassLaunch", "chunk_rows", "valid_chunks"]

MIN_M = 32  # below, writing and reading 16-bit weights costs several times what a fused kernel does
CHUNK_ROWS = 256  # chunks are a multiple of this: cuBLAS tiles stay whole
FINISH_M, FINISH_N = 4, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPassConfig(Config):
    """How many rows are dequantised at a time, and by what blocks."""

    chunk_mib: int  # 16-bit weights per chunk; 0: all rows at once
    block_words: int  # words of 8 codes per block


class TwoPass(Kernel):
    """See the module."""

    name = "two_pass"
    config_type = TwoPassConfig
    packages = ("triton",)
    made_for = ((193, None),)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """CUDA, sm_80 and newer."""
        return supports_triton(device, problem)

    def is_valid(self, device: Device, problem: Problem, config: TwoPassConfig, m: int) -> Verdict:
        """Chunks smaller than the weights, and scratch that leaves most of the memory free."""
        return valid_chunks(device, problem, config.chunk_mib, m)

    def space(self, device: Device, problem: Problem) -> Space[TwoPassConfig]:
        """Chunk sizes around half of an L2, and block shapes."""
        return Space(TwoPassConfig, {"chunk_mib": (0, 16, 32, 64, 256), "block_words": (512, 1024)})

    def default_config(self, device: Device, problem: Problem, m: int) -> TwoPassConfig:
        """All rows at once where scratch allows."""
        configs = [TwoPassConfig(chunk_mib=mib, block_words=512) for mib in (0, 256)]
        return next((c for c in configs if self.is_valid(device, problem, c, m)), configs[-1])

    def build(self, device: Device, problem: Problem, config: TwoPassConfig) -> Launcher:
        """Compile the dequantisation and the epilogue."""
        return _Launch(device, problem, config)

    def source_files(self) -> tuple[Path, ...]:
        """Device code, its shared functions, and this file: its constants are compiled in."""
        here = Path(__file__).parent
        return (
            Path(__file__),
            here / "_triton_dequant_device.py",
            here / "_triton_decode.py",
            here.parent / "cublas.py",
        )


def valid_chunks(device: Device, problem: Problem, chunk_mib: int, m: int) -> Verdict:
    """Chunks smaller than the weights, scratch that leaves most of the memory free, and an M that is worth it."""
    if m < MIN_M:
        return Verdict.no(f"made for M of {MIN_M} and more, not {m}")
    dense = 2 * problem.n * problem.k
    if chunk_mib and dense <= chunk_mib << 20:
        return Verdict.no(f"the 16-bit weights ({dense >> 20} MiB) fit one chunk of {chunk_mib} MiB")
    if not chunk_mib and dense > device.memory_bytes // 8:
        return Verdict.no(f"{dense >> 20} MiB of scratch is more than an eighth of the device's memory")
    return Verdict(True)


def chunk_rows(problem: Problem, chunk_mib: int) -> int:
    """Rows per chunk: a multiple of CHUNK_ROWS, at least one, at most all."""
    if not chunk_mib:
        return problem.n
    rows = (chunk_mib << 20) // (2 * problem.k) // CHUNK_ROWS * CHUNK_ROWS
    return min(problem.n, max(CHUNK_ROWS, rows))


class TwoPassLaunch(ABC):
    """Runs pass one over chunks of rows, each followed by pass two; subclasses say what pass one is."""

    def __init__(self, device: Device, problem: Problem, chunk_mib: int) -> None:
        from ._triton_dequant_device import finish

        self.n, self.k = problem.n, problem.k
        self.rows = chunk_rows(problem, chunk_mib)
        dtype = f"*{TRITON_TYPES[problem.dtype]}"
        pointers = {"acc_ptr": "*fp32", "global_scale_ptr": "*fp32", "bias_ptr": dtype}
        pointers |= {"float_bias_ptr": "*fp32", "out_ptr": dtype}
        integers = ("M", "N", "rows_here", "first_row", "scale_stride", "bias_kind")
        self.finish = TritonLaunch(
            finish,
            device,
            signature=pointers | dict.fromkeys(integers, "i32"),
            constants={"BM": FINISH_M, "BN": FINISH_N},
        )

    @abstractmethod
    def dequantise_rows(
        self, weight: Tensor, weight_scale: Tensor | None, first: int, last: int, dense: Tensor
    ) -> None:
        """Write code * block scale of rows [first, last) into dense [last - first, K]; first is a multiple of 64."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None,
        global_scale: Tensor,
        bias: Tensor | None,
        pre_quant_scale: Tensor | None,
        out: Tensor,
    ) -> None:
        """The launcher: see `kernels.kernel.Launcher`."""
        from ..cublas import scaled_mm

        x = scaled_x(x, pre_quant_scale)
        scratch = x.new_empty((self.rows, self.k))
        fits_cublas = not interpreting() and global_scale.shape[0] == 1 and (bias is None or bias.dtype == out.dtype)
        for first in range(0, self.n, self.rows):
            last = min(self.n, first + self.rows)
            dense = scratch[: last - first]
            self.dequantise_rows(weight, weight_scale, first, last, dense)
            part = out[:, first:last]
            if fits_cublas:
                if bias is not None:
                    part.copy_(bias.detach()[first:last].expand_as(part))  # a Parameter counts as a constant
                scaled_mm(x, dense, global_scale, part, accumulate=bias is not None)
            else:
                self._exact(x, dense, first, global_scale, bias, out)

    def _exact(
        self, x: Tensor, dense: Tensor, first: int, global_scale: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        import torch

        acc = x.float() @ dense.float().T if interpreting() else torch.mm(x, dense.T, out_dtype=torch.float32)
        m, rows = acc.shape
        bias_kind = 0 if bias is None else 1 if bias.dtype == out.dtype else 2
        self.finish.launch(
            (-(-rows // FINISH_N) * -(-m // FINISH_M), 1, 1),
            acc,
            global_scale,
            bias if bias is not None and bias_kind == 1 else out,
            bias if bias is not None and bias_kind == 2 else global_scale,
            out,
            m,
            self.n,
            rows,
            first,
            0 if global_scale.shape[0] == 1 else 1,
            bias_kind,
        )


class _Launch(TwoPassLaunch):
    def __init__(self, device: Device, problem: Problem, config: TwoPassConfig) -> None:
        from ._triton_dequant_device import dequantise

        super().__init__(device, problem, config.chunk_mib)
        self.block = config.block_words
        dtype = f"*{TRITON_TYPES[problem.dtype]}"
        self.dequantise = TritonLaunch(
            dequantise,
            device,
            signature={"weight_ptr": "*u8", "scale_ptr": "*u8", "out_ptr": dtype, "total": "i64"},
            constants={"BLOCK": config.block_words},
        )

    def dequantise_rows(
        self, weight: Tensor, weight_scale: Tensor | None, first: int, last: int, dense: Tensor
    ) -> None:
        assert weight_scale is not None, "the checkpoint layout has separate scales"
        words = dense.numel() // 8
        self.dequantise.launch(
            (-(-words // self.block), 1, 1), weight[first:last], weight_scale[first:last], dense, words
        )


KERNEL: Kernel = TwoPass()
