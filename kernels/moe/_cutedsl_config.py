"""What `cutedsl_grouped` and `cutedsl_moe` can run, and about how long a product takes. Plain arithmetic.

How many tiles there are depends on the ids, so what suits is judged by the mean of an expert's rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from ..gemm.cutedsl_wgmma import RING_TOKENS, fits
from ..kernel import Config, Space
from ..problem import Device, Problem, Verdict
from ..weights.fragment import padded
from ._cutedsl_experts.shape import ExpertShape

__all__ = ["CuteDslExpertsConfig", "Size", "best", "is_valid", "predicted_us", "shapes", "sizes", "space", "supports"]

# Rows of x in a tile, and into how many pieces it may be cut: the last tile of an expert is seldom full.
PIECES = {
    16: (1,),
    32: (1, 2),
    48: (3,),
    64: (2, 4),
    96: (2, 3, 6),
    128: (2, 4, 8),
    160: (10,),
    192: (4, 8),
    256: (4, 8),
}
TILES = ((64, 1), (128, 1), (128, 2), (256, 2))  # rows of W and the warpgroups that share them
STAGES = (3, 4, 5, 6, 8, 10, 12)
RING_BYTES = (40 << 10, 224 << 10)  # see `cutedsl_wgmma`: here the ring goes on filling while a tile is stored
MANY_PIECES = 4  # of a tile, above which ptxas makes wgmmas wait for each other unless a warpgroup has 64 rows
MANY = 256  # rows per expert, above which tiles are all but full
BYTES_PER_WEIGHT = 0.5625

# For `predicted_us`, by which configs are ranked. Fitted to 32 measurements of both products, three layers at 64 to
# 4096 tokens (NVIDIA H200, 2026-12): 5 % off in the root mean square, 11 % at most. A step of 64 rows and 16 k takes
# half as many cycles as it has tokens and some more, for decoding hides only in part.
CLOCK_MHZ = 1700.0
MEMORY_BYTES_PER_US = 3.73e6
STEP_CYCLES = 13.6
ITEM_CYCLES = 3200.0  # between two tiles of a block
CLOSE = 1.02  # times that differ by less say nothing
NOT_HIDDEN = 0.1  # of the less busy of memory and tensor cores


@dataclass(frozen=True, slots=True, kw_only=True)
class CuteDslExpertsConfig(Config):
    """One compiled tile shape and pipeline, for every product."""

    rows: int  # of W per tile
    tokens: int  # rows of x per tile, all of one expert
    pieces: int  # of a tile: see `ExpertShape`
    block_k: int  # k per stage
    warpgroups: int  # that multiply
    stages: int
    schedule: str  # when wgmmas are waited for: `Shape.waits`
    blocks_per_sm: int
    band: int  # tiles that advance together


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of a product: an expert's weight and what becomes of its rows."""

    rows: int  # of the weight, padded
    k: int
    n: int  # columns of the result
    result: str


