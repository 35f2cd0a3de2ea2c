"""Write the answers beside the results: each file whole or not at all, nothing of launching's touched."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from overlap_sweep.analysis import layer_frame
from overlap_sweep.analysis.frame import to_frame
from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.errors import UserError
from overlap_sweep.report import overlap_yaml, text, tuning_report
from overlap_sweep.report.overlap_yaml import Provenance
from overlap_sweep.report.provenance import describe_machine, environments, launch_commands, measured_when
from overlap_sweep.run_directory import write_atomically

TABLE_FILE = "points"
LAYER_TABLE_FILE = "layers"

if TYPE_CHECKING:
    import pandas as pd


def write_reports(analysis: Analysis, directory: Path, command: str) -> list[Path]:
    """Write every file into `directory`, made if need be; `command` is what was typed. The paths, summary first."""
    try:
        written = []
        for path, content in _contents(analysis, directory, command):
            path.parent.mkdir(parents=True, exist_ok=True)
            written.append(write_atomically(path, content))
        return written
    except OSError as error:
        raise UserError(f"{directory} cannot be written to ({error.strerror}); give another with --output.") from None


def _contents(analysis: Analysis, directory: Path, command: str) -> Iterator[tuple[Path, bytes]]:
    yield directory / text.FILE_NAME, text.summary_text(analysis).encode()
    report = msgspec.json.encode(tuning_report.tuning_report(analysis))
    yield directory / tuning_report.FILE_NAME, msgspec.json.format(report, indent=2) + b"\n"
    if analysis.rows:
        yield from _table(to_frame(analysis.rows), directory / TABLE_FILE)
    if analysis.layer_rows:
        yield from _table(to_frame(analysis.layer_rows, layer_frame.COLUMNS), directory / LAYER_TABLE_FILE)
    for case in analysis.cases:
        folder = directory / case.case.name if len(analysis.cases) > 1 else directory
        provenance = Provenance(
            machine=describe_machine(environments(case.points)[0]),
            measured=measured_when(case.points),
            commands=[*launch_commands(case.points), command],
        )
        texts = [
            (folder / overlap_yaml.file_name(tp_size), overlap_yaml.overlap_yaml(case, tp_size, provenance).encode())
            for tp_size in case.plans
        ]
        if texts:
            yield folder / overlap_yaml.FILE_NAME, texts[0][1]
        yield from texts


def _table(frame: pd.DataFrame, path: Path) -> Iterator[tuple[Path, bytes]]:
    yield path.with_suffix(".csv"), frame.to_csv(index=False).encode()
    parquet = io.BytesIO()
    frame.to_parquet(parquet, index=False)
    yield path.with_suffix(".parquet"), parquet.getvalue()
