"""Every error a user can meet.

Each message says what was wrong, what was got, what was expected and what to do; `message` puts the four in order.
"""

from __future__ import annotations

import sys

__all__ = [
    "BuildError",
    "DatabaseError",
    "InvalidInput",
    "LaunchError",
    "NoDevice",
    "NotWarm",
    "Nvfp4Error",
    "Unsupported",
    "caller_level",
    "message",
]


def message(what: str, *, got: object = None, expected: object = None, do: str = "") -> str:
    """One line from the four parts; parts that are not given are left out."""
    parts = [what]
    if got is not None:
        parts.append(f"got {got}")
    if expected is not None:
        parts.append(f"expected {expected}")
    if do:
        parts.append(do)
    return "; ".join(parts)


def caller_level() -> int:
    """The `stacklevel` with which `warnings.warn`, called beside this, names the first line outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("nvfp4", "torch"):
        level, frame = level + 1, frame.f_back
    return level


class Nvfp4Error(Exception):
    """Base of all errors raised on purpose."""


class InvalidInput(Nvfp4Error, ValueError):
    """A tensor, shape, value or option that no kernel can take."""


class Unsupported(Nvfp4Error, NotImplementedError):
    """The input is valid, but no kernel here can compute it; the message lists every kernel's reason."""


class NotWarm(Nvfp4Error, RuntimeError):
    """A problem met CUDA graph capture before it was ever bound."""


class BuildError(Nvfp4Error, RuntimeError):
    """A kernel did not compile."""


class LaunchError(Nvfp4Error, RuntimeError):
    """The driver refused to load or to launch a kernel."""


class DatabaseError(Nvfp4Error, RuntimeError):
    """The tuning database cannot be opened or written; nothing in it was changed.

    Attributes
    ----------
    reason : str
        "missing", "corrupt", "newer", "foreign", "readonly", "unreadable", "locked", "full" or "io".
    """

    def __init__(self, text: str, *, reason: str = "io") -> None:
        super().__init__(text)
        self.reason = reason


class NoDevice(Nvfp4Error, RuntimeError):
    """The device that was asked for is not there."""
