"""Values of M, and what is taken where nothing was measured: the weight layout, and the kernel made for an M."""

from __future__ import annotations

from collections.abc import Iterable

from .kernel import Kernel
from .problem import Device, Problem
from .weights.fragment import fragment_id

__all__ = ["ANCHORS", "FAR", "OPEN", "made_for_width", "untuned_layout"]

# The tuner measures at these M; between two of them defaults do not change.
ANCHORS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)

FAR = 1 << 20  # an M that stands for "however large" when a kernel is asked whether it is valid
OPEN = 1 << 31  # above every M, for comparing ranges without an end


def untuned_layout(device: Device, problem: Problem, kernels: Iterable[Kernel]) -> str:
    """The fragment layout on a GPU where kernels that read it serve few tokens and many; else "checkpoint".

    On the one GPU that was measured (NVIDIA H200, 2026-11) the best candidates of gemm that read fragments took less
    time than those that read the checkpoint's bytes at every M of all eight shapes. Experts follow the same rule.

    Parameters
    ----------
    kernels
        Those that may run; of other ops and of other devices too.
    """
    if device.kind != "cuda":
        return "checkpoint"
    wanted = fragment_id(device.capability, problem.dtype)
    readers = [
        kernel
        for kernel in kernels
        if kernel.op == problem.op and kernel.supports(device, problem) and kernel.layout(device, problem) == wanted
    ]
    served = all(any(_runs(kernel, device, problem, m) for kernel in readers) for m in (1, FAR))
    return wanted if served else "checkpoint"


def _runs(kernel: Kernel, device: Device, problem: Problem, m: int) -> bool:
    return bool(kernel.is_valid(device, problem, kernel.default_config(device, problem, m), m))


def made_for_width(kernel: Kernel, m: int) -> int | None:
    """Width of the narrowest of the kernel's ranges around m: the smallest runs. None: it is not made for m.

    Of two ranges without an end the one that begins later is the narrower.
    """
    ranges = ((low, OPEN if high is None else high) for low, high in kernel.made_for)
    return min((high - low for low, high in ranges if low <= m <= high), default=None)
