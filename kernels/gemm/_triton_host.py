"""Host side that the Triton split-K kernels share: what to compile, and how a call is laid out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from ..problem import Device, Problem, Verdict
from ..triton_launch import TRITON_TYPES, TritonLaunch
from ..workspace import zeroed_counters

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SplitKLaunch", "k_align", "near_rows", "scaled_x", "supports_triton", "valid_split"]

FAR_ROWS = 1 << 30  # elements: eight tokens times it, in words of four, stay below 2^31


def supports_triton(device: Device, problem: Problem) -> Verdict:
    """CUDA from sm_80 on, and K in whole groups."""
    if device.kind != "cuda":
        return Verdict.no(f"needs a CUDA device, this is {device.name}")
    if device.capability < (8, 0):
        return Verdict.no(f"needs sm_80 or newer, this is {device.arch}")
    if problem.k % 16:
        return Verdict.no(f"K = {problem.k} is not a multiple of 16")
    return Verdict(True)


def k_align(k: int) -> int:
    """The power of two dividing K that a kernel is compiled for.

    256 gives 16-byte copies of scales and 64 gives 4-byte ones, the least an asynchronous copy takes; 16 always holds.
    """
    return next(align for align in (256, 64, 16) if k % align == 0)


def near_rows(x: Tensor) -> Tensor:
    """x, or a compact copy where its rows are too far apart for 32-bit strides: the last tokens of long prompts."""
    return x if x.stride(0) < FAR_ROWS or x.shape[0] == 1 else x.contiguous()


def scaled_x(x: Tensor, pre_quant_scale: Tensor | None) -> Tensor:
    """x * pre_quant_scale, rounded to x's dtype."""
    return near_rows(x) if pre_quant_scale is None else x * pre_quant_scale


class SplitKConfig(Protocol):
    """What every split-K config has."""

    @property
    def block_m(self) -> int:
        """Tokens per tile."""

    @property
    def block_n(self) -> int:
        """Weight rows per tile."""

    @property
    def split(self) -> int:
        """Blocks along K."""


def valid_split(device: Device, problem: Problem, m: int, config: SplitKConfig, *, step: int) -> Verdict:
    """Every split has work (in steps along K), and none is asked for where tiles alone fill the device."""
    steps = -(-problem.k // step)
    if -(-steps // -(-steps // config.split)) != config.split:
        return Verdict.no(f"K = {problem.k} has {steps} steps of {step}: too few for {config.split} splits")
    tiles = -(-problem.n // config.block_n) * -(-m // config.block_m)
    if config.split > 1 and tiles * config.split > 8 * device.units:
        return Verdict.no(f"{tiles} tiles fill the device; {config.split} splits would only add work")
    return Verdict(True)


class SplitKLaunch(ABC):
    """Launches one split-K kernel over [tiles, splits] with a workspace of its own per call.

    Subclasses say how x reaches the kernel, and which integer it takes besides INTEGERS. A kernel whose weight is one
    blob (BLOB) gets it for its scales too.
    """

    POINTERS = ("x", "weight", "scale", "global_scale", "bias", "float_bias", "out", "partial", "counter")
    INTEGERS = ("M", "N", "K", "scale_stride", "bias_kind")
    EXTRA = ""
    BLOB = False

    def __init__(
        self,
        kernel: Any,
        device: Device,
        problem: Problem,
        config: SplitKConfig,
        *,
        warps: int,
        stages: int,
        max_registers: int = 0,
        after_pdl: bool = False,
        **constants: Any,
    ) -> None:
        self.k, self.config = problem.k, config
        x = f"*{TRITON_TYPES[problem.dtype]}"
        types = (x, "*u8", "*u8", "*fp32", x, "*fp32", x, "*fp32", "*i32")
        self._launch = TritonLaunch(
            kernel,
            device,
            signature={
                **{f"{name}_ptr": t for name, t in zip(self.POINTERS, types, strict=True)},
                **dict.fromkeys((*self.INTEGERS, self.EXTRA), "i32"),
            },
            constants={"BM": config.block_m, "BN": config.block_n, "STAGES": stages, **constants},
            divisible=("K",),
            num_warps=warps,
            num_stages=stages,
            max_registers=max_registers,
            after_pdl=after_pdl,
        )

    @abstractmethod
    def prepare(self, x: Tensor, pre_quant_scale: Tensor | None) -> tuple[Tensor, int]:
        """X as the kernel reads it, and the value of EXTRA."""

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
        assert (weight_scale is None) == self.BLOB, "the checkpoint layout has separate scales, a blob contains them"
        config = self.config
        m, n = out.shape
        x, extra = self.prepare(x, pre_quant_scale)
        tiles = -(-n // config.block_n) * -(-m // config.block_m)
        if config.split > 1:
            partial = global_scale.new_empty(tiles * config.split * config.block_m * config.block_n)
            counter = zeroed_counters(x.device, tiles)
        else:
            partial = counter = global_scale  # not touched
        bias_kind = 0 if bias is None else 1 if bias.dtype == out.dtype else 2
        self._launch.launch(
            (tiles, config.split, 1),
            x,
            weight,
            weight if weight_scale is None else weight_scale,
            global_scale,
            bias if bias is not None and bias_kind == 1 else out,
            bias if bias is not None and bias_kind == 2 else global_scale,
            out,
            partial,
            counter,
            m,
            n,
            self.k,
            0 if global_scale.shape[0] == 1 else 1,
            bias_kind,
            extra,
        )
