"""The config of `marlin`, what it needs of a multiprocessor, and about how long it takes. Plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..kernel import Config
from ..problem import Device, Problem, Verdict
from ..weights.fragment import SUBTILE_BYTES, fragment_id, padded

__all__ = [
    "LAUNCH",
    "MAX_SPLIT",
    "MHZ",
    "TOKENS",
    "MarlinConfig",
    "blocks_per_sm",
    "cycles",
    "fits",
    "macros",
    "predicted_us",
    "register_cap",
    "registers",
    "row_tiles",
    "smem_bytes",
    "token_tile",
]

# Per tile, and which M. 32 also for what 24 would hold: one candidate can then serve from 17 on.
TOKENS = {8: (1, 8), 16: (9, 16), 24: (17, 24), 32: (17, 32), 64: (33, 64)}
REGISTERS = 65536  # of a multiprocessor
RESERVED_SMEM = 1024  # bytes that the driver takes for every block
MAX_SPLIT = 8  # a portable cluster

# The space leaves out what was never near the best on an H200 (2026-11: 8 shapes, M = 1 to 64, 10,000 measurements).
MIN_WARPS, MAX_WARPS = 4, 16
MAX_BLOCKS = 4  # on a multiprocessor
MAX_WASTE = 1.3  # of rows in the last tile, of multiprocessors in the last wave
IN_FLIGHT = (13, 3)  # shared memory over the bytes of weights under way, at least and at most


@dataclass(frozen=True, slots=True, kw_only=True)
class MarlinConfig(Config):
    """One compiled tile, and how many blocks share its K."""

    tokens: int  # per tile: see TOKENS
    subtiles: int  # of 16 rows, per warp
    row_groups: int  # warps along the rows; they share x
    k_groups: int  # warps along K
    chunk: int  # blocks of 64 along K per stage
    stages: int  # per warp's ring
    split: int  # blocks along K
    meet: str = "cluster"  # where the sums of these meet: "cluster" or "memory"
    copy: str = "bulk"  # "bulk" or "async": who moves weights into shared memory, one thread or all

    @property
    def warps(self) -> int:
        """Per block."""
        return self.row_groups * self.k_groups

    @property
    def threads(self) -> int:
        """Per block."""
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 16 * self.subtiles * self.row_groups


def token_tile(m: int) -> int:
    """The smallest token tile that holds m."""
    return next((t for t in TOKENS if m <= t), max(TOKENS))


def row_tiles(problem: Problem, c: MarlinConfig) -> int:
    """Tiles along N."""
    return -(-padded(problem.n) // c.rows)


def smem_bytes(c: MarlinConfig, *, scaled: bool) -> int:
    """Dynamic shared memory of a block: the source's own sum, which it compares with this one."""
    x_stages = c.stages + (c.row_groups > 1)
    ring = max(c.stages * c.chunk * c.subtiles * SUBTILE_BYTES, c.tokens * (16 * c.subtiles + 4) * 4)
    x = c.k_groups * x_stages * (c.tokens + scaled) * (128 * c.chunk + 16)
    receive = c.tokens * c.rows * 4 if c.split > 1 and c.meet == "cluster" else 0
    barriers = c.warps * c.stages + (2 * c.k_groups * x_stages if c.row_groups > 1 else 0) + 1
    return c.warps * ring + x + receive + 8 * c.rows + 8 * barriers


def registers(c: MarlinConfig) -> int:
    """Per thread, without which the compiler spills."""
    tiles = c.tokens // 8
    fragments = 4 * tiles + 28 if tiles > 4 else 10 * tiles  # many tokens are loaded half a block at a time
    return 4 * c.subtiles * tiles + 6 * c.subtiles + fragments + 46


