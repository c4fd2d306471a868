"""Launchers of CUDA kernels on tensors in CPU memory, whose PTX runs on NumPy: a whole chain without a GPU.

Those of CuTe DSL too, if it is installed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..kernels import cutedsl
from ..kernels.cuda import compile as cuda
from ..kernels.cuda import program_cache
from ..kernels.cuda.launch import CudaLaunch
from ..kernels.cuda.tensor_map import TensorMaps
from . import ptx
from .ptx_of import Changes, ptx_of, ptx_of_cutedsl

__all__ = ["simulated"]

_FIELDS = re.compile(r"(\d*)([a-zA-Z?])")
_FACTS = {"registers": 1, "spill_bytes": 0, "stack_bytes": 0, "static_smem_bytes": 0}


@contextmanager
def simulated(
    tensors: Sequence[Tensor], *, seed: int = 0, changes: Changes = (), ordered: bool = True
) -> Iterator[list[str]]:
    """Within it, kernels are compiled to PTX only, and launched on NumPy.

    Launchers may use these tensors, what they make with `new_empty`, which is NaN (or -1), and what they make with
    `torch.zeros`, which must be zero again after each launch.

    Parameters
    ----------
    tensors
        Inputs and outputs.
    seed, ordered
        As for `ptx.run`.
    changes
        Replacements in the source of every kernel that is launched: see `ptx_of`.

    Yields
    ------
    list of str
        Grows by the entry of every launch.
    """
    known = list(tensors)
    zeros: list[Tensor] = []
    launched: list[str] = []
    programs: dict[bytes, Callable[[], str]] = {}
    new_empty, make_zeros = Tensor.new_empty, torch.zeros

    def recorded(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = new_empty(self, *args, **kwargs)
        made.view(-1).view(torch.uint8).fill_(0xFF)
        known.append(made)
        return made

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        made = make_zeros(*args, **kwargs)
        known.append(made)
        zeros.append(made)
        return made

    def compiled(source: Any, arch: str, entry: str, macros: list[tuple[str, int]]) -> cuda.Compiled:
        key = repr((source, arch, entry, macros)).encode()  # PTX is made of what is launched only
        capability = next(number for number, name in cuda.ARCHITECTURES.items() if name == arch)
        programs[key] = lambda: ptx_of(source, capability, dict(macros), changes)
        return cuda.Compiled(cubin=key, entry=entry, arch=arch, **_FACTS)

    def launch(self: CudaLaunch, grid_x: int, grid_y: int, grid_z: int, stream: int, *values: Any) -> None:
        memory, storages = ptx.GlobalMemory(), {tensor.untyped_storage().data_ptr(): tensor for tensor in known}
        places = {start: memory.add(_content(tensor)) for start, tensor in storages.items()}

        def address(pointer: int) -> int:
            if not pointer:
                return 0
            start = max(start for start in places if start <= pointer)
            assert pointer < start + storages[start].untyped_storage().nbytes(), "a pointer to unknown memory"
            return places[start] + pointer - start

        rest = iter(values)
        packed = [_pack(fields, rest, address) for fields in self._parameters]
        assert next(rest, None) is None, "more values than fields"
        ptx.run(
            text() if (text := programs.get(self.compiled.cubin)) else self.compiled.cubin.decode(),
            packed,
            memory,
            grid=(grid_x, grid_y, grid_z),
            threads=self.block,
            smem_bytes=self.smem_bytes,
            cluster=self.cluster,
            seed=seed + len(launched),
            ordered=ordered,
            entry=self.compiled.entry,
        )
        launched.append(self.compiled.entry)
        for start, tensor in storages.items():
            content = _content(tensor)
            content[:] = memory.read(places[start], content.dtype, content.size)
        assert not any(bool(tensor.any()) for tensor in zeros), "counters are not zero again"

    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(Tensor, "new_empty", recorded))
        stack.enter_context(patch(torch, "zeros", counted))
        stack.enter_context(patch(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True))
        stack.enter_context(patch(cuda, "_compile", compiled))
        stack.enter_context(patch(cutedsl, "_compile", ptx_of_cutedsl))
        stack.enter_context(patch(cutedsl, "read_cubin", _as_compiled))
        stack.enter_context(patch(TensorMaps, "_encode", _encode))
        stack.enter_context(patch(program_cache, "load", lambda key: None))
        stack.enter_context(patch(program_cache, "save", lambda key, content: None))
        stack.enter_context(patch(CudaLaunch, "launch", launch))
        stack.enter_context(patch(CudaLaunch, "load", lambda self, index: None))
        yield launched


def _pack(fields: str, values: Iterator[Any], address: Callable[[int], int]) -> bytes:
    """One parameter: the next values, with pointers and those in tensor maps as the simulated memory has them."""
    given = []
    for count, code in _FIELDS.findall(fields):
        for _ in range(1 if code == "s" else int(count or 1)):
            value = next(values)
            if code == "s":
                value = ptx.moved_map(value, address)
            given.append(address(value) if code == "P" else value)
    return struct.pack(f"@{fields}", *given)


def _encode(self: TensorMaps, pointer: int, rows: int, columns: int, stride: int) -> bytes:
    return ptx.tensor_map(pointer, rows, columns, stride, self._box[1])


def _as_compiled(text: bytes, arch: str) -> cuda.Compiled:
    return cuda.Compiled(cubin=text, entry="", arch=arch, **_FACTS)


def _content(tensor: Tensor) -> Any:
    """The bytes of its whole storage, as a NumPy array that shares them."""
    whole = torch.empty(0, dtype=torch.uint8)
    whole.set_(tensor.untyped_storage())
    return whole.numpy()
