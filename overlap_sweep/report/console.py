"""Prints lines and tables to a terminal of any width, or unwrapped and uncut to a pipe or file."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import IO, Any, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment
from rich.text import Text

from overlap_sweep.program import end_unread
from overlap_sweep.report.numbers import shortened, visible
from overlap_sweep.report.table import Column

R = TypeVar("R")

UNBOUNDED = 10_000
"""Width of a pipe or file, in columns."""
GAP = 2
"""Columns between two cells."""
NARROWEST_NAME = 20
"""Shortest length to which a name in the last column is cut, in columns."""


class _Visible:
    """A renderable with control characters in its text escaped; rich's own control codes are separate from the text."""

    def __init__(self, shown: ConsoleRenderable) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self._shown, options):
            yield Segment(text if control else visible(text), style, control)


class _Escaping(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Visible(shown) for shown in renderables]


def console_for(stream: IO[str]) -> Console:
    """Returns a console that does not cut lines in a pipe or file and does not interpret markup."""
    width = None if stream.isatty() else UNBOUNDED
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=width is not None)
    console.push_render_hook(_Escaping())
    # rich's own would end with status 1.
    console.on_broken_pipe = end_unread  # type: ignore[method-assign]
    return console


def print_lines(lines: Iterable[str], console: Console, indent: int = 2, hanging: int = 2) -> None:
    """Prints each line indented by `indent` columns; wrapped lines are indented further by `hanging`."""
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


def print_table(
    title: str,
    columns: Sequence[Column[R]],
    rows: Sequence[R],
    console: Console,
    *,
    style: Callable[[R], str] = lambda row: "",
    group: Callable[[R], Any] = lambda row: None,
    cut_last: bool = False,
) -> None:
    """Prints the columns that have a header. A blank line separates groups of rows, as by `group`.

    On a narrow terminal columns that may be dropped are dropped first, and the last one is shortened if it may be cut;
    if that does not help, each row becomes lines of text.
    """
    if title:
        console.print(f"\n{title}", style="bold")
    shown = [(column, [column.header, *map(column.text, rows)]) for column in columns if column.header]
    for turn in sorted({0, *(column.dropped for column, _ in shown)}):
        kept = [(column, texts) for column, texts in shown if not 0 < column.dropped <= turn]
        widths = [max(map(cell_len, texts)) for _, texts in kept]
        room = console.width - sum(width + GAP for width in widths[:-1])
        if room >= widths[-1] or (cut_last and room >= NARROWEST_NAME):
            break
    else:
        _print_stacked([column for column, _ in shown], rows, console)
        return
    # Laid out here, because rich would measure each cell of thousands of rows.
    widths[-1] = min(widths[-1], room)
    cells = [
        [_padded(column, text, width) for text in texts] for (column, texts), width in zip(kept, widths, strict=True)
    ]
    header, *body = ((" " * GAP).join(line).rstrip() for line in zip(*cells, strict=True))
    rule = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * (sum(widths) + GAP * (len(widths) - 1))
    styled = [(header, "bold"), (rule, "")]
    for i, (line, row) in enumerate(zip(body, rows, strict=True)):
        ends_group = i + 1 < len(rows) and group(rows[i + 1]) != group(row)
        styled.append((line + "\n" * ends_group, style(row)))
    console.print()
    for look, lines in groupby(styled, key=lambda one: one[1]):
        console.print(Text("\n".join(text for text, _ in lines), look), soft_wrap=True)
    if dropped := sorted((column for column, _ in shown if 0 < column.dropped <= turn), key=lambda one: -one.dropped):
        names = ", ".join(column.header.strip() for column in dropped)
        print_lines([f"Hidden columns: {names}. A wider terminal shows them."], console, indent=0)


def _padded(column: Column, text: str, width: int) -> str:
    cut = shortened(text, width) if len(text) > width else text
    gap = " " * (width - cell_len(cut))
    return gap + cut if column.is_number else cut + gap


def _print_stacked(columns: Sequence[Column[R]], rows: Sequence[R], console: Console) -> None:
    """Prints each row as lines: first its texts, then its numbers with their headers."""
    for row in rows:
        texts = [column.text(row) for column in columns if column.kind == "text" and column.header != "note"]
        notes = [column.text(row) for column in columns if column.header == "note"]
        note = f" ({notes[0]})" if any(notes) else ""
        print_lines([f"{', '.join(filter(None, texts))}{note}"], console)
        named = [(column.header.strip(), column.text(row)) for column in columns if column.kind != "text"]
        print_lines([", ".join(f"{header} {text}" for header, text in named if text)], console, indent=4)
