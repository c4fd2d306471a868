"""`cutedsl_wgmma`: many tokens on Hopper, decoding in the registers that wgmma reads. CuTe DSL.

out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias), float32 accumulation, one rounding; sm_90 only.

Weights (fragment layout) are wgmma's first operand: a few shifts, masks and one multiplication by the scale turn a word
of eight codes into the fragment of one step, exactly (`_cutedsl_wgmma/decode.py`). x is the second operand, in shared
memory. One warp fills a ring of stages, by bulk copies and TMA; the others multiply. Blocks are persistent; what does
not make whole waves of tiles is cut along K (stream-K, `_cutedsl_wgmma/schedule.py`), with partial sums added in a
fixed order.

The idea of the decode is the project's own; the schedule of waits follows from what ptxas keeps asynchronous: any
branch between the wgmmas of a stage makes it wait after each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..cutedsl import PACKAGE
from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict
from ..weights.fragment import fragment_id, padded
from ._cutedsl_wgmma.shape import RESERVED_BYTES, SM_SMEM_BYTES, Shape

# Tokens per tile, and for which M: from half a tile on, up to where larger tiles re-read less.
TOKENS = {
    16: (1, 32),
    32: (17, 64),
    48: (33, 96),
    64: (33, 256),
    96: (65, 384),
    128: (65, None),
    160: (129, None),
    192: (129, None),
    256: (129, None),
}
# Rows and the warpgroups that share them. 192 for waves that others leave part-filled: 6144 rows are 32 such tiles.
TILES = ((64, 1), (128, 1), (128, 2), (192, 3), (256, 2), (256, 4))
# In flight per multiprocessor. Few tokens: more is slower (28672x4096, M = 16, 22 KB stages: 3, 4, 5, 6, 7, 9 of them
# took 23.9, 22.5, 22.8, 23.6, 25.0, 27.5 us; H200, the prototype of this kernel).
RING_BYTES = (40 << 10, 112 << 10)
RING_TOKENS = 64  # up to here that holds
INSTRUCTION_REGISTERS = 30  # beside one wgmma's sums: ptxas refuses what does not fit those a block starts with


@dataclass(frozen=True, slots=True, kw_only=True)
class CuteDslWgmmaConfig(Config):
    """One compiled tile shape and pipeline, and how tiles are dealt out."""

    rows: int  # of W per tile
    tokens: int  # per tile
    block_k: int  # k per stage
    warpgroups: int  # that multiply
    stages: int
    schedule: str  # when wgmmas are waited for: `Shape.waits`
    blocks_per_sm: int
    multicast: int  # blocks that share x
    stream_k: bool
    band: int  # token tiles that advance together

    def shape(self, problem: Problem) -> Shape:
        """What is compiled."""
        return Shape(
            float16=problem.dtype == "float16",
            rows=self.rows,
            tokens=self.tokens,
            block_k=self.block_k,
            warpgroups=self.warpgroups,
            stages=self.stages,
            schedule=self.schedule,
            blocks_per_sm=self.blocks_per_sm,
            multicast=self.multicast,
            stream_k=self.stream_k,
            wide_stores=problem.n % 8 == 0,
        )


class CuteDslWgmma(Kernel):
    """See the module."""

    name = "cutedsl_wgmma"
    config_type = CuteDslWgmmaConfig
    packages = (PACKAGE,)
    # Any M is valid. Narrower ranges than those of the kernels for every GPU; below 17 `marlin` is ahead.
    made_for = ((17, 64), (65, 128), (129, 192), (193, None))

    def layout(self, device: Device, problem: Problem) -> str:
        """The fragment layout of x's dtype."""
        return fragment_id(device.capability, problem.dtype)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """Hopper, and K in whole groups."""
        if device.kind != "cuda" or device.capability != (9, 0):
            return Verdict.no(f"needs sm_90, this is {device.name} ({device.arch})")
        if problem.k % 16:
            return Verdict.no(f"K = {problem.k} is not a multiple of 16")
        return Verdict(True)

    def is_valid(self, device: Device, problem: Problem, config: CuteDslWgmmaConfig, m: int) -> Verdict:
        """Tiles that suit m and the device, and no two configs that would do the same."""
        c, shape = config, config.shape(problem)
        low, high = TOKENS[c.tokens]
        if m < low or (high is not None and m > high):
            return Verdict.no(f"tiles of {c.tokens} tokens serve M = {low}..{high or 'any'}, not {m}")
        verdict = fits(device, shape)
        if not verdict:
            return verdict
        if c.schedule != "each" and (c.schedule == "ends-prefetch") != (c.tokens > RING_TOKENS):
            return Verdict.no(f"schedule {c.schedule!r} gains nothing with {c.tokens} tokens")
        row_tiles = -(-problem.n // c.rows)
        if c.multicast > 1 and row_tiles < c.multicast:
            return Verdict.no(f"{row_tiles} row tiles are too few for {c.multicast} blocks to share x")
        k_tiles = -(-padded(problem.k) // c.block_k)
        groups = device.units * c.blocks_per_sm // c.multicast
        if c.stream_k and 2 * groups * groups * k_tiles >= 1 << 31:
            return Verdict.no(f"K = {problem.k} has more steps than 32 bits can deal out")
        return Verdict(True)

    def space(self, device: Device, problem: Problem) -> Space[CuteDslWgmmaConfig]:
        """Tile shapes, pipelines and schedules."""
        return Space(
            CuteDslWgmmaConfig,
            {
                "rows": (64, 128, 192, 256),
                "tokens": tuple(TOKENS),
                "block_k": (64, 128),
                "warpgroups": (1, 2, 3, 4),
                "stages": (3, 4, 5, 6, 8, 10),
                "schedule": ("each", "ends", "ends-prefetch"),
                "blocks_per_sm": (1, 2),
                "multicast": (1, 2),
                "stream_k": (True, False),
                "band": (8,),
            },
        )

    def default_config(self, device: Device, problem: Problem, m: int) -> CuteDslWgmmaConfig:
        """The prototype's rule, within 7 % of its best at M = 16 to 4096 on five shapes of an H200; one correction."""
        n, k = problem.n, problem.k
        if m <= 32:
            rows = 64 if n * k <= 20 << 20 else 128
            tokens = 16 if m <= 16 else 32
            return _config(
                device, problem, rows, tokens, 128, 1, "ends" if rows == 64 else "each", blocks_per_sm=2, stages=4
            )
        if m <= 64:
            rows, stages = (256, 4) if n >= 16384 else (128, 6)
            return _config(device, problem, rows, 48 if m <= 48 else 64, 128, 2, "each", stages=stages)
        if m <= 128:
            multicast = 2 if k > 4096 and n > 128 else 1
            return _config(device, problem, 128, 96 if m <= 96 else 128, 128, 2, "each", multicast=multicast)
        pair = 2 if n > 128 else 1
        # At 384 tokens 128 a tile took 72, 33 and 82 us, 256 a tile 88, 42 and 99 us (K x N 14336 x 4096, 4096 x 6144,
        # 8192 x 8192; H200, 2026-11).
        if m <= 384 and n < 16384:
            return _config(device, problem, 128, 128, 128, 2, "each", multicast=pair)
        if m <= 256:
            return _config(device, problem, 128, 192 if m <= 192 else 256, 64, 2, "ends-prefetch", multicast=pair)
        tiles = -(-n // 128) * -(-m // 256)
        if tiles <= device.units // 2:
            return _config(device, problem, 128, 128, 128, 2, "each", stream_k=False)
        full = tiles <= 7 * device.units and tiles / (-(-tiles // device.units) * device.units) >= 0.93
        return _config(device, problem, 128, 256, 64, 2, "ends-prefetch", multicast=pair, stream_k=not full)

    def build(self, device: Device, problem: Problem, config: CuteDslWgmmaConfig) -> Launcher:
        """Compile for the dtype and the alignment of N; N, K, M and the band stay run-time values."""
        from ._cutedsl_wgmma.launch import Launch

        return Launch(device, problem, config, self.source_files())

    def source_files(self) -> tuple[Path, ...]:
        """Device code with its pure arithmetic; not the launcher."""
        folder = Path(__file__).parent / "_cutedsl_wgmma"
        return tuple(sorted(path for path in folder.glob("*.py") if path.stem not in ("__init__", "launch")))


def fits(device: Device, shape: Shape, ring_bytes: tuple[int, int] = RING_BYTES) -> Verdict:
    """Whether a multiprocessor has shared memory and registers for it, and the ring is of a sensible depth."""
    c = shape
    if (c.rows, c.warpgroups) not in TILES:
        return Verdict.no(f"{c.warpgroups} warpgroups cannot share {c.rows} rows")
    room = min(device.smem_bytes, SM_SMEM_BYTES // c.blocks_per_sm - RESERVED_BYTES)
    if c.smem_bytes + RESERVED_BYTES > room:
        return Verdict.no(f"needs {c.smem_bytes} bytes of shared memory, {c.blocks_per_sm} blocks have {room} each")
    if (need := c.needed_registers) > (c.consumer_registers or c.launch_registers):
        return Verdict.no(f"needs {need} registers a thread, and there are {c.consumer_registers}")
    if (need := c.tokens // 2 + INSTRUCTION_REGISTERS) > c.launch_registers:
        return Verdict.no(f"one wgmma needs {need} registers a thread, blocks start with {c.launch_registers}")
    if c.blocks_per_sm > 1 and c.tokens > RING_TOKENS and c.warpgroups > 1:
        return Verdict.no(f"one block fills a multiprocessor with {c.tokens} tokens")  # but for one warpgroup each
    in_flight = c.stages * (c.x_bytes + c.weight_bytes)
    if c.tokens <= RING_TOKENS and not ring_bytes[0] <= in_flight * c.blocks_per_sm <= ring_bytes[1]:
        return Verdict.no(f"{in_flight} bytes in flight per block are too few or too many")
    return Verdict(True)


def _config(
    device: Device,
    problem: Problem,
    rows: int,
    tokens: int,
    block_k: int,
    warpgroups: int,
    schedule: str,
    *,
    blocks_per_sm: int = 1,
    multicast: int = 1,
    stream_k: bool = True,
    stages: int = 10,
) -> CuteDslWgmmaConfig:
    """With the deepest ring that fits, of at most `stages`."""
    for count in (10, 8, 6, 5, 4, 3):
        config = CuteDslWgmmaConfig(
            rows=rows,
            tokens=tokens,
            block_k=block_k,
            warpgroups=warpgroups,
            stages=count,
            schedule=schedule,
            blocks_per_sm=blocks_per_sm,
            multicast=multicast,
            stream_k=stream_k,
            band=8,
        )
        if count <= stages and fits(device, config.shape(problem)):
            break
    return config


KERNEL: Kernel = CuteDslWgmma()
