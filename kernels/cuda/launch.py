"""Launching a compiled CUDA kernel with little host work.

A kernel takes one struct by value (those of CuTe DSL several). A launch packs the struct's fields into memory that the
driver reads, and hands over a launch configuration that was made when this grid and stream were first met; nothing else
happens.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import LaunchError, message
from .compile import Compiled

__all__ = ["CudaLaunch", "dependent_launches"]

_FIELD = re.compile("[a-rt-wyzA-Z?]")  # not "s" and "x": bytes have no alignment, and a "0s" would take a value

MAX_CONFIGS = 1024  # grids and streams that are remembered; beyond it all are forgotten
MAX_PORTABLE_CLUSTER = 8  # blocks
FREE_SMEM_BYTES = 48 << 10  # what a block may have without asking
POINTER_BYTES = 8
TENSOR_MAP_ALIGN_BYTES = (64, 128)  # of a struct that holds one

# Packs values into the memory of one launch, and the address of the pointer to the struct: the driver's kernelParams.
Memory = tuple[Callable[..., None], int]


def dependent_launches() -> bool:
    """Whether gemm kernels ask for programmatic dependent launch: NVFP4_PDL=1.

    They then request weights while the kernel before them in the stream still ends. Never on by itself: a chain of
    equal kernels, which is what the tuner times, gains more from it than they do among others.
    """
    return os.environ.get("NVFP4_PDL", "") == "1"


class CudaLaunch:
    """One compiled kernel with its launch attributes. Threads may share it.

    It serves the device that it is first launched on, and those that it was loaded onto.

    Parameters
    ----------
    compiled
        The kernel.
    fields
        Of its only parameter, as `struct` writes them ("PPPfi"): native sizes and alignment, in the order of the C
        struct. Pointers are "P" and take `tensor.data_ptr()`, or 0. A tuple for a kernel with several parameters.
    block
        Threads per block.
    smem_bytes
        Dynamic shared memory per block.
    cluster
        Blocks per cluster, along x; grid_x is a multiple of it. More than 1 from sm_90 on.
    pdl
        The kernel may start while the one before it in the stream still runs, and waits for its results by itself
        (griddepcontrol.wait; sm_90 and newer).
    prefer_smem
        Leave L1 no more than it needs, so that several blocks' shared memory fits on a multiprocessor.
    """

    __slots__ = (
        "_configs",
        "_driver",
        "_give",
        "_kernel",
        "_parameters",
        "_run",
        "_struct",
        "_success",
        "_take",
        "block",
        "cluster",
        "compiled",
        "pdl",
        "prefer_smem",
        "smem_bytes",
    )

    def __init__(
        self,
        compiled: Compiled,
        *,
        fields: str | tuple[str, ...],
        block: int,
        smem_bytes: int,
        cluster: int = 1,
        pdl: bool = False,
        prefer_smem: bool = False,
    ) -> None:
        self.compiled = compiled
        self.block = block
        self.smem_bytes = smem_bytes
        self.cluster = cluster
        self.pdl = pdl
        self.prefer_smem = prefer_smem
        self._parameters = (fields,) if isinstance(fields, str) else fields
        # Before every parameter the padding that its alignment, that of its widest field, asks for.
        self._struct = struct.Struct("".join(f"0{_widest(one)}{one}" for one in self._parameters))
        free: list[Memory] = []
        self._take, self._give = free.pop, free.append
        self._configs: dict[tuple[int, int, int, int], Any] = {}
        self._driver: Any = None
        self._kernel: Any = None
        self._run: Any = None
        self._success: Any = None

    def launch(self, grid_x: int, grid_y: int, grid_z: int, stream: int, *values: int | float | bytes) -> None:
        """Launch on a stream of the current device.

        Parameters
        ----------
        grid_x, grid_y, grid_z
            In blocks.
        stream
            Its handle: `torch._C._cuda_getCurrentRawStream(index)`.
        *values
            One for each field of the struct.

        Raises
        ------
        LaunchError
            The driver refused to load the kernel (at the first launch) or to launch it.
        """
        try:
            config = self._configs[grid_x, grid_y, grid_z, stream]
        except KeyError:
            config = self._config(grid_x, grid_y, grid_z, stream)
        # The driver reads the arguments without the interpreter's lock, so no two launches may share their memory: what
        # is in use is in nobody's reach, and the list's pop and append are atomic. A threading.local costs 4 % less (of
        # the Python part), but a finaliser that launches this kernel between the two next lines would overwrite it.
        try:
            memory = self._take()
        except IndexError:
            memory = self._memory()
        memory[0](*values)
        (error,) = self._run(config, self._kernel, memory[1], 0)
        self._give(memory)
        if error is not self._success:
            raise self._failure(f"cannot be launched with grid {(grid_x, grid_y, grid_z)}", error)

    def load(self, index: int) -> None:
        """Load the kernel onto a device; not inside a stream capture. The first launch does so for its device.

        Raises
        ------
        LaunchError
            The driver refused.
        """
        import torch

        with torch.cuda.device(index):
            torch.cuda.current_stream()  # makes sure that there is a context
            self._load(index)

    def _load(self, index: int) -> None:
        driver = self._driver = importlib.import_module("cuda.bindings.driver")
        kernel = self._shared_kernel()
        self._allow(kernel, index)
        # The driver loads code onto a device when it is first used: here, so that no capture has to.
        self._call("cannot be loaded", driver.cuKernelGetFunction(kernel))
        for position, fields in enumerate(map(struct.Struct, self._parameters)):
            _, size = self._call(f"has no parameter {position}", driver.cuKernelGetParamInfo(kernel, position))
            if size not in _struct_sizes(fields):
                raise LaunchError(
                    message(
                        f"kernel {self.compiled.entry}: the fields {fields.format!r} are not its struct",
                        got=f"{fields.size} bytes",
                        expected=f"{size} bytes",
                    )
                )
        self._success = driver.CUresult.CUDA_SUCCESS
        self._run = driver.cuLaunchKernelEx
        # Kernels of a library serve every device. The launch function takes them as if they were of one.
        self._kernel = driver.CUfunction(int(kernel))

    def _shared_kernel(self) -> Any:
        """The kernel's handle, which equal launches share: a library is loaded once."""
        compiled, driver = self.compiled, self._driver
        key = (compiled.cubin, compiled.entry, self.smem_bytes, self.cluster, self.prefer_smem)
        with _lock:
            if key not in _kernels:
                (library,) = self._call(
                    "cannot be loaded", driver.cuLibraryLoadData(compiled.cubin, [], [], 0, [], [], 0)
                )
                _kernels[key] = self._call(
                    "is not in its code", driver.cuLibraryGetKernel(library, compiled.entry.encode())
                )[0]
            return _kernels[key]

    def _allow(self, kernel: Any, index: int) -> None:
        """Ask for what a device gives only when asked."""
        driver = self._driver
        attributes = driver.CUfunction_attribute
        wanted = []
        if self.smem_bytes + self.compiled.static_smem_bytes > FREE_SMEM_BYTES:
            wanted.append((attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.smem_bytes))
        if self.cluster > MAX_PORTABLE_CLUSTER:
            wanted.append((attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        if self.prefer_smem:
            wanted.append((attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100))
        for attribute, value in wanted:
            (device,) = self._call("cannot be loaded", driver.cuDeviceGet(index))
            self._call(
                "asks for more than the device has", driver.cuKernelSetAttribute(attribute, value, kernel, device)
            )

    def _config(self, grid_x: int, grid_y: int, grid_z: int, stream: int) -> Any:
        if self._kernel is None:
            import torch

            self._load(torch.cuda.current_device())
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid_x, grid_y, grid_z
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block, 1, 1
        config.sharedMemBytes = self.smem_bytes
        config.hStream = driver.CUstream(stream)
        ids = driver.CUlaunchAttributeID
        attributes = []
        if self.cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape = attribute.value.clusterDim
            shape.x, shape.y, shape.z = self.cluster, 1, 1
            attributes.append(attribute)
        if self.pdl:
            attribute = driver.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        if len(self._configs) >= MAX_CONFIGS:
            self._configs.clear()
        self._configs[grid_x, grid_y, grid_z, stream] = config
        return config

    def _memory(self) -> Memory:
        """Pointers to the parameters, and behind them the parameters: one struct after the other."""
        start = POINTER_BYTES * len(self._parameters)
        buffer = (ctypes.c_uint64 * ((start + max(_struct_sizes(self._struct))) // POINTER_BYTES))()
        address = ctypes.addressof(buffer)
        before = ""
        for position, fields in enumerate(self._parameters):
            before += f"0{_widest(fields)}"
            buffer[position] = address + start + struct.calcsize(before)
            before += fields
        return partial(self._struct.pack_into, buffer, start), address

    def _call(self, what: str, result: tuple[Any, ...]) -> tuple[Any, ...]:
        error, *values = result
        if int(error):
            raise self._failure(what, error)
        return tuple(values)

    def _failure(self, what: str, error: Any) -> LaunchError:
        wanted = f"{self.block} threads, {self.smem_bytes} bytes of dynamic shared memory, clusters of {self.cluster}"
        return LaunchError(
            message(f"kernel {self.compiled.entry} ({self.compiled.arch}; {wanted}) {what}", got=error.name)
        )


def _align_bytes(field: str) -> int:
    return struct.calcsize(f"b{field}") - struct.calcsize(field)


def _widest(fields: str) -> str:
    """The field whose alignment is the struct's."""
    codes: list[str] = ["b", *_FIELD.findall(fields)]
    return max(codes, key=_align_bytes)


def _struct_sizes(fields: struct.Struct) -> set[int]:
    """What the C struct may have in bytes: `struct` knows the padding between fields, not that at the end."""
    natural = _align_bytes(_widest(fields.format))
    return {-(-fields.size // align) * align for align in (natural, *TENSOR_MAP_ALIGN_BYTES)}


_lock = threading.Lock()
_kernels: dict[tuple[bytes, str, int, int, bool], Any] = {}  # CUkernel; they live as long as the process
