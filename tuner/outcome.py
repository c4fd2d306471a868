"""What comes of doing something with a candidate: a Wrong, a status, rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict

import torch

from ..errors import BuildError
from .messages import Entrant, Row, Started, shorten
from .statistics import Timing

__all__ = ["Say", "Step", "Wrong", "classify", "describe_error"]

NO_MEMORY = ("out of memory", "Out of memory", "can't allocate memory")  # the last is torch's, on a CPU

Say = Callable[[Started | Row], None]


class Wrong(Exception):
    """A candidate's result is not right."""

    def __init__(self, status: str, detail: str, *, error: float | None = None, tainted: bool = False) -> None:
        super().__init__(detail)
        self.status, self.error, self.tainted = status, error, tainted


def classify(error: BaseException) -> str:
    """The status that an exception of a candidate becomes."""
    if isinstance(error, Wrong):
        return error.status
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in NO_MEMORY):
        return "oom"
    return "build_error" if isinstance(error, BuildError) else "launch_error"


class Step:
    """Says what is being done to one entrant, and what came of it."""

    def __init__(self, say: Say, entrant: Entrant, protocol: str) -> None:
        self.entrant = entrant
        self.status = ""  # of the last row
        self._say, self._protocol, self._m = say, protocol, 0

    def begin(self, step: str, m: int) -> None:
        """Say what is about to be done: what was in flight, should the process end."""
        self._m = m
        self._say(Started(pid=os.getpid(), kernel=self.entrant.kernel, config=self.entrant.config, m=m, step=step))

    def ok(self, timing: Timing, error: float, routing: str = "") -> None:
        """Say that the M begun last was timed, with that routing."""
        self.status = "ok"
        self._say(
            Row(
                kernel=self.entrant.kernel,
                config=self.entrant.config,
                m=self._m,
                status="ok",
                protocol=self._protocol,
                relative_error=error,
                routing=routing,
                **asdict(timing),
            )
        )

    def failed(self, status: str, detail: str, error: float | None) -> None:
        """Say that it failed there."""
        self.status = status
        self._say(
            Row(
                kernel=self.entrant.kernel,
                config=self.entrant.config,
                m=max(1, self._m),
                status=status,
                protocol=self._protocol,
                relative_error=error,
                detail=shorten(detail),
            )
        )


def describe_error(error: BaseException) -> str:
    """Type and message; of a Wrong its message alone."""
    return shorten(str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}")
