"""`marlin`: decode, M up to 64, with mma.sync on weights that lie in fragment order; CUDA C++ for sm_80 and newer.

out[M, N] = x[M, K] . W[N, K]^T * global_scale (+ bias), float32 accumulation, one rounding. Decoded weights are exact.

Weights are the tensor core's A operand and tokens its n dimension, so an instruction carries 16 weight rows whatever M
is, and what a lane loads is what it multiplies. Each warp streams its own rows and its own share of K through a ring in
shared memory (bulk copies from sm_90 on); warps along K add up in shared memory, blocks along K (`split`) in the
cluster's or in global memory, always in the same order.

A tile is any multiple of 16 rows, so that a grid can be just as large as the device: 4096 rows are 128 tiles of 32,
28672 are 128 of 224.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..cuda.compile import compile_cuda, cuda_sources
from ..cuda.launch import CudaLaunch
from ..kernel import Config, Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict
from ..weights.fragment import SUBTILE_BYTES, fragment_id, padded
from ..workspace import zeroed_counters

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cu")
TOKENS = (8, 16, 24, 32, 64)
MAX_M = TOKENS[-1]
ARGS = "8PQ5I"  # struct Args of the source
REGISTERS = 65536  # of a multiprocessor
RESERVED_SMEM = 1024  # bytes that the driver takes for every block

# The space leaves out what was never near the best on an H200 (2026-11, 8 shapes, M = 1 to 64, 10,000 measurements).
MIN_WARPS, MAX_WARPS = 4, 16
MAX_SPLIT = 8  # a portable cluster
MAX_BLOCKS = 4  # on a multiprocessor
MAX_WASTE = 1.3  # of rows in the last tile, of multiprocessors in the last wave
IN_FLIGHT = (13, 3)  # shared memory over the bytes of weights under way, at least and at most


@dataclass(frozen=True, slots=True, kw_only=True)
class MarlinConfig(Config):
    """One compiled tile, and how many blocks share its K."""

    tokens: int  # per tile: as few as hold M
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


class Marlin(Kernel):
    """See the module."""

    name = "marlin"
    config_type = MarlinConfig
    packages = ("nvidia-cuda-nvrtc",)
    made_for = ((1, MAX_M),)

    def layout(self, device: Device, problem: Problem) -> str:
        """Fragment order, in the encoding for the device and x's dtype."""
        return fragment_id(device.capability, problem.dtype)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """CUDA, sm_80 and newer."""
        if device.kind != "cuda":
            return Verdict.no(f"needs a CUDA device, this is {device.name}")
        if device.capability < (8, 0):
            return Verdict.no(f"needs sm_80 or newer, this is {device.arch}")
        if problem.k % 16:
            return Verdict.no(f"K = {problem.k} is not a multiple of 16")
        return Verdict(True)

    def is_valid(self, device: Device, problem: Problem, config: MarlinConfig, m: int) -> Verdict:
        """Tiles that suit M, work for every warp, and what a multiprocessor holds."""
        c = config
        if m > MAX_M or c.tokens != token_tile(m):
            return Verdict.no(f"tiles of {c.tokens} tokens are not for M = {m}")
        if device.capability < (9, 0) and (c.copy == "bulk" or (c.split > 1 and c.meet == "cluster")):
            return Verdict.no("bulk copies and clusters need sm_90")
        if c.meet == "cluster" and c.split == 1:
            return Verdict.no("one block along K meets no other")
        if c.meet == "memory" and c.split == 2 and device.capability >= (9, 0):
            return Verdict.no("two blocks meet in a cluster sooner than in memory")
        return fits(device, problem, c)

    def space(self, device: Device, problem: Problem) -> Space[MarlinConfig]:
        """Tiles, rings and splits."""
        hopper = device.capability >= (9, 0)
        return Space(
            MarlinConfig,
            {
                "tokens": TOKENS,
                "subtiles": (1, 2, 3, 4, 8),
                "row_groups": (1, 2, 3, 4, 6, 7, 8),
                "k_groups": (1, 2, 4, 8, 16),
                "chunk": (1, 2),
                "stages": (2, 3),
                "split": (1, 2, 4, MAX_SPLIT),
                "meet": ("cluster", "memory") if hopper else ("memory",),
                "copy": ("bulk",) if hopper else ("async",),  # on an H200, "async" was up to 6 % slower
            },
        )

    def default_config(self, device: Device, problem: Problem, m: int) -> MarlinConfig:
        """PLACEHOLDER."""
        raise NotImplementedError

    def build(self, device: Device, problem: Problem, config: MarlinConfig) -> Launcher:
        """Compile for the device, x's dtype and the config; N, K and M stay run-time values."""
        return _Launch(device, problem, config)

    def source_files(self) -> tuple[Path, ...]:
        """Device code with its headers, and this file: it says what is compiled."""
        return (Path(__file__), *cuda_sources(SOURCE))


