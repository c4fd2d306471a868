"""What software runs here, and how it differs from what a measurement ran on."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from .records import Environment

__all__ = ["changes", "environment"]


@cache
def environment() -> Environment:
    """The software of this process. Creates no CUDA context and imports no compiler."""
    import torch

    from .. import __version__

    return Environment(
        nvfp4=__version__,  # not the installed distribution's: a checkout on the path has none
        torch=str(torch.__version__),  # a plain str: TorchVersion cannot be encoded
        triton=_version("triton"),
        cutlass_dsl=_version("nvidia-cutlass-dsl"),
        cuda=torch.version.cuda or "",
        driver=_driver(),
    )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    """The NVIDIA driver's version, "" on a machine that has none."""
    try:
        import pynvml
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()  # type: ignore[no-untyped-call]
    except pynvml.NVMLError:  # no driver
        return ""
    try:
        text = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()  # type: ignore[no-untyped-call]
    return text.decode() if isinstance(text, bytes) else str(text)


def changes(measured: Environment, now: Environment) -> tuple[str, ...]:
    """What differs, as "driver 580.1 -> 590.2"; such rows count on, and `nvfp4 inspect` shows it."""
    return tuple(
        f"{name} {getattr(measured, name) or 'none'} -> {getattr(now, name) or 'none'}"
        for name in Environment.__struct_fields__
        if getattr(measured, name) != getattr(now, name)
    )
