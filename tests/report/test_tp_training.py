from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from overlap_sweep.analysis.points import read_points
from overlap_sweep.analysis.step_communication import StepCommunication
from overlap_sweep.analysis.tp_training import analyse_tp_training
from overlap_sweep.report.console import console_for
from overlap_sweep.report.files import write_reports
from overlap_sweep.report.tp_training import PRINTED, print_analyses, write_and_print
from overlap_sweep.run_directory import read_result
from overlap_sweep.runtime.outcome import Outcome, Outcomes
from tests.analyze import analyze
from tests.made_sweeps import write_sweep_of_stacks
from tests.make_point import ENVIRONMENT, falling, make_point, stack_config
from tests.report.page.reports import analysis_of
from tests.sweeps import Launch


def shown(directory: Path, width: int | None = None) -> str:
    stream = io.StringIO()
    console = console_for(stream) if width is None else Console(file=stream, width=width, highlight=False, markup=False)
    assert write_and_print(read_points(directory).points, console) == []
    return stream.getvalue()


def test_the_answers_stand_before_the_table(tmp_path: Path) -> None:
    lines = [line for line in shown(write_sweep_of_stacks(tmp_path)).splitlines() if line.strip()]
    model = "qwen3_tiny, 2 layers, sequences of 512, batch 2, bfloat16 on NVIDIA H200"
    assert lines[0] == f"Tensor-parallel training of {model}, 200 M parameters"
    assert lines[1].startswith("  TP=2 DP=2: megatron is fastest")
    assert lines[6].split()[:4] == ["TP", "DP", "setting", "step"]
    assert lines[8].split() == [
        *("2", "2", "megatron", "10.000", "30%", "50%", "10%", "51,200", "10.1%", "20.0", "6.405"),
        *("best", "of", "all,", "fastest"),
    ]
    assert sum(line.endswith("  tie") for line in lines) == 2
    assert len(list(tmp_path.rglob("results_*.json"))) == 9


@pytest.mark.parametrize("width", [40, 70, 120])
def test_a_narrow_terminal_shows_all_of_it(tmp_path: Path, width: int) -> None:
    text = shown(write_sweep_of_stacks(tmp_path), width)
    assert max(map(len, text.splitlines())) <= width
    joined = " ".join(text.split())
    assert "autotp zero2" in joined
    assert "51,200" in joined


def test_a_terminal_of_140_columns_shows_every_column(tmp_path: Path) -> None:
    longest = {"tp_training.attn_impl": "eager", "tp_training.activation_checkpointing": True}
    directory = make_point("tp_training", tmp_path, stack_config("fsdp_dtensor", **longest), step_us=1_234_567.0)
    points = read_points(tmp_path).points
    seen = {directory: StepCommunication(100_000.0, 50_000.0)}
    stream = io.StringIO()
    console = Console(file=stream, width=140, highlight=False, markup=False)
    print_analyses(analyse_tp_training(points, seen), console)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 140
    headers = next(line for line in lines if line.startswith("TP"))
    assert headers.split("  ")[-1].strip() == "loss"
    assert all(header in headers for header in PRINTED if header != "note")


def test_what_to_know_before_believing_it(tmp_path: Path) -> None:
    said = "attention is not fused"
    make_point("tp_training", tmp_path, stack_config("autotp"), launch_bound=True, warnings=[said])
    make_point("tp_training", tmp_path, stack_config("megatron"), losses=falling(off={6: None}))
    other = {**ENVIRONMENT, "driver": "590.2", "variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    make_point("tp_training", tmp_path, stack_config("async_tp"), environment=other)
    text = shown(tmp_path)
    assert f"TP=2 DP=1 autotp: {said}" in text
    assert "so the time is that of the host: TP=2 DP=1 autotp." in text
    assert "so it cannot be the fastest: TP=2 DP=1 megatron." in text
    assert "measured in different environments" in text
    assert "deviates, diverges" in text


def test_connections_make_no_other_environment(tmp_path: Path) -> None:
    for impl, connections in (("autotp", "8"), ("megatron", "1")):
        variables = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "NCCL_NVLS_ENABLE": "0"}
        environment = {**ENVIRONMENT, "variables": variables}
        make_point("tp_training", tmp_path, stack_config(impl), environment=environment)
    assert "environments" not in shown(tmp_path)