def token_tile(m: int) -> int:
    """The smallest token tile that holds m."""
    return next((t for t in TOKENS if m <= t), TOKENS[-1])


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
    chunks, rest = divmod(padded(problem.k) // 64, c.chunk)
    if rest:
        return Verdict.no(f"K = {problem.k} does not divide into chunks of {c.chunk} x 64")
    if chunks < c.split * c.k_groups:
        return Verdict.no(f"K = {problem.k} has too few chunks for {c.split * c.k_groups} warps along it")
    if not MIN_WARPS <= c.warps <= MAX_WARPS:
        return Verdict.no(f"{c.warps} warps a block; {MIN_WARPS} to {MAX_WARPS} are useful")
    if c.split > 2 and row_tiles(problem, c) >= device.units:
        return Verdict.no(
            f"{row_tiles(problem, c)} tiles fill the device: {c.split} blocks along K would only add work"
        )
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


class _Launch:
    def __init__(self, device: Device, problem: Problem, config: MarlinConfig) -> None:
        self.k, self.config = problem.k, config
        self.tiles = row_tiles(problem, config)
        self.partial = config.split > 1 and config.meet == "memory"
        self.plain = _compiled(device, problem, config, scaled=False)
        self.scaled = _compiled(device, problem, config, scaled=True)

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
        from torch._C import _cuda_getCurrentRawStream

        m, n = out.shape
        c = self.config
        partial = counters = 0
        if self.partial:
            token_tiles = -(-m // c.tokens)
            space = global_scale.new_empty(token_tiles * self.tiles * c.split * c.tokens * c.rows)
            partial, counters = space.data_ptr(), zeroed_counters(x.device, token_tiles * self.tiles).data_ptr()
        (self.plain if pre_quant_scale is None else self.scaled).launch(
            self.tiles * c.split,
            -(-m // c.tokens),
            1,
            _cuda_getCurrentRawStream(out.get_device()),
            weight.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            global_scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if pre_quant_scale is None else pre_quant_scale.data_ptr(),
            partial,
            counters,
            x.stride(0) if m > 1 else self.k,
            m,
            n,
            self.k,
            0 if global_scale.shape[0] == 1 else 1,
            0 if bias is None else 1 if bias.dtype == out.dtype else 2,
        )


def _compiled(device: Device, problem: Problem, c: MarlinConfig, *, scaled: bool) -> CudaLaunch:
    smem = smem_bytes(c, scaled=scaled)
    cluster = c.split > 1 and c.meet == "cluster"
    compiled = compile_cuda(
        SOURCE,
        device.capability,
        entry="marlin",
        defines={
            "TOKENS": c.tokens,
            "SUBTILES": c.subtiles,
            "ROW_GROUPS": c.row_groups,
            "K_GROUPS": c.k_groups,
            "CHUNK": c.chunk,
            "STAGES": c.stages,
            "SPLIT": c.split,
            "CLUSTER": int(cluster),
            "BULK": int(c.copy == "bulk"),
            "K_TAIL": int(problem.k % 64 != 0),
            "PRE_QUANT_SCALE": int(scaled),
            "NIBBLES": int(fragment_id(device.capability, problem.dtype) == "fragment1-nib"),
            "HALF": int(problem.dtype == "float16"),
            "CTAS_PER_SM": blocks_per_sm(device, problem, c),
            "EXPECTED_SMEM_BYTES": smem,
        },
    )
    return CudaLaunch(compiled, fields=ARGS, block=c.threads, smem_bytes=smem, cluster=c.split if cluster else 1)
