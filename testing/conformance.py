"""What every kernel must do, as functions: any test suite can call them with its own kernels and devices.

`check` runs one candidate on one problem and M with inputs that have broken kernels before, and compares with the exact
reference. `check_exact` runs every code with every block scale through a gemm kernel, and wants equality.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference
from ..kernels.kernel import Kernel
from ..kernels.moe.activations import ACTIVATIONS
from ..kernels.problem import DTYPES, Device, Problem
from ..kernels.weights.codec import pack_codes
from ..kernels.weights.layouts import to_layout
from .experts import GroupedCase, MoeCase, experts_case
from .gemm import GemmCase

__all__ = ["GLOBAL_SCALES", "H200", "MS", "candidates", "check", "check_exact", "make_case", "problems"]

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

# experts, top_k, inter x hidden: one expert, more experts than pairs, sizes that are no multiple of a tile or a step.
EXPERTS = ((1, 1, 16, 16), (4, 2, 48, 96), (8, 3, 80, 48), (40, 2, 272, 64), (3, 1, 32, 304))

GUARD = 256  # elements before and after `out` that must keep their bytes


def problems(op: str = "gemm", *, max_weights: int | None = None) -> list[Problem]:
    """Problems of awkward sizes, in both dtypes; those of at most `max_weights` weights (of one expert)."""
    if op == "gemm":
        found = [Problem(n=n, k=k, dtype=dtype) for n, k in SHAPES for dtype in DTYPES]
    elif op == "grouped_gemm":
        sizes = [(experts, n, k) for experts, (n, k) in zip((1, 3, 8, 40, 4), SHAPES[:5], strict=True)]
        found = [Problem(op=op, n=n, k=k, experts=e, dtype=dtype) for e, n, k in sizes for dtype in DTYPES]
    else:
        found = [
            Problem(op=op, n=n, k=k, experts=e, top_k=top_k, activation=entry.name, dtype=DTYPES[i % 2])
            for i, (entry, (e, top_k, n, k)) in enumerate(
                (entry, EXPERTS[(turn + 2 * half) % len(EXPERTS)])
                for turn, entry in enumerate(ACTIVATIONS)
                for half in range(2)
            )
        ]
    return [problem for problem in found if max_weights is None or problem.n * problem.k <= max_weights]


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


def make_case(
    kernel: Kernel, device: Device, problem: Problem, m: int, seed: int, torch_device: torch.device
) -> GemmCase | GroupedCase | MoeCase:
    """The random input of `check`, with weights in the layout that the kernel reads on that device."""
    layout_id = kernel.layout(device, problem)
    if problem.op == "gemm":
        return GemmCase.random(problem, m, seed, torch_device, layout_id)
    return experts_case(problem, m, seed, torch_device, layout_id=layout_id)


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
    rows of zero weights, one NaN row of x (M > 1), NaN beside and behind x, NaN in `out` before the call. Experts also
    meet what `GroupedCase` and `MoeCase` say, and workspaces that are full of NaN.

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
    case = make_case(kernel, device, problem, m, seed, torch_device)
    launcher = kernel.build(device, problem, config)
    before = [_bytes(tensor).clone() for tensor in case.tensors()]
    out = _run(lambda out: case.launch(launcher, out), case.shape, case.x)
    what = f"{kernel.name} {config.to_json()} on {problem.label}, M = {m}, seed {seed}"
    for tensor, copy in zip(case.tensors(), before, strict=True):
        assert torch.equal(_bytes(tensor), copy), f"{what}: an input {tuple(tensor.shape)} {tensor.dtype} was changed"
    try:
        case.compare(out)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
    if repeat and kernel.deterministic:
        again = _run(lambda out: case.launch(launcher, out), case.shape, case.x)
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
        tensors = (x, packed.data, packed.scale, packed.global_scale, None, None)
        out = _run(lambda out, tensors=tensors: launcher(*tensors, out), (m, n), x)  # type: ignore[misc]
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


def _run(launch: Callable[[Tensor], None], shape: tuple[int, int], x: Tensor) -> Tensor:
    """Call into the middle of a poisoned buffer; a copy of the result."""
    size = math.prod(shape)
    buffer = torch.full((GUARD + size + GUARD,), math.nan, dtype=x.dtype, device=x.device)
    buffer[:GUARD] = buffer[GUARD + size :] = 1.5
    out = buffer[GUARD : GUARD + size].view(shape)
    launch(out)
    guards = torch.cat([buffer[:GUARD], buffer[GUARD + size :]])
    assert bool((guards == 1.5).all()), "something was written before or after out"
    return out.clone()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