def register_cap(c: MarlinConfig, blocks: int) -> int:
    """What the compiler uses at most so that so many blocks fit a multiprocessor: it counts in 128 threads."""
    return min(255, REGISTERS // (-(-c.threads // 128) * 128 * blocks) // 8 * 8)


def blocks_per_sm(device: Device, problem: Problem, c: MarlinConfig) -> int:
    """How many blocks share a multiprocessor: what the grid asks for, as far as there is room; at least 1."""
    by_smem = (device.smem_bytes + RESERVED_SMEM) // (smem_bytes(c, scaled=True) + RESERVED_SMEM)
    by_registers = next((b for b in range(MAX_BLOCKS, 0, -1) if registers(c) <= register_cap(c, b)), 0)
    return max(1, min(wanted_blocks(device, problem, c), by_smem, by_registers))


def wanted_blocks(device: Device, problem: Problem, c: MarlinConfig) -> int:
    """So that all blocks run at once, MAX_BLOCKS at most."""
    return min(MAX_BLOCKS, -(-row_tiles(problem, c) * c.split // device.units))


def fits(device: Device, problem: Problem, c: MarlinConfig) -> Verdict:
    """Work for every warp and multiprocessor, and no more registers and shared memory than there are."""
    if not MIN_WARPS <= c.warps <= MAX_WARPS:
        return Verdict.no(f"{c.warps} warps a block; {MIN_WARPS} to {MAX_WARPS} are useful")
    chunks, rest = divmod(padded(problem.k) // 64, c.chunk)
    if rest:
        return Verdict.no(f"K = {problem.k} does not divide into chunks of {c.chunk} x 64")
    if chunks < c.split * c.k_groups:
        return Verdict.no(f"K = {problem.k} has too few chunks for {c.split * c.k_groups} warps along it")
    if c.split > 2 and row_tiles(problem, c) * c.split // 2 >= device.units:
        return Verdict.no(f"half of {c.split} blocks along K fill the device with {row_tiles(problem, c)} tiles")
    subtiles, tile = padded(problem.n) // 16, c.rows // 16
    if row_tiles(problem, c) * tile > max(subtiles * MAX_WASTE, subtiles + 3):
        return Verdict.no(f"tiles of {c.rows} rows would be partly empty")
    grid = row_tiles(problem, c) * c.split
    cluster = c.split if c.meet == "cluster" else 1
    room = device.units if cluster < 4 else device.units * 10 // 11  # 30 clusters of 4 on the 132 of an H200
    waves = -(-grid // room)
    possible = min(device.units, subtiles * max(1, min(MAX_SPLIT, chunks // MIN_WARPS)))
    if grid * MAX_WASTE < waves * room and (waves > 1 or grid * 4 < possible):
        return Verdict.no(f"{grid} blocks leave multiprocessors idle")
    blocks = blocks_per_sm(device, problem, c)
    in_flight = blocks * c.warps * c.stages * c.chunk * c.subtiles * SUBTILE_BYTES
    share = problem.weight_bytes // min(grid, device.units)
    low, high = (device.smem_bytes // part for part in IN_FLIGHT)
    if not min(low, share // 3) <= in_flight <= high:
        return Verdict.no(f"{in_flight} bytes in flight a multiprocessor: too few or too many")
    if c.split > 1 and c.meet == "cluster" and c.rows % (4 * c.split):
        return Verdict.no(f"a cluster of {c.split} cannot share {c.rows} rows")
    if (need := smem_bytes(c, scaled=True)) > device.smem_bytes:
        return Verdict.no(f"needs {need} bytes of shared memory, a block has {device.smem_bytes}")
    if (need := registers(c)) > register_cap(c, 1):
        return Verdict.no(f"needs about {need} registers a thread, there are {register_cap(c, 1)}")
    if blocks < (wanted := wanted_blocks(device, problem, c)) < MAX_BLOCKS:
        return Verdict.no(f"a multiprocessor has room for {blocks} blocks, not for {wanted}")
    return Verdict(True)


def macros(
    device: Device, dtype: str, k: int, c: MarlinConfig, *, scaled: bool, blocks: int, smem_bytes: int
) -> dict[str, int]:
    """What the source wants to be told: `blocks` of so much shared memory share a multiprocessor."""
    return {
        "TOKENS": c.tokens,
        "SUBTILES": c.subtiles,
        "ROW_GROUPS": c.row_groups,
        "K_GROUPS": c.k_groups,
        "CHUNK": c.chunk,
        "STAGES": c.stages,
        "SPLIT": c.split,
        "CLUSTER": int(c.split > 1 and c.meet == "cluster"),
        "BULK": int(c.copy == "bulk"),
        "K_TAIL": int(k % 64 != 0),
        "PRE_QUANT_SCALE": int(scaled),
        "NIBBLES": int(fragment_id(device.capability, dtype) == "fragment1-nib"),
        "HALF": int(dtype == "float16"),
        "CTAS_PER_SM": blocks,
        "EXPECTED_SMEM_BYTES": smem_bytes,
    }


# Fitted to 15,000 measurements on an H200 (2026-11; 489 shapes of 0.6 to 800 MB, M = 1 to 64; bench/results has them).
# Where many configs were measured, the one it ranks first was 4 % slower than the best in the mean, 18 % at worst; its
# microseconds are off by 12 % in the mean. In cycles of a multiprocessor.
MHZ = 1980
WEIGHT_RATE, X_COST = 18.2, 0.24  # bytes a cycle with all multiprocessors loading; of a byte of x, which comes from L2
ISSUE, MMA, ALONE = 1.02, 1.04, 2.4  # instructions a scheduler issues at best, by kind; cycles each for a lone warp
UNHIDDEN = 0.56  # of the shorter one of loading and computing
SHALLOW, SHALLOW_COST = 27_000, 0.088  # bytes in flight below which loading stalls
TAIL, MERGE = 1.26, 41.0  # cycles per instruction of the last stage, per float that a thread adds up
NEXT_BLOCK, CLUSTER, LARGER_CLUSTER, MEMORY = 285, 158, 490, 2340  # cycles each
NARROW_WARP, MANY_GROUPS = 0.2, 0.07  # more time with 16 rows a warp, with more than 4 warps sharing x
LAUNCH = 4690  # cycles from the kernel before to the first weights, and from the last sum to the next kernel


def predicted_us(device: Device, problem: Problem, c: MarlinConfig, m: int) -> float:
    """Microseconds; what `default_config` compares. On other devices than an H200 only the order means something."""
    grid = row_tiles(problem, c) * c.split
    blocks = -(-grid // device.units)
    spent = cycles(device, c, k=problem.k, m=m, grid=grid, blocks=blocks, together=min(blocks, MAX_BLOCKS))
    return (spent + LAUNCH) / MHZ


def cycles(device: Device, c: MarlinConfig, *, k: int, m: float, grid: float, blocks: float, together: int) -> float:
    """Of the busiest multiprocessor.

    Parameters
    ----------
    k, m
        Columns of the weight; rows of x that a tile really has.
    grid, blocks, together
        Blocks, those that this multiprocessor runs, and how many of these at a time.
    """
    chunks = padded(k) // 64 // c.chunk
    steps = -(-chunks // c.split) * c.chunk  # blocks of 64 along K
    warp_steps = -(-chunks // (c.split * c.k_groups)) * c.chunk
    token_tiles = c.tokens // 8

    rate = WEIGHT_RATE * device.units / min(grid, device.units)
    load = blocks * (c.rows // 16 * SUBTILE_BYTES + X_COST * 128 * m) * steps / rate
    instructions = c.subtiles * (62 + 4 * token_tiles) + 4 * token_tiles + 45 / c.chunk
    work = blocks * c.warps * warp_steps / 4
    compute = max(
        work * instructions / ISSUE, work * c.subtiles * 32 * token_tiles / MMA, warp_steps * instructions * ALONE
    )
    spent = max(load, compute) + UNHIDDEN * min(load, compute)

    in_flight = together * c.warps * c.stages * c.chunk * c.subtiles * SUBTILE_BYTES
    spent *= 1 + SHALLOW_COST * max(0.0, SHALLOW / in_flight - 1)
    spent *= 1 + NARROW_WARP * (c.subtiles == 1) + MANY_GROUPS * (c.row_groups > 4)
    spent += TAIL * instructions * c.chunk * max(1.0, min(c.warps * together / 4, 4.0))
    spent += MERGE * m * c.rows * c.k_groups / c.threads + NEXT_BLOCK * (together - 1)
    if c.split > 1 and c.meet == "memory":
        spent += MEMORY
    elif c.split > 1:
        spent += (CLUSTER + LARGER_CLUSTER * math.log2(c.split / 2)) * min(blocks, 8)
    return spent
