"""Tables of comparisons, on terminals of any width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overlap_sweep.report.console import fits, print_lines

NARROWEST_NAME = 20
"""The shortest that a kernel's name is cut to, in columns."""

STYLES = {"faster": "green", "disappeared": "green", "slower": "red", "appeared": "yellow"}


def print_table(
    title: str,
    headers: Sequence[str],
    content: Iterable[Sequence[str | Text]],
    left: set[str],
    console: Console,
    optional: Sequence[str] = (),
    cut: str | None = None,
) -> None:
    """On a narrow terminal first without the `optional` columns, the first of them first, and with the last column
    shortened if it is `cut`; lines instead, where that does not help."""
    rows = [list(row) for row in content]
    console.print(f"\n{title}:")
    for count in range(len(optional) + 1):
        dropped = optional[:count]
        kept = [i for i, header in enumerate(headers) if header not in dropped]
        table = _table([headers[i] for i in kept], [[row[i] for i in kept] for row in rows], left, cut, console)
        if table and fits(table, console):
            console.print(table)
            if dropped:
                names = ", ".join(reversed(dropped))
                print_lines([f"No room for {names}: a wider terminal shows them."], console, indent=0)
            return
    for row in rows:
        named = {header: str(cell) for header, cell in zip(headers, row, strict=True) if str(cell)}
        first = [_named(header, named.pop(header, "")) for header in ([cut] if cut else _identity(headers, left))]
        print_lines([" ".join(filter(None, first))], console, indent=0)
        print_lines([", ".join(f"{header} {value}" for header, value in named.items())], console, hanging=0)


def _table(
    headers: Sequence[str], rows: Sequence[Sequence[str | Text]], left: set[str], cut: str | None, console: Console
) -> Table | None:
    """None where the last column would be cut too short."""
    room = _room(headers, rows, console) if cut else 0
    if cut and room < NARROWEST_NAME:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*([*row[:-1], _cut(str(row[-1]), room)] if cut else row))
    return table


def _room(headers: Sequence[str], rows: Sequence[Sequence[str | Text]], console: Console) -> int:
    """Columns that are left for the last one."""
    widths = [max(map(len, [header, *(str(row[i]) for row in rows)])) for i, header in enumerate(headers[:-1])]
    return console.width - sum(widths) - 3 * len(widths) - 2


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(room - 3, 0)]}..."


def _named(header: str, value: str) -> str:
    return f"TP={value}" if header == "TP" and value.isdigit() else value


def _identity(headers: Sequence[str], left: set[str]) -> list[str]:
    """What a line begins with: all up to the last of the leading names."""
    last = 0
    for i, header in enumerate(headers):
        if header != "TP" and header not in left:
            break
        last = i
    return list(headers[: last + 1])


def styled(word: str) -> Text:
    return Text(word, STYLES.get(word, ""))


def as_ratio(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.3f}"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
