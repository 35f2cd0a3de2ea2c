"""Of every measured point the table says whether its figures from the trace are there, and if not, why."""

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.results.points import read_points
from overlap_sweep.results.traces import TraceReading
from overlap_sweep.workloads.operator.answer import OperatorAnalysis
from overlap_sweep.workloads.operator.section import TABLE, point_rows
from tests.make_point import make_point, operator_config
from tests.results.reading import operator_rows


@pytest.mark.parametrize(
    ("profile", "measured", "why"),
    [
        ("none", {}, "profile=none"),
        ("best", {}, "profile=best: not among the fastest when it was measured"),
        # Of none beside it.
        ("best", {"traces": ["trace_none_rank0.json.gz"]}, "profile=best: not among the fastest"),
        ("all", {"traces": ["trace_rank0.json.gz"]}, "traces missing or unreadable"),
        ("all", {"reused_from": "somewhere"}, "reused from the store, which keeps no traces"),
    ],
)
def test_a_point_without_figures_from_its_trace_says_why(
    tmp_path: Path, profile: str, measured: dict[str, Any], why: str
) -> None:
    make_point("operator", tmp_path, {**operator_config(2), "profile": profile}, **measured)
    for row in operator_rows(tmp_path):
        assert row["profiled"] is False
        assert row["not_profiled_because"].startswith(why)
        assert row["total_overlap_ratio"] is None


def test_a_point_with_figures_has_no_reason_and_one_that_failed_has_neither(tmp_path: Path) -> None:
    profiled = make_point("operator", tmp_path, operator_config(2), traces=["trace_rank0.json.gz"])
    make_point("operator", tmp_path, operator_config(4), status="failed", error="out of memory")
    traces = {profiled: TraceReading({"total_overlap_ratio": 0.5})}
    rows = point_rows(read_points(tmp_path).points, tmp_path, OperatorAnalysis([], [], traces))
    told = {row["tp_size"]: (row["profiled"], row["not_profiled_because"]) for row in TABLE.records(rows)}
    assert told == {2: (True, None), 4: (None, None)}
