"""`cutedsl_mma`: the middle of M on GPUs without wgmma, decoding in the registers that mma.sync reads. CuTe DSL.

out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias), float32 accumulation, one rounding; sm_80 and newer.

Weights (fragment layout) are mma.m16n8k16's first operand and tokens its n dimension: a few shifts, masks and one
multiplication by the scale turn a word of eight codes into the fragment of one step, exactly
(`_cutedsl_mma/decode.py`). Blocks of weights and of x come through a ring in shared memory by cp.async; x is read by
ldmatrix, a step ahead. Warps stand along the rows, and along the tokens only where a tile has more than 64 of them, so
that few words are decoded twice. Where tiles do not fill the device, blocks share a tile's K: the last one to finish
adds their sums in the order of K.

Beside the multiplication a weight takes 3.3 instructions where a warp has 32 rows and 64 tokens, 2.9 with 64 rows
(counted in sm_89 code). The untuned choice follows from work and occupancy; it was not measured.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from ..cutedsl import PACKAGE
from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict
from ..weights.fragment import fragment_id, padded
from ._cutedsl_mma.shape import REGISTERS_PER_SM, Shape

TOKENS = {32: (1, 64), 64: (33, 256), 128: (65, None)}  # tokens per tile, and for which M
ROWS, WARPS, SPLITS = (64, 128, 256), (4, 8), (1, 2, 4, 8)
WARP_TOKENS = 64  # at most
MAX_SUBTILES = 4  # of 16 rows, per warp
RESERVED_BYTES = 1024  # of shared memory, that every block takes besides its own
MAX_BLOCKS = 4  # on a multiprocessor

# What `_estimate` reckons with, in multiplications: per row and k for decoding, per token and k for ldmatrix and
# copies, per element of a tile that is shared, and per round of blocks.
DECODE, READ, SHARE, ROUND = 24, 8, 192, 1 << 21
FEW_WARPS, SLOWER = 8, 1.25  # on a multiprocessor, and how much slower fewer of them are


@dataclass(frozen=True, slots=True, kw_only=True)
class CuteDslMmaConfig(Config):
    """One compiled tile shape and pipeline, and how many blocks share a tile's K."""

    rows: int  # of W per tile
    tokens: int  # per tile
    warps: int
    block_k: int  # k per stage
    stages: int
    split: int  # blocks along K

    @property
    def warp_tokens(self) -> int:
        """Warps along the tokens: as few as possible."""
        return max(self.tokens // WARP_TOKENS, 16 * self.warps // self.rows, 1)

    def shape(self, device: Device, problem: Problem) -> Shape:
        """What is compiled."""
        shape = Shape(
            encoding=fragment_id(device.capability, problem.dtype).rpartition("-")[2],
            float16=problem.dtype == "float16",
            hopper=device.capability >= (9, 0),
            rows=self.rows,
            tokens=self.tokens,
            warps=self.warps,
            warp_tokens=self.warp_tokens,
            block_k=self.block_k,
            stages=self.stages,
            split=self.split,
            store_values=next(values for values in (8, 4, 2, 1) if problem.n % values == 0),
            blocks_per_sm=1,
        )
        return replace(shape, blocks_per_sm=max(1, _room(device, shape)))


class CuteDslMma(Kernel):
    """See the module."""

    name = "cutedsl_mma"
    config_type = CuteDslMmaConfig
    packages = (PACKAGE,)
    # Any M is valid. As wide as the range of `triton_fused_fragment`, which comes later by name, and wider than those
    # of `cutedsl_wgmma`, which is ahead where it runs.
    made_for = ((64, 191),)

    def layout(self, device: Device, problem: Problem) -> str:
        """The fragment layout for the device and x's dtype."""
        return fragment_id(device.capability, problem.dtype)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """CUDA, sm_80 and newer, and K in whole groups."""
        if device.kind != "cuda":
            return Verdict.no(f"needs a CUDA device, this is {device.name}")
        if device.capability < (8, 0):
            return Verdict.no(f"needs sm_80 or newer, this is {device.arch}")
        if problem.k % 16:
            return Verdict.no(f"K = {problem.k} is not a multiple of 16")
        return Verdict(True)

    def is_valid(self, device: Device, problem: Problem, config: CuteDslMmaConfig, m: int) -> Verdict:
        """Tiles that suit M, N and K and fit a multiprocessor, and blocks along K that all have work."""
        c = config
        low, high = TOKENS[c.tokens]
        if m < low or (high is not None and m > high):
            return Verdict.no(f"tiles of {c.tokens} tokens serve M = {low}..{high or 'any'}, not {m}")
        if c.rows > padded(problem.n) or c.block_k > padded(problem.k):
            return Verdict.no(f"tiles of {c.rows} rows, {c.block_k} k: more than {problem.n}x{problem.k}")
        shape = c.shape(device, problem)
        verdict = fits(device, shape)
        if not verdict or c.split == 1:
            return verdict
        k_tiles = -(-problem.k // c.block_k)
        if k_tiles < 2 * c.split:
            return Verdict.no(f"K = {problem.k} has {k_tiles} steps of {c.block_k}: too few for {c.split} blocks")
        if (tiles := _tiles(problem, c, m)) > 2 * device.units:
            return Verdict.no(f"{tiles} tiles fill the device; {c.split} blocks for each would only add work")
        return Verdict(True)

    def space(self, device: Device, problem: Problem) -> Space[CuteDslMmaConfig]:
        """Tiles, pipelines and splits."""
        return Space(
            CuteDslMmaConfig,
            {
                "rows": ROWS,
                "tokens": tuple(TOKENS),
                "warps": WARPS,
                "block_k": (64, 128),
                "stages": (2, 3, 4),
                "split": SPLITS,
            },
        )

    def default_config(self, device: Device, problem: Problem, m: int) -> CuteDslMmaConfig:
        """What `_estimate` puts first, with as deep a ring as fits; not measured."""
        serving = [tokens for tokens, (low, high) in TOKENS.items() if low <= m <= (high or m)]
        tokens = min(serving, key=lambda t: -(-m // t) * (t + 32))  # small tiles pad less and decode more
        for stages in (4, 3, 2):
            configs = (
                CuteDslMmaConfig(rows=rows, tokens=tokens, warps=warps, block_k=64, stages=stages, split=split)
                for rows, warps, split in itertools.product(ROWS, WARPS, SPLITS)
            )
            valid = [config for config in configs if self.is_valid(device, problem, config, m)]
            if valid:
                break
        return min(valid, key=lambda config: _estimate(device, problem, config, m))

    def build(self, device: Device, problem: Problem, config: CuteDslMmaConfig) -> Launcher:
        """Compile for the device, x's dtype and the alignment of N; N, K and M stay run-time values."""
        from ._cutedsl_mma.launch import Launch

        return Launch(device, problem, config, self.source_files())

    def source_files(self) -> tuple[Path, ...]:
        """Device code with its pure arithmetic; not the launcher."""
        folder = Path(__file__).parent
        own = (path for path in (folder / "_cutedsl_mma").glob("*.py") if path.stem not in ("__init__", "launch"))
        shared = (folder / "_cutedsl_wgmma" / f"{name}.py" for name in ("decode", "ptx", "schedule"))
        return (*sorted(own), *shared)


def fits(device: Device, shape: Shape) -> Verdict:
    """Whether warps can share the tile, and a multiprocessor has shared memory and registers for it."""
    c = shape
    if c.warps % c.warp_tokens or c.subtiles > MAX_SUBTILES or c.own_tokens < 32:
        return Verdict.no(f"{c.warps} warps cannot share {c.rows} rows and {c.tokens} tokens")
    if c.smem_bytes > device.smem_bytes:
        return Verdict.no(f"needs {c.smem_bytes} bytes of shared memory, a block has {device.smem_bytes}")
    if (need := c.needed_registers) > c.launch_registers:
        return Verdict.no(f"needs about {need} registers a thread, there are {c.launch_registers}")
    return Verdict(True)


def _room(device: Device, shape: Shape) -> int:
    """Blocks that a multiprocessor holds at once."""
    by_smem = (device.smem_bytes + RESERVED_BYTES) // (shape.smem_bytes + RESERVED_BYTES)
    by_registers = REGISTERS_PER_SM // (shape.threads * (-(-shape.needed_registers // 8) * 8))
    return min(by_smem, by_registers, MAX_BLOCKS)


def _tiles(problem: Problem, config: CuteDslMmaConfig, m: int) -> int:
    return -(-problem.n // config.rows) * -(-m // config.tokens)


def _estimate(device: Device, problem: Problem, config: CuteDslMmaConfig, m: int) -> float:
    """Time on the multiprocessor that has most to do, in multiplications."""
    c = config
    blocks = -(-_tiles(problem, c, m) * c.split // device.units)
    own_k = padded(-(-problem.k // c.split))
    work = own_k * (c.rows * c.tokens + DECODE * c.warp_tokens * c.rows + READ * c.tokens)
    if c.split > 1:
        work += SHARE * c.rows * c.tokens
    room = c.shape(device, problem).blocks_per_sm
    slower = SLOWER if min(blocks, room) * c.warps < FEW_WARPS else 1
    return blocks * work * slower + -(-blocks // room) * ROUND


KERNEL: Kernel = CuteDslMma()
