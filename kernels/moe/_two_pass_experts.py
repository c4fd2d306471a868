"""What the two-pass kernels for experts share: configs, limits, and both passes over chunks of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..kernel import Config, Kernel, Space
from ..problem import Device, Problem, Verdict
from ..triton_launch import TRITON_TYPES, TritonLaunch
from ..weights.fragment import BLOCK_BYTES, TILE, fragment_id
from .routing import most_tiles, power_of_two

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_MIB = (64, 256, 1024)
STEP = 64  # k per step
GROUP = 8  # as in the device code
LEAST_ROWS = 16  # of x per expert on average: below, 16-bit weights cost several times what a fused kernel takes
MOST_SUMS = {9: 128 * 256, 10: 128 * 256}  # of a tile; elsewhere the operands of a product are in registers too
BLOCK_WORDS = 512  # of eight codes, per block of threads of pass one
FRAGMENT_ROWS, FRAGMENT_K = 64, 128  # the same for fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPassExpertsConfig(Config):
    """Tiles of pass two, and how much is dequantised at a time."""

    block_m: int  # rows of x per tile, all of one expert
    block_n: int  # weight rows per tile; of gate and of up as many each
    stages: int  # steps of x and weights in flight
    chunk_mib: int  # 16-bit weights per chunk of experts; at least one expert


class TwoPassExperts(Kernel):
    """Configs and limits of all of them."""

    config_type: ClassVar[type[Config]] = TwoPassExpertsConfig
    packages = ("triton",)
    made_for = ()  # where it pays was not measured
    fragments: ClassVar[bool] = False

    def layout(self, device: Device, problem: Problem) -> str:
        """The fragment layout for the device and x's dtype, or the checkpoint's."""
        return fragment_id(device.capability, problem.dtype) if self.fragments else "checkpoint"

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """CUDA from sm_80 on, and every K in whole groups."""
        if device.kind != "cuda":
            return Verdict.no(f"needs a CUDA device, this is {device.name}")
        if device.capability < (8, 0):
            return Verdict.no(f"needs sm_80 or newer, this is {device.arch}")
        for _, k in products(problem):
            if k % 16:
                return Verdict.no(f"K = {k} is not a multiple of 16")
        return Verdict(True)

    def is_valid(self, device: Device, problem: Problem, config: TwoPassExpertsConfig, m: int) -> Verdict:
        """Enough rows, tiles that fit, and chunks that are not larger than all experts, nor than the memory allows."""
        rows = m * max(1, problem.top_k)
        if rows < LEAST_ROWS * problem.experts:
            return Verdict.no(f"made for {LEAST_ROWS} rows and more per expert, not {rows} for {problem.experts}")
        sums = config.block_m * config.block_n * _halves(problem)
        if sums > MOST_SUMS.get(device.capability[0], 128 * 128):
            return Verdict.no(f"sums of {config.block_m} rows by {_halves(problem)} x {config.block_n} spill registers")
        if (need := smem_bytes(config, problem)) > device.smem_bytes:
            return Verdict.no(f"needs {need} bytes of shared memory, the device has {device.smem_bytes}")
        smaller = [size for size in CHUNK_MIB if size < config.chunk_mib]
        if smaller and problem.experts * _expert_bytes(problem) <= smaller[-1] << 20:
            return Verdict.no(f"the 16-bit weights of all experts fit chunks of {smaller[-1]} MiB")
        scratch = max(config.chunk_mib << 20, _expert_bytes(problem))
        if device.memory_bytes and scratch > device.memory_bytes // 8:
            return Verdict.no(f"{scratch >> 20} MiB of scratch is more than an eighth of the device's memory")
        return Verdict(True)

    def space(self, device: Device, problem: Problem) -> Space[TwoPassExpertsConfig]:
        """Tile shapes, stages, and chunks from about an L2 to a GiB."""
        choices = {"block_m": (64, 128), "block_n": (64, 128, 256), "stages": (2, 3, 4), "chunk_mib": CHUNK_MIB}
        return Space(TwoPassExpertsConfig, choices)

    def default_config(self, device: Device, problem: Problem, m: int) -> TwoPassExpertsConfig:
        """The largest tiles whose sums leave room for the rest, and the largest chunks that fit. Not measured."""
        room = (128 if device.capability[0] == 9 else 64) * 128 // _halves(problem)
        wanted = [
            TwoPassExpertsConfig(block_m=rows, block_n=columns, stages=stages, chunk_mib=chunk)
            for rows, columns, stages in ((128, 128, 3), (64, 128, 3), (64, 64, 3), (64, 64, 2))
            for chunk in reversed(CHUNK_MIB)
            if rows * columns <= room
        ]
        return next((config for config in wanted if self.is_valid(device, problem, config, m)), wanted[-1])

    def source_files(self) -> tuple[Path, ...]:
        """The kernel's own file, this one, routing, and all device code."""
        here = Path(__file__).parent
        kind = "moe" if self.op == "moe" else "grouped"
        own = (f"two_pass_{kind}.py", Path(__file__).name, "_triton_sum.py", "routing.py", "_triton_dense_device.py")
        more = ("_triton_grouped_device.py", "_triton_routing_device.py", "_triton_activation_device.py")
        shared = ("_triton_dequant_device.py", "_triton_fragment_device.py", "_triton_decode.py")
        return (*(here / name for name in (*own, *more)), *(here.parent / "gemm" / name for name in shared))


