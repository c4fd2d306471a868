"""The PTX that NVRTC makes of a CUDA source, or CuTe DSL of a kernel, for `testing.ptx`."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..kernels.cuda.compile import cuda_sources, known_architecture

__all__ = ["ptx_of", "ptx_of_cutedsl"]

Changes = tuple[tuple[str, str], ...]


def ptx_of(
    source: Path, capability: tuple[int, int], defines: Mapping[str, int] | None = None, changes: Changes = ()
) -> str:
    """PTX of all kernels in a source.

    Parameters
    ----------
    source, capability, defines
        As for `compile_cuda`.
    changes
        Replacements in the source, or in one of its headers; each must be found just once in them.
    """
    return _ptx_of(source, capability, tuple((defines or {}).items()), changes)


@cache
def _ptx_of(source: Path, capability: tuple[int, int], defines: tuple[tuple[str, int], ...], changes: Changes) -> str:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    texts = {path.name: path.read_text() for path in cuda_sources(source)}
    for old, new in changes:
        holders = [name for name, text in texts.items() if old in text]
        assert len(holders) == 1 and texts[holders[0]].count(old) == 1, f"not once in the source: {old}"
        texts[holders[0]] = texts[holders[0]].replace(old, new)
    main = "".join(f"#define {name} {value}\n" for name, value in defines) + texts.pop(source.name)
    headers = [text.encode() for text in texts.values()], [name.encode() for name in texts]
    (program,) = _call(nvrtc.nvrtcCreateProgram, main.encode(), source.name.encode(), len(texts), *headers)
    options = [f"--gpu-architecture={known_architecture(capability)}".encode(), b"--std=c++17"]
    if int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]):
        log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize, program)[0])
        _call(nvrtc.nvrtcGetProgramLog, program, log)
        raise AssertionError(log.rstrip(b"\0").decode())
    text = bytearray(_call(nvrtc.nvrtcGetPTXSize, program)[0])
    _call(nvrtc.nvrtcGetPTX, program, text)
    return text.rstrip(b"\0").decode()


_cutedsl: dict[tuple[str, str], bytes] = {}  # by what `compile_cutedsl` knows a kernel by


def ptx_of_cutedsl(make: Callable[[], tuple[Any, tuple[Any, ...]]], arch: str, key: str) -> bytes:
    """PTX of what `make` returns: see `kernels.cutedsl.compile_cutedsl`."""
    found = _cutedsl.get((arch, key))
    if found is None:
        cute = importlib.import_module("cutlass.cute")
        function, arguments = make()
        with tempfile.TemporaryDirectory() as folder:
            options = f"--gpu-arch {arch} --keep-ptx --dump-dir={folder}"
            found = cute.compile(function, *arguments, options=options).artifacts.PTX.encode()
        _cutedsl[arch, key] = found
    return found


def _call(function: Any, *arguments: Any) -> tuple[Any, ...]:
    status, *values = function(*arguments)
    assert not int(status), status
    return tuple(values)
