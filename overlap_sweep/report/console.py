"""Where text goes: a terminal of any width, or a pipe or file in which nothing may be wrapped or cut."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import IO

from rich.console import Console
from rich.table import Table

UNBOUNDED = 10_000
"""The width of what is no terminal, in columns."""


def console_for(stream: IO[str]) -> Console:
    """A console that never cuts what goes into a pipe or a file."""
    width = None if stream.isatty() else UNBOUNDED
    return Console(file=stream, width=width, highlight=False, markup=False, soft_wrap=width is not None)


def fits(table: Table, console: Console) -> bool:
    """Whether the table can be printed whole; rich would cut off what a narrow terminal cannot show."""
    return console.measure(table, options=console.options.update(width=UNBOUNDED)).maximum <= console.width


def print_lines(lines: Iterable[str], console: Console, indent: int = 2, hanging: int = 2) -> None:
    """Each line indented by so many columns; on a terminal what it must wrap is indented further by `hanging`."""
    for line in lines:
        if console.soft_wrap:
            console.print(" " * indent + line)
            continue
        wrapped = textwrap.wrap(
            line,
            console.width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hanging),
            break_on_hyphens=False,
        )
        console.print("\n".join(wrapped))
