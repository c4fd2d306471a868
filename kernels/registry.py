"""Finds the kernels: every module of `kernels/gemm/` and `kernels/moe/` with a `KERNEL`, and what other packages offer.

There is no central list and no priority order; order comes from measurements. Other packages register through the
entry point group "nvfp4.kernels" (each entry point loads a Kernel instance). NVFP4_KERNELS may name further modules,
comma-separated, whose `KERNELS` are added: a kernel under development needs no packaging, and worker processes see it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points

from ..errors import InvalidInput, message
from .kernel import Kernel
from .problem import OPS

__all__ = ["OPS", "get", "kernels"]

FOLDERS = ("gemm", "moe")


@cache
def _all() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for kernel in _discover():
        if kernel.name in found:
            raise InvalidInput(
                message(f"two kernels are named {kernel.name!r}", got=type(kernel), do="rename or remove one")
            )
        found[kernel.name] = kernel
    return found


def _discover() -> Iterator[Kernel]:
    for folder in FOLDERS:
        package = importlib.import_module(f".{folder}", __package__)
        for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
            if not info.name.startswith("_"):
                kernel = getattr(importlib.import_module(f".{folder}.{info.name}", __package__), "KERNEL", None)
                if kernel is not None:
                    yield kernel
    for point in entry_points(group="nvfp4.kernels"):
        yield point.load()
    for module in filter(None, os.environ.get("NVFP4_KERNELS", "").split(",")):
        try:
            yield from importlib.import_module(module.strip()).KERNELS
        except (ImportError, AttributeError) as error:
            raise InvalidInput(
                message(
                    f"NVFP4_KERNELS names {module.strip()!r}, which gives no kernels",
                    got=error,
                    expected="modules that can be imported and have KERNELS",
                )
            ) from error


def kernels(op: str) -> tuple[Kernel, ...]:
    """All kernels of one op, sorted by name."""
    return tuple(kernel for name, kernel in sorted(_all().items()) if kernel.op == op)


def get(name: str) -> Kernel | None:
    """The kernel of that name, or None: a database may name kernels that are not installed here."""
    return _all().get(name)


def refresh() -> None:
    """Forget what was found, so that a changed NVFP4_KERNELS takes effect."""
    _all.cache_clear()
