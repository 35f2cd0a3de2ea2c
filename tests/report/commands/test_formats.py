"""Every command's rows: the same ones in every format, under the names that its help tells."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from overlap_sweep.analysis import (
    answers,
    copies,
    frame,
    history,
    kernel_frame,
    layer_frame,
    tp_training_frame,
    training_frame,
)
from overlap_sweep.analysis.comparison import rows as comparison_rows
from overlap_sweep.analysis.comparison import telemetry_rows, trace_rows
from overlap_sweep.analysis.telemetry_steps import QUANTITIES
from overlap_sweep.report.trace_rows import FIELDS, PART_FIELDS, RANK_FIELDS
from tests.analyze import analyze
from tests.report.conftest import Made

pytestmark = pytest.mark.usefixtures("no_page")

DEFAULT, NONE = (f"traces:h200x4_llama3_70b_layer_{name}.json.gz" for name in ("te_default", "none"))
TABLES: dict[str, tuple[str, Sequence[str]]] = {
    "answers": ("report operators:", list(answers.COLUMNS)),
    "answers about kernels": ("report kernels:", list(kernel_frame.ANSWER_COLUMNS)),
    "answers about training": ("report training:", list(training_frame.ANSWER_COLUMNS)),
    "answers about stacks": ("report stacks:", list(tp_training_frame.ANSWER_COLUMNS)),
    "answers about copies": ("report copies:", list(copies.COPY_COLUMNS)),
    "operators": ("query operators:", list(frame.COLUMNS)),
    "layers": ("query tuned: --layers", list(layer_frame.COLUMNS)),
    "kernels": ("query kernels:", list(kernel_frame.COLUMNS)),
    "training": ("query training:", list(training_frame.COLUMNS)),
    "copies": ("query copies:", list(copies.COPY_COLUMNS)),
    "stacks": ("query stacks:", list(tp_training_frame.COLUMNS)),
    "no rows": ("query operators: tp_size==16", list(frame.COLUMNS)),
    "traces": (f"trace {DEFAULT} traces:cpu_gloo_tp2_rank0.json.gz", FIELDS),
    "kernels of a trace": (f"trace {DEFAULT} --by kernel --phase bwd", PART_FIELDS),
    "ranks": ("trace ranks:ranks --by rank", RANK_FIELDS),
    "compared points": ("compare compared:old compared:new", list(comparison_rows.POINT_COLUMNS)),
    "compared slots": ("compare compared:old compared:new --by slot", list(comparison_rows.SLOT_COLUMNS)),
    "compared traces": (f"compare {NONE} {DEFAULT}", list(trace_rows.QUANTITY_COLUMNS)),
    "ranks of compared traces": (f"compare {NONE} {DEFAULT} --by rank", list(trace_rows.QUANTITY_COLUMNS)),
    "classes of compared traces": (f"compare {NONE} {DEFAULT} --by class", list(trace_rows.PART_COLUMNS)),
    "kernels of compared traces": (f"compare {NONE} {DEFAULT} --by kernel", list(trace_rows.PART_COLUMNS)),
    "streams of compared traces": (f"compare {NONE} {DEFAULT} --by stream", list(trace_rows.PART_COLUMNS)),
    "telemetry": ("compare compared:cuda compared:rocm", list(telemetry_rows.COLUMNS)),
    "history": ("history store:measurements.sqlite", list(history.HISTORY_COLUMNS)),
}

UNTOLD = {"hidden_noise", "baseline_launch_bound", "measurements", "reference_measurements"}
"""Columns that no help names."""


@pytest.mark.parametrize("name", TABLES)
def test_every_format_has_the_same_rows_and_nothing_else(made: Made, tmp_path: Path, name: str) -> None:
    command, columns = TABLES[name]
    arguments = arguments_of(command, made)
    if arguments[0] == "report":
        arguments += ["--output", str(tmp_path)]
    parquet = pd.read_parquet(io.BytesIO(analyze(*arguments, "--format", "parquet").stdout_bytes))
    assert list(parquet.columns) == list(columns)
    types = parquet.dtypes.to_dict()
    text = analyze(*arguments, "--format", "csv").stdout
    # CSV cannot tell an empty text from none.
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(text), dtype=types), parquet.replace("", pd.NA))
    found = analyze(*arguments, "--format", "json").rows
    assert all(list(row) == list(columns) for row in found)
    pd.testing.assert_frame_equal(pd.DataFrame(found, columns=list(columns)).astype(types), parquet)
    assert parquet.empty == (name == "no rows")


def arguments_of(command: str, made: Made) -> list[str]:
    """The command's words, `name:path` as a path in the made-up directory of that name."""
    words = (word.partition(":") for word in command.split())
    return [str(made(name) / path) if colon else name for name, colon, path in words]


@pytest.mark.parametrize("command", ["report", "query", "trace", "compare", "history"])
def test_help_names_every_column(command: str) -> None:
    # What copies answer is the rows that query shows.
    asked = (command, "query") if command == "report" else (command,)
    words = {word for one in asked for word in analyze(one, "--help").stdout.split()}
    told = {column for line, columns in TABLES.values() if line.startswith(f"{command} ") for column in columns}
    assert told - words <= UNTOLD
    assert command != "compare" or words >= QUANTITIES.keys()


def test_medians_are_rows_that_tell_their_iterations(made: Made) -> None:
    trace = made("traces") / "h200x4_llama3_70b_layer_te_default.json.gz"
    for options, fields in (((), FIELDS), (("--by", "kernel", "--phase", "all", "--top", "3"), PART_FIELDS)):
        found = analyze("trace", trace, "--median", "--format", "json", *options).rows
        assert len(found) == 3
        assert list(found[0]) == ["iterations" if name == "iteration" else name for name in fields]
