"""SIGTERM, which batch systems and containers send before they kill, ends a command as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["TERMINATED", "Terminated", "ends_on_sigterm"]

TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """The first SIGTERM inside raises Terminated; further ones do not disturb what is put away then.

    Where SIGTERM is ignored it stays so; other threads than the main one get none.
    """
    ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    raise Terminated
