"""Compiling a Triton kernel for a named architecture without a GPU, and launching it with little host work.

`triton.jit`'s own launch path looks every argument up on every call; a kernel compiled here has a fixed signature, so a
call packs integers and launches. The same compile serves the tuner's pool (no GPU, fills Triton's disk cache), the
worker and the online op.

Under TRITON_INTERPRET=1 the launch runs Triton's interpreter on CPU tensors instead.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        after_pdl: bool = False,
    ) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._interpret = interpreting()
        if self._interpret:
            return
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = kernel.arg_names
        types = {name: signature.get(name, "constexpr") for name in names}
        aligned = [n for n, t in signature.items() if t.startswith("*") or n in divisible]
        source = ASTSource(
            kernel, types, self._constants, {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        )
        major, minor = device.capability
        try:
            self.compiled = triton.compile(
                source,
                target=GPUTarget("cuda", 10 * major + minor, 32),
                options={"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": after_pdl},
            )
        except Exception as error:  # Triton raises many kinds, and plain RuntimeError from its passes
            cause: BaseException = error
            while cause.__cause__ is not None:  # the outermost names the call, the innermost the fault
                cause = cause.__cause__
            raise BuildError(
                message(f"{kernel.__name__} did not compile for {device.arch}", got=f"{type(cause).__name__}: {cause}")
            ) from error
        # Constants come last in every kernel here, and the launcher skips them by their type.
        self._tail = tuple(self._constants[name] for name in names if types[name] == "constexpr")
        self._function = 0

    def _load(self) -> None:
        compiled = self.compiled
        self._run = compiled.run  # loads the module on the current device
        self._packed = compiled.packed_metadata
        self._function = compiled.function

    def __call__(self, grid: tuple[int, int, int], stream: int, *args: int) -> None:
        """Launch on a stream; pointers are passed as `data_ptr()` integers."""
        if not self._function:
            self._load()
        self._run(*grid, stream, self._function, self._packed, None, None, None, *args, *self._tail)

    def interpret(self, grid: tuple[int, int, int], *args: Tensor | int) -> None:
        """Run on CPU tensors."""
        self._kernel[grid](*args, **self._constants)

    def launch(self, grid: tuple[int, int, int], *args: Tensor | int) -> None:
        """Launch with tensors and integers on the current stream of the tensors' device, or interpret."""
        if self._interpret:
            self.interpret(grid, *args)
            return
        import torch

        index = args[0].device.index  # type: ignore[union-attr]
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                self.launch(grid, *args)
            return
        stream = torch._C._cuda_getCurrentRawStream(index)
        self(grid, stream, *[a if isinstance(a, int) else a.data_ptr() for a in args])
