"""`cpu_blocked`: any M on a CPU; dequantises a block of rows at a time into cache and multiplies it in float32.

out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias), float32 products and sums, one rounding.

Codes become values by table look-up: one 8-byte gather yields two float32 values per packed byte ("pair"), or four
float16 values per two bytes ("quad"; half the gathers, one more conversion). Block scales multiply the block in place,
so code * scale is exact. The dense weight never exists as a whole: a block of float32 values stays in cache between the
look-up and the product.

All work runs on torch's intra-op threads, as many as the caller has set. A pool of threads with one-thread ops was
about a third faster at M = 1 and no faster at M = 16 (2 busy cores), but torch.set_num_threads, called in a worker,
also changes the default of every thread that starts later.
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

BLOCK_ROWS = (16, 32, 64, 128, 256, 512, 1024)
MAX_BLOCK_BYTES = 64 << 20
MANY_TOKENS = 4  # above, products have weight rows as rows


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
        """Blocks of about 1 MiB, or 4 MiB for many tokens: they fit a cache, and outweigh the cost of the calls."""
        wanted = (1 << 20 if m <= 64 else 4 << 20) // (4 * problem.k)
        rows = max((r for r in BLOCK_ROWS if r <= min(wanted, 2 * problem.n - 1)), default=min(BLOCK_ROWS))
        config = CpuBlockedConfig(block_rows=rows, lookup="pair")
        smallest = CpuBlockedConfig(block_rows=min(BLOCK_ROWS), lookup="pair")
        return config if self.is_valid(device, problem, config, m) else smallest

    def build(self, device: Device, problem: Problem, config: CpuBlockedConfig) -> Launcher:
        """Nothing to compile; the tables are made once per process."""
        return _Launch(config)

    def source_files(self) -> tuple[Path, ...]:
        """This file."""
        return (Path(__file__),)


class _Launch:
    def __init__(self, config: CpuBlockedConfig) -> None:
        self.config = config
        _code_table(config.lookup), _scale_table()  # made now, not in the first call

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
        assert weight_scale is not None, "the checkpoint layout has separate scales"
        n, k = out.shape[1], x.shape[1]
        # Parameters count as constants: with them as they are, autograd would record what is done here.
        global_scale, bias = global_scale.detach(), None if bias is None else bias.detach()
        pre_quant_scale = None if pre_quant_scale is None else pre_quant_scale.detach()
        x = (x if pre_quant_scale is None else x * pre_quant_scale).float()
        columns = x.t().contiguous() if x.shape[0] > MANY_TOKENS else None
        rows = min(self.config.block_rows, n)
        decoder = _Decoder(self.config.lookup, rows, k)
        for first in range(0, n, rows):
            block = slice(first, min(n, first + rows))
            dense = decoder(weight[block], weight_scale[block])
            # MKL, one thread, 16 tokens, 4096 x 4096 in blocks of 128 rows: 18 ms with tokens as rows, 5 ms this way.
            y = x @ dense.t() if columns is None else (dense @ columns).t()
            y *= global_scale if global_scale.shape[0] == 1 else global_scale[block]
            if bias is not None:
                y += bias[block]
            out[:, block] = y


class _Decoder:
    """Scratch for one block, and the look-ups that fill it."""

    def __init__(self, lookup: str, rows: int, k: int) -> None:
        import torch

        self.k = k
        self.codes, self.scales = _code_table(lookup), _scale_table()
        self.values = torch.empty(rows * k, dtype=torch.float32, device="cpu")
        self.halves = torch.empty_like(self.values, dtype=torch.float16) if lookup == "quad" else None
        self.code_index = torch.empty(rows * k // (2 if self.halves is None else 4), dtype=torch.int32, device="cpu")
        self.scale_index = torch.empty(rows * k // 16, dtype=torch.int32, device="cpu")
        self.scale_values = torch.empty_like(self.scale_index, dtype=torch.float32)

    def __call__(self, weight: Tensor, weight_scale: Tensor) -> Tensor:
        """code * block scale of [R, K/2] and [R, K/16], as float32 [R, K]; valid until the next call."""
        import torch

        size = weight.shape[0] * self.k
        codes, values, scales = weight.view(-1), self.values[:size], self.scale_values[: size // 16]
        if self.halves is None:
            index, target = self.code_index[: size // 2], values
            index.copy_(codes)
        else:
            index, target = self.code_index[: size // 4], self.halves[:size]
            index.copy_(_as_uint16(codes))
        torch.index_select(self.codes, 0, index, out=target.view(torch.float64))
        if self.halves is not None:
            values.copy_(target)
        index = self.scale_index[: size // 16]
        index.copy_(weight_scale.view(-1))
        torch.index_select(self.scales, 0, index, out=scales)
        values.view(-1, 16).mul_(scales.view(-1, 1))
        return values.view(-1, self.k)


def _as_uint16(codes: Tensor) -> Tensor:
    import torch

    aligned = codes if codes.storage_offset() % 2 == 0 else codes.clone()
    return aligned.view(torch.uint16)


@cache
def _code_table(lookup: str) -> Tensor:
    """Values of all codes in a byte (float32) or in two (float16), in order of k, as 8-byte entries."""
    import torch

    from ..weights.codec import e2m1_decode

    code_bytes, dtype = (1, torch.float32) if lookup == "pair" else (2, torch.float16)
    packed = torch.arange(256**code_bytes, device="cpu").unsqueeze(1)
    shifts = 4 * torch.arange(2 * code_bytes, device="cpu")
    values = e2m1_decode((packed >> shifts) & 15, dtype)
    return values.view(torch.float64).flatten()


@cache
def _scale_table() -> Tensor:
    import torch

    from ..weights.codec import scale_values

    return scale_values(torch.arange(256, dtype=torch.uint8, device="cpu"))


KERNEL: Kernel = CpuBlocked()
