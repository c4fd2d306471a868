"""Fake kernels for tests of the tuner and the dispatcher: one that is right, and those that go wrong on purpose.

NVFP4_KERNELS=nvfp4.testing.fakes adds them to the registry of a process and of its children. They run on the CPU.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import BuildError
from ..kernels.kernel import Config, Kernel, Launcher, Space
from ..kernels.problem import YES, Device, Problem, Verdict
from ..kernels.weights.codec import dequantize

__all__ = ["KERNELS", "TRACE_ENV", "TROUBLES", "FakeConfig", "Good", "Trouble", "TroubleConfig", "fake_device"]

TRACE_ENV = "NVFP4_FAKE_TRACE"  # a file to which every launch of a fake appends a line
TROUBLES_ENV = "NVFP4_FAKE_TROUBLES"  # comma-separated: the only configs of fake_trouble
IN_BUILD_ENV = "NVFP4_FAKE_IN_BUILD"  # "segfault" and "hang" happen while building, not while launching

TROUBLES = (
    "zeros",
    "nan",
    "unwritten_tail",
    "out_of_memory",
    "launch_error",
    "build_error",
    "guard_rows",
    "changes_weights",
    "ignores_bias",
    "ignores_pre_quant_scale",
    "ignores_row_scales",
    "abort",
    "segfault",
    "hang",
)


def fake_device(name: str = "Fake 3000") -> Device:
    """A made-up CPU-kind Device."""
    return Device(kind="cpu", name=name, units=4, l2_bytes=1 << 20, memory_bytes=1 << 33)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig(Config):
    """`delay_us` is how long a launch waits, whatever M."""

    delay_us: int
    small_m: bool = False  # serves M up to 8 only


def multiply(x: Tensor, weight: Tensor, scale: Tensor | None, gs: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """A right result, in float64."""
    assert scale is not None
    one = torch.ones((), dtype=torch.float32)
    exact = x.double() @ dequantize(weight, scale, one, torch.float64).t() * gs.double()
    out.copy_((exact if bias is None else exact + bias.double()).float())


class _Fake(Kernel):
    def supports(self, device: Device, problem: Problem) -> Verdict:
        """Any problem on a CPU."""
        return YES if device.kind == "cpu" else Verdict.no("fakes run on the CPU")

    def source_files(self) -> tuple[Path, ...]:
        """This file."""
        return (Path(__file__),)


class Good(_Fake):
    """Always right; the smaller `delay_us` the faster."""

    name: ClassVar[str] = "fake_good"
    config_type = FakeConfig

    def is_valid(self, device: Device, problem: Problem, config: FakeConfig, m: int) -> Verdict:
        """Configs for small M refuse more than 8 tokens."""
        return Verdict.no("serves at most 8 tokens") if config.small_m and m > 8 else YES

    def space(self, device: Device, problem: Problem) -> Space[FakeConfig]:
        """Three delays, with and without the limit on M."""
        return Space(FakeConfig, {"delay_us": (0, 300, 3000), "small_m": (False, True)})

    def default_config(self, device: Device, problem: Problem, m: int) -> FakeConfig:
        """Neither the best nor the worst."""
        return FakeConfig(delay_us=300)

    def build(self, device: Device, problem: Problem, config: FakeConfig) -> Launcher:
        """A launcher that waits, then multiplies."""

        def launch(
            x: Tensor,
            weight: Tensor,
            scale: Tensor | None,
            gs: Tensor,
            bias: Tensor | None,
            pqs: Tensor | None,
            out: Tensor,
        ) -> None:
            trace = os.environ.get(TRACE_ENV)
            if trace:
                with open(trace, "a") as file:
                    file.write(f"{self.name} {config.to_json()} {x.shape[0]}\n")
            if config.delay_us and not config.small_m:
                time.sleep(config.delay_us / 1e6)
            multiply(x if pqs is None else (x.float() * pqs.float()).to(x.dtype), weight, scale, gs, bias, out)

        return launch


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubleConfig(Config):
    """What goes wrong."""

    what: str


class Trouble(_Fake):
    """Goes wrong in as many ways as there are configs; every one of them would be fast."""

    name: ClassVar[str] = "fake_trouble"
    config_type = TroubleConfig
    packages: ClassVar[tuple[str, ...]] = ("torch",)  # so that the compile pool builds it
    conformance_skip: ClassVar[str] = "wrong on purpose"

    def is_valid(self, device: Device, problem: Problem, config: TroubleConfig, m: int) -> Verdict:
        """It claims to be fine."""
        return YES

    def space(self, device: Device, problem: Problem) -> Space[TroubleConfig]:
        """All troubles, or those that TROUBLES_ENV names."""
        named = os.environ.get(TROUBLES_ENV)
        return Space(TroubleConfig, {"what": tuple(named.split(",")) if named else TROUBLES})

    def default_config(self, device: Device, problem: Problem, m: int) -> TroubleConfig:
        """The first of them."""
        return next(iter(self.space(device, problem)))

    def build(self, device: Device, problem: Problem, config: TroubleConfig) -> Launcher:
        """A launcher that goes wrong, or the failure to make one."""
        if config.what == "build_error":
            raise BuildError("fake.cu(7): error: expected a ';'")
        if os.environ.get(IN_BUILD_ENV) and config.what in ("segfault", "hang"):
            _misbehave(config.what)

        def launch(
            x: Tensor,
            weight: Tensor,
            scale: Tensor | None,
            gs: Tensor,
            bias: Tensor | None,
            pqs: Tensor | None,
            out: Tensor,
        ) -> None:
            if pqs is not None and config.what != "ignores_pre_quant_scale":
                x = (x.float() * pqs.float()).to(x.dtype)
            _go_wrong(config.what, x, weight, scale, gs, bias, out)

        return launch


def _go_wrong(
    what: str, x: Tensor, weight: Tensor, scale: Tensor | None, gs: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    if what == "zeros":
        out.zero_()
    elif what == "nan":
        out.fill_(float("nan"))
    elif what == "out_of_memory":
        raise torch.OutOfMemoryError("Tried to allocate 3.00 TiB")
    elif what == "launch_error":
        raise RuntimeError("too many resources requested for launch")
    elif what in ("abort", "segfault", "hang"):
        _misbehave(what)
    elif what == "ignores_bias":
        multiply(x, weight, scale, gs, None, out)
    elif what == "ignores_row_scales":
        multiply(x, weight, scale, gs[:1], bias, out)
    else:
        multiply(x, weight, scale, gs, bias, out)
        m, n = out.shape
        if what == "unwritten_tail" and m > 1:
            out[-1] = float("nan")
        elif what == "guard_rows":
            out.as_strided((m + 1, n), (n, 1)).select(0, m).zero_()
        elif what == "changes_weights":
            weight[0, 0] += 1


def _misbehave(what: str) -> None:
    if what == "abort":
        os.abort()
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    while True:
        time.sleep(3600)


KERNELS: tuple[Kernel, ...] = (Good(), Trouble())
