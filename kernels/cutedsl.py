"""Compiling CuTe DSL kernels for a named architecture without a GPU; what comes out is a cubin, kept on disk.

The DSL's own host code, which would make tensor maps and launch, is not used: a cubin launches through
`cuda.launch.CudaLaunch` like any other, and a process that finds it in the cache does not import the DSL (0.9 s).
What the DSL's host code does besides is little: `cuda.tensor_map` encodes tensor maps, and the order of the kernel's
parameters is that of its signature, which loading checks by their sizes.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from ..errors import BuildError, message
from .cuda import program_cache
from .cuda.compile import ARCHITECTURES, Compiled
from .cuda.cubin import read_cubin

__all__ = ["PACKAGE", "compile_cutedsl"]

PACKAGE = "nvidia-cutlass-dsl"
FORMAT = 1  # of what is kept in the cache: a change here makes everything be compiled again
MESSAGE_CHARS = 1500

_lock = threading.Lock()  # the DSL builds one function at a time
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def compile_cutedsl(
    make: Callable[[], tuple[Any, tuple[Any, ...]]],
    capability: tuple[int, int],
    *,
    key: str,
    sources: tuple[Path, ...],
) -> Compiled:
    """Compile a kernel; a second time, in any process, it comes from the cache.

    Parameters
    ----------
    make
        Imports the device code and returns a `cute.jit` callable that launches one kernel, and arguments of the right
        types for it.
    capability
        Of the device: (9, 0).
    key
        Everything that `make` decides by, as text.
    sources
        The files that the machine code depends on.

    Raises
    ------
    BuildError
        The DSL is not installed, or it refused.
    """
    arch = ARCHITECTURES.get(capability, f"sm_{capability[0]}{capability[1]}")
    cache_key = _key(arch, key, sources)
    stored = program_cache.load(cache_key)
    if stored is not None:
        return msgspec.msgpack.decode(stored, type=Compiled)
    compiled = read_cubin(_compile(make, arch, key), arch)
    program_cache.save(cache_key, msgspec.msgpack.encode(compiled))
    return compiled


def _key(arch: str, key: str, sources: tuple[Path, ...]) -> str:
    try:
        package = version(PACKAGE)
    except PackageNotFoundError:
        package = ""
    digest = hashlib.sha256(repr((FORMAT, "cutedsl", package, arch, key)).encode())
    for path in sources:
        text = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def _compile(make: Callable[[], tuple[Any, tuple[Any, ...]]], arch: str, key: str) -> bytes:
    try:
        from cutlass import cute
    except ImportError as error:
        raise BuildError(message("CuTe DSL cannot be imported", got=error, do=f"install {PACKAGE}")) from error
    # Kernels of one name dump into files of one name: a folder for each, or two processes read each other's code.
    with _lock, tempfile.TemporaryDirectory(prefix="nvfp4-") as folder:
        try:
            function, arguments = make()
            built = cute.compile(function, *arguments, options=f"--gpu-arch {arch} --keep-cubin --dump-dir={folder}")
            return bytes(built.artifacts.CUBIN)
        except Exception as error:  # the DSL and MLIR raise many kinds
            text = _COLOUR.sub("", str(error)).strip()[:MESSAGE_CHARS]
            raise BuildError(
                message(f"CuTe DSL did not compile {key} for {arch}", got=f"{type(error).__name__}: {text}")
            ) from error
