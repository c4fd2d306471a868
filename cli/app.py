"""The command group, and how errors become messages and exit codes.

Exit codes: 0 ok, 1 failed, 2 usage, 3 no usable device, 4 finished but some problems have no winner, 130 interrupted,
143 terminated.
"""

from __future__ import annotations

import warnings
from typing import Any, TextIO

import rich_click as click

from .. import __version__
from ..errors import InvalidInput, NoDevice, Nvfp4Error
from .entry import FAILED, INTERRUPTED
from .env import env
from .inspect import inspect
from .options import help_style
from .signals import TERMINATED, Terminated, ends_on_sigterm
from .tune import tune
from .warmup import warmup

__all__ = ["NO_DEVICE", "USAGE", "app"]

USAGE, NO_DEVICE = 2, 3


class App(click.RichGroup):
    """A group whose commands may raise what is in errors.py."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error that a user can cause is one message on stderr, not a traceback."""
        with warnings.catch_warnings(), ends_on_sigterm():
            warnings.simplefilter("default", UserWarning)
            warnings.simplefilter("default", RuntimeWarning)
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except Nvfp4Error as error:
                click.echo(f"error: {error}", err=True)
                ctx.exit(_exit_code(error))
            except KeyboardInterrupt as stop:
                click.echo("interrupted", err=True)
                ctx.exit(TERMINATED if isinstance(stop, Terminated) else INTERRUPTED)


def _exit_code(error: Nvfp4Error) -> int:
    if isinstance(error, NoDevice):
        return NO_DEVICE
    return USAGE if isinstance(error, InvalidInput) else FAILED


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    click.echo(f"warning: {message}", err=True)


@click.group(cls=App, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="nvfp4")
@help_style
def app() -> None:
    """Tune and inspect NVFP4 weight-only kernels.

    Exit codes: 0 ok, 1 failed, 2 usage, 3 no usable device, 4 finished but some problems have no winner,
    or no plan yet, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).

    Measurements and plans are in one SQLite file: `--db`, or NVFP4_DB, or `nvfp4.db` in the user's cache folder.
    """


for command in (tune, inspect, warmup, env):
    app.add_command(command)
