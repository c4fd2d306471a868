"""What kernels of experts must give bit by bit: every product of a code and a block scale, and sums beyond float16."""

from __future__ import annotations

import torch

from ..kernels import reference
from ..kernels.kernel import Kernel
from ..kernels.problem import Device, Problem
from ..kernels.weights.codec import pack_codes
from ..kernels.weights.layouts import layout
from .experts import MoeCase

__all__ = ["check_exact_grouped", "check_float16_range"]

INTER = 512  # products that are added up; the raw sum is 21 times the largest float16


def check_exact_grouped(
    kernel: Kernel, device: Device, torch_device: torch.device, dtype: str, *, k: int = 16, padding: int = 0
) -> None:
    """Every code times every non-negative finite block scale, picked out by a one-hot x: equal to the reference.

    Two experts with global scales of their own have 16 rows each, a third has none.

    Parameters
    ----------
    kernel
        Of grouped_gemm.
    device, torch_device
        As in `conformance.check`.
    dtype
        "bfloat16" or "float16".
    k
        Size of K, whose last 16 columns are looked at.
    padding
        Rows of no expert behind the others, so that configs for many rows run too.

    Raises
    ------
    AssertionError
        A product is another one, or a row of no expert is not zero.
    """
    problem = Problem(op="grouped_gemm", n=127, k=k, experts=3, dtype=dtype)
    launcher = kernel.build(device, problem, kernel.default_config(device, problem, 32 + padding))
    codes = (torch.arange(k) + torch.arange(127).unsqueeze(1)) % 16
    stack = torch.stack([codes, codes.flip(1), codes.roll(5, 1)]).to(torch.uint8)
    weight = pack_codes(stack.view(-1, k)).view(3, 127, k // 2).to(torch_device)
    scale = torch.arange(127, dtype=torch.uint8).view(1, 127, 1).expand(3, -1, k // 16).contiguous().to(torch_device)
    factors = torch.tensor([[3e-5], [1.0], [7.0]], device=torch_device)
    offsets = torch.tensor([0, 16, 32, 32], dtype=torch.int32, device=torch_device)
    x = torch.zeros(32 + padding, k, dtype=getattr(torch, dtype), device=torch_device)
    x[:16, k - 16 :].fill_diagonal_(1)
    x[16:32, k - 16 :].fill_diagonal_(1)
    packed = layout(kernel.layout(device, problem)).pack(weight, scale, factors)
    out = torch.full((32 + padding, 127), float("nan"), dtype=x.dtype, device=torch_device)
    launcher(x, packed.data, packed.scale, packed.global_scale, offsets, out)
    right = reference.grouped_gemm(x, weight, scale, factors, offsets)
    wrong = (out != right).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise AssertionError(
            f"{kernel.name} {dtype}: {len(wrong)} of {out.numel()} products are wrong, first: row {row}, block scale "
            f"0x{column:02X}: got {float(out[row, column])!r}, expected {float(right[row, column])!r}"
        )


def check_float16_range(kernel: Kernel, device: Device, torch_device: torch.device, m: int) -> None:
    """Raw sums of 1.4e6 in float16, and results of 13.76: global scale and router weight come before the rounding.

    Parameters
    ----------
    kernel
        Of moe.
    device, torch_device
        As in `conformance.check`.
    m
        Tokens; all of them go to one of two experts.

    Raises
    ------
    AssertionError
        Another result.
    """
    problem = Problem(op="moe", n=INTER, k=64, experts=2, top_k=1, activation="swiglu", dtype="float16")

    def full(*shape: int, byte: int) -> torch.Tensor:
        return torch.full(shape, byte, dtype=torch.uint8, device=torch_device)

    # The first product is 0; its bias makes every value of the activation 100 * 0.01.
    bias = torch.full((2, 2 * INTER), 0.01, device=torch_device)
    bias[:, :INTER] = 100
    case = MoeCase(
        problem=problem,
        x=torch.zeros(m, 64, dtype=torch.float16, device=torch_device),
        weights=(
            *(full(2, 2 * INTER, 32, byte=0), full(2, 2 * INTER, 4, byte=0x38), torch.ones(2, 1, device=torch_device)),
            *(full(2, 64, INTER // 2, byte=0x77), full(2, 64, INTER // 16, byte=0x7E)),  # codes 6, scales 448
            torch.full((2, 1), 1e-5, device=torch_device),
        ),
        ids=torch.ones(m, 1, dtype=torch.int32, device=torch_device),
        router=torch.ones(m, 1, device=torch_device),
        options={"w13_bias": bias},
        nan_row=None,
        layout_id=kernel.layout(device, problem),
    )
    out = torch.empty_like(case.x)
    case.launch(kernel.build(device, problem, kernel.default_config(device, problem, m)), out)
    right = torch.full_like(out, INTER * 6 * 448 * 1e-5)
    got = sorted(set(out.flatten().tolist()))
    assert torch.equal(out, right), f"{kernel.name}, M = {m}: got {got}, expected {float(right[0, 0])}"
