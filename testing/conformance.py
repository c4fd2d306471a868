"""What every gemm kernel must do, as functions: any test suite can call them with its own kernels and devices.

`check` runs one candidate on one problem and M with inputs that have broken kernels before, and compares with the exact
reference. `check_exact` runs every code with every block scale, and wants equality.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference
from ..kernels.kernel import Kernel, Launcher
from ..kernels.problem import Device, Problem
from ..kernels.weights.codec import pack_codes
from ..kernels.weights.layouts import to_layout
from .close import assert_gemm_close

__all__ = ["GLOBAL_SCALES", "H200", "MS", "candidates", "check", "check_exact", "problems"]

MS = (1, 5, 16, 31, 33, 64)  # around the tails of 16- and 32-row tiles

GLOBAL_SCALES = (1.0, 2.0**-20, 3e-5)

# N x K: smaller than any tile, not a multiple of one, one row, and sizes that sharding produces.
SHAPES = ((1, 16), (8, 48), (100, 80), (129, 96), (232, 352), (352, 80), (360, 1056), (96, 16), (1056, 48), (80, 352))

H200 = Device(
    kind="cuda",
    name="NVIDIA H200",
    capability=(9, 0),
    units=132,
    smem_bytes=232448,
    l2_bytes=62914560,
    memory_bytes=150_000_000_000,
)

GUARD = 256  # elements before and after `out` that must keep their bytes


def problems(*, max_weights: int | None = None) -> list[Problem]:
    """Problems of awkward sizes, in both dtypes; those of at most `max_weights` weights."""
    shapes = [(n, k) for n, k in SHAPES if max_weights is None or n * k <= max_weights]
    return [Problem(n=n, k=k, dtype=dtype) for n, k in shapes for dtype in ("bfloat16", "float16")]


def candidates(kernel: Kernel, device: Device, problem: Problem, m: int, *, sampled: int, seed: int) -> list[Any]:
    """The default config and up to `sampled` other valid ones; none if the kernel has no valid config for this M.

    Raises AssertionError when the default is not in the space, or is not valid although another config is.
    """
    space = kernel.space(device, problem)
    default = kernel.default_config(device, problem, m)
    assert default in space, f"{kernel.name}: the default {default} is not in the space"
    others = [config for config in space if config != default]
    random.Random(seed).shuffle(others)
    valid = (config for config in others if kernel.is_valid(device, problem, config, m))
    verdict = kernel.is_valid(device, problem, default, m)
    if not verdict:
        better = next(valid, None)
        assert better is None, (
            f"{kernel.name}: the default {default} is not valid for {problem.label}, M = {m}: {verdict.reason}; "
            f"but {better} is"
        )
        return []
    return [default, *itertools.islice(valid, sampled)]


def check(
    kernel: Kernel,
    device: Device,
    torch_device: torch.device,
    problem: Problem,
    config: Any,
    m: int,
    *,
    seed: int,
    repeat: bool = True,
) -> None:
    """Run one candidate and compare with the reference.

    The seed decides which of these an input has: global scale per row (one of them subnormal), pre_quant_scale, bias in
    x's dtype or float32, strided rows of x, negative block scales. Always: every code, subnormal and zero block scales,
    rows of zero weights, one NaN row of x (M > 1), NaN beside and behind x, NaN in `out` before the call.

    Parameters
    ----------
    kernel, device, problem, config
        What to build; the config must be valid for m.
    torch_device
        Where the tensors are: not always `device` (an interpreter runs on the CPU).
    m
        Rows of x.
    seed
        Decides all inputs.
    repeat
        Run twice and compare, if the kernel says that it is deterministic.

    Raises
    ------
    AssertionError
        Wrong values, values in a wrong place, changed inputs, bytes written outside `out`, or two runs that differ
        although the kernel says that it is deterministic.
    """
    inputs = _Inputs.random(problem, m, seed, torch_device)
    launcher = kernel.build(device, problem, config)
    arguments = inputs.arguments(kernel.layout(device, problem))
    before = [_bytes(t).clone() for t in (inputs.x_buffer, *arguments) if t is not None]
    out = _run(launcher, inputs.x, arguments, problem.n)
    what = f"{kernel.name} {config.to_json()} on {problem.label}, M = {m}, seed {seed}"
    for tensor, copy in zip((t for t in (inputs.x_buffer, *arguments) if t is not None), before, strict=True):
        assert torch.equal(_bytes(tensor), copy), f"{what}: an input {tuple(tensor.shape)} {tensor.dtype} was changed"
    try:
        inputs.compare(out)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
    if repeat and kernel.deterministic:
        again = _run(launcher, inputs.x, arguments, problem.n)
        assert torch.equal(_bytes(again), _bytes(out)), f"{what}: two runs differ"


def check_exact(
    kernel: Kernel,
    device: Device,
    torch_device: torch.device,
    dtype: str,
    *,
    k: int = 16,
    rotations: int = 16,
    global_scales: Sequence[float] = GLOBAL_SCALES,
    config: Any = None,
    m: int | None = None,
) -> None:
    """Every code times every non-negative finite block scale, picked out one by one: equal to the reference.

    16 codes x 127 scale bytes x the global scales 1, 2^-20 and 3e-5, with a one-hot x.

    Parameters
    ----------
    kernel, device, torch_device
        As in `check`.
    dtype
        "bfloat16" or "float16".
    k
        Size of K; what is beyond the first 16 is multiplied by zeros of x.
    rotations
        How many positions of a group each code takes, 1 to 16; N is 127 times as much.
    global_scales
        Which ones; each costs a call or more.
    config
        None: the default one.
    m
        Rows of x per call; None: 16, or the next size that the config can run.
    """
    n = 127 * rotations
    problem = Problem(n=n, k=k, dtype=dtype)
    sizes = (16, 8, 1, 32, 64, 128, 256) if m is None else (m,)
    runnable = [
        (size, c)
        for size in sizes
        for c in [config or kernel.default_config(device, problem, size)]
        if kernel.is_valid(device, problem, c, size)
    ]
    assert runnable, f"{kernel.name}: no valid config for {problem.label} and M in {sizes}"
    m, config = runnable[0]
    launcher = kernel.build(device, problem, config)
    codes = ((torch.arange(k) + torch.arange(n).unsqueeze(1) // 127) % 16).to(torch.uint8)
    scale = (torch.arange(n) % 127).to(torch.uint8).unsqueeze(1).expand(n, k // 16).contiguous().to(torch_device)
    weight = pack_codes(codes).to(torch_device)
    for value, start in itertools.product(global_scales, range(0, 16, m)):
        x = torch.zeros((m, k), dtype=getattr(torch, dtype), device=torch_device)
        x[: 16 - start, start:16].fill_diagonal_(1)
        global_scale = torch.tensor([value], device=torch_device)
        packed = to_layout(weight, scale, global_scale, layout_id=kernel.layout(device, problem))
        out = _run(launcher, x, (packed.data, packed.scale, packed.global_scale, None, None), n)
        right = reference.gemm(x, weight, scale, global_scale)
        wrong = (out != right).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            position = min(start + row, k - 1)
            raise AssertionError(
                f"{kernel.name} {config.to_json()} {dtype}: {len(wrong)} of {out.numel()} products are wrong, first: "
                f"code {int(codes[column, position])} * scale byte 0x{int(scale[column, 0]):02X} * {value}: "
                f"got {float(out[row, column])!r}, expected {float(right[row, column])!r}"
            )


_Arguments = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Inputs:
    """One random input of a problem."""

    x_buffer: Tensor  # [M + 1, stride], NaN outside x
    x: Tensor  # [M, K], a view of it
    nan_row: int | None
    weight: Tensor  # checkpoint form
    scale: Tensor
    global_scale: Tensor
    bias: Tensor | None
    pre_quant_scale: Tensor | None

    @staticmethod
    def random(problem: Problem, m: int, seed: int, device: torch.device) -> _Inputs:
        per_row, pre_quant, strided, signed = (bool(seed >> bit & 1) for bit in range(4))
        bias_dtype = (None, getattr(torch, problem.dtype), torch.float32)[seed % 3]
        n, k, dtype = problem.n, problem.k, getattr(torch, problem.dtype)
        g = torch.Generator().manual_seed(seed)
        x_buffer = torch.full((m + 1, k + 24 if strided else k), math.nan, dtype=dtype)
        row_size = torch.exp2(torch.randint(-4, 5, (m, 1), generator=g))
        x_buffer[:m, :k] = (torch.randn(m, k, generator=g) * row_size).to(dtype)
        nan_row = int(torch.randint(m, (), generator=g)) if m > 1 else None
        if nan_row is not None:
            x_buffer[nan_row, :k] = math.nan
        base = 1 / (200 * math.sqrt(k))  # results near 1, far from the largest float16
        global_scale = torch.full((1,), base)
        if per_row:
            global_scale = base * 10 ** (-3 * torch.rand(n, generator=g))
            global_scale[seed % n] = 1e-38  # subnormal
        x_buffer = x_buffer.to(device)
        return _Inputs(
            x_buffer=x_buffer,
            x=x_buffer[:m, :k],
            nan_row=nan_row,
            weight=torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g).to(device),
            scale=_random_scales(n, k // 16, seed, signed, g).to(device),
            global_scale=global_scale.to(device),
            bias=torch.randn(n, generator=g).to(bias_dtype).to(device) if bias_dtype is not None else None,
            pre_quant_scale=(0.5 + torch.rand(k, generator=g)).to(dtype).to(device) if pre_quant else None,
        )

    def arguments(self, layout_id: str) -> _Arguments:
        """What follows x in a launcher's call."""
        packed = to_layout(self.weight, self.scale, self.global_scale, layout_id=layout_id)
        return packed.data, packed.scale, packed.global_scale, self.bias, self.pre_quant_scale

    def compare(self, out: Tensor) -> None:
        rows = [row for row in range(out.shape[0]) if row != self.nan_row]
        x = self.x[rows]
        if self.nan_row is not None:
            assert bool(out[self.nan_row].isnan().all()), f"row {self.nan_row} of x is NaN, its results are not"
        ref = reference.gemm(
            x, self.weight, self.scale, self.global_scale, self.bias, self.pre_quant_scale, round_output=False
        )
        magnitude = reference.gemm(
            x.abs(),
            self.weight & 0x77,
            self.scale & 0x7F,
            self.global_scale,
            None if self.bias is None else self.bias.abs(),
            self.pre_quant_scale,
            round_output=False,
        )
        assert_gemm_close(out[rows], ref, k=x.shape[1], dtype=x.dtype, magnitude=magnitude)


