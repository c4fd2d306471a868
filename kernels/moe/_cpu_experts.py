"""What `cpu_grouped` and `cpu_moe` share: config, limits, and the product of one block of an expert's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..cpu_decode import Decoder, side_by_side
from ..kernel import Config, Kernel, Space
from ..problem import Device, Problem, Verdict

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS = (16, 32, 64, 128, 256)
MAX_BLOCK_BYTES = 64 << 20
MANY_TOKENS = 4  # above, products have weight rows as rows
LOOKUP = "pair"

Block = tuple[int, slice]  # an expert, and some rows of its weight


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuExpertsConfig(Config):
    """How much is decoded at a time, and by how many threads."""

    block_rows: int  # weight rows per block
    threads: int  # that take blocks side by side; 0: one after another, on torch's intra-op threads


class CpuExperts(Kernel):
    """Configs and limits of both kernels."""

    config_type: ClassVar[type[Config]] = CpuExpertsConfig

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """Any CPU."""
        if device.kind != "cpu":
            return Verdict.no(f"runs on CPUs, this is {device.name}")
        for name, size in _columns(problem).items():
            if size % 16:
                return Verdict.no(f"{name} = {size} is not a multiple of 16")
        return Verdict(True)

    def is_valid(self, device: Device, problem: Problem, config: CpuExpertsConfig, m: int) -> Verdict:
        """The blocks of all threads fit the cache; and there are blocks for all of them."""
        smallest = config.block_rows == min(BLOCK_ROWS)
        if config.block_rows >= 2 * problem.n and not smallest:
            return Verdict.no(f"blocks of {config.block_rows} rows are twice N = {problem.n} or more")
        if config.threads > 1 and problem.experts * -(-problem.n // config.block_rows) < config.threads:
            return Verdict.no(f"fewer blocks of {config.block_rows} rows than {config.threads} threads")
        size_bytes = 4 * config.block_rows * max(_columns(problem).values()) * max(1, config.threads)
        limit = min(device.l2_bytes or MAX_BLOCK_BYTES, MAX_BLOCK_BYTES)
        if size_bytes > limit and not (smallest and config.threads <= 1):
            return Verdict.no(f"blocks of {size_bytes >> 20} MiB do not fit {limit >> 20} MiB of cache")
        return Verdict(True)

    def space(self, device: Device, problem: Problem) -> Space[CpuExpertsConfig]:
        """Block sizes, and powers of two of threads up to the cores."""
        threads = (0, *(1 << i for i in range(device.units.bit_length())))
        return Space(CpuExpertsConfig, {"block_rows": BLOCK_ROWS, "threads": threads})

    def default_config(self, device: Device, problem: Problem, m: int) -> CpuExpertsConfig:
        """Blocks of about 1 MiB."""
        wanted = (1 << 20) // (4 * max(_columns(problem).values()))
        rows = max((r for r in BLOCK_ROWS if r <= min(wanted, 2 * problem.n - 1)), default=min(BLOCK_ROWS))
        config = CpuExpertsConfig(block_rows=rows, threads=0)
        smallest = CpuExpertsConfig(block_rows=min(BLOCK_ROWS), threads=0)
        return config if self.is_valid(device, problem, config, m) else smallest

    def source_files(self) -> tuple[Path, ...]:
        """The kernel's own file, this one, what `cpu_moe` imports besides, and the decoder."""
        here = Path(__file__).parent
        own = (f"{self.name}.py", Path(__file__).name, "activations.py", "routing.py")
        return (*(here / name for name in own), here.parent / "cpu_decode.py")


def _columns(problem: Problem) -> dict[str, int]:
    """The K of every product."""
    return {"hidden": problem.k, "inter": problem.n} if problem.op == "moe" else {"K": problem.k}


def blocks(ends: Sequence[int], rows: int, block_rows: int) -> list[Block]:
    """All blocks of `rows` weight rows, of the experts that have any work."""
    busy = [expert for expert in range(len(ends) - 1) if ends[expert] < ends[expert + 1]]
    firsts = range(0, rows, block_rows)
    return [(expert, slice(first, min(rows, first + block_rows))) for expert in busy for first in firsts]


def run_blocks(
    todo: Sequence[Block], config: CpuExpertsConfig, k: int, work: Callable[[Decoder, Iterable[Block]], None]
) -> None:
    """Do all blocks, side by side if the config says so; each share has a decoder of its own."""

    def share(part: Sequence[Block]) -> None:
        work(Decoder(LOOKUP, config.block_rows, k), part)

    if config.threads:
        count = config.threads
        side_by_side(share, [todo[i * len(todo) // count : (i + 1) * len(todo) // count] for i in range(count)])
    else:
        share(todo)


def product(decoder: Decoder, x: Tensor, weight: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
    """float32 [M, rows]: x [M, K] float32 times a block of weight rows, times its global scale."""
    dense = decoder(weight, scale)
    # With many tokens a matrix library does better when the weight rows are the rows of the product.
    y = x @ dense.t() if x.shape[0] <= MANY_TOKENS else (dense @ x.t()).t()
    return y.mul_(factor)
