"""Launching a compiled CUDA kernel with little host work.

A kernel takes one struct by value. A launch packs the struct's fields into memory that the driver reads, and hands over
a launch configuration that was made when this grid and stream were first met; nothing else happens.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import threading
from typing import Any

from ...errors import LaunchError, message
from .compile import Compiled

__all__ = ["CudaLaunch"]

MAX_CONFIGS = 1024  # grids and streams that are remembered; beyond it all are forgotten
MAX_PORTABLE_CLUSTER = 8
FREE_SMEM_BYTES = 48 << 10  # what a block may have without asking
POINTER_BYTES = 8


class CudaLaunch:
    """One compiled kernel with its launch attributes. Threads may share it.

    Parameters
    ----------
    compiled
        The kernel.
    fields
        Of its only parameter, as `struct` writes them ("PPPfi"): native sizes and alignment, in the order of the C
        struct. Pointers are "P" and take `tensor.data_ptr()`.
    block
        Threads per block.
    smem_bytes
        Dynamic shared memory per block.
    cluster
        Blocks per cluster, along x; grid_x is a multiple of it. More than 1 from sm_90 on.
    pdl
        The kernel may start while the one before it in the stream still runs, and waits for its results by itself
        (griddepcontrol.wait; sm_90 and newer).
    """

    def __init__(
        self, compiled: Compiled, *, fields: str, block: int, smem_bytes: int, cluster: int = 1, pdl: bool = False
    ) -> None:
        self.compiled = compiled
        self.block = block
        self.smem_bytes = smem_bytes
        self.cluster = cluster
        self.pdl = pdl
        self._struct = struct.Struct(fields)
        self._pack = self._struct.pack_into
        self._free: list[tuple[Any, int]] = []  # of argument memory, none of it in use
        self._configs: dict[tuple[int, int, int, int], Any] = {}
        self._kernel: Any = None  # a CUkernel as a CUfunction: it serves every device
        self._run: Any = None
        self._success: Any = None

    def launch(self, grid_x: int, grid_y: int, grid_z: int, stream: int, *values: int | float) -> None:
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
        # The driver reads the arguments without the interpreter's lock, so no two launches may share their memory. Both
        # list operations are atomic; memory in use is in nobody's reach.
        try:
            memory = self._free.pop()
        except IndexError:
            memory = self._memory()
        self._pack(memory[0], POINTER_BYTES, *values)
        (error,) = self._run(config, self._kernel, memory[1], 0)
        self._free.append(memory)
        if error is not self._success:
            raise self._failure("cannot be launched", error, (grid_x, grid_y, grid_z))

    def load(self, index: int) -> None:
        """Load the kernel onto a device, which the first launch does otherwise; not inside a stream capture.

        Raises
        ------
        LaunchError
            The driver refused.
        """
        import torch

        with torch.cuda.device(index):
            torch.cuda.current_stream()  # makes the context
            self._load(index)

    def _load(self, index: int) -> None:
        driver = _driver()
        kernel = _kernel(self, driver)
        self._allow(kernel, driver, index)
        # Loading is lazy: this puts the code onto the current device, so that a capture finds it there.
        self._call(driver.cuKernelGetFunction(kernel), "cannot be loaded")
        self._success = driver.CUresult.CUDA_SUCCESS
        self._run = driver.cuLaunchKernelEx
        self._kernel = driver.CUfunction(int(kernel))

    def _allow(self, kernel: Any, driver: Any, index: int) -> None:
        attributes = driver.CUfunction_attribute
        wanted = []
        if self.smem_bytes + self.compiled.static_smem_bytes > FREE_SMEM_BYTES:
            wanted.append((attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.smem_bytes))
        if self.cluster > MAX_PORTABLE_CLUSTER:
            wanted.append((attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        for attribute, value in wanted:
            (device,) = self._call(driver.cuDeviceGet(index), "cannot be loaded")
            self._call(
                driver.cuKernelSetAttribute(attribute, value, kernel, device), f"cannot have {attribute.name} = {value}"
            )

    def _call(self, result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
        error, *values = result
        if int(error):
            raise self._failure(what, error)
        return tuple(values)

    def _failure(self, what: str, error: Any, grid: tuple[int, int, int] | None = None) -> LaunchError:
        expected = f"{self.smem_bytes} bytes of shared memory, {self.block} threads, clusters of {self.cluster}"
        if grid is not None:
            expected = f"grid {grid}, {expected}"
        return LaunchError(
            message(f"kernel {self.compiled.entry} ({self.compiled.arch}) {what} with {expected}", got=error.name)
        )

    def _config(self, grid_x: int, grid_y: int, grid_z: int, stream: int) -> Any:
        if self._kernel is None:
            import torch

            self._load(torch.cuda.current_device())
        driver = _driver()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid_x, grid_y, grid_z
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block, 1, 1
        config.sharedMemBytes = self.smem_bytes
        config.hStream = driver.CUstream(stream)
        attributes = []
        if self.cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = attribute.value.clusterDim
            dimension.x, dimension.y, dimension.z = self.cluster, 1, 1
            attributes.append(attribute)
        if self.pdl:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        if len(self._configs) >= MAX_CONFIGS:
            self._configs.clear()
        self._configs[grid_x, grid_y, grid_z, stream] = config
        return config

    def _memory(self) -> tuple[Any, int]:
        """A pointer to the struct followed by the struct, and the address of the pointer: what kernelParams is."""
        buffer = (ctypes.c_uint64 * (2 + -(-self._struct.size // 8)))()
        address = ctypes.addressof(buffer)
        buffer[0] = address + POINTER_BYTES
        return buffer, address


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


_lock = threading.Lock()
_kernels: dict[
    tuple[bytes, str, int, int], tuple[Any, Any]
] = {}  # (library, kernel), which live as long as the process


def _kernel(launch: CudaLaunch, driver: Any) -> Any:
    """The kernel's handle, for all devices; equal launches share it."""
    compiled = launch.compiled
    key = (compiled.cubin, compiled.entry, launch.smem_bytes, launch.cluster)
    with _lock:
        if key not in _kernels:
            (library,) = launch._call(
                driver.cuLibraryLoadData(compiled.cubin, [], [], 0, [], [], 0), "cannot be loaded"
            )
            (kernel,) = launch._call(driver.cuLibraryGetKernel(library, compiled.entry.encode()), "cannot be found")
            _kernels[key] = (library, kernel)
        return _kernels[key][1]
