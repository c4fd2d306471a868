"""Ctrl-C while the `nvfp4` command is being imported: one line and exit code 130, not a traceback from inside torch.

The first import of the package does it, for torch takes longest and comes with that one. Programs that import nvfp4
keep their own handling.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["INTERRUPTED", "catch", "is_command", "release"]

INTERRUPTED = 130


def is_command(argv: list[str], orig_argv: list[str]) -> bool:
    """Whether this process is the `nvfp4` script or `python -m nvfp4`, and not a child of one."""
    if argv[:1] == ["-m"]:  # what runs is still being found
        return "-m" in orig_argv and orig_argv[orig_argv.index("-m") :][1:2] == ["nvfp4"]
    return bool(argv) and os.path.basename(argv[0]) == "nvfp4" and argv[0] in orig_argv


def catch() -> None:
    """From here on Ctrl-C ends the process at once. Nothing is open yet, and nothing needs to be put back."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def release() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


if is_command(sys.argv, sys.orig_argv):
    catch()
