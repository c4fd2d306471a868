"""`cpu_blocked`: any M on a CPU; dequantises a block of rows at a time into cache and multiplies it in float32.

out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias), float32 products and sums, one rounding.

Codes become values by table look-up: one 8-byte gather yields two float32 values per packed byte ("pair"), or four
float16 values per two bytes ("quad"; half the gathers, one more conversion). Block scales multiply the block in place,
so code * scale is exact. The dense weight never exists as a whole: a block of float32 values stays in cache between the
look-up and the product.

The blocks are done one after another on torch's intra-op threads, or side by side on threads of this kernel's own,
each with ops of one thread: fewer hand-overs, one block in cache per thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..cpu_decode import Decoder, prepare_tables, side_by_side
from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS = (32, 64, 128, 256, 512)
MAX_BLOCK_BYTES = 64 << 20
MANY_TOKENS = 4  # above, products have weight rows as rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBlockedConfig(Config):
    """How much is decoded at a time, and by which table."""

    block_rows: int  # weight rows per block
    lookup: str  # "pair": a byte to two float32; "quad": two bytes to four float16
    threads: int  # that take blocks side by side; 0: one after another, on torch's intra-op threads


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
        if config.threads > 1 and -(-problem.n // config.block_rows) < config.threads:
            return Verdict.no(f"fewer blocks of {config.block_rows} rows than {config.threads} threads")
        size_bytes = 4 * config.block_rows * problem.k * max(1, config.threads)
        smallest = config.block_rows == min(BLOCK_ROWS)
        limit = min(device.l2_bytes or MAX_BLOCK_BYTES, MAX_BLOCK_BYTES)
        if size_bytes > limit and not (smallest and config.threads <= 1):
            return Verdict.no(f"blocks of {size_bytes >> 20} MiB do not fit {limit >> 20} MiB of cache")
        if config.block_rows >= 2 * problem.n and not smallest:
            return Verdict.no(f"blocks of {config.block_rows} rows are twice N = {problem.n} or more")
        return Verdict(True)

    def space(self, device: Device, problem: Problem) -> Space[CpuBlockedConfig]:
        """Block sizes, look-ups, and powers of two of threads up to the cores."""
        threads = (0, *(1 << i for i in range(device.units.bit_length())))
        return Space(CpuBlockedConfig, {"block_rows": BLOCK_ROWS, "lookup": ("pair", "quad"), "threads": threads})

    def default_config(self, device: Device, problem: Problem, m: int) -> CpuBlockedConfig:
        """Blocks of about 1 MiB, or 4 MiB for many tokens: they fit a cache, and outweigh the cost of the calls."""
        wanted = (1 << 20 if m <= 64 else 4 << 20) // (4 * problem.k)
        rows = max((r for r in BLOCK_ROWS if r <= min(wanted, 2 * problem.n - 1)), default=min(BLOCK_ROWS))
        config = CpuBlockedConfig(block_rows=rows, lookup="pair", threads=0)
        smallest = CpuBlockedConfig(block_rows=min(BLOCK_ROWS), lookup="pair", threads=0)
        return config if self.is_valid(device, problem, config, m) else smallest

    def build(self, device: Device, problem: Problem, config: CpuBlockedConfig) -> Launcher:
        """Nothing to compile; the tables are made once per process."""
        return _Launch(config)

    def source_files(self) -> tuple[Path, ...]:
        """This file and the decoder."""
        return (Path(__file__), Path(__file__).parent.parent / "cpu_decode.py")


class _Launch:
    def __init__(self, config: CpuBlockedConfig) -> None:
        self.config = config
        prepare_tables(config.lookup)

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

        def work(firsts: Sequence[int]) -> None:
            decoder = Decoder(self.config.lookup, rows, k)
            for first in firsts:
                block = slice(first, min(n, first + rows))
                dense = decoder(weight[block], weight_scale[block])
                # With many tokens a matrix library does better when the weight rows are the rows of the product.
                y = x @ dense.t() if columns is None else (dense @ columns).t()
                y *= global_scale if global_scale.shape[0] == 1 else global_scale[block]
                if bias is not None:
                    y += bias[block]
                out[:, block] = y

        firsts = range(0, n, rows)
        if self.config.threads:
            side_by_side(work, [firsts[i :: self.config.threads] for i in range(self.config.threads)])
        else:
            work(firsts)


KERNEL: Kernel = CpuBlocked()
