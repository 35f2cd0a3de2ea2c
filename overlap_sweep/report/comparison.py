"""What all comparisons have in common: how workloads take part, tables on terminals of any width, charts and files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from overlap_sweep.errors import UserError
from overlap_sweep.report.charts import Form, figures
from overlap_sweep.report.console import fits, print_lines
from overlap_sweep.report.table import Column, Table, csv_of, to_frame
from overlap_sweep.results.comparable import Comparable, Sample
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result, write_atomically

if TYPE_CHECKING:
    import pandas as pd

R = TypeVar("R")

NARROWEST_NAME = 20
"""The shortest that a kernel's name is cut to, in columns."""
STYLES = {"green": ("faster", "better", "disappeared"), "red": ("slower", "worse"), "yellow": ("appeared",)}
FEW_NAMES = 5
FEW_VALUES = 3
LONGEST_VALUE = 60
TABLE_FILE = "comparison"
LONGEST_WORD = 120
"""Of a label in a file's name."""


@dataclass(frozen=True)
class Chart:
    """One PNG: charts below each other, under a title where they are several."""

    file_name: str
    drawn: Sequence[Form]
    title: str = ""
    subtitle: Sequence[str] = ()

    @property
    def spec(self) -> dict[str, Any]:
        """Vega-Lite's."""
        drawn = [figures.figure(f"{self.file_name}_{i}", form) for i, form in enumerate(self.drawn)]
        return figures.column_spec(drawn, {"text": self.title, "subtitle": list(self.subtitle)} if self.title else None)


@dataclass(frozen=True)
class Comparison:
    """Two or more of a kind beside each other, as they are shown and written."""

    table: Table[Any]
    """Its name is what the rows are, in plural."""
    rows: Sequence[Any]
    show: Callable[[Console], None]
    """Prints it for people."""
    summary: Callable[[], Mapping[str, Any]]
    """Returns the content of `summary_file`; NaN where something is undefined."""
    charts: Callable[[], list[Chart]]
    problems: Sequence[str]
    warnings: Sequence[str] = ()
    summary_file: str = "comparison.json"

    def frame(self) -> pd.DataFrame:
        """Returns the rows as programs take them."""
        return to_frame(self.table.records(self.rows), self.table.types)


CompareTelemetry = Callable[[Sequence[tuple[str, Path]], str, str | None, bool], Comparison]


@dataclass(frozen=True)
class Comparing:
    """How a workload takes part in comparisons and histories: `COMPARED` in its module `compare`."""

    measured: Callable[[Sequence[Point], Records], Comparable]
    """Returns what one dataset has of it, whose points these are, of whatever workload."""
    samples: Callable[[Result], Mapping[str, Sample]]
    """Returns the times of a point that is ok by setting, but for those that the host limited."""
    matched: Sequence[str] = ()
    """Options, or groups of them, that keys tell: they are no differences of configuration."""
    changes_nothing: Sequence[str] = ()
    """Options, or groups of them, that change neither what is timed nor how, such as `training.max_steps`: points that
    differ in nothing else have one history."""
    telemetry: CompareTelemetry | None = None
    """Compares directories with telemetry, given with their labels; the label of the reference, and of the only one
    that is to be compared with it; and whether tables have every quantity of each run, however many."""


def write_files(directory: Path, compared: Comparison, frame: pd.DataFrame, plots: bool) -> list[Path]:
    """Writes all at once, after all could be made. UserError where the directory cannot be written to."""
    parquet = io.BytesIO()
    frame.to_parquet(parquet, index=False)
    contents = {
        # What is no number of JSON's becomes null.
        compared.summary_file: msgspec.json.format(msgspec.json.encode(compared.summary()), indent=2) + b"\n",
        f"{TABLE_FILE}.csv": csv_of(frame).encode(),
        f"{TABLE_FILE}.parquet": parquet.getvalue(),
    }
    for chart in compared.charts() if plots else ():
        contents[_unused(chart.file_name, contents)] = as_png(chart)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [write_atomically(directory / name, content) for name, content in contents.items()]
    except OSError as error:
        reason = f"cannot be written to ({error.strerror})"
        raise UserError(f"{directory} {reason}; give another with --output.") from None


def _unused(name: str, taken: Iterable[str]) -> str:
    """With a number where labels differ only in what no file's name should have."""
    lower = {one.lower() for one in taken}
    label, _, end = name.rpartition("_")
    names = chain([name], (f"{label}-{i}_{end}" for i in count(2)))
    return next(one for one in names if one.lower() not in lower)


