"""`cutedsl_grouped`: grouped_gemm on Hopper, decoding in the registers that wgmma reads. CuTe DSL.

out[rows of e] = x[rows of e] . W_e^T * global_scale_e, float32 accumulation, one rounding; sm_90 only. The tiles are
those of `cutedsl_wgmma`, dealt out from a list that a small kernel makes of the offsets; a tile that is not full is
multiplied as far as it has rows. K is not split.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..cuda.compile import cuda_sources
from ..cutedsl import PACKAGE
from ..kernel import Kernel, Space
from ..problem import Device, Problem, Verdict
from ..weights.fragment import fragment_id
from . import _cutedsl_config as configs
from ._cutedsl_config import CuteDslExpertsConfig
from .cuda_routing import ROUTE

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import GroupedLauncher


class CuteDslExperts(Kernel):
    """What `cutedsl_grouped` and `cutedsl_moe` have in common."""

    config_type = CuteDslExpertsConfig
    packages = (PACKAGE, "nvidia-cuda-nvrtc")

    def layout(self, device: Device, problem: Problem) -> str:
        """The fragment layout of x's dtype."""
        return fragment_id(device.capability, problem.dtype)

    def supports(self, device: Device, problem: Problem) -> Verdict:
        """Hopper, and every K in whole groups."""
        return configs.supports(device, problem)

    def is_valid(self, device: Device, problem: Problem, config: CuteDslExpertsConfig, m: int) -> Verdict:
        """Tiles that suit an expert's rows and the device."""
        return configs.is_valid(device, problem, config, m)

    def space(self, device: Device, problem: Problem) -> Space[CuteDslExpertsConfig]:
        """Tile shapes, pipelines and schedules."""
        return configs.space(device, problem)

    def default_config(self, device: Device, problem: Problem, m: int) -> CuteDslExpertsConfig:
        """Of one pipeline per number of tokens what `predicted_us` ranks first."""
        return configs.best(device, problem, m)

    def predicted_us(self, device: Device, problem: Problem, config: CuteDslExpertsConfig, m: int) -> float:
        """Of the products: from bytes, instructions and the number of tiles expected."""
        return configs.predicted_us(device, problem, config, m)

    def source_files(self) -> tuple[Path, ...]:
        """Device code, and the files that say what is compiled and launched."""
        from ._cutedsl_experts.launch import source_files

        here = Path(__file__).parent
        names = (self.name, "cutedsl_grouped", "_cutedsl_config", "cuda_routing", "routing")
        own = tuple(here / f"{name}.py" for name in dict.fromkeys(names))
        return (*own, *source_files(), *cuda_sources(ROUTE))


class CuteDslGrouped(CuteDslExperts):
    """See the module."""

    name = "cutedsl_grouped"
    op = "grouped_gemm"
    # 4096 rows and more are faster than with `marlin_grouped`, 512 are slower (three layers; H200, 2026-11).
    made_for = ((2049, None),)

    def build(self, device: Device, problem: Problem, config: CuteDslExpertsConfig) -> GroupedLauncher:
        """Compile for x's dtype and the alignment of N; sizes stay run-time values."""
        return _Launch(device, problem, config)


class _Launch:
    def __init__(self, device: Device, problem: Problem, config: CuteDslExpertsConfig) -> None:
        from ._cutedsl_experts.launch import ProductLaunch
        from .cuda_routing import CudaRouting

        ((size, shape),) = zip(configs.sizes(problem), configs.shapes(problem, config), strict=True)
        self._tokens = config.tokens
        self.routing = CudaRouting(device, problem.experts)
        self.product = ProductLaunch(device, shape, rows=size.rows, k=size.k, n=size.n, band=config.band, pdl=True)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None,
        global_scale: Tensor,
        expert_offsets: Tensor,
        out: Tensor,
    ) -> None:
        """The launcher: see `arguments.GroupedLauncher`."""
        if x.data_ptr() % 16 or (len(x) > 1 and x.stride(0) % 8):  # TMA reads no such rows
            x = x.new_empty(x.shape).copy_(x)
        tiles = self.routing.groups(expert_offsets, out, self._tokens)
        self.product(x, weight, global_scale, tiles, out)


KERNEL: Kernel = CuteDslGrouped()
