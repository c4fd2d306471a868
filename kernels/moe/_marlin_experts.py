"""What `marlin_grouped` and `marlin_moe` can run, and about how long a product takes. Plain arithmetic.

A product multiplies every expert's weight with its rows. Its tiles are those of `marlin`, one of the SHAPES with a
number of rows of x (`tokens`) and of blocks along K (`split`). How many tiles there are depends on the ids, so what
fits is judged by the number expected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from ..gemm import _marlin_model as model
from ..gemm._marlin_model import MarlinConfig
from ..problem import Device, Problem, Verdict
from ..weights.fragment import padded
from .routing import most_tiles

__all__ = [
    "SHAPES",
    "SPLITS",
    "TOKENS",
    "Size",
    "best",
    "blocks_per_sm",
    "expected_tiles",
    "fits",
    "fits_tokens",
    "product_us",
    "registers",
    "row_tiles",
    "sizes",
    "smem_bytes",
    "supports",
    "tile",
]

TOKENS = (8, 16, 32, 64)  # rows of x in a tile, at most
SPLITS = (1, 2, 4)  # blocks along K
# Subtiles of 16 rows a warp, warps along the rows, warps along K, blocks of 64 along K a stage, stages. The first one
# can run any size.
SHAPES = (
    "2x4x1x1x2",
    "4x4x1x1x3",
    "2x1x4x2x2",
    "2x2x4x1x3",
    "2x3x4x1x3",
    "2x4x2x1x3",
    "4x1x4x1x2",
    "4x1x4x1x3",
    "4x1x8x1x2",
    "4x2x2x1x3",
    "4x2x2x2x2",
    "4x2x4x1x2",
    "4x2x8x1x2",
    "4x4x2x1x2",
    "8x1x4x1x2",
)
MAX_THREADS = 1536  # of a multiprocessor: the fewest that any has
MAX_WASTE = 1.3  # of rows in the last tile
MAX_COPIES = 16  # with 32 the compiler spilled
MANY = 256  # rows per expert, above which tiles are all but full
CLOSE = 1.02  # times foreseen that differ by less say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of one expert's weight."""

    rows: int  # padded
    k: int
    paired: bool = False  # rows are gate and up by turns


def sizes(problem: Problem) -> tuple[Size, ...]:
    """The products of an op, in their order."""
    if problem.op == "grouped_gemm":
        return (Size(rows=padded(problem.n), k=problem.k),)
    rows = padded(2 * problem.n if problem.gated else problem.n)
    return Size(rows=rows, k=problem.k, paired=problem.gated), Size(rows=padded(problem.k), k=problem.n)


def supports(device: Device, problem: Problem) -> Verdict:
    """CUDA, sm_80 and newer."""
    if device.kind != "cuda":
        return Verdict.no(f"needs a CUDA device, this is {device.name}")
    if device.capability < (8, 0):
        return Verdict.no(f"needs sm_80 or newer, this is {device.arch}")
    for name, size in {"hidden": problem.k, "inter": problem.n}.items() if problem.op == "moe" else [("K", problem.k)]:
        if size % 16:
            return Verdict.no(f"{name} = {size} is not a multiple of 16")
    return Verdict(True)


@cache
def tile(device: Device, tokens: int, shape: str, split: int) -> MarlinConfig:
    """The tile of `marlin` that these choices mean on this device."""
    subtiles, row_groups, k_groups, chunk, stages = map(int, shape.split("x"))
    hopper = device.capability >= (9, 0)
    return MarlinConfig(
        tokens=tokens,
        subtiles=subtiles,
        row_groups=row_groups,
        k_groups=k_groups,
        chunk=chunk,
        stages=stages,
        split=split,
        meet="cluster" if hopper and split > 1 else "memory",
        copy="bulk" if hopper else "async",
    )


def smem_bytes(c: MarlinConfig, *, scaled: bool) -> int:
    """Dynamic shared memory of a block: `marlin`'s, and three words for every row of x."""
    return model.smem_bytes(c, scaled=scaled) + 12 * c.tokens + 16


