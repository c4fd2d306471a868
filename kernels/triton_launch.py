"""Launching a Triton kernel with little host work, and without a C compiler on the machine that launches.

`triton.jit`'s own launch path looks every argument up on every call; a kernel compiled here has a fixed signature, so a
call packs integers and launches. The same compile serves the tuner's pool (no GPU, fills the disk cache), the worker
and the online op.

Under TRITON_INTERPRET=1 the launch runs Triton's interpreter on CPU tensors instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .cuda.launch import FREE_SMEM_BYTES, CudaLaunch
from .problem import Device
from .triton_compile import compile_triton, parameter_fields, triton_result

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
        if self._interpret:
            return
        types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
        aligned = tuple(name for name, type_ in signature.items() if type_.startswith("*") or name in divisible)
        options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": after_pdl}
        if max_registers:
            options["maxnreg"] = max_registers
        self._source = (kernel, device.capability, tuple(types.items()), tuple(constants.items()), aligned)
        self._options = tuple(options.items())
        self.program = compile_triton(self._source, self._options)
        self._launch = CudaLaunch(
            self.program.compiled,
            fields=parameter_fields(self._source),
            block=self.program.threads,
            smem_bytes=self.program.smem_bytes,
            pdl=after_pdl,
            prefer_smem=self.program.smem_bytes > FREE_SMEM_BYTES,  # as Triton itself asks for
        )

    @property
    def compiled(self) -> Any:
        """Triton's own result, with the code of every stage; compiled again if Triton's cache does not have it."""
        return triton_result(self._source, self._options)

    def launch(self, grid: tuple[int, int, int], *args: Tensor | int | float) -> None:
        """Launch with tensors and numbers on the current stream of the tensors' device, or interpret.

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
        values = [a if isinstance(a, int | float) else a.data_ptr() for a in args]
        self._launch.launch(*grid, torch._C._cuda_getCurrentRawStream(index), *values, 0, 0)  # no scratch
