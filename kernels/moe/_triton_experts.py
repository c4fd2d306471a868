"""Host side that `triton_grouped` and `triton_moe` share: configs, limits, and x by planes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..gemm._triton_host import k_align, near_rows
from ..kernel import Config, Kernel, Space
from ..problem import Device, Problem, Verdict
from ..triton_launch import TRITON_TYPES, TritonLaunch
from .routing import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

WORDS = 16  # per step: 256 k
STEP = 16 * WORDS
PLANE_TOKENS = 4  # rows per block of the kernel that orders x
ROWS_PER_WARP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonExpertsConfig(Config):
    """One compiled tile shape, for every product."""

    block_m: int  # rows of x per tile, all of one expert
    block_n: int  # weight rows per tile; a warp for every 16
    stages: int  # copies of words and scales in flight, plus one


class TritonExperts(Kernel):
    """Configs and limits of both kernels."""

    config_type: ClassVar[type[Config]] = TritonExpertsConfig
    packages = ("triton",)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """CUDA from sm_80 on, and every K in whole groups."""
        if device.kind != "cuda":
            return Verdict.no(f"needs a CUDA device, this is {device.name}")
        if device.capability < (8, 0):
            return Verdict.no(f"needs sm_80 or newer, this is {device.arch}")
        for name, size in _columns(problem).items():
            if size % 16:
                return Verdict.no(f"{name} = {size} is not a multiple of 16")
        return Verdict(True)

    def is_valid(self, device: Device, problem: Problem, config: TritonExpertsConfig, m: int) -> Verdict:
        """Tiles that fit in shared memory, and are not far larger than any expert's rows."""
        rows = m * max(1, problem.top_k)
        if config.block_m > 16 and rows < config.block_m // 2:
            return Verdict.no(f"tiles of {config.block_m} rows, and only {rows} rows for all experts")
        if (need := smem_bytes(config, problem)) > device.smem_bytes:
            return Verdict.no(f"needs {need} bytes of shared memory, the device has {device.smem_bytes}")
        return Verdict(True)

    def space(self, device: Device, problem: Problem) -> Space[TritonExpertsConfig]:
        """Tile shapes and stages."""
        return Space(TritonExpertsConfig, {"block_m": (16, 32, 64), "block_n": (64, 128), "stages": (2, 3)})

    def default_config(self, device: Device, problem: Problem, m: int) -> TritonExpertsConfig:
        """The smallest tile that holds an expert's rows if all have equally many. Not measured.

        But for sm_90, whose tensor cores read x from shared memory, two sums of 64 rows spill.
        """
        rows = -(-m * max(1, problem.top_k) // problem.experts)
        largest = 32 if problem.gated and device.capability != (9, 0) else 64
        block_m = next((size for size in (16, 32) if rows <= size), largest)
        config = TritonExpertsConfig(block_m=block_m, block_n=64, stages=3)
        smallest = TritonExpertsConfig(block_m=16, block_n=64, stages=2)
        return config if self.is_valid(device, problem, config, m) else smallest

    def source_files(self) -> tuple[Path, ...]:
        """The kernel's own file, this one, routing, and all device code."""
        here = Path(__file__).parent
        own = (f"{self.name}.py", Path(__file__).name, "_triton_sum.py", "routing.py", "_triton_grouped_device.py")
        more = ("_triton_routing_device.py", "_triton_activation_device.py")
        shared = ("_triton_fused_device.py", "_triton_decode.py")
        return (*(here / name for name in (*own, *more)), *(here.parent / "gemm" / name for name in shared))


def _columns(problem: Problem) -> dict[str, int]:
    """The K of every product."""
    return {"hidden": problem.k, "inter": problem.n} if problem.op == "moe" else {"K": problem.k}


def smem_bytes(c: TritonExpertsConfig, problem: Problem) -> int:
    """At most what Triton allocates: copies in flight of words and scales, for gate and up, and of x; 2 KiB more.

    Where scales come by less than 16 bytes at a time, decoded planes pass through shared memory too.
    """
    halves = 2 if problem.gated else 1
    loop = WORDS * (halves * (c.stages - 1) * 9 * c.block_n + c.stages * 32 * c.block_m)
    if any(k_align(k) < 256 for k in _columns(problem).values()):
        loop += 8 * WORDS * c.block_n
    return max(loop, 4 * c.block_m * c.block_n) + 2048


def expert_launch(
    kernel: Any, device: Device, problem: Problem, config: TritonExpertsConfig, k: int, **constants: Any
) -> TritonLaunch:
    """One of `_triton_grouped_device`'s products, compiled; the argument's name tells its type."""
    dtype = f"*{TRITON_TYPES[problem.dtype]}"
    types = {"weight_ptr": "*u8", "scale_ptr": "*u8", "x_ptr": dtype, "bias_ptr": dtype, "vector_ptr": dtype}
    types |= dict.fromkeys(("global_scale_ptr", "float_bias_ptr", "router_ptr"), "*fp32")
    types |= {"offsets_ptr": "*i32", "pairs_ptr": "*i32", "limit": "fp32", "alpha": "fp32", "beta": "fp32"}
    types["out_ptr"] = "*fp32" if constants.pop("FLOAT_OUT", False) else dtype
    constants |= {
        "K_ALIGN": k_align(k),
        "PADDED": power_of_two(problem.experts + 2),
        "BM": config.block_m,
        "BN": config.block_n,
        "WORDS": WORDS,
        "STAGES": config.stages,
    }
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    return TritonLaunch(
        kernel,
        device,
        signature=signature,
        constants={name: constants[name] for name in kernel.arg_names if name in constants},
        divisible=("K",),
        num_warps=config.block_n // ROWS_PER_WARP,
        num_stages=config.stages,
    )


class Planes:
    """Orders x as the products read it, with pre_quant_scale applied on the way."""

    def __init__(self, device: Device, problem: Problem) -> None:
        from ..gemm._triton_fused_device import permute_x

        self.k, self.steps = problem.k, -(-problem.k // STEP)
        pointers = dict.fromkeys(("x_ptr", "pre_quant_scale_ptr", "out_ptr"), f"*{TRITON_TYPES[problem.dtype]}")
        self._permute = TritonLaunch(
            permute_x,
            device,
            signature=pointers | dict.fromkeys(("M", "K", "x_stride", "has_pqs"), "i32"),
            constants={"WORDS": WORDS, "TOKENS": PLANE_TOKENS, "PDL": False},
            divisible=("K",),
        )

    def __call__(self, x: Tensor, pre_quant_scale: Tensor | None) -> Tensor:
        """[M up to fours, steps, 16, WORDS] of x [M, K]; what lies beyond M and K is zero."""
        x, m = near_rows(x), x.shape[0]
        blocks = -(-m // PLANE_TOKENS)
        planes = x.new_empty((blocks * PLANE_TOKENS, self.steps * STEP))
        self._permute.launch(
            (blocks, self.steps, 1),
            x,
            x if pre_quant_scale is None else pre_quant_scale,
            planes,
            m,
            self.k,
            x.stride(0) if m > 1 else self.k,
            0 if pre_quant_scale is None else 1,
        )
        return planes
