from __future__ import annotations

from pathlib import Path

import yaml

from overlap_sweep.report.page.points_table import Table, layers_table, points_table
from tests.made_sweeps import rounds, write_sweep
from tests.make_point import layer_config, make_point, operator_config, pass_times
from tests.report.page.reports import analysis_of


def column(table: Table, name: str) -> list[str]:
    at = table.columns.index(name)
    return [row[at].text for row in table.rows]


def test_every_point_is_there(tmp_path: Path) -> None:
    table = points_table(analysis_of(write_sweep(tmp_path)))
    assert len(set(column(table, "point"))) == 9
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert column(table, "TP") == sorted(column(table, "TP"))
    failed = column(table, "status").index("failed")
    assert column(table, "note")[failed] == "[rank3] out of memory"
    assert column(table, "time us")[failed] == ""
    assert [n for n, s in zip(column(table, "note"), column(table, "status"), strict=True) if s == "skipped"] == [
        "bulk does not fit"
    ] * 2


def test_what_was_chosen_is_marked(tmp_path: Path) -> None:
    table = points_table(analysis_of(write_sweep(tmp_path)))
    settings = [s for s, note in zip(column(table, "setting"), column(table, "note"), strict=True) if note == "chosen"]
    assert settings == ["bulk_sm4", "pipeline_sm8_split4"]


def test_numbers_sort_as_numbers(tmp_path: Path) -> None:
    make_point(
        "operator",
        tmp_path,
        operator_config(2, "fc1", "all", "bulk", num_sm=4),
        bwd=pass_times(12345.678, 20000.0, 10000.0),
    )
    table = points_table(analysis_of(tmp_path))
    cell = table.rows[0][table.columns.index("time us")]
    assert (cell.text, cell.order) == ("12,345.7", 12345.678)


def test_launch_bound_points_are_flagged(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4), launch_bound=True)
    table = points_table(analysis_of(tmp_path))
    assert column(table, "status") == ["ok, launch-bound"]
    assert column(table, "note") == ["the host was too slow: this says nothing about the device"]


def test_cases_are_a_column_where_there_are_several(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4))
    assert "case" not in points_table(analysis_of(tmp_path)).columns
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4, tokens=4096))
    table = points_table(analysis_of(tmp_path))
    assert table.columns[0] == "case"
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_points_that_died_make_no_other_case(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4))
    died = operator_config(2, "fc1", "all", "bulk", num_sm=8)
    (tmp_path / "died" / ".hydra").mkdir(parents=True)
    (tmp_path / "died" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(died))
    table = points_table(analysis_of(tmp_path))
    assert "case" not in table.columns
    assert column(table, "status") == ["ok", "missing"]


def test_layers_have_a_row_for_each_variant(tmp_path: Path) -> None:
    make_point("layer", tmp_path, layer_config(), variants={"none": rounds(1.0), "default": rounds(0.97)})
    make_point("layer", tmp_path, layer_config(), variants={}, name="broken", status="timeout", error="no answer\nlog")
    table = layers_table(analysis_of(tmp_path))
    assert column(table, "variant") == ["", "none", "default"]
    assert column(table, "note") == ["no answer", "", ""]
    assert column(table, "ratio") == ["", "1.000", "0.970"]
    assert all(len(row) == len(table.columns) for row in table.rows)
