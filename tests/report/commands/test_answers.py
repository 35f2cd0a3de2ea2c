"""The answers as rows: the pure function, and `analyze.py DIR --format`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from overlap_sweep.analysis.answers import COLUMNS, answer_rows
from overlap_sweep.analysis.frame import to_frame
from overlap_sweep.analysis.sweep import analyse
from overlap_sweep.config import AnalysisConfig
from tests.analyze import analyze, on_terminal
from tests.made_sweeps import write_sweep, write_tuned_sweep
from tests.make_point import make_point, operator_config, pass_times
from tests.report.test_command_line import ROOT, WRITTEN, assert_one_error


def answers(directory: Path) -> pd.DataFrame:
    return to_frame(answer_rows(analyse(directory, AnalysisConfig())), COLUMNS)


def only(frame: pd.DataFrame, tp_size: int, slot: str) -> dict[str, object]:
    (row,) = frame.query(f"tp_size == {tp_size} and slot == '{slot}'").to_dict("records")
    return {name: value for name, value in row.items() if not pd.isna(value)}


def test_one_row_per_tp_size_and_slot_that_was_tried(tmp_path: Path) -> None:
    frame = answers(write_sweep(tmp_path))
    assert list(zip(frame["tp_size"], frame["slot"], strict=True)) == [
        *((2, slot) for slot in ("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "fc2_fprop")),
        *((4, slot) for slot in ("fc1_dgrad", "fc1_wgrad")),
    ]
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == COLUMNS
    assert only(frame, 2, "fc1_dgrad") == {
        "model": "llama3_8b",
        "backend": "transformer_engine",
        "device": "NVIDIA H200",
        "precision": "bf16",
        "tokens": 8192,
        "tp_size": 2,
        "slot": "fc1_dgrad",
        "operator": "fc1",
        "phase": "dgrad",
        "pass": "bwd",
        "setting": "bulk_sm4",
        "method": "bulk",
        "num_sm": 4,
        "time_us": 320.0,
        "noise_us": 0.0,
        "none_us": 400.0,
        "floor_us": 300.0,
        "hidden_fraction": pytest.approx(0.8),
        "speedup": 1.25,
        "measured": True,
        "reason": "fastest of 3, none included",
        "final_setting": "bulk_sm4",
        "proven": False,
    }
    untouched = only(frame, 2, "fc1_fprop")
    assert (untouched["setting"], untouched["method"], untouched["final_setting"]) == ("none", "none", "none")
    assert "num_sm" not in untouched


def test_cases_are_told_apart(tmp_path: Path) -> None:
    for model in ("llama3_8b", "qwen3_0_6b"):
        make_point(
            "operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4, model=model), bwd=pass_times(80.0)
        )
    frame = answers(tmp_path)
    assert frame.groupby("model")["slot"].apply(list).to_dict() == {
        "llama3_8b": ["fc1_dgrad", "fc1_wgrad"],
        "qwen3_0_6b": ["fc1_dgrad", "fc1_wgrad"],
    }


def test_what_was_proven(tmp_path: Path) -> None:
    frame = answers(write_tuned_sweep(tmp_path))
    assert frame["proven"].all()
    assert set(frame["recommended"]) == {"tuned"}
    assert frame["layer_ratio"].tolist() == pytest.approx([0.905] * 4)
    assert only(frame, 4, "fc2_fprop")["final_setting"] == "pipeline_sm8_split4"
    assert only(frame, 4, "fc2_fprop")["default_us"] == 160.0


@pytest.mark.parametrize(
    ("best", "final"),
    [
        ("none", {"fc1_fprop": "none", "fc1_dgrad": "none", "fc1_wgrad": "none", "fc2_fprop": "none"}),
        ("default", dict.fromkeys(("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "fc2_fprop"), "default")),
        (
            "preset preset_tp4",
            {"fc1_fprop": "default", "fc1_dgrad": "default", "fc1_wgrad": "default", "fc2_fprop": "pipeline_sm16"},
        ),
    ],
)
def test_the_final_setting_is_what_the_whole_layer_says(tmp_path: Path, best: str, final: dict[str, str]) -> None:
    """Whatever is best for the operators one by one."""
    slow = {"none": 1.0, "default": 0.99, "tuned": 1.02, "preset preset_tp4": 0.98, "floor": 0.85}
    frame = answers(write_tuned_sweep(tmp_path, ratios={**slow, best: 0.9}))
    assert dict(zip(frame["slot"], frame["final_setting"], strict=True)) == final
    assert only(frame, 4, "fc1_dgrad")["setting"] == "bulk_sm4"
    assert set(frame["recommended"]) == {best}
    assert frame["layer_ratio"].iloc[0] == pytest.approx(1.0 if best == "none" else 0.9)


def test_nothing_measured_has_no_answers(tmp_path: Path) -> None:
    make_point(
        "operator", tmp_path, operator_config(2, "fc1", "fprop", "bulk"), status="skipped", error="bulk does not fit"
    )
    assert answers(tmp_path).empty


def test_every_format_has_the_answers_and_nothing_else(tmp_path: Path) -> None:
    expected = answers(write_sweep(tmp_path))
    process = analyze(tmp_path, "--format", "csv")
    assert process.returncode == 0
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(process.stdout), dtype=COLUMNS), expected)
    rows = json.loads(analyze(tmp_path, "--format", "json").stdout)
    assert [row["hidden_fraction"] for row in rows] == expected["hidden_fraction"].tolist()
    assert rows[0].keys() == COLUMNS.keys()
    command = [sys.executable, "analyze.py", str(tmp_path), "--format", "parquet"]
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(piped.stdout)), expected)


def test_files_are_written_in_every_format(tmp_path: Path) -> None:
    process = analyze(write_sweep(tmp_path), "--format", "json")
    assert {path.name for path in tmp_path.iterdir()} >= WRITTEN
    assert f"Written to {tmp_path}: summary.txt" in process.stderr


def test_parquet_on_a_terminal_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    shown = on_terminal(80, write_sweep(tmp_path), "--format", "parquet")
    assert shown.startswith("error: parquet is binary")
    assert not (tmp_path / "summary.txt").exists()


def test_fail_if(tmp_path: Path) -> None:
    directory = write_sweep(tmp_path)
    process = analyze(directory, "--fail-if", "hidden_fraction < 0.3", "--fail-if", "speedup < 1")
    assert process.returncode == 3
    assert process.stderr == (
        "fail-if: hidden_fraction < 0.3 holds for 3 of 6 answers, first fc1_fprop at TP=2 (hidden_fraction 0.000)\n"
    )
    assert "fc1_dgrad" in process.stdout
    assert (tmp_path / "summary.txt").exists()
    assert analyze(directory, "--fail-if", "speedup < 1").returncode == 0
    assert_one_error(analyze(directory, "--fail-if", "layer_ratio > 1"), "layer_ratio has no value")
    assert_one_error(analyze(directory, "--fail-if", "hidden < 0.3"), "hidden is no column", "hidden_fraction")
    assert analyze(directory, "--fail-if").returncode == 2


def test_what_cannot_be_read_counts_before_fail_if(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "result.json").write_text("{")
    process = analyze(tmp_path, "--fail-if", "hidden_fraction < 0.3", "--format", "csv")
    assert_one_error(process, "cut/result.json cannot be read")
    assert process.stdout.startswith("model,backend")


def test_help_names_every_column() -> None:
    words = analyze("report", "--help").stdout.split()
    assert COLUMNS.keys() <= set(words)


def test_a_wrong_fail_if_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep")
    process = analyze(tmp_path / "sweep", "--output", tmp_path / "reports", "--fail-if", "speedups < 1")
    assert_one_error(process, "speedups is no column", "speedup")
    assert process.stdout == ""
    assert not (tmp_path / "reports").exists()
