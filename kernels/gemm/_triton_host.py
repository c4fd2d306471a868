"""Host side that `triton_fused` and `triton_gemv` share: what to compile, and how a call is laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..problem import Device, Problem, Verdict
from ..triton_launch import TRITON_TYPES, TritonLaunch
from ..workspace import zeroed_counters

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SplitKLaunch", "k_align", "scaled_x", "supports_triton", "valid_split"]


def supports_triton(device: Device, problem: Problem) -> Verdict:
    """CUDA from sm_80 on; K and N within 32-bit offsets of one row."""
    if device.kind != "cuda":
        return Verdict.no(f"needs a CUDA device, this is {device.kind!r}")
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


def scaled_x(x: Tensor, pre_quant_scale: Tensor | None) -> Tensor:
    """x * pre_quant_scale rounded to x's dtype, with rows that start at multiples of 16 bytes (a copy only if needed)."""
    if pre_quant_scale is not None:
        return x * pre_quant_scale
    if x.data_ptr() % 16 or (x.shape[0] > 1 and x.stride(0) % 8):
        return x.clone()
    return x


class SplitKConfig(Protocol):
    """What every split-K config has."""

    block_m: int
    block_n: int
    words: int
    split: int
    stages: int
    warps: int


def valid_split(device: Device, problem: Problem, config: SplitKConfig, m: int) -> Verdict:
    """Every split has work, and splitting is not asked for where tiles alone fill the device four times."""
    steps = -(-problem.k // (16 * config.words))
    if -(-steps // -(-steps // config.split)) != config.split:
        return Verdict.no(f"K = {problem.k} has {steps} steps of {16 * config.words}: too few for {config.split} splits")
    tiles = -(-problem.n // config.block_n) * -(-m // config.block_m)
    if config.split > 1 and tiles * config.split > 8 * device.units:
        return Verdict.no(f"{tiles} tiles fill the device; {config.split} splits would only add work")
    return Verdict(True)


class SplitKLaunch:
    """Launches one split-K kernel over [tiles, splits] with a workspace of its own per call.

    The kernel's run-time arguments are POINTERS, INTEGERS and then the names of `extra`, integers that never change.
    With `token_axis` the token tiles are the grid's third axis, else the first axis counts row tiles x token tiles.
    """

    POINTERS = ("x", "weight", "scale", "global_scale", "bias", "out", "partial", "counter")
    INTEGERS = ("M", "N", "K", "x_stride", "scale_stride", "has_bias")

    def __init__(
        self,
        kernel: Any,
        device: Device,
        problem: Problem,
        config: SplitKConfig,
        *,
        extra: Mapping[str, int] | None = None,
        token_axis: bool = False,
        **constants: Any,
    ) -> None:
        extra = dict(extra or {})
        self.k, self.split, self.token_axis, self.extra = problem.k, config.split, token_axis, tuple(extra.values())
        self.block_m, self.block_n = config.block_m, config.block_n
        constants |= {
            "K_ALIGN": k_align(problem.k),
            "BM": config.block_m,
            "BN": config.block_n,
            "WORDS": config.words,
            "STAGES": config.stages,
        }

        def compile_for(bias_dtype: str) -> TritonLaunch:
            x, bias = f"*{TRITON_TYPES[problem.dtype]}", f"*{TRITON_TYPES[bias_dtype]}"
            types = (x, "*u8", "*u8", "*fp32", bias, x, "*fp32", "*i32")
            signature = {f"{name}_ptr": t for name, t in zip(self.POINTERS, types, strict=True)}
            return TritonLaunch(
                kernel,
                device,
                signature=signature | dict.fromkeys((*self.INTEGERS, *extra), "i32"),
                constants=constants,
                divisible=("K",),
                num_warps=config.warps,
                num_stages=config.stages,
            )

        self._compile = compile_for
        self._launch = compile_for(problem.dtype)
        self._float_bias: TritonLaunch | None = None  # compiled when a float32 bias is first met

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
        assert weight_scale is not None, "the checkpoint layout has separate scales"
        x = scaled_x(x, pre_quant_scale)
        m, n = out.shape
        launch = self._launch
        if bias is not None and bias.dtype != out.dtype:
            launch = self._float_bias = self._float_bias or self._compile("float32")
        row_tiles, token_tiles = -(-n // self.block_n), -(-m // self.block_m)
        tiles = row_tiles * token_tiles
        if self.split > 1:
            partial = global_scale.new_empty(tiles * self.split * self.block_m * self.block_n)
            counter = zeroed_counters(x.device, tiles)
        else:
            partial = counter = global_scale  # not touched
        launch.launch(
            (row_tiles, self.split, token_tiles) if self.token_axis else (tiles, self.split, 1),
            x,
            weight,
            weight_scale,
            global_scale,
            global_scale if bias is None else bias,
            out,
            partial,
            counter,
            m,
            n,
            self.k,
            x.stride(0) if m > 1 else self.k,
            0 if global_scale.shape[0] == 1 else 1,
            0 if bias is None else 1,
            *self.extra,
        )
