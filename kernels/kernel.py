"""The interface of a candidate kernel: Config, Space, Kernel.

A candidate is a pair of a Kernel and one Config of its Space. Adding a kernel means adding one file under
`kernels/gemm/` (or `kernels/moe/`) with a module-level `KERNEL`, its device code beside it, and nothing else.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from .problem import Device, Problem, Verdict

__all__ = ["Config", "Kernel", "Launcher", "Space", "implementation_hash"]

# launcher(x, weight, weight_scale, global_scale, bias, pre_quant_scale, out) -> None
#   x                [M, K] bfloat16 or float16; rows may be strided, the last dimension is contiguous; M >= 1
#   weight           uint8, contiguous, in the layout the kernel reads ("checkpoint": [N, K/2])
#   weight_scale     uint8 view of e4m3, contiguous ("checkpoint": [N, K/16]), or None for blobs that contain it
#   global_scale     float32 [1] or [N], contiguous
#   bias             [N] in x's dtype or float32, contiguous, or None
#   pre_quant_scale  [K] in x's dtype, contiguous, or None
#   out              [M, N] in x's dtype, contiguous; every element is written
# Those of the other ops take what `kernels.moe.arguments` says, so the type leaves it open.
Launcher = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Base of every kernel's config: a frozen dataclass of ints, bools and strings, units in the names."""

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, so that equal configs have equal text."""
        return msgspec.json.encode(self, order="sorted").decode()


C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class Space(Generic[C]):
    """Named finite choices; iterating yields every combination as a config, in a fixed order."""

    config_type: type[C]
    choices: Mapping[str, tuple[Any, ...]]

    def __iter__(self) -> Iterator[C]:
        names = tuple(self.choices)
        for values in itertools.product(*self.choices.values()):
            yield self.config_type(**dict(zip(names, values, strict=True)))

    def __len__(self) -> int:
        return math.prod(len(values) for values in self.choices.values())

    def __contains__(self, config: object) -> bool:
        return type(config) is self.config_type and all(
            getattr(config, name) in values for name, values in self.choices.items()
        )


class Kernel(ABC):
    """A family of candidates for one op. Imports on a machine with no GPU and without its DSL installed."""

    name: ClassVar[str]
    op: ClassVar[str] = "gemm"
    config_type: ClassVar[type[Config]]
    packages: ClassVar[tuple[str, ...]] = ()  # distributions whose version decides the machine code: ("triton",)
    deterministic: ClassVar[bool] = True  # bitwise equal from run to run
    conformance_skip: ClassVar[str] = ""  # a reason here opts out of the conformance test
    # Ranges of M (both ends included, None: no end) this family is made for. An untuned problem runs the kernel with
    # the narrowest range that contains M; a measurement always beats this declaration.
    made_for: ClassVar[tuple[tuple[int, int | None], ...]] = ((1, None),)

    def layout(self, device: Device, problem: Problem) -> str:
        """The weight layout that this kernel reads on that device."""
        return "checkpoint"

    @abstractmethod
    def supports(self, device: Device, problem: Problem) -> Verdict:
        """Whether any config can run; the reason in words if not."""

    @abstractmethod
    def is_valid(self, device: Device, problem: Problem, config: Any, m: int) -> Verdict:
        """Whether this config can run M = m: the only statement of shared memory, register and size limits."""

    @abstractmethod
    def space(self, device: Device, problem: Problem) -> Space[Any]:
        """All choices, at most about 2,000 of them valid for one problem."""

    @abstractmethod
    def default_config(self, device: Device, problem: Problem, m: int) -> Any:
        """What an untuned machine runs, and what the tuner measures first; in the space, and valid for m."""

    def predicted_us(self, device: Device, problem: Problem, config: Any, m: int) -> float | None:
        """About how many microseconds a valid config takes, or None where nothing is foreseen.

        The tuner compares the configs of one kernel at one M by it, and measures those in front first.
        """
        return None

    @abstractmethod
    def build(self, device: Device, problem: Problem, config: Any) -> Launcher:
        """Compile (cached on disk; no GPU needed) and return the launcher, which loads onto the GPU when first called.

        Raises
        ------
        BuildError
            The compiler refused.
        """

    @abstractmethod
    def source_files(self) -> tuple[Path, ...]:
        """Device code and what shapes it, for the implementation hash; not the host-side interface."""

    def parse_config(self, device: Device, problem: Problem, text: str | bytes) -> Any | None:
        """A config from JSON of unknown origin, or None when it is not one of this kernel's space.

        A field that the config does not have means that the text speaks of something else: None too. Those that are
        absent have their default.
        """
        try:
            given = msgspec.json.decode(text, type=dict[str, bool | int | str])
            config = msgspec.convert(given, self.config_type)
        except msgspec.DecodeError:  # includes ValidationError
            return None
        if not given.keys() <= {field.name for field in fields(self.config_type)}:
            return None
        return config if config in self.space(device, problem) else None


def implementation_hash(kernel: Kernel) -> str:
    """16 hex digits over the kernel's sources and its compilers' versions: a change retires its own rows only."""
    digest = hashlib.sha256()
    for path in kernel.source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for package in kernel.packages:
        try:
            digest.update(f"{package}=={version(package)}\0".encode())
        except PackageNotFoundError:
            digest.update(f"{package} absent\0".encode())
    return digest.hexdigest()[:16]
