"""`analyze.py query`: which rows and columns, in which order; of results, and of reports about them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.analyze import analyze, rows
from tests.golden.made_report import TRACES
from tests.made_sweeps import write_sweep, write_sweep_of_copies, write_sweep_of_kernels, write_sweep_of_training
from tests.make_point import implementation, kernel_config, make_point, operator_config, pass_times, variant
from tests.report.conftest import Made

TRACE = TRACES / "h200x4_llama3_70b_layer_te_default.json.gz"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (
            ["num_sm >= 8 and tp_size == 2 and status == 'ok'"],
            ["tp2_fc1_dgrad_bulk_sm8", "tp2_fc1_wgrad_bulk_sm8", "tp2_fc2_fprop_pipeline_sm8_split4"],
        ),
        (
            ["phase != 'wgrad'", "--sort", "tp_size,-speedup", "--limit", "3"],
            ["tp2_fc2_fprop_pipeline_sm8_split4", "tp2_fc1_dgrad_bulk_sm4", "tp2_fc1_dgrad_bulk_sm8"],
        ),
        (["tp_size == 16"], []),
    ],
)
def test_the_rows_that_match_in_order(made: Made, arguments: list[str], found: list[str]) -> None:
    assert [row["config_id"] for row in rows("query", made("operators"), *arguments)] == found


def test_of_13_rows(made: Made) -> None:
    sweep = made("operators")
    assert len(rows("query", sweep)) == 13
    # What has no value comes last, whichever way.
    for sort in ("speedup", "-speedup"):
        assert rows("query", sweep, "--sort", sort)[-1]["speedup"] is None
    assert "2 of 13 rows" in analyze("query", sweep, "--limit", "2").stdout
    nothing = analyze("query", sweep, "tp_size == 16")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", "No row matches, of 13.\n")


def test_columns(made: Made) -> None:
    sweep = made("operators")
    (row,) = rows("query", sweep, "speedup > 1.3", "--columns", "slot, num_sm,slot")
    assert row == {"slot": "fc2_fprop", "num_sm": 8}
    # A table shows what the condition is about, and everything where it is asked for.
    assert "num_splits" not in analyze("query", sweep, "speedup > 1.3").stdout
    assert "num_splits" in analyze("query", sweep, "num_splits == 4").stdout
    assert "relative_error" in analyze("query", sweep, "--columns", "all").stdout
    assert "[rank3] out of memory" in analyze("query", sweep, "status == 'failed'").stdout


def test_metrics_of_traces(tmp_path: Path) -> None:
    point = operator_config(2, "fc1", "fprop", "ring_exchange")
    directory = make_point("operator", tmp_path, point, traces=["t.json.gz", "gone.json.gz"])
    shutil.copy(TRACE, directory / "t.json.gz")
    (row,) = rows("query", tmp_path, "forward_overlap_ratio > 0 and note.notna()")
    assert row["note"] == "gone.json.gz is missing"


@pytest.mark.parametrize(
    ("name", "asked"),
    [("tuned", ()), ("tuned", ("--layers",)), ("kernels", ("--kernels",)), ("training", ("--training",))],
)
def test_a_report_has_the_rows_of_its_results(
    made: Made, tmp_path: Path, name: str, asked: tuple[str, ...], no_page: None
) -> None:
    raw = rows("query", made(name), *asked)
    assert raw
    for output in (tmp_path / "reports", shutil.copytree(made(name), tmp_path / "copy")):
        analyze(made(name) if output.name == "reports" else output, "--output", output)
        assert rows("query", output, *asked) == raw
    if name == "kernels":
        analyze("query", tmp_path / "reports", "--layers").assert_error("holds no results")


def test_only_what_differs_is_a_column_of_the_table(tmp_path: Path) -> None:
    ring = operator_config(2, "fc1", "fprop", "ring_exchange")
    make_point("operator", tmp_path, ring)
    point = operator_config(2, "fc2", "fprop", "ring_exchange")
    skipped = make_point("operator", tmp_path, point, status="skipped", environment={})
    # A point that does not know its GPU is of no other.
    assert {row["device"] for row in rows("query", tmp_path)} == {"NVIDIA H200", "cuda"}
    assert not {"device", "model"} & set(analyze("query", tmp_path).stdout.split())
    assert skipped.name in {row["point"] for row in rows("query", tmp_path)}
    make_point("operator", tmp_path, {**ring, "tp_size": 4}, environment={"gpu": "another"})
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", model="qwen3_0_6b"), bwd=pass_times(80.0))
    shown = analyze("query", tmp_path).stdout
    assert {"device", "model", "qwen3_0_6b"} <= set(shown.split())
    assert "bf16" not in shown


def test_variants_are_called_by_their_files_in_tables(tmp_path: Path) -> None:
    names = ["none", "file:/some/where/best.yaml", "file:/some/where/same.yaml", "file:/else/where/same.yaml"]
    make_point("layer", tmp_path, variants={name: variant([100.0, 101.0, 102.0]) for name in names})
    table = analyze("query", tmp_path, "--layers").stdout
    assert "file:best.yaml" in table
    assert "/best.yaml" not in table
    assert all(name in table for name in names[2:])
    assert {row["variant"] for row in rows("query", tmp_path, "--layers")} == set(names)
    assert [row["point"] for row in rows("query", tmp_path, "--layers", "--columns", "point")]


def test_beside_operators_other_rows_have_to_be_asked_for(tmp_path: Path) -> None:
    write_sweep_of_kernels(tmp_path / "kernels")
    alone = rows("query", tmp_path, "m == 8192 and implementation == 'ring'")
    assert [(row["backend"], row["time_us"], row["chosen"]) for row in alone] == [("torch", 130.0, True)]
    assert len(rows("query", tmp_path, "status == 'left_out'")) == 2
    write_sweep(tmp_path / "operators")
    write_sweep_of_training(tmp_path / "training")
    write_sweep_of_copies(tmp_path / "copies")
    assert len(rows("query", tmp_path)) == 13
    assert rows("query", tmp_path, "--kernels", "m == 8192 and implementation == 'ring'") == alone
    chosen = rows("query", tmp_path, "--training", "chosen")
    assert [row["directory"] for row in chosen] == ["training/fsdp_6"]
    assert len(rows("query", tmp_path, "--copies", "hidden_fraction > 0.5")) == 4
    header = analyze("query", tmp_path, "--copies").stdout.splitlines()[1].split()
    assert header[:3] == ["direction", "matrix_size", "copy_mb"]


@pytest.mark.parametrize("asked", [(), ("--tp-training",)])
def test_rows_of_stacks_are_shown_also_unasked(made: Made, asked: tuple[str, ...]) -> None:
    found = rows("query", made("stacks"), "chosen and tp_size == 4", *asked, "--columns", "impl,step_us")
    assert json.dumps(found) == '[{"impl": "megatron", "step_us": 7000.0}]'


def test_of_kernels_that_all_failed_the_reasons_are_shown(tmp_path: Path) -> None:
    failed = kernel_config(backend="flux")
    make_point("kernel", tmp_path, failed, status="skipped", error="flux is not installed")
    assert "flux is not installed" in analyze("query", tmp_path).stdout
    make_point("kernel", tmp_path, implementations={"a": implementation(150.0)})
    assert "flux is not installed" in analyze("query", tmp_path, "status != 'ok'").stdout
