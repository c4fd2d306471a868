"""Fake kernels of experts that read the fragment layouts: they unpack the blobs and run the CPU kernels on them.

NVFP4_KERNELS=nvfp4.testing.fake_experts adds them to the registry of a process and of its children.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.kernel import Kernel
from ..kernels.moe._cpu_experts import CpuExpertsConfig
from ..kernels.moe.arguments import GroupedLauncher, MoeArguments, MoeLauncher
from ..kernels.moe.cpu_grouped import CpuGrouped
from ..kernels.moe.cpu_moe import CpuMoe
from ..kernels.problem import Device, Problem
from ..kernels.weights.fragment import fragment_id
from ..kernels.weights.layouts import first_layout
from ..kernels.weights.weight import Weight

__all__ = ["KERNELS", "FragmentGrouped", "FragmentMoe"]


class FragmentGrouped(CpuGrouped):
    """`cpu_grouped` on blobs."""

    name: ClassVar[str] = "fake_fragment_grouped"

    def layout(self, device: Device, problem: Problem) -> str:
        """That of the dtype."""
        return fragment_id(device.capability, problem.dtype)

    def build(self, device: Device, problem: Problem, config: CpuExpertsConfig) -> GroupedLauncher:
        """A launcher that unpacks, then multiplies."""
        launcher, layout = super().build(device, problem, config), self.layout(device, problem)

        def launch(x: Tensor, weight: Tensor, scale: Tensor | None, gs: Tensor, offsets: Tensor, out: Tensor) -> None:
            launcher(x, *_unpacked(weight, scale, gs, layout, problem.n, problem.k), gs, offsets, out)

        return launch

    def source_files(self) -> tuple[Path, ...]:
        """This file."""
        return (Path(__file__),)


class FragmentMoe(CpuMoe):
    """`cpu_moe` on blobs."""

    name: ClassVar[str] = "fake_fragment_moe"

    def layout(self, device: Device, problem: Problem) -> str:
        """That of the dtype."""
        return fragment_id(device.capability, problem.dtype)

    def build(self, device: Device, problem: Problem, config: CpuExpertsConfig) -> MoeLauncher:
        """A launcher that unpacks, then runs the layer."""
        p, launcher, layout = problem, super().build(device, problem, config), self.layout(device, problem)

        def launch(a: MoeArguments, out: Tensor) -> None:
            rows, first = p.n * (2 if p.gated else 1), first_layout(layout, p)
            w13, w13_scale = _unpacked(a.w13, a.w13_scale, a.w13_scale_2, first, rows, p.k)
            w2, w2_scale = _unpacked(a.w2, a.w2_scale, a.w2_scale_2, layout, p.k, p.n)
            launcher(replace(a, w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale), out)

        return launch

    def source_files(self) -> tuple[Path, ...]:
        """This file."""
        return (Path(__file__),)


def _unpacked(data: Tensor, scale: Tensor | None, gs: Tensor, layout: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    assert scale is None, "blobs contain their scales"
    packed = Weight(data=data, scale=None, global_scale=gs, layout=layout, out_features=n, in_features=k)
    weight, unpacked, _ = packed.to_checkpoint()
    return weight, unpacked.view(torch.uint8)


KERNELS: tuple[Kernel, ...] = (FragmentGrouped(), FragmentMoe())
