"""The worker: one supervised process per device, which alone touches it. The parent never creates a CUDA context."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import Nvfp4Error, message
from ..kernels.build import child_setup, describe_exit
from ..kernels.problem import Device
from .events import CeilingsMeasured
from .messages import Ceilings, Done, Hello, Line, Race, Row, Screen, Started

if TYPE_CHECKING:
    from pebble import ProcessPool

    from .measure import Measurer

__all__ = ["Died", "Worker"]

START_S = 180.0  # importing torch and creating a context, on a busy machine
HANG_S = {"cuda": 30.0, "cpu": 120.0}  # without a word; a step that is alive takes far less
SLOW_STEPS = ("start", "prepare")
POLL_S = 0.05

Request = Hello | Ceilings | Screen | Race


class Died(Exception):
    """The worker is gone; it will be started again by the next request.

    Attributes
    ----------
    status
        "crash" or "timeout".
    last
        The step it had begun.
    killed
        Somebody else sent SIGKILL or SIGTERM: what it was measuring may be innocent.
    """

    def __init__(self, status: str, detail: str, last: Started | None, *, killed: bool = False) -> None:
        super().__init__(detail)
        self.status, self.detail, self.last, self.killed = status, detail, last, killed


class _NotStarted(Exception):
    """The worker never said a word about a request."""


class Worker:
    """A process that measures on one device. Use from one thread, which must outlive it.

    Parameters
    ----------
    place
        The torch device: "cuda:0", "cpu".
    hang_s
        How long a step may say nothing before the worker is killed.
    """

    def __init__(self, place: str, *, hang_s: float | None = None) -> None:
        self._place = place
        self._hang_s = hang_s or HANG_S[place.split(":")[0]]
        self._pool: ProcessPool | None = None
        self._reader: Connection | None = None
        self._pid = 0
        self._request = 0
        self._value: object = None
        self.starts = 0  # processes so far

    def describe(self) -> Device:
        """The device. Raises NoDevice when it is not there."""
        answer = self._answer(Hello())
        assert isinstance(answer, Device)
        return answer

    def ceilings(self) -> CeilingsMeasured:
        """What no kernel can beat by much on this device."""
        answer = self._answer(Ceilings())
        assert isinstance(answer, CeilingsMeasured)
        return answer

    def run(self, request: Screen | Race) -> Iterator[Row | Done]:
        """Rows as they are measured, and Done at the end.

        Raises
        ------
        Died
            The worker crashed, or hung and was killed. What it had measured was yielded before.
        """
        done = Done()
        for body in self._converse(request):
            if isinstance(body, Row):
                yield body
            elif isinstance(body, Done):
                done = body
        if done.tainted:
            self.close()
        yield done

    def close(self) -> None:
        """End the process and what it started."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self._kill()
            pool.stop()  # type: ignore[no-untyped-call]
            pool.join()
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _answer(self, request: Hello | Ceilings) -> object:
        for _ in self._converse(request):
            pass
        return self._value

    def _converse(self, request: Request) -> Iterator[Started | Row | Done]:
        """What the worker says, as it arrives; its answer is kept in `_value`."""
        try:
            for attempt in (0, 1):
                try:
                    yield from self._listen(self._schedule(request))
                    return
                except _NotStarted as error:  # it may have been killed while it had nothing to do
                    self.close()
                    if attempt:
                        raise Nvfp4Error(str(error)) from error
        except BaseException:
            self.close()
            raise

    def _listen(self, future: Any) -> Iterator[Started | Row | Done]:
        last: Started | None = None
        heard = time.monotonic()
        while True:
            body = self._receive(POLL_S)
            if body is not None:
                heard = time.monotonic()
                if isinstance(body, Started):
                    last, self._pid = body, body.pid
                yield body
                if isinstance(body, Done):
                    break
            elif future.done():
                body = self._receive(0)  # its last words came between the two questions
                if body is None:
                    break
                yield body
            slow = last is None or last.step in SLOW_STEPS
            limit_s = max(START_S, self._hang_s) if slow else self._hang_s
            if time.monotonic() - heard > limit_s:
                raise Died("timeout", f"no sign of life for {limit_s:.0f} s: killed", last)
        self._value = self._outcome(future, last)

    def _outcome(self, future: Any, last: Started | None) -> object:
        from pebble import ProcessExpired

        try:
            return future.result()
        except (ProcessExpired, BrokenProcessPool) as error:
            code = getattr(error, "exitcode", None)
            if last is None or last.step == "start":
                raise _NotStarted(
                    message(
                        "the worker process did not start",
                        got=None if code is None else describe_exit(code),
                        do='see its output above; a script that calls tune() needs `if __name__ == "__main__":`',
                    )
                ) from error
            killed = code in (-signal.SIGKILL, signal.SIGTERM)  # nobody here sent it; of SIGTERM pebble makes a code
            hint = ", perhaps by the system, short of memory" if code == -signal.SIGKILL else ""
            raise Died("crash", f"the worker died: {describe_exit(code)}{hint}", last, killed=killed) from error

    def _receive(self, wait_s: float) -> Started | Row | Done | None:
        assert self._reader is not None
        try:
            if not self._reader.poll(wait_s):
                return None
            line = msgspec.json.decode(self._reader.recv_bytes(), type=Line)
        except EOFError:
            return None
        return line.body if line.request == self._request else None

    def _schedule(self, request: Request) -> Any:
        self._request += 1
        try:
            return self._start().schedule(_serve, args=(self._request, request))
        except (BrokenProcessPool, RuntimeError) as error:  # the pool has just found its process dead
            raise _NotStarted(f"the worker process cannot be reached: {error}") from error

    def _start(self) -> ProcessPool:
        if self._pool is not None and not self._pool.active:
            self.close()
        if self._pool is None:
            from pebble import ProcessPool

            context = multiprocessing.get_context("spawn")
            self._reader, writer = context.Pipe(duplex=False)
            self._pool = ProcessPool(
                max_workers=1,
                context=context,
                initializer=_begin,
                initargs=(os.getpid(), self._place, writer),
            )
            self.starts += 1
            self._pid = 0
        return self._pool

    def _kill(self) -> None:
        """The process group of the worker: it and the compilers that it may have started."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.killpg(self._pid, signal.SIGKILL)
            self._pid = 0


_writer: Connection | None = None
_place = ""
_measurer: Measurer | None = None


def _begin(parent_pid: int, place: str, writer: Connection) -> None:
    global _writer, _place
    child_setup(parent_pid)
    _writer, _place = writer, place


def _serve(number: int, request: Request) -> Device | CeilingsMeasured | None:
    """In the worker: do one request."""
    global _measurer
    _say(number, Started(pid=os.getpid(), step="start"))
    from .measure import Measurer

    if _measurer is None:
        _measurer = Measurer(_place)
        gc.freeze()  # what is there stays: collecting after a failed candidate need not walk it
    answer: Device | CeilingsMeasured | None = None
    done = Done()
    if isinstance(request, Hello):
        answer = _measurer.device
    elif isinstance(request, Ceilings):
        answer = _measurer.ceilings()
    elif isinstance(request, Screen):
        done = _measurer.screen(request, lambda body: _say(number, body))
    else:
        done = _measurer.race(request, lambda body: _say(number, body))
    _say(number, done)
    return answer


def _say(number: int, body: Started | Row | Done) -> None:
    assert _writer is not None
    _writer.send_bytes(msgspec.json.encode(Line(request=number, body=body)))
