"""Compiling CUDA C++ with NVRTC for a named architecture: no GPU, no CUDA toolkit, cached on disk.

A source file is one translation unit. It and what it includes may include (`#include "x.cuh"`) files that lie beside
the source or in this folder, and declare what they use of the toolkit's headers. The kernel is `extern "C"`; what a
config decides reaches it as integer macros.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from ...errors import BuildError, message
from . import program_cache

__all__ = ["ARCHITECTURES", "Compiled", "compile_cuda", "cuda_sources", "known_architecture"]

# Architectures whose own instructions (wgmma, tcgen05, block-scaled mma, conversions from e2m1) need the "a" targets.
# Their code runs on that very capability only; a cubin is made for one device anyway.
ARCHITECTURES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}

# no_source_include: without it NVRTC looks for headers in the process's current folder first.
# no_cache: what NVRTC takes from its own cache comes without the words of ptxas.
OPTIONS: dict[str, Any] = {"std": "c++17", "ptxas_options": ["-v"], "no_source_include": True, "no_cache": True}

HERE = Path(__file__).parent  # what several kernels include lies here

FORMAT = 1  # of what is kept in the cache: a change here makes everything be compiled again
MAX_ERROR_LINES = 12

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
_SPILLS = re.compile(r"(\d+) bytes spill (?:stores|loads)")
_STACK = re.compile(r"(\d+) bytes stack frame")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Machine code of one kernel, and what ptxas says it needs."""

    cubin: bytes
    entry: str
    arch: str  # "sm_90a"
    registers: int  # per thread
    spill_bytes: int  # stores and loads, per thread
    stack_bytes: int  # local memory per thread: spilled registers, and arrays whose index is not known when compiling
    static_smem_bytes: int  # per block


def compile_cuda(
    source: Path, capability: tuple[int, int], *, entry: str, defines: Mapping[str, int] | None = None
) -> Compiled:
    """Compile one kernel of a source file; a second time, in any process, it comes from the cache.

    Parameters
    ----------
    source
        A `.cu` file.
    capability
        Of the device: (9, 0).
    entry
        Name of an `extern "C"` kernel in it.
    defines
        Macros and their values.

    Raises
    ------
    BuildError
        The compiler refused, with its first errors; there is no such kernel in the source; or NVRTC is missing or does
        not know the architecture.
    """
    arch = known_architecture(capability)
    macros = sorted((defines or {}).items())
    key = _key(source, arch, entry, macros)
    stored = program_cache.load(key)
    if stored is not None:
        return msgspec.msgpack.decode(stored, type=Compiled)
    compiled = _compile(source, arch, entry, macros)
    program_cache.save(key, msgspec.msgpack.encode(compiled))
    return compiled


def cuda_sources(source: Path) -> tuple[Path, ...]:
    """The source and all files that it includes by quotes, directly or not; those that are not there are left out."""
    found = [source]
    for path in found:  # grows meanwhile
        for name in _INCLUDE.findall(path.read_text()):
            header = next((place / name for place in _places(source) if (place / name).is_file()), None)
            if header is not None and not any(header.samefile(known) for known in found):
                found.append(header)
    return tuple(found)


def _places(source: Path) -> tuple[Path, Path]:
    """Where headers are looked for, in this order."""
    return source.parent, HERE


def known_architecture(capability: tuple[int, int]) -> str:
    """What is compiled for: "sm_90a".

    Raises
    ------
    BuildError
        NVRTC is missing, or does not know it.
    """
    major, minor = capability
    plain = f"sm_{major}{minor}"
    if 10 * major + minor not in _known():
        raise BuildError(message(f"NVRTC {_nvrtc()} does not compile for {plain}", do="update nvidia-cuda-nvrtc"))
    return ARCHITECTURES.get(capability, plain)


@cache
def _known() -> frozenset[int]:
    return frozenset(_call("nvrtcGetSupportedArchs")[0])


@cache
def _nvrtc() -> str:
    return ".".join(map(str, _call("nvrtcVersion")))


def _call(function: str) -> tuple[Any, ...]:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        status, *values = getattr(nvrtc, function)()
    except Exception as error:  # pathfinder has its own kinds for a library that is not there
        raise BuildError(
            message("NVRTC cannot be used", got=f"{type(error).__name__}: {error}", do="install nvidia-cuda-nvrtc")
        ) from error
    if int(status):
        raise BuildError(message(f"{function} failed", got=status.name))
    return tuple(values)


def _key(source: Path, arch: str, entry: str, macros: list[tuple[str, int]]) -> str:
    """Over everything that decides the machine code."""
    try:
        package = version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:  # the library of an installed toolkit
        package = ""
    digest = hashlib.sha256(repr((FORMAT, OPTIONS, arch, entry, macros, _nvrtc(), package)).encode())
    for path in cuda_sources(source):
        text = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def _compile(source: Path, arch: str, entry: str, macros: list[tuple[str, int]]) -> Compiled:
    log = io.StringIO()
    # Not as options: those would reach NVRTC's own headers too, where a macro named T is the end.
    head = "".join(f"#define {name} {value}\n" for name, value in macros) + f'#line 1 "{source.name}"\n'
    try:
        core: Any = importlib.import_module("cuda.core")
        places = [str(place) for place in _places(source)]
        options = core.ProgramOptions(name=source.name, arch=arch, include_path=places, **OPTIONS)
        program = core.Program(head + source.read_text(), "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # the errors of NVRTC have no base of their own
        raise BuildError(
            message(f"{source.name} did not compile for {arch} with {dict(macros)}", got=_first_errors(str(error)))
        ) from error
    usage = _usage(log.getvalue(), entry)
    if usage is None:
        raise BuildError(
            message(f'{source.name} has no extern "C" kernel', got=_ENTRY.findall(log.getvalue()), expected=entry)
        )
    return Compiled(cubin=cubin, entry=entry, arch=arch, **usage)


def _first_errors(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if re.search(r"\berror\b", line)), 0)
    return "\n".join(lines[first : first + MAX_ERROR_LINES])


def _usage(log: str, entry: str) -> dict[str, int] | None:
    """What `ptxas -v` says of one kernel and the functions that it calls; None when it names no such kernel."""
    parts = _ENTRY.split(log)  # text, name, text, name, text
    about = dict(zip(parts[1::2], parts[2::2], strict=True)).get(entry)
    registers = _REGISTERS.search(about) if about is not None else None
    if about is None or registers is None:
        return None
    smem = _STATIC_SMEM.search(about)
    return {
        "registers": int(registers[1]),
        "spill_bytes": sum(map(int, _SPILLS.findall(about))),
        "stack_bytes": sum(map(int, _STACK.findall(about))),
        "static_smem_bytes": int(smem[1]) if smem else 0,
    }
