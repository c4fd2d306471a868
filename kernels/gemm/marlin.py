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

from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..cuda.compile import compile_cuda, cuda_sources
from ..cuda.launch import CudaLaunch, dependent_launches
from ..kernel import Kernel, Launcher, Space
from ..problem import Device, Problem, Verdict
from ..weights.fragment import fragment_id
from ..workspace import zeroed_counters
from ._marlin_model import (
    MAX_SPLIT,
    TOKENS,
    MarlinConfig,
    blocks_per_sm,
    fits,
    macros,
    predicted_us,
    row_tiles,
    smem_bytes,
    token_tile,
)

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cu")
MAX_M = max(TOKENS)
ARGS = "8PQ5I"  # struct Args of the source


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
        low, high = TOKENS[c.tokens]
        if not low <= m <= high:
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
                "tokens": tuple(TOKENS),
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
        """What `predicted_us` ranks first."""
        return _default(device, problem, token_tile(m))

    def predicted_us(self, device: Device, problem: Problem, config: MarlinConfig, m: int) -> float:
        """From bytes, instructions and what blocks cost each other."""
        return predicted_us(device, problem, config, m)

    def build(self, device: Device, problem: Problem, config: MarlinConfig) -> Launcher:
        """Compile for the device, x's dtype and the config; N, K and M stay run-time values."""
        return _Launch(device, problem, config)

    def source_files(self) -> tuple[Path, ...]:
        """Device code with its headers, and this file: it says what is compiled."""
        return (Path(__file__), Path(__file__).with_name("_marlin_model.py"), *cuda_sources(SOURCE))


@cache
def _default(device: Device, problem: Problem, tokens: int) -> MarlinConfig:
    """Of a part of the space, which all but contains the best and is searched in about ten milliseconds."""
    kernel = Marlin()
    copy, meet = ("bulk", "cluster") if device.capability >= (9, 0) else ("async", "memory")
    names = ("subtiles", "row_groups", "k_groups", "chunk", "stages", "split")
    choices = kernel.space(device, problem).choices
    part = {name: choices[name] for name in names} | {"subtiles": (1, 2, 4)}
    valid = []
    for values in product(*part.values()):
        c = MarlinConfig(
            tokens=tokens,
            copy=copy,
            meet="memory" if values[-1] == 1 else meet,
            **dict(zip(names, values, strict=True)),
        )
        if fits(device, problem, c):
            valid.append(c)
    if not valid:  # the part may be empty where the space is not
        valid = [c for c in kernel.space(device, problem) if kernel.is_valid(device, problem, c, tokens)]
    return min(valid, key=lambda c: predicted_us(device, problem, c, tokens))


class _Launch:
    def __init__(self, device: Device, problem: Problem, config: MarlinConfig) -> None:
        c, self.k = config, problem.k
        self.grid = row_tiles(problem, c) * c.split
        # Blocks that meet in memory leave their sums there, counted by tile.
        meets = c.split > 1 and c.meet == "memory"
        self.counters = self.grid // c.split if meets else 0
        self.partials = self.grid * c.tokens * c.rows if meets else 0
        self.plain = _compiled(device, problem, c, scaled=False)
        self.scaled = _compiled(device, problem, c, scaled=True)

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
        m, n = out.shape
        partials = counters = 0
        if self.partials:
            space = global_scale.new_empty(self.partials)
            partials, counters = space.data_ptr(), zeroed_counters(out.device, self.counters).data_ptr()
        (self.plain if pre_quant_scale is None else self.scaled).launch(
            self.grid,
            1,
            1,
            torch._C._cuda_getCurrentRawStream(out.get_device()),
            weight.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            global_scale.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if pre_quant_scale is None else pre_quant_scale.data_ptr(),
            partials,
            counters,
            x.stride(0) if m > 1 else self.k,
            m,
            n,
            self.k,
            0 if global_scale.numel() == 1 else 1,
            0 if bias is None else 1 if bias.dtype == out.dtype else 2,
        )


def _compiled(device: Device, problem: Problem, c: MarlinConfig, *, scaled: bool) -> CudaLaunch:
    smem, cluster = smem_bytes(c, scaled=scaled), c.split > 1 and c.meet == "cluster"
    compiled = compile_cuda(
        SOURCE,
        device.capability,
        entry="marlin",
        defines=macros(
            device,
            problem.dtype,
            problem.k,
            c,
            scaled=scaled,
            blocks=blocks_per_sm(device, problem, c),
            smem_bytes=smem,
        ),
    )
    return CudaLaunch(
        compiled,
        fields=ARGS,
        block=c.threads,
        smem_bytes=smem,
        cluster=c.split if cluster else 1,
        pdl=dependent_launches(),
        prefer_smem=True,
    )


KERNEL: Kernel = Marlin()
