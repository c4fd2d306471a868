"""Compiling a Triton kernel for a named architecture without a GPU; what comes out is a cubin, kept on disk.

Triton keeps its results too, but not so that they can be shipped: its files name one another by absolute paths, and its
launchers are C code that is compiled on the machine that launches. A cubin of the common cache needs neither: it
launches through `cuda.launch.CudaLaunch` like any other.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ..errors import BuildError, message
from .cuda import program_cache
from .cuda.compile import ARCHITECTURES, Compiled
from .cuda.cubin import parameter_bytes, read_cubin

__all__ = ["Options", "Source", "TritonProgram", "compile_triton", "parameter_fields", "triton_result"]

# The kernel, compute capability, type of every argument by name, value of every constant, names of aligned arguments.
Source = tuple[Any, tuple[int, int], tuple[tuple[str, str], ...], tuple[tuple[str, Any], ...], tuple[str, ...]]
Options = tuple[tuple[str, Any], ...]

FORMAT = 1  # of what is kept in the cache: a change here makes everything be compiled again
WARP = 32
# Arguments that are no pointers, as `struct` writes them.
FIELDS = {"i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f"}
# Behind a kernel's own parameters Triton adds two pointers, to scratch that none of the kernels here asks for.
SCRATCH = ("P", "P")
TOOLS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")  # other compilers than those that Triton brings


class TritonProgram(msgspec.Struct, frozen=True, kw_only=True):
    """Machine code of one kernel, and how it is launched."""

    compiled: Compiled
    threads: int  # per block
    smem_bytes: int  # per block, dynamic


@cache
def compile_triton(source: Source, options: Options) -> TritonProgram:
    """Compile a kernel; a second time, in any process, it comes from the cache.

    Triton's settings for looking into a compilation (TRITON_ALWAYS_COMPILE, TRITON_KERNEL_DUMP and
    TRITON_KERNEL_OVERRIDE) pass the cache by.

    Raises
    ------
    BuildError
        Triton refused, or made code that is launched in another way than this version knows.
    """
    from triton import knobs

    looking = knobs.compilation.always_compile or knobs.compilation.dump_ir or knobs.compilation.override
    key = _key(source, options)
    stored = None if looking else program_cache.load(key)
    if stored is not None:
        return msgspec.msgpack.decode(stored, type=TritonProgram)
    program = _program(source, triton_result(source, options))
    if not looking:
        program_cache.save(key, msgspec.msgpack.encode(program))
    return program


def triton_result(source: Source, options: Options) -> Any:
    """What Triton itself returns, with the code of every stage; kept in Triton's own cache folder.

    Raises
    ------
    BuildError
        Triton refused.
    """
    import triton

    kernel, (major, minor), *_ = source
    try:
        return triton.compile(_ast(source), target=_target(source), options=dict(options))
    except Exception as error:  # Triton raises many kinds, and plain RuntimeError from its passes
        cause: BaseException = error
        while cause.__cause__ is not None:  # the outermost names the call, the innermost the fault
            cause = cause.__cause__
        raise BuildError(
            message(f"{kernel.__name__} did not compile for sm_{major}{minor}", got=f"{type(cause).__name__}: {cause}")
        ) from error


def parameter_fields(source: Source) -> tuple[str, ...]:
    """The kernel's parameters in their order, one `struct` code each: its arguments, then scratch."""
    types = (type_ for _, type_ in source[2] if type_ != "constexpr")
    return (*("P" if type_.startswith("*") else FIELDS[type_] for type_ in types), *SCRATCH)


def _program(source: Source, result: Any) -> TritonProgram:
    kernel, capability, *_ = source
    facts, cubin = result.metadata, result.asm["cubin"]
    compiled = read_cubin(cubin, ARCHITECTURES.get(capability, f"sm_{capability[0]}{capability[1]}"))
    sizes = tuple(map(struct.calcsize, parameter_fields(source)))
    scratch = facts.global_scratch_size + facts.profile_scratch_size
    if parameter_bytes(cubin) != sizes or scratch or facts.num_ctas != 1 or facts.launch_cooperative_grid:
        raise BuildError(
            message(
                f"{kernel.__name__}: this version of Triton makes code that is launched in another way",
                got=f"parameters of {parameter_bytes(cubin)} bytes, {scratch} bytes of scratch, {facts.num_ctas} CTAs",
                expected=f"parameters of {sizes} bytes, no scratch, 1 CTA",
            )
        )
    return TritonProgram(compiled=compiled, threads=WARP * facts.num_warps, smem_bytes=facts.shared)


def _key(source: Source, options: Options) -> str:
    """Over everything that decides the machine code.

    Triton's own hash of a kernel is not used: it depends on which other kernels, with functions in common, the process
    has asked for before (3.6 and 3.7), so that a process may not find what another one has compiled.
    """
    import triton
    from triton.compiler import make_backend

    native: Any = importlib.import_module("triton._C.libtriton")
    extra = _ast(source).parse_options()
    parsed: Any = make_backend(_target(source)).parse_options({**dict(options), **extra})
    settings = sorted(native.get_cache_invalidating_env_vars().items()), [os.environ.get(name, "") for name in TOOLS]
    kernel, capability, types, constants, aligned = source
    signature = (kernel.__name__, capability, types, constants, aligned)
    digest = hashlib.sha256(repr((FORMAT, "triton", triton.__version__, signature, parsed.hash(), settings)).encode())
    for name, text, values in _modules(kernel):
        digest.update(f"\0{name}\0{len(text)}\0{values!r}\0".encode() + text)
    return digest.hexdigest()


def _modules(kernel: Any) -> list[tuple[str, bytes, list[tuple[str, Any]]]]:
    """The modules that a kernel's functions may be from: name, text, and the constants that Triton sees as globals.

    Which of them the kernel calls is not asked: a change anywhere in these files compiles it again.
    """
    from triton import JITFunction
    from triton.language import constexpr

    found: dict[str, tuple[str, bytes, list[tuple[str, Any]]]] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop().fn
        name = function.__module__
        if name in found or name.partition(".")[0] == "triton":  # whose version is in the key
            continue
        names = sorted(function.__globals__.items(), key=lambda item: item[0])
        values = [(key, value.value) for key, value in names if isinstance(value, constexpr)]
        found[name] = (name.rpartition(".")[2], Path(function.__code__.co_filename).read_bytes(), values)
        waiting += [value for _, value in names if isinstance(value, JITFunction)]
    return [found[name] for name in sorted(found)]


def _ast(source: Source) -> Any:
    from triton.compiler import ASTSource

    kernel, _, types, constants, aligned = source
    names = kernel.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return ASTSource(kernel, dict(types), dict(constants), attributes)


def _target(source: Source) -> Any:
    from triton.backends.compiler import GPUTarget

    major, minor = source[1]
    return GPUTarget("cuda", 10 * major + minor, WARP)
