"""Where text goes: a terminal of any width, or a pipe or file in which nothing may be wrapped or cut."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment
from rich.table import Table

from overlap_sweep.report.numbers import visible

UNBOUNDED = 10_000
"""The width of what is no terminal, in columns."""


class _Visible:
    """Something to be printed, the control characters in its text escaped: rich's own are apart from the text."""

    def __init__(self, shown: ConsoleRenderable) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self._shown, options):
            yield Segment(text if control else visible(text), style, control)


class _Escaping(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Visible(shown) for shown in renderables]


def console_for(stream: IO[str]) -> Console:
    """A console that never cuts what goes into a pipe or a file, and takes texts for nothing but what they say."""
    width = None if stream.isatty() else UNBOUNDED
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=width is not None)
    console.push_render_hook(_Escaping())
    return console


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
            visible(line),
            console.width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hanging),
            break_on_hyphens=False,
        )
        console.print("\n".join(wrapped))
