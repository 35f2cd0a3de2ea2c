from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from overlap_sweep.analysis import frame, kernel_frame, layer_frame, tp_training_frame, training_frame
from overlap_sweep.analysis.copies import COPY_COLUMNS
from tests.analyze import analyze, files_below, on_terminal
from tests.made_sweeps import write_sweep, write_sweep_of_copies, write_sweep_of_training, write_tuned_sweep
from tests.make_point import implementation, kernel_config, make_point, operator_config, pass_times, variant
from tests.report.test_command_line import ROOT, TRACE, assert_one_error
from tests.report.test_kernels import write_family


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed; 13 rows."""
    return write_sweep(tmp_path_factory.mktemp("sweep"))


def rows(*arguments: str | Path) -> list[dict[str, object]]:
    process = analyze("query", *arguments, "--format", "json")
    assert process.returncode == 0, process.stderr
    found: list[dict[str, object]] = json.loads(process.stdout)
    return found


def test_the_rows_that_match(sweep: Path) -> None:
    found = rows(sweep, "num_sm >= 8 and tp_size == 2 and status == 'ok'")
    assert [row["config_id"] for row in found] == [
        "tp2_fc1_dgrad_bulk_sm8", "tp2_fc1_wgrad_bulk_sm8", "tp2_fc2_fprop_pipeline_sm8_split4",
    ]  # fmt: skip
    assert found[0].keys() == frame.COLUMNS.keys()
    assert len(rows(sweep)) == 13


def test_results_are_only_read(tmp_path: Path) -> None:
    before = files_below(write_sweep(tmp_path))
    assert len(rows(tmp_path, "tp_size == 2")) == 8
    assert files_below(tmp_path) == before


def test_a_directory_that_was_analysed_already(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path / "sweep")
    raw = rows(tmp_path / "sweep"), rows(tmp_path / "sweep", "--layers")
    analyze(tmp_path / "sweep", "--output", tmp_path / "reports")
    analyze(tmp_path / "sweep")
    assert (rows(tmp_path / "sweep"), rows(tmp_path / "sweep", "--layers")) == raw
    assert (rows(tmp_path / "reports"), rows(tmp_path / "reports", "--layers")) == raw
    (tmp_path / "reports" / "points.parquet").write_bytes(b"PAR1")
    assert_one_error(analyze("query", tmp_path / "reports"), "points.parquet cannot be read", "analyse the results")


def test_metrics_of_traces(tmp_path: Path) -> None:
    directory = make_point(
        "operator", tmp_path, operator_config(2, "fc1", "fprop", "ring_exchange"), traces=["t.json.gz", "gone.json.gz"]
    )
    shutil.copy(TRACE, directory / "t.json.gz")
    (row,) = rows(tmp_path, "forward_overlap_ratio > 0 and note.notna()")
    assert row["note"] == "gone.json.gz is missing"
    table = analyze("query", tmp_path, "total_overlap_ratio > 0").stdout
    assert "total_overlap_ratio" in table


def test_layers(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path)
    found = rows(tmp_path, "--layers", "point == 'proof' and ratio < 0.96", "--sort", "-ratio")
    assert [round(float(str(row["ratio"])), 3) for row in found] == [0.95, 0.905, 0.85]
    assert found[0].keys() == layer_frame.COLUMNS.keys()
    assert "55,114.5" in analyze("query", tmp_path, "--layers").stdout


def test_sort_and_limit(sweep: Path) -> None:
    found = rows(sweep, "phase != 'wgrad'", "--sort", "tp_size,-speedup", "--limit", "4")
    assert [row["config_id"] for row in found] == [
        "tp2_fc2_fprop_pipeline_sm8_split4",
        "tp2_fc1_dgrad_bulk_sm4",
        "tp2_fc1_dgrad_bulk_sm8",
        "tp2_fc1_fprop_ring_agg0",
    ]
    # What has no value comes last, whichever way.
    for sort in ("speedup", "-speedup"):
        assert rows(sweep, "--sort", sort)[-1]["speedup"] is None
    assert "2 of 13 rows" in analyze("query", sweep, "--limit", "2").stdout


def test_columns(sweep: Path) -> None:
    (row,) = rows(sweep, "speedup > 1.3", "--columns", "slot, num_sm,slot")
    assert row == {"slot": "fc2_fprop", "num_sm": 8}
    lines = analyze("query", sweep, "speedup > 1.3").stdout.splitlines()
    assert lines[1].split()[0] == "config_id"
    assert lines[3].split() == ["tp2_fc2_fprop_pipeline_sm8_split4", "150.0", "200.0", "100.0", "0.500", "1.333", "ok"]
    # A table shows what the condition is about.
    assert "num_splits" in analyze("query", sweep, "num_splits == 4").stdout
    assert "relative_error" in analyze("query", sweep, "--columns", "all").stdout


def test_why_points_are_not_ok(sweep: Path) -> None:
    lines = analyze("query", sweep, "status != 'ok'").stdout.splitlines()
    assert any(line.split() == ["tp8_fc1_all_bulk_sm4", "failed", "[rank3]", "out", "of", "memory"] for line in lines)


def test_cases_are_told_apart(tmp_path: Path) -> None:
    for model in ("llama3_8b", "qwen3_0_6b"):
        make_point(
            "operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4, model=model), bwd=pass_times(80.0)
        )
    shown = analyze("query", tmp_path).stdout
    assert "llama3_8b" in shown
    assert "qwen3_0_6b" in shown
    assert "bf16" not in shown


def test_every_format_round_trips(sweep: Path) -> None:
    expected = pd.DataFrame(rows(sweep), columns=list(frame.COLUMNS)).astype(frame.COLUMNS)
    text = analyze("query", sweep, "--format", "csv").stdout
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(text), dtype=frame.COLUMNS), expected)
    command = [sys.executable, "analyze.py", "query", str(sweep), "--format", "parquet"]
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(piped.stdout)), expected)
    assert on_terminal(80, *command[2:]).startswith("error: parquet is binary and stdout a terminal")


def test_no_row_matches(sweep: Path) -> None:
    process = analyze("query", sweep, "tp_size == 16")
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "No row matches, of 13.\n")
    assert rows(sweep, "tp_size == 16") == []
    text = analyze("query", sweep, "tp_size == 16", "--format", "csv").stdout
    assert text == ",".join(frame.COLUMNS) + "\n"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_terminal_of_any_width_shows_everything(sweep: Path, columns: int) -> None:
    shown = on_terminal(columns, "query", sweep, "tp_size == 2 and num_splits == 4")
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    for expected in ("tp2_fc2_fprop_pipeline_sm8_split4", "150.0", "1.333", "num_splits", "1 row"):
        assert expected in shown


def test_fail_if_looks_at_the_rows_that_match(sweep: Path) -> None:
    failing = analyze("query", sweep, "tp_size == 4", "--fail-if", "speedup < 1", "--limit", "1")
    assert failing.returncode == 3
    assert failing.stderr.startswith("fail-if: speedup < 1 holds for 4 of 4 matching rows, first fc1_dgrad at TP=4")
    assert analyze("query", sweep, "slot == 'fc2_fprop'", "--fail-if", "speedup < 1").returncode == 0
    assert_one_error(analyze("query", sweep, "tp_size == 16", "--fail-if", "speedup < 1"), "no matching rows")
    assert_one_error(analyze("query", sweep, "--fail-if", "tp1_us > 1 and default_us > 1"), "default_us has no value")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("num_sms > 8",), "num_sms is no column; the nearest are num_sm"),
        (("num_sm > 8 and",), "cannot be understood"),
        (("pass == 'fwd'",), "`pass`"),
        (("num_sm + 1",), "is no condition"),
        (("@pd.compat",), "@ is not allowed"),
        (("__import__('os')",), "__import__ is no column"),
        (("num_sm.to_csv('written') == 1",), "not allowed"),
        (("",), "is empty"),
        (("--columns", "slot,speedups"), "speedups is no column; the nearest are speedup"),
        (("--columns", ""), "An empty name"),
        (("--sort", "-speedups"), "speedups is no column"),
    ],
)
def test_wrong_input_is_one_error(sweep: Path, arguments: tuple[str, ...], reason: str) -> None:
    process = analyze("query", sweep, *arguments)
    assert_one_error(process, reason)
    assert process.stderr.count("\n") == 1
    assert process.stdout == ""


def test_directories_without_results(tmp_path: Path) -> None:
    assert_one_error(analyze("query", tmp_path), "holds no results")
    assert_one_error(analyze("query", tmp_path / "nowhere"), "does not exist")


def test_usage_errors(sweep: Path) -> None:
    for arguments in (("--limit", "0"), ("--format", "xml"), ("a", "b")):
        assert analyze("query", sweep, *arguments).returncode == 2


def test_what_cannot_be_read_is_named_after_the_rows(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "result.json").write_text("{")
    process = analyze("query", tmp_path, "tp_size == 2", "--format", "csv")
    assert_one_error(process, "cut/result.json cannot be read")
    assert len(pd.read_csv(io.StringIO(process.stdout))) == 8


def test_points_that_do_not_know_their_gpu_are_of_no_other(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(2, "fc1", "fprop", "ring_exchange"))
    skipped = (
        make_point("operator", tmp_path, operator_config(2, "fc2", "fprop", "ring_exchange"), status="skipped")
        / "result.json"
    )
    skipped.write_text(json.dumps({**json.loads(skipped.read_text()), "environment": {}}))
    assert len({row["device"] for row in rows(tmp_path)}) == 2
    assert "device" not in analyze("query", tmp_path).stdout
    other = make_point("operator", tmp_path, operator_config(4, "fc1", "fprop", "ring_exchange")) / "result.json"
    other.write_text(json.dumps({**json.loads(other.read_text()), "environment": {"gpu": "another"}}))
    assert "device" in analyze("query", tmp_path).stdout


def test_variants_are_called_by_their_files_in_tables(tmp_path: Path) -> None:
    names = ["none", "file:/some/where/best.yaml", "file:/some/where/same.yaml", "file:/else/where/same.yaml"]
    make_point("layer", tmp_path, variants={name: variant([100.0, 101.0, 102.0]) for name in names})
    table = analyze("query", tmp_path, "--layers").stdout
    assert "file:best.yaml" in table
    assert "/best.yaml" not in table
    assert all(name in table for name in names[2:])
    assert {row["variant"] for row in rows(tmp_path, "--layers")} == set(names)
    assert analyze("query", tmp_path, "--layers", "--columns", "point").returncode == 0


def test_a_wrong_fail_if_prints_nothing_else(sweep: Path) -> None:
    wrong = analyze("query", sweep, "--fail-if", "tp_sizes > 2")
    assert_one_error(wrong, "tp_sizes is no column")
    assert wrong.stdout == ""


def test_help_names_every_column() -> None:
    shown = analyze("query", "--help").stdout
    assert "python analyze.py query multirun/2026-11-20 'num_sm > 8 and tp_size == 8'" in shown
    of_points, _, of_layers = shown.partition("Columns with --layers")
    assert frame.COLUMNS.keys() <= set(of_points.split())
    assert layer_frame.COLUMNS.keys() <= set(of_layers.split())
    assert tp_training_frame.COLUMNS.keys() <= set(of_layers.partition("Columns with --tp-training")[2].split())


def test_rows_of_kernels(tmp_path: Path) -> None:
    write_family(tmp_path / "kernels")
    found = rows(tmp_path, "m == 8192 and implementation == 'ring'")
    assert [(row["backend"], row["time_us"], row["chosen"]) for row in found] == [("torch", 130.0, True)]
    assert found[0].keys() == kernel_frame.COLUMNS.keys()
    assert len(rows(tmp_path, "status == 'left_out'")) == 2
    # Beside others they have to be asked for.
    write_sweep(tmp_path / "operators")
    assert len(rows(tmp_path)) == 13
    assert rows(tmp_path, "--kernels", "m == 8192 and implementation == 'ring'") == [
        {**found[0], "directory": "kernels/torch_8192"}
    ]
    shown = analyze("query", tmp_path, "--kernels", "chosen", "--sort", "m").stdout
    header = next(line for line in shown.splitlines() if "implementation" in line).split()
    assert header[:4] == ["kernel", "m", "n", "k"]
    assert "2 rows" in shown
    assert analyze("query", tmp_path, "--kernels", "--layers").returncode == 2


def test_rows_of_kernels_that_were_analysed_elsewhere(tmp_path: Path) -> None:
    raw = rows(write_family(tmp_path / "kernels"))
    analyze(tmp_path / "kernels", "--output", tmp_path / "reports")
    assert rows(tmp_path / "reports") == rows(tmp_path / "reports", "--kernels") == raw
    assert_one_error(analyze("query", tmp_path / "reports", "--layers"), "holds no results")


def test_of_kernels_that_all_failed_the_reasons_are_shown(tmp_path: Path) -> None:
    make_point(
        "kernel",
        tmp_path,
        kernel_config(backend="flux"),
        implementations={},
        status="skipped",
        error="flux is not installed",
    )
    process = analyze("query", tmp_path)
    assert "flux is not installed" in process.stdout
    make_point("kernel", tmp_path, implementations={"a": implementation(150.0)})
    assert "flux is not installed" in analyze("query", tmp_path, "status != 'ok'").stdout


def test_rows_of_training_runs_and_copies(tmp_path: Path) -> None:
    write_sweep_of_training(tmp_path / "training")
    found = rows(tmp_path / "training")
    assert len(found) == 9
    assert found[0].keys() == training_frame.COLUMNS.keys()
    write_sweep_of_copies(tmp_path / "copies")
    assert rows(tmp_path / "copies")[0].keys() == COPY_COLUMNS.keys()
    # Of several kinds of points, those that are asked for.
    chosen = rows(tmp_path, "--training", "chosen")
    assert [row["directory"] for row in chosen] == ["training/fsdp_6"]
    shown = analyze("query", tmp_path, "--copies", "hidden_fraction > 0.5", "--sort", "matrix_size").stdout
    assert shown.splitlines()[1].split()[:3] == ["direction", "matrix_size", "copy_mb"]
    assert shown.count("device_to_host") == 4
    refused = analyze("query", tmp_path, "--copies", "--training")
    assert refused.returncode == 2
    assert "--training and --copies: give only one" in " ".join(refused.stderr.replace("\u2502", " ").split())


def test_rows_of_training_runs_that_were_analysed_elsewhere(tmp_path: Path) -> None:
    raw = rows(write_sweep_of_training(tmp_path / "training"))
    analyze(tmp_path / "training", "--output", tmp_path / "reports")
    assert rows(tmp_path / "reports") == rows(tmp_path / "reports", "--training") == raw
