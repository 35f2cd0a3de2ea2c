from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from tests.analyze import Ran, analyze, files_below, on_terminal
from tests.made_sweeps import write_sweep, write_tuned_sweep
from tests.make_point import default_timing, layer_config, make_point, operator_config, pass_times, variant

ROOT = Path(__file__).parent.parent.parent
TRACE = ROOT / "tests" / "data" / "traces" / "h200x4_llama3_70b_layer_te_default.json.gz"

WRITTEN = {
    "report.html",
    "summary.txt",
    "tuning_report.json",
    "points.csv",
    "points.parquet",
    "optimal_tp_comm_overlap_cfg.yaml",
    "optimal_tp_comm_overlap_cfg_tp2.yaml",
    "optimal_tp_comm_overlap_cfg_tp4.yaml",
    "megatron_bridge_preset_tp2.py",
    "megatron_bridge_preset_tp4.py",
    "ub_cfgs_tp2.json",
    "ub_cfgs_tp4.json",
}
PLOTS = {*(f"{plot}_tp{tp_size}.png" for plot in ("hidden_fraction", "num_sm") for tp_size in (2, 4)), "tp_scaling.png"}


def assert_one_error(process: Ran, *parts: str, status: int = 1) -> None:
    assert process.returncode == status
    assert "Traceback" not in process.stderr
    assert process.stderr.count("error: ") == 1
    assert all(part in process.stderr for part in parts), process.stderr


def test_writes_everything_and_prints_the_table(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    before = files_below(tmp_path)
    process = analyze(tmp_path)
    assert (process.returncode, process.stderr) == (0, "")
    after = files_below(tmp_path)
    assert {path.name for path in after.keys() - before.keys()} == WRITTEN | PLOTS
    assert before.items() <= after.items()
    lines = process.stdout.splitlines()
    assert next(line for line in lines if "fc1_dgrad " in line).split() == [
        "2", "fc1_dgrad", "bulk_sm4", "320.0", "0.0", "400.0", "300.0", "1.25x", "80%", "-",
    ]  # fmt: skip
    answer = "TP=2: 1.19x no overlap in fc1, fc2 fwd: 670.0 us instead of 800.0, GEMMs alone 500.0"
    assert any(answer in line for line in lines[:4])
    assert "9 points: 6 ok, 1 failed, 2 skipped" in lines
    assert any(line.endswith(" and 1 more: bulk does not fit") for line in lines)
    assert any(line.endswith("[rank3] out of memory") for line in lines)
    summary = (tmp_path / "summary.txt").read_text()
    assert summary.startswith(process.stdout.partition("\nWritten to")[0].rstrip())
    assert "python launch.py -m tp_size=2,4,8" in summary


def test_the_table_in_parquet_and_csv(tmp_path: Path) -> None:
    analyze(write_sweep(tmp_path))
    parquet, text = pd.read_parquet(tmp_path / "points.parquet"), pd.read_csv(tmp_path / "points.csv")
    assert len(parquet) == len(text) == 13
    assert list(parquet.columns) == list(text.columns)
    best = parquet.query("method == 'bulk' and tp_size == 2 and phase == 'dgrad' and status == 'ok'")
    assert sorted(best["hidden_fraction"]) == [pytest.approx(0.4), pytest.approx(0.8)]


def test_output_elsewhere_leaves_the_results_alone(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep")
    before = files_below(tmp_path / "sweep")
    assert analyze(tmp_path / "sweep", "--output", tmp_path / "new" / "there").returncode == 0
    assert files_below(tmp_path / "sweep") == before
    assert {path.name for path in (tmp_path / "new" / "there").iterdir()} == WRITTEN | {"plots"}


def test_analysing_again_changes_nothing_but_the_date(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    analyze(tmp_path)
    first = files_below(tmp_path)
    analyze(tmp_path)
    changed = {path.name for path, content in files_below(tmp_path).items() if first[path] != content}
    assert changed <= {"tuning_report.json"}


def test_one_run_directory(tmp_path: Path) -> None:
    directory = make_point(
        "operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4), bwd=pass_times(80.0)
    )
    assert analyze(directory).returncode == 0
    assert yaml.safe_load((directory / "optimal_tp_comm_overlap_cfg.yaml").read_text()).keys() == {
        "fc1_dgrad",
        "fc1_wgrad",
    }


def test_the_objective_is_an_option(tmp_path: Path) -> None:
    directory = make_point(
        "operator", tmp_path, operator_config(2, "fc1", "fprop", "ring_exchange"), traces=["t.json.gz"]
    )
    shutil.copy(TRACE, directory / "t.json.gz")
    assert analyze(tmp_path, "analysis.objective=overlap_ratio").returncode == 0
    report = json.loads((tmp_path / "tuning_report.json").read_text())
    assert report["objective"] == "overlap_ratio"
    # By time the ring, no faster than none, would not be chosen.
    assert report["best"][0]["overlap_method"] == "ring_exchange"


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("analysis.objective=speed", "choose one of time, overlap_ratio"),
        ("analysis.speed=1", "is no option of the analysis"),
        ("analysis.overlap_threshold=high", "is no number"),
        ("analysis.overlap_threshold=7", "out of range"),
    ],
)
def test_a_wrong_option_is_a_usage_error(tmp_path: Path, option: str, reason: str) -> None:
    process = analyze(write_sweep(tmp_path), option)
    assert process.returncode == 2
    assert reason in process.stderr
    assert "Traceback" not in process.stderr


def test_unreadable_results_are_named_and_the_rest_is_analysed(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    (tmp_path / "cut" / "x").mkdir(parents=True)
    (tmp_path / "cut" / "result.json").write_text('{"schema": 1, "na')
    process = analyze(tmp_path)
    assert_one_error(process, f"{tmp_path}/cut/result.json", "measure the point again")
    assert {path.name for path in tmp_path.iterdir()} >= WRITTEN
    assert "10 points: 6 ok, 1 failed, 2 skipped, 1 unreadable" in process.stdout


def test_an_unreadable_trace_is_named_and_the_rest_is_analysed(tmp_path: Path) -> None:
    directory = make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4), traces=["t.json"])
    (directory / "t.json").write_text("")
    process = analyze(tmp_path)
    assert_one_error(process, f"{directory}/t.json is empty")
    assert (tmp_path / "optimal_tp_comm_overlap_cfg.yaml").exists()


