"""`cpu_blocked`: any M on a CPU; dequantises a block of rows at a time into cache and multiplies it in float32.

out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias), float32 products and sums, one rounding.

Codes become values by table look-up: one 8-byte gather yields two float32 values per packed byte ("pair"), or four
float16 values per two bytes ("quad"; half the gathers, one more conversion). Block scales multiply the block in place,
so code * scale is exact. The dense weight never exists as a whole: a block of float32 values stays in cache between the
look-up and the product.

All work runs on torch's intra-op threads, as many as the caller has set. A pool of threads with one-thread ops was 1.2
to 1.5 times faster at M = 1 and slower at M = 16 (2 cores), but torch.set_num_threads, called in a worker, also changes
the default of every thread that starts later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict

if TYPE_CHECKING:
    from torch import Tensor

MAX_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBlockedConfig(Config):
    """How much is decoded at a time, and by which table."""

    block_rows: int  # weight rows per block
    lookup: str  # "pair": a byte to two float32; "quad": two bytes to four float16


class CpuBlocked(Kernel):
    """See the module."""

    name = "cpu_blocked"
    config_type = CpuBlockedConfig

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """Any CPU."""
        if device.kind != "cpu":
            return Verdict.no(f"runs on CPUs, this is {device.name}")
        if problem.k % 16:
            return Verdict.no(f"K = {problem.k} is not a multiple of 16")
        return Verdict(True)

    def is_valid(self, device: Device, problem: Problem, config: CpuBlockedConfig, m: int) -> Verdict:
        """The block fits the cache; and blocks beyond N would all be the same."""
        size_bytes = 4 * config.block_rows * problem.k
        smallest = config.block_rows == min(BLOCK_ROWS)
        limit = min(device.l2_bytes or MAX_BLOCK_BYTES, MAX_BLOCK_BYTES)
        if size_bytes > limit and not smallest:
            return Verdict.no(f"a block of {size_bytes >> 20} MiB does not fit {limit >> 20} MiB of cache")
        if config.block_rows >= 2 * problem.n and not smallest:
            return Verdict.no(f"blocks of {config.block_rows} rows are twice N = {problem.n} or more")
        return Verdict(True)

    def space(self, device: Device, problem: Problem) -> Space[CpuBlockedConfig]:
        """Block sizes and look-ups."""
        return Space(CpuBlockedConfig, {"block_rows": BLOCK_ROWS, "lookup": ("pair", "quad")})

    def default_config(self, device: Device, problem: Problem, m: int) -> CpuBlockedConfig:
        """Blocks of about 2 MiB: small enough for caches, large enough to outweigh the calls."""
        wanted = max(1, (2 << 20) // (4 * problem.k))
        rows = max((r for r in BLOCK_ROWS if r <= min(wanted, 2 * problem.n - 1)), default=min(BLOCK_ROWS))
        config = CpuBlockedConfig(block_rows=rows, lookup="quad")
        smallest = CpuBlockedConfig(block_rows=min(BLOCK_ROWS), lookup="quad")
        return config if self.is_valid(device, problem, config, m) else smallest

    def build(self, device: Device, problem: Problem, config: CpuBlockedConfig) -> Launcher:
        """Nothing to compile; the tables are made once per process."""
        return _Launch(config)

    def source_files(self) -> tuple[Path, ...]:
        """This file."""
        return (Path(__file__),)


BLOCK_ROWS = (16, 32, 64, 128, 256, 512, 1024)


class _Launch:
    def __init__(self, config: CpuBlockedConfig) -> None:
        self.rows = config.block_rows
        self.code_bytes = 1 if config.lookup == "pair" else 2
        self.codes = _code_table(self.code_bytes)
        self.scales = _scale_table()

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
        """The launcher: see `kernels.kernel.Launcher`. Scratch is its own, so threads may call at once."""
        import torch

        assert weight_scale is not None, "the checkpoint layout has separate scales"
        (m, n), k = out.shape, x.shape[1]
        x = (x if pre_quant_scale is None else x * pre_quant_scale).float()
        rows = min(self.rows, n)
        values = torch.empty(rows * k, dtype=torch.float32)
        halves = torch.empty(rows * k, dtype=torch.float16) if self.code_bytes == 2 else None
        scales = torch.empty(rows * k // 16, dtype=torch.float32)
        code_index = torch.empty(rows * k // 2 // self.code_bytes, dtype=torch.int32)
        scale_index = torch.empty(rows * k // 16, dtype=torch.int32)
        products = torch.empty((m, rows), dtype=torch.float32)
        for first in range(0, n, rows):
            count = min(rows, n - first)
            block = slice(first, first + count)
            part = values[: count * k]
            codes = weight[block].view(-1)
            if halves is None:
                index = code_index[: codes.numel()]
                index.copy_(codes)
                torch.index_select(self.codes, 0, index, out=part.view(torch.float64))
            else:
                index = code_index[: codes.numel() // 2]
                index.copy_(_as_uint16(codes))
                torch.index_select(self.codes, 0, index, out=halves[: count * k].view(torch.float64))
                part.copy_(halves[: count * k])
            index = scale_index[: count * k // 16]
            index.copy_(weight_scale[block].view(-1))
            torch.index_select(self.scales, 0, index, out=scales[: count * k // 16])
            part.view(-1, 16).mul_(scales[: count * k // 16].view(-1, 1))
            y = products[:, :count]
            if m == 1:
                torch.mv(part.view(count, k), x[0], out=y[0])
            elif count == rows:
                torch.mm(x, part.view(count, k).t(), out=y)
            else:
                y.copy_(x @ part.view(count, k).t())
            y *= global_scale if global_scale.shape[0] == 1 else global_scale[block]
            if bias is not None:
                y += bias[block]
            out[:, block] = y


def _as_uint16(codes: Tensor) -> Tensor:
    import torch

    aligned = codes if codes.storage_offset() % 2 == 0 else codes.clone()
    return aligned.view(torch.uint16)


@cache
def _code_table(code_bytes: int) -> Tensor:
    """Values of all codes in a byte (float32) or in two (float16), in order of k, as 8-byte entries."""
    import torch

    from ..weights.codec import e2m1_decode

    packed = torch.arange(256**code_bytes).unsqueeze(1)
    shifts = 4 * torch.arange(2 * code_bytes)
    values = e2m1_decode((packed >> shifts) & 15, torch.float32 if code_bytes == 1 else torch.float16)
    return values.view(torch.float64).flatten()


@cache
def _scale_table() -> Tensor:
    import torch

    from ..weights.codec import scale_values

    return scale_values(torch.arange(256, dtype=torch.uint8))


KERNEL: Kernel = CpuBlocked()
