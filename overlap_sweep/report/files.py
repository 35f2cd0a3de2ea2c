"""Write the answers beside the results: each file whole or not at all, nothing of launching's touched."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.errors import UserError
from overlap_sweep.report import text
from overlap_sweep.report.csv_text import csv_of
from overlap_sweep.report.frame import to_frame
from overlap_sweep.report.page.page import page_files
from overlap_sweep.results.provenance import describe_machine, environments, launch_commands, measured_when
from overlap_sweep.results.run_directory import write_atomically
from overlap_sweep.trace.directories import is_below
from overlap_sweep.workloads.operator import frame as operator_frame
from overlap_sweep.workloads.operator import overlap_yaml, tuning_report
from overlap_sweep.workloads.operator.overlap_yaml import Provenance
from overlap_sweep.workloads.operator.yaml_files import training_files

TABLE_FILE = "points"

if TYPE_CHECKING:
    import pandas as pd


def write_reports(analysis: Analysis, directory: Path, command: str, *, with_plots: bool = False) -> list[Path]:
    """Write every file into `directory`, made if need be; `command` is what was typed. The paths, summary first."""
    try:
        written: list[Path] = []

        def write(path: Path, content: bytes) -> None:
            if not is_below(path.parent, directory):
                raise UserError(f"{path.parent} is a link that leads out of {directory}; remove it, or give --output.")
            path.parent.mkdir(parents=True, exist_ok=True)
            written.append(write_atomically(path, content))

        for path, content in _contents(analysis, directory, command):
            write(path, content)
        beside = [path.relative_to(directory).as_posix() for path in written]
        for name, content in page_files(analysis, command, beside, with_plots=with_plots):
            write(directory / name, content)
        return written
    except OSError as error:
        raise UserError(f"{directory} cannot be written to ({error.strerror}); give another with --output.") from None


def _contents(analysis: Analysis, directory: Path, command: str) -> Iterator[tuple[Path, bytes]]:
    yield directory / text.FILE_NAME, text.summary_text(analysis).encode()
    yield directory / tuning_report.FILE_NAME, _json(tuning_report.tuning_report(analysis))
    if analysis.operators.rows:
        yield from _table(to_frame(analysis.operators.rows, operator_frame.COLUMNS), directory / TABLE_FILE)
    for section in analysis.sections:
        table = section.points.table
        yield from _table(to_frame(section.records, table.types), directory / table.name)
        for file in section.files:
            run_directory = directory / file.point.directory.relative_to(analysis.reading.root)
            yield run_directory / file.name, file.content()
    for case in analysis.operators.cases:
        folder = directory / analysis.operators.folder(case)
        points = [*case.points, *(proof.trial.point for proof in case.proofs.values() if proof.trial.point)]
        provenance = Provenance(
            machine=describe_machine(environments(case.points)[0]),
            measured=measured_when(points),
            commands=list(dict.fromkeys([*launch_commands(points), command])),
        )
        texts = {tp_size: training_files(case, tp_size, provenance) for tp_size in case.tp_sizes}
        if texts:
            smallest = min(texts)
            yield folder / overlap_yaml.FILE_NAME, texts[smallest][overlap_yaml.file_name(smallest)].encode()
        for of_size in texts.values():
            yield from ((folder / name, content.encode()) for name, content in of_size.items())


def _json(content: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _table(frame: pd.DataFrame, path: Path) -> Iterator[tuple[Path, bytes]]:
    yield path.with_suffix(".csv"), csv_of(frame).encode()
    parquet = io.BytesIO()
    frame.to_parquet(parquet, index=False)
    yield path.with_suffix(".parquet"), parquet.getvalue()
