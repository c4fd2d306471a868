"""Timers: how long a sequence of launches takes. On CUDA a graph is replayed between events; on a CPU it is called."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["CaptureError", "Clock", "Launch", "Replay", "Round", "Timer", "make_timer"]

Launch = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of every replay."""

    times_us: tuple[float, ...]  # of one launch, per replay
    clock_mhz: int | None


class CaptureError(RuntimeError):
    """Launches broke a capture. The allocator still believes that it goes on: the process must be replaced."""


class Replay(Protocol):
    """A sequence of launches that can be repeated."""

    launches: int

    def close(self) -> None:
        """Give its memory back."""


class Timer(Protocol):
    """Times replays on one device."""

    def once(self, launch: Launch) -> float:
        """Microseconds of one launch, its overhead included."""

    def replay(self, launches: Sequence[Launch], count: int) -> Replay:
        """Make `count` launches, taken in turn from the sequence, repeatable; every launcher has run before."""

    def repeat(self, replay: Replay, times: int) -> list[float]:
        """Run it back to back; microseconds of one launch in each repetition."""

    def round(self, replays: Sequence[Replay], start: int) -> Round:
        """Run all in turn, beginning with number `start`."""

    def idle(self, idle_us: float) -> None:
        """Wait for the device, then leave it alone for a while."""

    def sync(self) -> None:
        """Wait for the device; raises what went wrong there."""

    def release(self) -> None:
        """Give back the memory that replays share; all of them are closed."""


class Clock:
    """SM clock of one CUDA device through NVML; `mhz` is None where NVML is absent or refuses."""

    def __init__(self, place: torch.device) -> None:
        self._handle: Any = None
        if place.type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            return
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()  # type: ignore[no-untyped-call]
            # NVML numbers all cards, CUDA only the visible ones: the UUID is common to both.
            uuid = torch.cuda.get_device_properties(place).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except (pynvml.NVMLError, AttributeError):
            self._handle = None

    def mhz(self) -> int | None:
        """The clock now, in MHz."""
        if self._handle is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        except self._nvml.NVMLError:
            self._handle = None
            return None


def make_timer(place: torch.device) -> Timer:
    """The timer of a torch device."""
    return CudaTimer(place) if place.type == "cuda" else CpuTimer()


class _Calls:
    """Launches called one after another; each run goes on where the last one stopped."""

    def __init__(self, launches: Sequence[Launch], count: int) -> None:
        self._next = itertools.cycle(launches)
        self.launches = count

    def run(self) -> None:
        for launch in itertools.islice(self._next, self.launches):
            launch()

    def close(self) -> None:
        self._next = itertools.cycle(())


class CpuTimer:
    """perf_counter_ns around calls."""

    def once(self, launch: Launch) -> float:
        """See Timer."""
        start = time.perf_counter_ns()
        launch()
        return (time.perf_counter_ns() - start) / 1e3

    def replay(self, launches: Sequence[Launch], count: int) -> Replay:
        """See Timer."""
        return _Calls(launches, count)

    def repeat(self, replay: Replay, times: int) -> list[float]:
        """See Timer."""
        assert isinstance(replay, _Calls)
        return [self.once(replay.run) / replay.launches for _ in range(times)]

    def round(self, replays: Sequence[Replay], start: int) -> Round:
        """See Timer."""
        times = [0.0] * len(replays)
        for i in _turn(len(replays), start):
            times[i] = self.repeat(replays[i], 1)[0]
        return Round(tuple(times), None)

    def idle(self, idle_us: float) -> None:
        """See Timer."""
        time.sleep(idle_us / 1e6)

    def sync(self) -> None:
        """See Timer."""

    def release(self) -> None:
        """See Timer."""


class _Graph:
    """A captured CUDA graph, with the launches that it was captured from: it reads their tensors."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any, launches: Sequence[Launch]) -> None:
        self.launches = len(launches)
        self._captured: Sequence[Launch] = launches
        self._graph = torch.cuda.CUDAGraph()
        # Not the torch.cuda.graph context manager: it empties the allocator's cache, which takes longer than a screen.
        with torch.cuda.stream(stream):
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for launch in launches:
                    launch()
                self._graph.capture_end()
            except Exception as error:
                raise CaptureError(f"it cannot be captured in a CUDA graph: {error}") from error

    def run(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()
        self._captured = ()


class CudaTimer:
    """Events around graph replays, all on one stream, which is made current: launchers use the current stream."""

    def __init__(self, place: torch.device) -> None:
        torch.cuda.set_device(place)
        self._clock = Clock(place)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(place))
        torch.cuda.set_stream(self._stream)
        self._events: list[torch.cuda.Event] = []
        # All graphs share one memory pool, or every capture of a kernel with scratch would allocate it anew. Nothing
        # has to outlive a replay, and they never run at once. A pool exists while a graph does: that is the keeper.
        self._pool: Any = None
        self._keeper: _Graph | None = None
        self._counter = torch.zeros(1, device=place)

    def once(self, launch: Launch) -> float:
        """See Timer."""
        before, after = self._take(2)
        before.record(self._stream)
        launch()
        after.record(self._stream)
        after.synchronize()
        return float(before.elapsed_time(after)) * 1e3

    def replay(self, launches: Sequence[Launch], count: int) -> Replay:
        """See Timer."""
        self._stream.synchronize()
        if self._keeper is None:
            self._tick()  # loads its kernel, which a capture must not
            self._stream.synchronize()
            self._pool = torch.cuda.graph_pool_handle()
            self._keeper = _Graph(self._stream, self._pool, [self._tick])
        return _Graph(self._stream, self._pool, [launches[i % len(launches)] for i in range(count)])

    def repeat(self, replay: Replay, times: int) -> list[float]:
        """See Timer."""
        return [us / replay.launches for us in self._between([replay] * times)]

    def round(self, replays: Sequence[Replay], start: int) -> Round:
        """See Timer."""
        order = _turn(len(replays), start)
        clocks: list[int | None] = []
        measured = self._between([replays[i] for i in order], clocks)
        times = [0.0] * len(replays)
        for i, us in zip(order, measured, strict=True):
            times[i] = us / replays[i].launches
        return Round(tuple(times), clocks[0])

    def idle(self, idle_us: float) -> None:
        """See Timer."""
        self._stream.synchronize()
        time.sleep(idle_us / 1e6)

    def sync(self) -> None:
        """See Timer."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """See Timer."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = self._pool = None

    def _tick(self) -> None:
        self._counter.add_(1)

    def _between(self, replays: Sequence[Replay], clocks: list[int | None] | None = None) -> list[float]:
        """Microseconds of each replay in the order given; appends the clock that was read while they ran."""
        events = self._take(len(replays) + 1)
        _run(replays[0])  # not timed: while it runs the others are queued, so no launch latency lies between events
        events[0].record(self._stream)
        for event, replay in zip(events[1:], replays, strict=True):
            _run(replay)
            event.record(self._stream)
        if clocks is not None:
            clocks.append(self._clock.mhz())
        events[-1].synchronize()
        return [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(events)]

    def _take(self, count: int) -> list[torch.cuda.Event]:
        while len(self._events) < count:
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        return self._events[:count]


def _run(replay: Replay) -> None:
    assert isinstance(replay, _Graph)
    replay.run()


def _turn(count: int, start: int) -> list[int]:
    return [(start + i) % count for i in range(count)]
