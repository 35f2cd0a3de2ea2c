"""Tables of thousands of rows: laid out once, from their strings, where rich would weigh every cell."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from overlap_sweep.report.console import print_lines

GAP = 2
"""Columns between two cells."""


@dataclass(frozen=True)
class PlainRow:
    cells: Sequence[str]
    style: str = ""
    ends_section: bool = False
    """An empty line follows."""


def print_table(
    headers: Sequence[str], rows: Sequence[PlainRow], left: Collection[str], console: Console, optional: Sequence[str]
) -> bool:
    """False where the terminal is too narrow, even without the `optional` columns, the first of which go first."""
    widths = [max(cell_len(row.cells[i]) for row in [PlainRow(headers), *rows]) for i in range(len(headers))]
    for count in range(len(optional) + 1):
        kept = [i for i, header in enumerate(headers) if header not in optional[:count]]
        if sum(widths[i] + GAP for i in kept) - GAP <= console.width:
            break
    else:
        return False

    def line(cells: Sequence[str]) -> str:
        padded = (_padded(cells[i], widths[i], headers[i] in left) for i in kept)
        return (" " * GAP).join(padded).rstrip()

    console.print()
    whole = sum(widths[i] + GAP for i in kept) - GAP
    styled = [(line(headers), "bold"), ("\N{BOX DRAWINGS LIGHT HORIZONTAL}" * whole, "")]
    styled += [(line(row.cells) + "\n" * row.ends_section, row.style) for row in rows]
    _print(styled, console)
    if dropped := [header for header in optional[:count] if header in headers]:
        print_lines([f"No room for {', '.join(reversed(dropped))}: a wider terminal shows them."], console, indent=0)
    return True


def _padded(text: str, width: int, to_the_left: bool) -> str:
    room = " " * (width - cell_len(text))
    return text + room if to_the_left else room + text


def _print(styled: Iterable[tuple[str, str]], console: Console) -> None:
    """Lines of one style at once."""
    for style, lines in groupby(styled, key=lambda one: one[1]):
        text = "\n".join(line for line, _ in lines)
        console.print(Text(text, style), soft_wrap=True)
