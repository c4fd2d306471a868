"""Counters for kernels whose blocks meet: zero before every launch, and zero again after it.

Split-K kernels count the blocks that have finished a tile; the last one adds up and sets the counter back to zero. So
one buffer serves every launch of a stream, where launches follow one another. fp32 partial sums need no such care:
kernels take them from `torch.empty`.

Why each buffer lives as long as it must:

- Eager: one buffer per (device, stream), kept for the process. A larger one replaces it when asked for; the caching
  allocator gives the old block only to later work of the stream it was allocated on, which is the stream that used it.
- CUDA graph: every capture has counters of its own, per stream, zeroed by a memset node inside the capture, so a
  replay starts clean whatever happened before and two graphs may replay at once. They are slices of an arena outside
  the graph's private pool, and they are never given back, because nothing tells when a graph dies: a capture costs
  4 bytes a counter. A tensor of the private pool would have to be held until the capture ends, and whoever still holds
  one after that breaks the check of torch.compile(mode="reduce-overhead"), which accounts for every live block.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import torch
from torch import Tensor

__all__ = ["zeroed_counters"]

MIN_COUNT = 1 << 10
ARENA_COUNT = 1 << 18  # 1 MiB
ALIGN_COUNT = 64  # 256 bytes: no two captures' counters in one cache line

_eager: dict[tuple[int, int], Tensor] = {}  # (device index, stream)
_captured: dict[tuple[int, int], tuple[int, Tensor]] = {}  # the last capture of that stream: (capture id, counters)
_arenas: dict[int, _Arena] = {}
_lock = threading.Lock()


def zeroed_counters(device: torch.device, count: int) -> Tensor:
    """Counters for one launch on the current stream of `device`, which must be the current device.

    The launch must leave all of them zero. Kernels of one stream share them.

    Returns
    -------
    Tensor
        int32 [at least count], zero when the launch starts.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    if torch.cuda.is_current_stream_capturing():
        return _for_capture(key, count)
    counters = _eager.get(key)
    if counters is None or counters.numel() < count:
        _arena(index)  # made here, so that captures find its stream and memory ready
        size = max(MIN_COUNT, 1 << (count - 1).bit_length())
        with torch.inference_mode(False):  # they outlive the caller's mode
            counters = _eager[key] = torch.zeros(size, dtype=torch.int32, device=torch.device("cuda", index))
    return counters


def _for_capture(key: tuple[int, int], count: int) -> Tensor:
    capture = _capture_id(key[1])
    known = _captured.get(key)
    if known is not None and known[0] == capture and known[1].numel() >= count:
        return known[1]
    counters = _arena(key[0]).take(max(MIN_COUNT, count))
    counters.zero_()  # a node of the graph
    _captured[key] = (capture, counters)
    return counters


def _capture_id(stream: int) -> int:
    runtime: Any = importlib.import_module("cuda.bindings.runtime")
    error, _status, capture, *_ = runtime.cudaStreamGetCaptureInfo(runtime.cudaStream_t(stream))
    assert error == runtime.cudaError_t.cudaSuccess, error
    return int(capture)


def _arena(index: int) -> _Arena:
    with _lock:
        arena = _arenas.get(index)
        if arena is None:
            arena = _arenas[index] = _Arena(index)
        return arena


class _Arena:
    """Hands out slices of device memory that no graph's pool owns; takes none back."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        # Nothing is ever launched on this stream. The allocator keeps blocks by stream, so what it hands out here was
        # never used by other work, and a stream that is not captured allocates outside the graph's pool.
        self.stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.lock = threading.Lock()
        self.free = self._chunk(ARENA_COUNT)

    def _chunk(self, count: int) -> Tensor:
        with torch.cuda.stream(self.stream), torch.inference_mode(False):
            return torch.empty(count, dtype=torch.int32, device=self.device)

    def take(self, count: int) -> Tensor:
        """Int32 [count], uninitialised, for this caller only."""
        rounded = -(-count // ALIGN_COUNT) * ALIGN_COUNT
        with self.lock:
            if self.free.numel() < rounded:
                self.free = self._chunk(max(ARENA_COUNT, rounded))
            taken, self.free = self.free[:rounded], self.free[rounded:]
        return taken