@pytest.mark.end_to_end
def test_analyze_writes_a_table_the_results_and_the_report(tmp_path: Path) -> None:
    process = analyze(write_sweep_of_stacks(tmp_path), "--format", "json")
    assert (process.returncode, [line for line in process.stderr.splitlines() if "error" in line]) == (0, [])
    answers = json.loads(process.stdout)
    assert [(row["setting"], row["tied"]) for row in answers] == [("megatron", None), ("megatron", "async_tp")]
    names = {path.name for path in tmp_path.rglob("*.*")} - {"result.json"}
    assert {name for name in names if not name.startswith("results_")} == {
        *("summary.txt", "tuning_report.json", "tp_training.csv", "tp_training.parquet", "report.html"),
        *("tp_training_1.png", "tp_training_1_losses.png"),
    }
    assert sum(name.startswith("results_") for name in names) == 8
    report = json.loads((tmp_path / "tuning_report.json").read_text())
    (case,) = report["tp_training"]
    assert [grid["setting"] for grid in case["grids"]] == ["megatron", "megatron"]
    assert len(case["settings"]) == 9
    assert len(report["tp_training_points"]) == 11
    assert "Details of Tensor-parallel training of qwen3_tiny" in (tmp_path / "summary.txt").read_text()


def test_results_go_where_the_reports_go(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path / "sweep", name="a")
    (tmp_path / "out").mkdir()
    write_reports(analysis_of(tmp_path / "sweep"), tmp_path / "out", "python analyze.py there")
    assert [path.name for path in (tmp_path / "out" / "a").iterdir()] == ["results_fsdp_dtensor_tp2_dp1.json"]
    assert [path.name for path in (tmp_path / "sweep" / "a").iterdir()] == ["result.json"]


@pytest.mark.parametrize("asked", [[], pytest.param(["--tp-training"], marks=pytest.mark.end_to_end)])
def test_query_shows_the_rows_also_unasked(tmp_path: Path, asked: list[str]) -> None:
    write_sweep_of_stacks(tmp_path)
    condition = "chosen and tp_size == 4"
    process = analyze("query", tmp_path, condition, *asked, "--columns", "impl,step_us", "--format", "csv")
    assert (process.returncode, process.stdout) == (0, "impl,step_us\nmegatron,7000.0\n")


def test_progress_tells_the_rate(tmp_path: Path) -> None:
    directory = make_point("tp_training", tmp_path, step_us=10_000.0, name="stack")
    outcomes = Outcomes()
    outcome = Outcome.of(read_result(directory / "result.json"), directory)
    outcomes.keep(outcome)
    assert str(outcome) == "ok      stack  10.000 ms  102,400 tokens/s"
    assert outcomes.best() is None


@pytest.mark.end_to_end
def test_real_stacks_from_launch_to_report(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "sweep")
    sizes = ("tp_size=1,2", "tp_training.num_training_steps=5", "tp_training.warmup_steps=1")
    process = launch.run("-m", "workload=tp_training", "impl=fsdp_dtensor", *sizes, "runtime.device=cpu")
    assert (process.returncode, process.stderr) == (0, "")
    assert "Tensor-parallel training of qwen3_tiny, 2 layers, sequences of 64" in process.stdout
    assert "the losses agree" in process.stdout
    found = {path.name: json.loads(path.read_text()) for path in launch.directory.rglob("results_*.json")}
    assert set(found) == {"results_fsdp_dtensor_tp1_dp1.json", "results_fsdp_dtensor_tp2_dp1.json"}
    summary = found["results_fsdp_dtensor_tp2_dp1.json"]["summary"]
    assert (summary["num_steps"], summary["losses_agree"]) == (4, True)
    assert summary["communication"]["total_ms"] > summary["communication"]["exposed_ms"] >= 0
    process = analyze(launch.directory)
    assert (process.returncode, process.stderr) == (0, "")
    assert (launch.directory / "plots" / "tp_training_1_losses.png").exists()