def test_directories_without_anything_to_analyse(tmp_path: Path) -> None:
    assert_one_error(analyze(tmp_path), f"{tmp_path} holds no results")
    assert_one_error(analyze(tmp_path / "nowhere"), "does not exist")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "result.json").touch()
    assert_one_error(analyze(tmp_path), "cut/result.json cannot be read")
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


def test_nothing_measured_is_still_reported(tmp_path: Path) -> None:
    make_point(
        "operator",
        tmp_path,
        operator_config(2, "fc1", "fprop", "bulk"),
        status="skipped",
        error="bulk does not fit fc1_fprop",
    )
    process = analyze(tmp_path)
    assert process.returncode == 0
    assert "1 point: 1 skipped" in process.stdout
    assert "bulk does not fit fc1_fprop" in process.stdout


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = analyze(write_sweep(tmp_path / "sweep"), "--output", tmp_path / "file")
    assert_one_error(process, "cannot be written to", "--output")


@pytest.mark.parametrize("columns", [40, 79, 200])
def test_a_terminal_of_any_width_shows_everything(tmp_path: Path, columns: int) -> None:
    shown = on_terminal(columns, write_sweep(tmp_path))
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    for expected in ("fc1_dgrad", "bulk_sm4", "320.0", "pipeline_sm8_split4", "1.25x", "80%"):
        assert expected in shown


def write_sweep_with_defaults(directory: Path) -> Path:
    """fc1: forward default 190 beats none 200 and ring 220; backward default 440, none 400, bulk 320."""
    fwd, bwd = default_timing(190.0, none_us=200.0), default_timing(440.0, none_us=400.0)
    ring = operator_config(2, "fc1", "fprop", "ring_exchange", aggregate=False)
    bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4)
    for point, fwd_us, bwd_us in ((ring, 220.0, 400.0), (bulk, 200.0, 320.0)):
        times = {"fwd": pass_times(fwd_us, 200.0, default=fwd), "bwd": pass_times(bwd_us, 400.0, default=bwd)}
        make_point("operator", directory, point, **times)
    return directory


def test_the_default_is_compared_with(tmp_path: Path) -> None:
    lines = analyze(write_sweep_with_defaults(tmp_path)).stdout.splitlines()
    assert any("TP=2: 1.15x no overlap, 1.21x the default in fc1: 520.0 us instead of 600.0" in line for line in lines)
    assert next(line for line in lines if "fc1_dgrad " in line).split() == [
        "2", "fc1_dgrad", "bulk_sm4", "320.0", "0.0", "400.0", "440.0", "50.0", "1.25x", "23%", "-",
    ]  # fmt: skip
    assert "TP=2 fc1 fwd: the default, 190.0 us, is faster than anything tried; sweep more settings." in lines
    narrow = on_terminal(60, tmp_path)
    assert "none 400.0 us, default 440.0 us, floor 50.0 us" in narrow


def test_nothing_beats_no_overlap_only_where_the_default_does_not(tmp_path: Path) -> None:
    for folder, default_us, expected in (
        ("faster", 90.0, "nothing tried beats 100.0 us without overlap, 0.90x the default"),
        ("slower", 110.0, "nothing beats 100.0 us without overlap, 1.10x the default"),
    ):
        ring = operator_config(2, "fc1", "fprop", "ring_exchange", aggregate=False)
        make_point("operator", tmp_path / folder, ring, fwd=pass_times(120.0, default=default_timing(default_us)))
        assert f"TP=2: don't overlap fc1 fwd: {expected}\n" in analyze(tmp_path / folder).stdout


