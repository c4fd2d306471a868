"""Whether a kernel of this package can run a problem where vLLM builds a layer."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from ...kernels import registry
from ...kernels.device import describe
from ...kernels.problem import Problem, Verdict

__all__ = ["Layer", "log", "runs_here", "where", "why_not"]

Layer: TypeAlias = Any  # a torch module with the attributes that vLLM gives it

log = init_logger("vllm.nvfp4")  # below "vllm", so that vLLM's settings of logging hold


def runs_here() -> bool:
    """Whether this is a CUDA device that the kernels are made for."""
    return bool(current_platform.is_cuda() and current_platform.has_device_capability(80))


def where(device: torch.device) -> torch.device:
    """The device on which weights will be: the platform's, for those on the meta device that are made later."""
    return torch.device(current_platform.device_type) if device.type == "meta" else device


def why_not(problem: Problem, device: torch.device, *, layout: str = "") -> str:
    """Why no kernel runs the problem on the device, in this layout or in any, "" if one does."""
    here = describe(where(device))
    verdicts = {}
    for kernel in registry.kernels(problem.op):
        verdict = verdicts[kernel.name] = kernel.supports(here, problem)
        if verdict and layout in ("", kernel.layout(here, problem)):
            return ""
        if verdict:
            verdicts[kernel.name] = Verdict.no(f"reads no weights in layout {layout!r}")
    return "; ".join(f"{name}: {verdict.reason}" for name, verdict in verdicts.items()) or "there are no kernels"
