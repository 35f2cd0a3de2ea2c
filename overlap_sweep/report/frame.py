"""Tidy tables: rows with every column always there, as DataFrames with one type a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.results.points import Point

if TYPE_CHECKING:
    import pandas as pd


Row = dict[str, Any]


_TEXT = (
    *("point", "directory", "config_id", "model", "backend", "device", "precision"),
    *("operator", "phase", "slot", "pass", "method", "status", "error", "not_profiled_because", "note"),
)


INTEGERS = (
    *("tokens", "tp_size", "num_sm", "num_splits", "cga_size", "repeats", "num_gemm_events", "num_comm_events"),
)


_BOOLEANS = (
    *("aggregate", "set_sm_margin", "use_ce", "atomic_gemm", "fp8_buf", "launch_bound"),
    "profiled",
)


_TYPES = {**dict.fromkeys(_TEXT, "string"), **dict.fromkeys(INTEGERS, "Int64"), **dict.fromkeys(_BOOLEANS, "boolean")}


def column_types(*names: str) -> dict[str, str]:
    """The pandas type of each column of a table, in their order."""
    return {name: _TYPES.get(name, "float64") for name in names}


def to_frame(rows: Sequence[Row], columns: Mapping[str, str]) -> pd.DataFrame:
    """`columns`: the types that `column_types` gave them."""
    import pandas as pd

    return pd.DataFrame(rows, columns=list(columns)).astype(dict(columns))


def common_cells(point: Point, root: Path) -> Row:
    """What every row of a point says, whatever it measured."""
    result = point.result
    return {
        "point": point.name,
        "directory": point.directory.relative_to(root).as_posix(),
        **point.case._asdict(),
        "tp_size": point.config["tp_size"],
        "status": point.status,
        "error": result.error if result else "no result.json: the point was given up, or is still running",
    }