def write_layers(directory: Path) -> Path:
    variants = {
        "none": variant([60_000.0] * 6),
        "floor": variant([50_000.0] * 6),
        "file:best.yaml": variant([57_000.0] * 6),
    }
    make_point("layer", directory, variants=variants, name="a_layer", warnings=["GPU 3 was throttled."])
    make_point("layer", directory, variants={}, name="b_layer", status="failed", error="[rank3] out of memory\n...")
    (directory / "c_layer" / ".hydra").mkdir(parents=True)
    (directory / "c_layer" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(layer_config()))
    return directory


def test_layers_alone(tmp_path: Path) -> None:
    process = analyze(write_layers(tmp_path))
    assert (process.returncode, process.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        "report.html", "summary.txt", "tuning_report.json", "layers.csv", "layers.parquet",
    }  # fmt: skip
    lines = process.stdout.splitlines()
    assert lines[1].startswith("llama3_8b transformer_layer, TP=4, 8192 tokens")
    assert "file:best.yaml is 5.0% faster than none (5.0 to 5.0%)" in lines
    assert "GPU 3 was throttled." in lines
    assert "3 points: 1 ok, 1 failed, 1 missing" in lines
    assert "  failed: b_layer: [rank3] out of memory" in lines
    assert "  missing: c_layer: no result.json: given up, or still running" in lines
    summary = (tmp_path / "summary.txt").read_text()
    assert summary.startswith(process.stdout.partition("\nWritten to")[0].rstrip())
    assert f"in {tmp_path}/a_layer" in summary
    parquet, text = pd.read_parquet(tmp_path / "layers.parquet"), pd.read_csv(tmp_path / "layers.csv")
    assert list(parquet.columns) == list(text.columns)
    assert parquet["variant"].fillna("").tolist() == ["none", "floor", "file:best.yaml", "", ""]


def test_layers_beside_operators(tmp_path: Path) -> None:
    analyze(write_sweep(tmp_path / "alone"), "--output", tmp_path / "alone_reports")
    write_sweep(tmp_path / "both" / "operators")
    write_layers(tmp_path / "both" / "layers")
    process = analyze(tmp_path / "both", "--output", tmp_path / "reports")
    assert "12 points: 7 ok, 2 failed, 2 skipped, 1 missing" in process.stdout
    written = {path.name for path in (tmp_path / "reports").iterdir()}
    assert written == WRITTEN | {"plots", "layers.csv", "layers.parquet"}
    with_layers = pd.read_csv(tmp_path / "reports" / "points.csv").drop(columns="directory")
    pd.testing.assert_frame_equal(
        with_layers, pd.read_csv(tmp_path / "alone_reports" / "points.csv").drop(columns="directory")
    )
    one = analyze(tmp_path / "both" / "layers" / "a_layer")
    assert "1 point: 1 ok" in one.stdout


def test_launch_bound_layers_are_counted(tmp_path: Path) -> None:
    make_point(
        "layer", tmp_path, variants={"none": variant([100.0] * 6), "default": variant([90.0] * 6, launch_bound=True)}
    )
    assert "1 point: 1 ok, 1 launch_bound" in analyze(tmp_path).stdout


@pytest.mark.parametrize("arguments", [(), ("--help",), ("report", "--help"), ("trace", "--help")])
def test_help(arguments: tuple[str, ...]) -> None:
    process = analyze(*arguments)
    assert "Usage: analyze.py" in process.stdout + process.stderr
    if arguments == ("--help",):
        assert "python analyze.py trace trace_rank0.json.gz --format json" in process.stdout


def test_analysis_never_imports_torch(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    write_layers(tmp_path)
    for arguments in (["--help"], [str(tmp_path)], ["trace", str(TRACE)]):
        command = [sys.executable, "-X", "importtime", "analyze.py", *arguments]
        process = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
        imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in process.stderr.splitlines()}
        assert process.returncode == 0
        assert "torch" not in imported
        assert arguments != ["--help"] or not imported & {"pandas", "pyarrow", "numpy", "hydra"}


def test_a_sweep_of_the_tuner(tmp_path: Path) -> None:
    process = analyze(write_tuned_sweep(tmp_path))
    assert (process.returncode, process.stderr) == (0, "")
    written = {path.name for path in tmp_path.iterdir() if path.is_file()} - {"tuner.json", "search.json"}
    of_size_2 = {name for name in WRITTEN if "_tp2" in name}
    assert written == (WRITTEN - of_size_2) | {"proof.json", "layers.csv", "layers.parquet"}
    assert (tmp_path / "summary.txt").read_text().startswith(process.stdout.partition("\nWritten to")[0].rstrip())
    assert "6 points: 6 ok" in process.stdout.splitlines()


def test_a_tuner_record_that_cannot_be_read_is_named_and_the_rest_is_analysed(tmp_path: Path) -> None:
    write_tuned_sweep(tmp_path)
    (tmp_path / "tuner.json").write_text("{")
    process = analyze(tmp_path)
    assert_one_error(process, f"{tmp_path}/tuner.json cannot be read", "run the tuner again")
    assert "TP=4: 1.19x no overlap" in process.stdout
    assert "llama3_8b transformer_layer, TP=4" in process.stdout
