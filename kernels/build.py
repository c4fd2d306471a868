"""The compile pool: candidates are built in child processes, ahead of use, to fill the compilers' disk caches.

Compiling needs no GPU and runs on all cores; building again in the process that launches then reads from the cache.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import CancelledError, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import registry
from .cuda import program_cache
from .cuda.program_cache import Counts
from .kernel import Config, Kernel
from .problem import Device, Problem

if TYPE_CHECKING:
    from pebble import ProcessPool

__all__ = ["BuildPool", "Built", "available_cores", "child_setup"]

PROCESS_BYTES = 2 << 30  # what a compiling process may take
BUILD_TIMEOUT_S = 180.0
PR_SET_PDEATHSIG = 1
MESSAGE_CHARS = 1500

Job = tuple[str, Device, Problem, str]

log = logging.getLogger("nvfp4.build")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What came of one build."""

    error: str = ""  # the compiler's message; "" when it was built
    seconds: float = 0.0
    programs: Counts = field(default_factory=Counts)  # of the folder of compiled programs
    known: bool = True  # False: the pool broke before an answer came; asking again builds again


def child_setup(parent_pid: int) -> None:
    """Tie a child process to its parent: first call in every process that this package starts.

    The child is killed when its parent dies, whatever the reason. It leads a process group of its own, so it can be
    killed with what it started, and a Ctrl-C in the terminal reaches the parent alone.

    Only Linux has the signal; elsewhere a child ends when it next reads from its parent.
    """
    if os.name == "posix":
        os.setpgid(0, 0)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the signal was asked for
        os._exit(1)


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default_processes() -> int:
    return max(1, min(available_cores(), _available_bytes() // PROCESS_BYTES))


def _available_bytes() -> int:
    """Memory that can be had without swapping; where that is not known, enough for all cores."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:  # not Linux
        pass
    return available_cores() * PROCESS_BYTES


class BuildPool:
    """Builds candidates in the background. Use from one thread, which must outlive the pool.

    Parameters
    ----------
    processes
        How many to use; by default as many as cores, fewer when memory is short.
    timeout_s
        Of one build.
    """

    def __init__(self, processes: int | None = None, *, timeout_s: float = BUILD_TIMEOUT_S) -> None:
        self._processes = processes or _default_processes()
        self._timeout_s = timeout_s
        self._pool: ProcessPool | None = None
        self._futures: dict[Job, Any] = {}
        self._built: dict[Job, Built] = {}

    def submit(self, device: Device, problem: Problem, kernel: Kernel, config: Config) -> None:
        """Start to build a candidate, unless that was asked for before or there is nothing to compile."""
        job = (kernel.name, device, problem, config.to_json())
        if kernel.packages and job not in self._futures and job not in self._built:
            self._futures[job] = self._start().schedule(_build, args=job, timeout=self._timeout_s)

    def wait(self, device: Device, problem: Problem, kernel: Kernel, config: Config) -> str:
        """Wait until a candidate is built; "" when it was, else the compiler's message."""
        return self.outcome(device, problem, kernel, config).error

    def outcome(self, device: Device, problem: Problem, kernel: Kernel, config: Config) -> Built:
        """Wait until a candidate is built, and say what that took."""
        if not kernel.packages:
            return Built()
        job = (kernel.name, device, problem, config.to_json())
        if job not in self._built:
            self.submit(device, problem, kernel, config)
            built = self._result(job)
            if not built.known:
                return built
            self._built[job] = built
        return self._built[job]

    def close(self) -> None:
        """Drop what is not built yet and end all processes."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
        self._pool = None
        self._futures.clear()

    def _result(self, job: Job) -> Built:
        from pebble import ProcessExpired

        try:
            built = self._futures.pop(job).result()
        except TimeoutError:
            return Built(error=f"the build took longer than {self._timeout_s:.0f} s", seconds=self._timeout_s)
        except ProcessExpired as error:
            return Built(error=f"the compiler's process died ({describe_exit(error.exitcode)})")
        except (BrokenProcessPool, CancelledError) as error:
            # A process died between two builds. Nothing is known about this candidate: its user will build it.
            log.warning("the compile pool broke and is started again: %s", error)
            self.close()
            return Built(known=False)
        assert isinstance(built, Built)
        return built

    def _start(self) -> ProcessPool:
        if self._pool is None or not self._pool.active:
            from pebble import ProcessPool

            self.close()
            self._pool = ProcessPool(
                max_workers=self._processes,
                context=multiprocessing.get_context("spawn"),
                initializer=child_setup,
                initargs=(os.getpid(),),
            )
        return self._pool


def describe_exit(code: int | None) -> str:
    """An exit code in words: "signal SIGSEGV", "exit code 1"."""
    if code is not None and code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:  # a number without a name
            return f"signal {-code}"
    return f"exit code {code}"


def _build(name: str, device: Device, problem: Problem, text: str) -> Built:
    """In a child."""
    before, begun = program_cache.counts(), time.perf_counter()
    error = _try(name, device, problem, text)
    return Built(error=error, seconds=time.perf_counter() - begun, programs=program_cache.counts().since(before))


def _try(name: str, device: Device, problem: Problem, text: str) -> str:
    """ "" or the reason why the candidate cannot be built."""
    kernel = registry.get(name)
    if kernel is None:
        return f"no kernel named {name!r} in the compiling process"
    config = kernel.parse_config(device, problem, text)
    if config is None:
        return "the config is not in the kernel's space"
    try:
        kernel.build(device, problem, config)
    except Exception as error:  # whatever a compiler raises is the candidate's failure
        words = f"{type(error).__name__}: {error}"[:MESSAGE_CHARS]
        return words.encode(errors="backslashreplace").decode()  # names of files may hold what is no text
    return ""
