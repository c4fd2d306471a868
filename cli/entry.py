"""What the shell calls: imports the commands, and ends the process with a message where output cannot be written."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, NoReturn, TextIO, cast

from .signals import TERMINATED, Terminated, ends_on_sigterm

__all__ = ["FAILED", "INTERRUPTED", "main"]

FAILED, INTERRUPTED = 1, 130


class Watched:
    """A stream that remembers the error it failed with last, so that it is told from all other OSErrors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write, as the stream does."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Flush, as the stream does."""
        try:
            self._stream.flush()
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main() -> NoReturn:
    """Run the `nvfp4` command and end the process."""
    watched = Watched(sys.stdout)
    sys.stdout = cast(TextIO, watched)
    try:
        _run()
    except OSError as error:
        if error is not watched.error:
            raise
        if error.errno != errno.EPIPE:  # who closed a pipe wants no more
            print(f"error: the output could not be written: {error.strerror}", file=sys.stderr)
        sys.exit(FAILED)
    finally:
        if watched.error is not None:  # what is left in its buffer would fail again when the interpreter ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


def _run() -> NoReturn:
    try:
        with ends_on_sigterm():
            from .app import app

            app(prog_name="nvfp4")
    except KeyboardInterrupt as stop:
        print("interrupted", file=sys.stderr)
        sys.exit(TERMINATED if isinstance(stop, Terminated) else INTERRUPTED)
    sys.exit(0)
