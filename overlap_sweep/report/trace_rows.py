"""The rows of `analyze.py trace`: as a table, CSV or JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from overlap_sweep.report.console import fits
from overlap_sweep.trace.overlap import TraceRow

FIELDS = (
    "file",
    "rank",
    "iteration",
    "phase",
    "span_us",
    "gemm_busy_us",
    "comm_busy_us",
    "wait_us",
    "overlap_us",
    "exposed_comm_us",
    "idle_us",
    "overlap_ratio",
    "num_gemm_events",
    "num_comm_events",
    "num_wait_events",
    "num_compute_events",
)


def as_dictionaries(rows: Sequence[TraceRow]) -> list[dict[str, Any]]:
    return [{name: getattr(row, name) for name in FIELDS} for row in rows]


def as_json(rows: Sequence[TraceRow]) -> str:
    return msgspec.json.format(msgspec.json.encode(as_dictionaries(rows)), indent=2).decode()


def as_csv(rows: Sequence[TraceRow]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(as_dictionaries(rows))
    return stream.getvalue().rstrip("\n")


HEADERS = {
    "rank": "rank",
    "iteration": "iteration",
    "phase": "phase",
    "span_us": "span us",
    "gemm_busy_us": "GEMM us",
    "comm_busy_us": "comm us",
    "overlap_us": "overlap us",
    "overlap_ratio": "ratio",
    "exposed_comm_us": "exposed us",
    "wait_us": "wait us",
    "idle_us": "idle us",
    "num_gemm_events": "GEMMs",
    "num_comm_events": "comms",
    "num_wait_events": "waits",
    "num_compute_events": "others",
}


def print_table(rows: Sequence[TraceRow], console: Console) -> None:
    """One table for each file; lines instead where the terminal is too narrow for it."""
    for file, of_file in groupby(as_dictionaries(rows), key=lambda row: row["file"]):
        cells = [{header: _cell(name, row[name]) for name, header in HEADERS.items()} for row in of_file]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for header in HEADERS.values():
            table.add_column(header, justify="left" if header == "phase" else "right", no_wrap=True)
        for row in cells:
            table.add_row(*row.values())
        console.print(f"\n{file}", style="bold")
        if fits(table, console):
            console.print(table)
        else:
            for row in cells:
                rank, iteration, phase, *times = (f"{header} {value}" for header, value in row.items())
                console.print(f"{rank}, {iteration}, {phase}\n{', '.join(times)}\n")


def _cell(name: str, value: Any) -> str:
    """What is unknown, such as the rank of some traces, or undefined is `-`."""
    if value is None:
        return "-"
    if name.endswith("_us"):
        return f"{value:,.1f}"
    return f"{value:.2f}" if name == "overlap_ratio" else str(value)