def _halves(problem: Problem) -> int:
    return 2 if problem.gated else 1


def products(problem: Problem) -> list[tuple[int, int]]:
    """Rows and k of every product's weight of an expert, gate and up together."""
    if problem.op != "moe":
        return [(problem.n, problem.k)]
    return [(_halves(problem) * problem.n, problem.k), (problem.k, problem.n)]


def _expert_bytes(problem: Problem) -> int:
    """Of an expert's larger 16-bit weight."""
    return max(2 * rows * k for rows, k in products(problem))


def smem_bytes(c: TwoPassExpertsConfig, problem: Problem) -> int:
    """At most what Triton allocates: steps in flight of x and weights, or a tile of sums on its way out; 2 KiB more."""
    loop = c.stages * 2 * STEP * (c.block_m + _halves(problem) * c.block_n)
    return max(loop, 4 * c.block_m * c.block_n) + 2048


class Dequantise:
    """Pass one of one product: the weights of a chunk's experts that have rows, [experts, rows, K] in x's dtype.

    Attributes
    ----------
    rows
        Dense rows of an expert: of a -glu blob those of its padding too.
    in_turns
        Whether gate and up come in turns of 8 rows.
    """

    def __init__(self, device: Device, problem: Problem, rows: int, k: int, layout: str, *, gated: bool) -> None:
        from ._triton_dense_device import dequantise_expert_fragments, dequantise_experts

        self.in_turns = gated and layout != "checkpoint"
        self.rows = 2 * (-(-rows // 2 // 32) * 32) if self.in_turns else rows
        self.k = k
        self.fragments = layout != "checkpoint"
        pointers = {"weight_ptr": "*u8", "scale_ptr": "*u8", "offsets_ptr": "*i32"}
        pointers["out_ptr"] = f"*{TRITON_TYPES[problem.dtype]}"
        if self.fragments:
            del pointers["scale_ptr"]
            self.blob_bytes = -(-self.rows // TILE) * -(-k // TILE) * BLOCK_BYTES
            self.blocks = -(-self.rows // TILE) * -(-k // FRAGMENT_K) * (TILE // FRAGMENT_ROWS)
            self.launch = TritonLaunch(
                dequantise_expert_fragments,
                device,
                signature=pointers | dict.fromkeys(("rows", "K", "blob_bytes", "first_expert"), "i32"),
                constants={
                    "ENCODING": layout.rpartition("-")[2],
                    "BLOCKS": FRAGMENT_K // TILE,
                    "ROWS": FRAGMENT_ROWS,
                },
                divisible=("K", "blob_bytes"),
                num_warps=FRAGMENT_ROWS // 16,
            )
            return
        self.scales = rows * k // 16
        self.blocks = -(-2 * self.scales // BLOCK_WORDS)
        self.launch = TritonLaunch(
            dequantise_experts,
            device,
            signature=pointers | dict.fromkeys(("scales", "first_expert"), "i32"),
            constants={"BLOCK": BLOCK_WORDS},
            divisible=("scales",) if self.scales % 16 == 0 else (),
        )

    def __call__(
        self, weight: Tensor, weight_scale: Tensor | None, offsets: Tensor, dense: Tensor, first: int, count: int
    ) -> None:
        """Of experts first .. first + count."""
        if self.fragments:
            assert weight_scale is None, "a blob contains its scales"
            sizes = (self.rows, self.k, self.blob_bytes, first)
            self.launch.launch((self.blocks, count, 1), weight, offsets, dense, *sizes)
        else:
            assert weight_scale is not None, "the checkpoint layout has separate scales"
            self.launch.launch((self.blocks, count, 1), weight, weight_scale, offsets, dense, self.scales, first)


class Chunks:
    """Both passes over one chunk of experts after another; what a product takes besides, its caller knows."""

    def __init__(self, device: Device, problem: Problem, config: TwoPassExpertsConfig) -> None:
        self.device, self.problem, self.config = device, problem, config
        self.experts = max(1, min(problem.experts, (config.chunk_mib << 20) // _expert_bytes(problem)))

    def product(self, kernel: Any, **constants: Any) -> TritonLaunch:
        """One of `_triton_dense_device`'s products, compiled; the argument's name tells its type."""
        c, dtype = self.config, f"*{TRITON_TYPES[self.problem.dtype]}"
        types = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "vector_ptr"), dtype)
        types |= dict.fromkeys(("global_scale_ptr", "float_bias_ptr", "router_ptr"), "*fp32")
        types |= {"offsets_ptr": "*i32", "pairs_ptr": "*i32", "limit": "fp32", "alpha": "fp32", "beta": "fp32"}
        types["out_ptr"] = "*fp32" if constants.pop("FLOAT_OUT", False) else dtype
        constants |= {
            "PADDED": power_of_two(self.experts + 2),
            "BM": c.block_m,
            "BN": c.block_n,
            "BK": STEP,
            "STAGES": c.stages,
        }
        wide = c.block_m * c.block_n * (2 if constants.get("GATED") else 1) > 64 * 128
        return TritonLaunch(
            kernel,
            self.device,
            signature={name: types.get(name, "i32") for name in kernel.arg_names if name not in constants},
            constants={name: constants[name] for name in kernel.arg_names if name in constants},
            divisible=("K",),
            num_warps=8 if wide else 4,
            num_stages=c.stages,
        )

    def run(
        self,
        dequantise: Dequantise,
        weight: Tensor,
        weight_scale: Tensor | None,
        offsets: Tensor,
        like: Tensor,
        rows: int,
        multiply: Callable[[tuple[int, int, int], Tensor, int, int], None],
        columns: int,
    ) -> None:
        """`multiply(grid, dense, first expert, experts)` follows the dequantisation of every chunk."""
        dense = like.new_empty((self.experts, dequantise.rows, dequantise.k))
        row_tiles = -(-columns // self.config.block_n)
        for first in range(0, self.problem.experts, self.experts):
            count = min(self.experts, self.problem.experts - first)
            dequantise(weight, weight_scale, offsets, dense, first, count)
            tiles = most_tiles(rows, count + 2, self.config.block_m)  # rows before and behind the chunk's too
            multiply((-(-tiles // GROUP) * GROUP * row_tiles, 1, 1), dense, first, count)


def wide_rows(x: Tensor) -> Tensor:
    """x, or a compact copy where its rows do not begin on 16 bytes or are too far apart."""
    return x if x.stride(0) % 8 == 0 and 0 < x.stride(0) < 1 << 30 and x.data_ptr() % 16 == 0 else x.contiguous()
