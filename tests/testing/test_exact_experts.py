"""The exact checks of experts: right kernels pass in every layout, slightly wrong ones do not."""

from dataclasses import replace

import pytest
import torch
from nvfp4.kernels.device import describe
from nvfp4.kernels.moe.cpu_grouped import CpuGrouped
from nvfp4.kernels.moe.cpu_moe import CpuMoe
from nvfp4.testing import exact_experts
from nvfp4.testing.fake_experts import FragmentGrouped, FragmentMoe

CPU = torch.device("cpu")


class SmallScales(CpuGrouped):
    """Takes 416 for 448."""

    name = "small_scales"

    def build(self, device, problem, config):
        right = super().build(device, problem, config)

        def launch(x, weight, scale, gs, offsets, out):
            right(x, weight, scale.clamp(max=0x7D), gs, offsets, out)

        return launch


class EarlyRounding(CpuMoe):
    """Rounds before the global scale of w2."""

    name = "early_rounding"

    def build(self, device, problem, config):
        right = super().build(device, problem, config)

        def launch(a, out):
            right(replace(a, w2_scale_2=torch.ones_like(a.w2_scale_2)), out)
            out.mul_(a.w2_scale_2[0].to(out.dtype))

        return launch


@pytest.mark.parametrize("padding", [0, 40])
@pytest.mark.parametrize("k", [16, 80])
def test_products(k, padding):
    for kernel in (CpuGrouped(), FragmentGrouped()):
        exact_experts.check_exact_grouped(kernel, describe("cpu"), CPU, "float16", k=k, padding=padding)
    with pytest.raises(AssertionError, match=r"28 of .* products are wrong, first: row 0, block scale 0x7E: got"):
        exact_experts.check_exact_grouped(SmallScales(), describe("cpu"), CPU, "float16", k=k, padding=padding)


def test_sums_beyond_float16():
    for kernel in (CpuMoe(), FragmentMoe()):
        exact_experts.check_float16_range(kernel, describe("cpu"), CPU, 3)
    with pytest.raises(AssertionError, match=r"got \[inf\], expected 13\.76"):
        exact_experts.check_float16_range(EarlyRounding(), describe("cpu"), CPU, 3)