def _random_scales(n: int, groups: int, seed: int, signed: bool, g: torch.Generator) -> Tensor:
    """[n, groups] e4m3 bytes. Rows take turns: subnormal, all finite ones, common ones, zero.

    Subnormal scales need rows of their own: beside large ones their products would be lost in the rounding.
    """
    kind = ((torch.arange(n) + seed) % 4).unsqueeze(1)
    low = torch.tensor([0x00, 0x00, 0x28, 0x00])[kind]
    high = torch.tensor([0x08, 0x7E, 0x58, 0x00])[kind]
    scales = low + (torch.rand(n, groups, generator=g) * (high - low + 1)).long().clamp_max(high - low)
    if signed:
        scales |= torch.randint(0, 2, (n, groups), generator=g) << 7
    return scales.to(torch.uint8)


def _run(launcher: Launcher, x: Tensor, arguments: _Arguments, n: int) -> Tensor:
    """Call into the middle of a poisoned buffer; a copy of the result."""
    m = x.shape[0]
    buffer = torch.full((GUARD + m * n + GUARD,), math.nan, dtype=x.dtype, device=x.device)
    buffer[:GUARD] = buffer[GUARD + m * n :] = 1.5
    out = buffer[GUARD : GUARD + m * n].view(m, n)
    launcher(x, *arguments, out)
    guards = torch.cat([buffer[:GUARD], buffer[GUARD + m * n :]])
    assert bool((guards == 1.5).all()), "something was written before or after out"
    return out.clone()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