def sizes(problem: Problem) -> tuple[Size, ...]:
    """The products of an op, in their order."""
    p = problem
    if p.op == "grouped_gemm":
        return (Size(rows=padded(p.n), k=p.k, n=p.n, result="out"),)
    rows = 2 * (-(-p.n // 32) * 32) if p.gated else padded(p.n)
    return (
        Size(rows=rows, k=p.k, n=p.n, result="activated"),
        Size(rows=padded(p.k), k=p.n, n=p.k, result="summand"),
    )


def shapes(problem: Problem, config: CuteDslExpertsConfig) -> tuple[ExpertShape, ...]:
    """What is compiled for each product."""
    return tuple(
        ExpertShape(
            float16=problem.dtype == "float16",
            rows=config.rows,
            tokens=config.tokens,
            pieces=config.pieces,
            block_k=config.block_k,
            warpgroups=config.warpgroups,
            stages=config.stages,
            schedule=config.schedule,
            blocks_per_sm=config.blocks_per_sm,
            multicast=1,
            stream_k=False,
            wide_stores=size.n % 8 == 0,
            result=size.result,
            activation=problem.activation if size.result == "activated" else "",
            gated=problem.gated and size.result == "activated",
        )
        for size in sizes(problem)
    )


def supports(device: Device, problem: Problem) -> Verdict:
    """Hopper, and every K in whole groups."""
    if device.kind != "cuda" or device.capability != (9, 0):
        return Verdict.no(f"needs sm_90, this is {device.name} ({device.arch})")
    names = ("K",) if problem.op == "grouped_gemm" else ("hidden", "inter")
    for name, size in zip(names, sizes(problem), strict=True):
        if size.k % 16:
            return Verdict.no(f"{name} = {size.k} is not a multiple of 16")
    return Verdict(True)


def is_valid(device: Device, problem: Problem, config: CuteDslExpertsConfig, m: int) -> Verdict:
    """Tiles that suit an expert's rows and the device, and no two configs that would do the same."""
    c, rows = config, mean_rows(problem, m)
    if (c.rows, c.warpgroups) not in TILES or c.pieces not in PIECES[c.tokens]:
        return Verdict.no(
            f"not a tile: {c.rows} rows of {c.warpgroups} warpgroups, {c.tokens} tokens, {c.pieces} pieces"
        )
    if c.pieces > MANY_PIECES and c.rows // c.warpgroups > 64:
        return Verdict.no(f"{c.pieces} pieces are too many with {c.rows // c.warpgroups} rows a warpgroup")
    if c.pieces > MANY_PIECES and c.tokens == max(PIECES) and c.schedule == "each":
        return Verdict.no(
            f"{c.pieces} pieces of {c.tokens} tokens need more registers than there are without a prefetch"
        )
    if c.tokens > 16 and c.tokens >= 4 * rows:
        return Verdict.no(f"tiles of {c.tokens} rows, and an expert has {rows:.1f} in the mean")
    if c.tokens < min(rows / 4, 128):
        return Verdict.no(f"tiles of {c.tokens} rows are small where an expert has {rows:.1f} in the mean")
    if c.schedule != "each" and (c.schedule == "ends-prefetch") != (c.tokens > RING_TOKENS):
        return Verdict.no(f"schedule {c.schedule!r} gains nothing with {c.tokens} tokens")
    for shape in shapes(problem, c):
        if not (verdict := fits(device, shape, RING_BYTES)):
            return verdict
    if (deeper := _deepest(device, problem, c)) != c.stages:
        return Verdict.no(f"there is room for {deeper} stages")
    return Verdict(True)


def space(device: Device, problem: Problem) -> Space[CuteDslExpertsConfig]:
    """Tile shapes, pipelines and schedules."""
    return Space(
        CuteDslExpertsConfig,
        {
            "rows": (64, 128, 256),
            "tokens": tuple(PIECES),
            "pieces": tuple(sorted({pieces for some in PIECES.values() for pieces in some})),
            "block_k": (64, 128),
            "warpgroups": (1, 2),
            "stages": STAGES,
            "schedule": ("each", "ends", "ends-prefetch"),
            "blocks_per_sm": (1, 2),
            "band": (8,),
        },
    )


def mean_rows(problem: Problem, m: int) -> float:
    """Of x, per expert."""
    return m * max(1, problem.top_k) / problem.experts


def _deepest(device: Device, problem: Problem, config: CuteDslExpertsConfig) -> int:
    """The deepest ring of those on offer; 0: none fits."""
    for stages in reversed(STAGES):
        if all(fits(device, shape, RING_BYTES) for shape in shapes(problem, replace(config, stages=stages))):
            return stages
    return 0


# ---- what is likely fast ----


def usual(device: Device, problem: Problem) -> Iterator[CuteDslExpertsConfig]:
    """For every number of tokens the pipelines that were fast there: of 128 rows, and of 256."""
    for tokens, pieces in PIECES.items():
        for rows in (128, 256):
            two = rows == 128 and tokens <= RING_TOKENS  # blocks, of one warpgroup each
            prefetch = tokens > 128
            config = CuteDslExpertsConfig(
                rows=rows,
                tokens=tokens,
                pieces=pieces[0] if (rows, tokens) == (256, 128) else _finest(pieces, rows // (1 if two else 2)),
                block_k=64 if prefetch or rows == 256 else 128,
                warpgroups=1 if two else 2,
                stages=0,
                schedule="ends-prefetch" if prefetch else "each",
                blocks_per_sm=2 if two else 1,
                band=8,
            )
            stages = _deepest(device, problem, config)
            if stages:
                yield replace(config, stages=stages)


def _finest(pieces: tuple[int, ...], rows: int) -> int:
    """The most pieces for warpgroups of so many rows."""
    return max((n for n in pieces if rows <= 64 or n <= MANY_PIECES), default=min(pieces))


@cache
def best(device: Device, problem: Problem, m: int) -> CuteDslExpertsConfig:
    """Of the usual configs that `predicted_us` ranks first, or close to it, the one with the smallest tile."""
    found = list(usual(device, problem))
    valid = [config for config in found if is_valid(device, problem, config, m)] or found[:1]
    times = [predicted_us(device, problem, config, m) for config in valid]
    return next(config for config, us in zip(valid, times, strict=True) if us <= CLOSE * min(times))


def predicted_us(device: Device, problem: Problem, config: CuteDslExpertsConfig, m: int) -> float:
    """All products: what the busiest of memory, L2 and tensor cores takes, with ids as random as they may be."""
    return sum(_product_us(device, problem, size, config, m) for size in sizes(problem))


def _product_us(device: Device, problem: Problem, size: Size, c: CuteDslExpertsConfig, m: int) -> float:
    step = c.tokens // c.pieces
    active, pieces, tiles = expected(problem, m, c.tokens, step)
    row_tiles = -(-size.rows // c.rows)
    steps = row_tiles * (c.rows // 64) * -(-size.k // c.block_k) * (c.block_k // 16)  # of 64 rows, 16 k
    result_bytes = pieces * step * size.n * (4 if size.result == "summand" else 2)
    memory = (active * size.rows * size.k * BYTES_PER_WEIGHT + result_bytes) / MEMORY_BYTES_PER_US
    cycles = steps * (pieces * step / 2 + tiles * STEP_CYCLES) + tiles * row_tiles * (ITEM_CYCLES / c.blocks_per_sm)
    waves = tiles * row_tiles / (device.units * c.blocks_per_sm)
    compute = cycles * (waves + 0.5) / waves / (device.units * CLOCK_MHZ)
    return max(memory, compute) + NOT_HIDDEN * min(memory, compute)


@cache
def expected(problem: Problem, m: int, tokens: int, step: int) -> tuple[float, float, float]:
    """Experts that have rows, pieces of `step` rows, and tiles of `tokens`: means if ids are random."""
    pairs, experts = m * max(1, problem.top_k), problem.experts
    rate = pairs / experts
    if experts == 1:
        return 1.0, float(-(-pairs // step)), float(-(-pairs // tokens))
    if rate > MANY:
        return float(experts), experts * (rate / step + 0.5), experts * (rate / tokens + 0.5)
    active = pieces = tiles = 0.0
    for rows in range(1, int(rate + 10 * math.sqrt(rate)) + 20):  # their number is all but Poisson-distributed
        share = experts * math.exp(rows * math.log(rate) - rate - math.lgamma(rows + 1))
        active += share
        pieces += share * -(-rows // step)
        tiles += share * -(-rows // tokens)
    return max(active, 1e-9), max(pieces, 1e-9), max(tiles, 1e-9)
