"""The files of a comparison: JSON, tables and charts."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from overlap_sweep.compare.charts import Chart
from overlap_sweep.errors import UserError
from overlap_sweep.report.charts import figures
from overlap_sweep.report.csv_text import csv_of
from overlap_sweep.results.run_directory import write_atomically

if TYPE_CHECKING:
    import pandas as pd

SUMMARY_FILE, TABLE_FILE = "comparison.json", "comparison"


def as_png(chart: Chart) -> bytes:
    return figures.rendered(chart.spec)


def write_files(
    directory: Path,
    summary: Mapping[str, Any],
    frame: pd.DataFrame,
    charts: Sequence[Chart],
    summary_file: str = SUMMARY_FILE,
) -> list[Path]:
    """All at once, after all could be made. UserError where the directory cannot be written to."""
    parquet = io.BytesIO()
    frame.to_parquet(parquet, index=False)
    contents = {
        # What is no number of JSON's becomes null.
        summary_file: msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n",
        f"{TABLE_FILE}.csv": csv_of(frame).encode(),
        f"{TABLE_FILE}.parquet": parquet.getvalue(),
        **{chart.file_name: as_png(chart) for chart in charts},
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [write_atomically(directory / name, content) for name, content in contents.items()]
    except OSError as error:
        reason = f"cannot be written to ({error.strerror})"
        raise UserError(f"{directory} {reason}; give another with --output.") from None
