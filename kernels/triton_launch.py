"""Compiling a Triton kernel for a named architecture without a GPU, and launching it with little host work.

`triton.jit`'s own launch path looks every argument up on every call; a kernel compiled here has a fixed signature, so a
call packs integers and launches. The same compile serves the tuner's pool (no GPU, fills Triton's disk cache), the
worker and the online op.

Under TRITON_INTERPRET=1 the launch runs Triton's interpreter on CPU tensors instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import BuildError, message
from .problem import Device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TritonLaunch", "interpreting"]

TRITON_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "uint8": "u8", "int32": "i32"}


def interpreting() -> bool:
    """Whether Triton runs its interpreter in this process."""
    import triton

    return bool(triton.knobs.runtime.interpret)


class TritonLaunch:
    """One compiled Triton kernel.

    Equal launches of one process share their compiled code, so that a config costs nothing for the next problem.

    Parameters
    ----------
    kernel
        The `triton.jit` function.
    device
        What to compile for.
    signature
        Type of every run-time argument by name, in order: "*bf16", "i32". Pointers must be 16-byte aligned.
    constants
        Value of every `tl.constexpr` argument.
    divisible
        Names of integer arguments that are multiples of 16.
    num_warps, num_stages
        Triton's options.
    max_registers
        Per thread; 0: as many as ptxas likes.
    after_pdl
        The kernel waits for the one before it by itself (programmatic dependent launch, sm_90 and newer).

    Raises
    ------
    BuildError
        Triton refused.
    """

    def __init__(
        self,
        kernel: Any,
        device: Device,
        *,
        signature: Mapping[str, str],
        constants: Mapping[str, Any],
        divisible: tuple[str, ...] = (),
        num_warps: int = 4,
        num_stages: int = 2,
        max_registers: int = 0,
        after_pdl: bool = False,
    ) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._interpret = interpreting()
        self._loaded: tuple[Any, Any, int] | None = None
        if self._interpret:
            return
        types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
        aligned = tuple(name for name, type_ in signature.items() if type_.startswith("*") or name in divisible)
        options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": after_pdl}
        if max_registers:
            options["maxnreg"] = max_registers
        self._source = (kernel, device.capability, tuple(types.items()), tuple(constants.items()), aligned)
        self._options = tuple(options.items())
        self.compiled = _compiled(self._source, self._options)
        # Constants come last in every kernel here, and the launcher skips them by their type.
        self._tail = tuple(self._constants[name] for name, type_ in types.items() if type_ == "constexpr")

    def _load(self, index: int) -> tuple[Any, Any, int]:
        key = (self._source, self._options, index)
        if key not in _on_device:
            # A compiled kernel loads itself onto one device only: another device takes a copy from the disk cache.
            compiled = self.compiled if self.compiled.module is None else _compile(self._source, self._options)
            run = compiled.run
            _on_device[key] = (run, compiled.packed_metadata, compiled.function)
        self._loaded = _on_device[key]
        return self._loaded

    def launch(self, grid: tuple[int, int, int], *args: Tensor | int) -> None:
        """Launch with tensors and integers on the current stream of the tensors' device, or interpret.

        One object serves one device: the first that it is launched on.
        """
        if self._interpret:
            self._kernel[grid](*args, **self._constants)
            return
        import torch

        index = args[0].device.index  # type: ignore[union-attr]
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                self.launch(grid, *args)
            return
        run, packed, function = self._loaded or self._load(index)
        stream = torch._C._cuda_getCurrentRawStream(index)
        pointers = [a if isinstance(a, int) else a.data_ptr() for a in args]
        run(*grid, stream, function, packed, None, None, None, *pointers, *self._tail)


_Source = tuple[Any, tuple[int, int], tuple[tuple[str, str], ...], tuple[tuple[str, Any], ...], tuple[str, ...]]
_Options = tuple[tuple[str, Any], ...]

_on_device: dict[tuple[_Source, _Options, int], tuple[Any, Any, int]] = {}  # launcher, metadata, function


@cache
def _compiled(source: _Source, options: _Options) -> Any:
    return _compile(source, options)


def _compile(source: _Source, options: _Options) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, (major, minor), types, constants, aligned = source
    names = kernel.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    try:
        return triton.compile(
            ASTSource(kernel, dict(types), dict(constants), attributes),
            target=GPUTarget("cuda", 10 * major + minor, 32),
            options=dict(options),
        )
    except Exception as error:  # Triton raises many kinds, and plain RuntimeError from its passes
        cause: BaseException = error
        while cause.__cause__ is not None:  # the outermost names the call, the innermost the fault
            cause = cause.__cause__
        raise BuildError(
            message(f"{kernel.__name__} did not compile for sm_{major}{minor}", got=f"{type(cause).__name__}: {cause}")
        ) from error
