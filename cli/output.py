"""Where data and progress go: stdout and stderr, as tables or as JSON."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
import rich_click as click
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["Grid", "console", "print_json"]

PIPED_COLUMNS = 120  # a file or a pipe has no width of its own
WRAPPED_COLUMNS = 14  # cells are wrapped to no less
WIDE = 10_000  # columns, more than any table needs


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPED_COLUMNS
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def print_json(value: Any, *, indent: int = 2) -> None:
    """A record or several, on stdout; `indent=0` gives one line."""
    text = msgspec.json.encode(value)
    click.echo((msgspec.json.format(text, indent=indent) if indent else text).decode())


class Grid:
    """A table that becomes one block of `name value` lines per row where the terminal is too narrow for it.

    Parameters
    ----------
    columns
        Names; one that begins with ">" is numeric, one that begins with "~" may wrap. Empty names: no header.
    title
        A line above.
    """

    def __init__(self, *columns: str, title: str = "") -> None:
        self._names = tuple(name.lstrip(">~") for name in columns)
        self._rows: list[tuple[str, ...]] = []
        self._title = title
        self._table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=any(self._names))
        for column, name in zip(columns, self._names, strict=True):
            numeric, wraps = column.startswith(">"), column.startswith("~")
            self._table.add_column(
                name,
                justify="right" if numeric else "left",
                no_wrap=not wraps,
                overflow="fold" if wraps else "ellipsis",
            )

    def row(self, *cells: str) -> None:
        """Add a row."""
        self._rows.append(cells)
        self._table.add_row(*cells)
        for column, cell in zip(self._table.columns, cells, strict=True):
            least = len(cell) if column.no_wrap else min(len(cell), WRAPPED_COLUMNS)
            column.min_width = max(column.min_width or 0, least)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._title:
            yield Text(self._title)
        if Measurement.get(console, options.update(max_width=WIDE), self._table).minimum <= options.max_width:
            yield self._table
            return
        width = max(map(len, self._names))
        for cells in self._rows:
            for name, cell in zip(self._names, cells, strict=True):
                if cell:
                    yield Text(f"{name:{width}}  {cell}" if width else cell)
            yield Text("")