def as_png(chart: Chart) -> bytes:
    return figures.rendered(chart.spec)


def ratios_file(label: str, candidates: Sequence[str]) -> str:
    """Returns the name of the chart of one of the candidates."""
    return "ratios.png" if len(candidates) == 1 else f"{_word(label)}_ratios.png"


def timeline_file(label: str) -> str:
    return f"{_word(label)}_timeline.png"


def _word(label: str) -> str:
    """As part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", label[:LONGEST_WORD]).strip("-.") or "dataset"


def print_table(
    title: str, columns: Sequence[Column[R]], rows: Sequence[R], console: Console, cut_last: bool = False
) -> None:
    """Prints the columns that have a header. On a narrow terminal those go first that may be dropped, and the last is
    shortened if it may be cut; lines instead, where that does not help."""
    shown = [column for column in columns if column.header]
    cells = [[column.text(row) for column in shown] for row in rows]
    optional = sorted((column for column in shown if column.dropped), key=lambda column: column.dropped)
    console.print(f"\n{title}:")
    for few in range(len(optional) + 1):
        dropped = optional[:few]
        kept = [i for i, column in enumerate(shown) if column not in dropped]
        table = _table([shown[i] for i in kept], [[row[i] for i in kept] for row in cells], cut_last, console)
        if table and fits(table, console):
            console.print(table)
            if dropped:
                names = ", ".join(column.header.strip() for column in reversed(dropped))
                print_lines([f"No room for {names}: a wider terminal shows them."], console, indent=0)
            return
    headers = [column.header for column in shown]
    for row in cells:
        named = {header: text for header, text in zip(headers, row, strict=True) if text}
        first = [_named(header, named.pop(header, "")) for header in (headers[-1:] if cut_last else _identity(shown))]
        print_lines([" ".join(filter(None, first))], console, indent=0)
        print_lines([", ".join(f"{header} {value}" for header, value in named.items())], console, hanging=0)


def _table(
    columns: Sequence[Column[Any]], rows: Sequence[Sequence[str]], cut_last: bool, console: Console
) -> RichTable | None:
    """None where the last column would be cut too short."""
    room = None
    if cut_last:
        widths = [max(map(len, [column.header, *(row[i] for row in rows)])) for i, column in enumerate(columns[:-1])]
        room = console.width - sum(widths) - 3 * len(widths) - 2
        if room < NARROWEST_NAME:
            return None
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.header, justify="right" if column.is_number else "left", no_wrap=True)
    for row in rows:
        *others, last = (_styled(column, text) for column, text in zip(columns, row, strict=True))
        table.add_row(*others, last if room is None else shortened(str(last), room))
    return table


def _styled(column: Column[Any], text: str) -> Text:
    styles = (style for style, words in STYLES.items() if text in words)
    return Text(text, next(styles, "") if column.header in ("verdict", "change") else "")


def _named(header: str, value: str) -> str:
    return f"TP={value}" if header == "TP" and value.isdigit() else value


def _identity(columns: Sequence[Column[Any]]) -> list[str]:
    """What a line begins with: all up to the last of the leading names."""
    leading = next((i for i, column in enumerate(columns) if column.header != "TP" and column.is_number), len(columns))
    return [column.header for column in columns[: max(leading, 1)]]


def ratio_column(name: str, value: Callable[[R], float], header: str, **more: Any) -> Column[R]:
    """A column of ratios to the reference's."""
    return Column(name, value, header=header, words=lambda row: as_ratio(value(row)), **more)


def as_ratio(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.3f}"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def some_of(names: Sequence[str], most: int = FEW_NAMES) -> str:
    """`a, b`; of many the first ones, and how many more."""
    more = f", ... and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: max(longest - 3, 0)]}..."


def by_label(values: Mapping[str, Any], several: bool = False) -> str:
    """`old=2.10.0, new=2.11.0`; `several`: each has all values that its points have, as in `new=2.11.0 or 2.12.0`."""
    told = []
    for label, value in values.items():
        every = value if several else [value]
        more = f" and {len(every) - FEW_VALUES} more" if len(every) > FEW_VALUES else ""
        told.append(f"{label}={' or '.join(map(_value, every[:FEW_VALUES])) or '-'}{more}")
    return ", ".join(told)


def _value(value: Any) -> str:
    if isinstance(value, str) and "\n" in value:
        return f"({len(value.splitlines())} lines)"
    text = str(value).lower() if isinstance(value, bool) else "-" if value is None else str(value)
    return shortened(text, LONGEST_VALUE)


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns `packages.torch` of {"packages": {"torch": ...}}."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