def copies(c: MarlinConfig) -> int:
    """Rows of x of which a thread copies a part in every stage: it keeps where each lies."""
    return -(-c.tokens * c.chunk // (4 * c.row_groups))


def registers(c: MarlinConfig) -> int:
    """Per thread, without which the compiler spills: those of `marlin`, and what gathering takes."""
    return model.registers(c) + copies(c) + 2


@cache
def blocks_per_sm(device: Device, c: MarlinConfig) -> int:
    """How many blocks share a multiprocessor: as many as there is room for, so that one begins while others stream."""
    by_smem = (device.smem_bytes + model.RESERVED_SMEM) // (smem_bytes(c, scaled=True) + model.RESERVED_SMEM)
    most = min(model.MAX_BLOCKS, by_smem, MAX_THREADS // c.threads)
    return next((b for b in range(most, 1, -1) if registers(c) <= model.register_cap(c, b)), 1)


def row_tiles(size: Size, c: MarlinConfig) -> int:
    """Along the weight's rows."""
    return -(-size.rows // c.rows)


@cache
def expected_tiles(problem: Problem, m: int, tokens: int) -> tuple[float, float]:
    """How many tiles have rows if ids are random, and how many rows those have in the mean."""
    pairs, experts = m * max(1, problem.top_k), problem.experts
    rate, count = pairs / experts, 0.0
    if experts == 1:
        count = float(-(-pairs // tokens))
    elif rate > MANY:
        count = experts * (rate / tokens + 0.5)
    else:  # the number of rows of an expert is all but Poisson-distributed
        for rows in range(1, int(rate + 10 * math.sqrt(rate)) + 20):
            count += experts * math.exp(rows * math.log(rate) - rate - math.lgamma(rows + 1)) * -(-rows // tokens)
    count = max(1.0, min(count, most_tiles(pairs, experts, tokens)))
    return count, pairs / count


def fits_tokens(problem: Problem, tokens: int, m: int) -> Verdict:
    """Tiles that are neither far too high nor far too low for an expert's rows."""
    rows = expected_tiles(problem, m, 1 << 30)[1]  # of an expert that has any
    # From some M on the highest tiles are valid for any number of experts, so that they can serve all that follows.
    if tokens > max(TOKENS[0], 4 * rows, m // 32):
        return Verdict.no(f"tiles of {tokens} rows, and an expert has about {rows:.0f}")
    if tokens < min(rows / 2, TOKENS[-1]):
        return Verdict.no(f"tiles of {tokens} rows, and an expert has about {rows:.0f}: its weight would be read often")
    return Verdict(True)


@cache
def fits(device: Device, problem: Problem, size: Size, c: MarlinConfig, m: int) -> Verdict:
    """Work for every warp, and no more registers and shared memory than there are."""
    chunks, rest = divmod(padded(size.k) // 64, c.chunk)
    if rest:
        return Verdict.no(f"K = {size.k} does not divide into chunks of {c.chunk} x 64")
    if chunks < c.split * c.k_groups:
        return Verdict.no(f"K = {size.k} has too few chunks for {c.split * c.k_groups} warps along it")
    any_size = c.k_groups == 1 and c.rows <= 128
    if row_tiles(size, c) * c.rows > max(size.rows * MAX_WASTE, size.rows + 48) and not any_size:
        return Verdict.no(f"tiles of {c.rows} rows would be partly empty")
    if c.split > 1 and c.rows % ((16 if size.paired else 4) * c.split):
        return Verdict.no(f"{c.split} blocks cannot share {c.rows} rows")
    tiles, _ = expected_tiles(problem, m, c.tokens)
    if c.split > 1 and tiles * row_tiles(size, c) * c.split >= 4 * device.units:
        return Verdict.no(f"half of {c.split} blocks along K fill the device twice")
    if (need := smem_bytes(c, scaled=True)) > device.smem_bytes:
        return Verdict.no(f"needs {need} bytes of shared memory, a block has {device.smem_bytes}")
    if copies(c) > MAX_COPIES:
        return Verdict.no(f"a thread would copy parts of {copies(c)} rows of x")
    if (need := registers(c)) > model.register_cap(c, 1):
        return Verdict.no(f"needs about {need} registers a thread, there are {model.register_cap(c, 1)}")
    return Verdict(True)


# Fitted to measurements of three layers on an H200 (bench/results/2026-12-01-h200-marlin-moe-screens.json): of what was
# measured at an M, the config that it ranks first was 2 % slower than the best in the mean, 9 % at worst. In cycles.
START = 2500  # of a block that takes another's place: until its first weights are there
BLOCK = 200  # of every block besides
FEW, MISSING = 3, 1200  # blocks a multiprocessor, and for each that is missing: nothing hides how a block begins
SMALL_COPIES = 0.05  # more time where a warp copies fewer than four subtiles


@cache
def product_us(device: Device, problem: Problem, size: Size, c: MarlinConfig, m: int) -> float:
    """Microseconds of one product; on any device only the order means something."""
    tiles, rows = expected_tiles(problem, m, c.tokens)
    grid = tiles * row_tiles(size, c) * c.split
    together = min(blocks_per_sm(device, c), math.ceil(grid / device.units))
    share = grid / device.units
    blocks = math.ceil(share) if share <= together else share + 0.5
    spent = model.cycles(device, c, k=size.k, m=rows, grid=grid, blocks=blocks, together=together)
    spent *= 1 + SMALL_COPIES * (c.chunk * c.subtiles < 4)
    spent += BLOCK * blocks + MISSING * max(0.0, FEW - share)
    return (spent + max(0.0, share / together - 1) * START / together + model.LAUNCH) / model.MHZ


def best(device: Device, problem: Problem, m: int) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Tokens, and for every product its shape and split: what takes least time by `product_us`.

    Of tokens that differ by less than CLOSE the fewest: 64 tokens of Qwen3-30B-A3B took 97 us with tiles of 8, 104 with
    16, and are foreseen to take the same (NVIDIA H200, 2026-12).
    """
    found = []
    for tokens in TOKENS:
        if not fits_tokens(problem, tokens, m):
            continue
        total, choices = 0.0, []
        for size in sizes(problem):
            valid = [
                (product_us(device, problem, size, c, m), shape, split)
                for shape in SHAPES
                for split in SPLITS
                for c in [tile(device, tokens, shape, split)]
                if fits(device, problem, size, c, m)
            ]
            us, shape, split = min(valid)
            total += us
            choices.append((shape, split))
        found.append((total, tokens, tuple(choices)))
    least = min(total for total, _, _ in found)
    return next((tokens, chosen) for total, tokens, chosen in found if total <= CLOSE * least)
