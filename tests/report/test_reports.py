"""`analyze.py DIR`: what every report has in common, and decisions of its own about what is told where."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from rich.console import Console

from overlap_sweep.analysis.kernels import analyse_kernels
from overlap_sweep.analysis.points import Point, read_points
from overlap_sweep.analysis.step_communication import StepCommunication
from overlap_sweep.analysis.tp_training import analyse_tp_training
from overlap_sweep.report import copies, kernels, tp_training, training
from overlap_sweep.report.console import console_for
from overlap_sweep.report.plain_table import PlainRow, print_table
from overlap_sweep.report.provenance import launch_commands
from overlap_sweep.run_directory import read_result
from overlap_sweep.runtime.outcome import Outcome, Outcomes
from overlap_sweep.runtime.progress import progress
from tests.analyze import analyze, files_below
from tests.golden.made_report import BEST_TRACE
from tests.made_sweeps import write_tuner
from tests.make_point import (
    ENVIRONMENT,
    implementation,
    kernel_config,
    make_point,
    operator_config,
    pass_times,
    resolved,
    stack_config,
)
from tests.report.conftest import Made


@pytest.mark.parametrize("name", ["operators", "tuned", "layers", "kernels", "training", "copies", "stacks"])
def test_a_report_stands_beside_results_that_stay_as_they_are(made: Made, tmp_path: Path, name: str) -> None:
    sweep = tmp_path / "sweep"
    shutil.copytree(made(name), sweep)
    before = files_below(sweep)
    process = analyze(sweep)
    assert (process.returncode, [line for line in process.stderr.splitlines() if "error" in line]) == (0, [])
    first = files_below(sweep)
    assert before.items() <= first.items()
    summary = (sweep / "summary.txt").read_text()
    assert summary.startswith(process.stdout.partition("\nWritten to")[0].rstrip())
    for path in sweep.glob("*.parquet"):
        parquet, text = pd.read_parquet(path), pd.read_csv(path.with_suffix(".csv"))
        assert (list(parquet.columns), len(parquet)) == (list(text.columns), len(text))
    # Analysing again changes nothing but the date.
    analyze(sweep)
    again = files_below(sweep)
    assert {path.name for path in again if again[path] != first.get(path)} <= {"tuning_report.json"}


def test_one_run_directory(tmp_path: Path, no_page: None) -> None:
    point = operator_config(2, "fc1", "all", "bulk", num_sm=4)
    directory = make_point("operator", tmp_path, point, bwd=pass_times(80.0))
    assert analyze(directory).returncode == 0
    given = yaml.safe_load((directory / "optimal_tp_comm_overlap_cfg.yaml").read_text())
    assert given.keys() == {"fc1_dgrad", "fc1_wgrad"}


def test_the_objective_is_an_option(tmp_path: Path, no_page: None) -> None:
    point = operator_config(2, "fc1", "fprop", "ring_exchange")
    shutil.copy(BEST_TRACE, make_point("operator", tmp_path, point, traces=["t.json.gz"]) / "t.json.gz")
    # By time the ring, no faster than none, is not chosen.
    for objective, chosen in (("time", "none"), ("overlap_ratio", "ring_exchange")):
        assert analyze(tmp_path, f"analysis.objective={objective}").returncode == 0
        report = json.loads((tmp_path / "tuning_report.json").read_text())
        assert (report["objective"], report["best"][0]["overlap_method"]) == (objective, chosen)


def test_where_the_commands_of_a_sweep_are_told(tmp_path: Path) -> None:
    """The tuner's own record comes first, then the sweep's, then that of each point; what was cut short costs them."""

    def commands() -> list[str]:
        return launch_commands(read_points(tmp_path).points)

    overrides = {"task": ["tp_size=2", "method=none,bulk"], "hydra": ["hydra.mode=MULTIRUN", "hydra/launcher=torchrun"]}
    for method in ("none", "bulk"):
        point = make_point("operator", tmp_path, operator_config(method=method), name=method)
        (point / ".hydra").mkdir()
        (point / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(["tp_size=2", f"method={method}"]))
    assert commands() == [f"python launch.py tp_size=2 method={method}" for method in ("bulk", "none")]
    (tmp_path / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": overrides}}))
    assert commands() == ["python launch.py -m tp_size=2 method=none,bulk hydra/launcher=torchrun"]
    (tmp_path / "multirun.yaml").write_text("hydra: {")
    assert commands() == []
    write_tuner(tmp_path)
    assert commands() == ["python launch.py +experiment=tp_overlap_tuner"]


@pytest.mark.parametrize(
    ("name", "print_sweep"),
    [
        ("kernels", kernels.print_kernels),
        ("training", training.print_training),
        ("copies", copies.print_copies),
        ("stacks", tp_training.write_and_print),
    ],
)
def test_a_sweep_prints_at_its_end_what_a_report_begins_with(
    made: Made, tmp_path: Path, name: str, print_sweep: Callable[[list[Point], Console], object], no_page: None
) -> None:
    shutil.copytree(made(name), tmp_path / "sweep")
    stream = io.StringIO()
    print_sweep(read_points(tmp_path / "sweep").points, console_for(stream))
    assert len(stream.getvalue().splitlines()) > 5
    assert analyze(tmp_path / "sweep").stdout.startswith(stream.getvalue())


@pytest.mark.parametrize(("cases", "tables"), [(3, True), (4, False)])
def test_tables_of_few_kernels_are_printed_those_of_all_are_written(
    tmp_path: Path, cases: int, tables: bool, no_page: None
) -> None:
    for i in range(cases):
        make_point("kernel", tmp_path, kernel_config(n=4096 * (i + 1)), implementations={"ring": implementation(150.0)})
    below = {"fused": implementation(90.0)}
    make_point("kernel", tmp_path, kernel_config(n=4096, backend="flux"), implementations=below)
    printed = analyze(tmp_path).stdout
    assert ("gemm_only" in printed, "summary.txt and report.html" in printed) == (tables, not tables)
    # Whatever is printed, what makes an answer doubtful is.
    assert "beats the bound" in printed
    assert (tmp_path / "summary.txt").read_text().count("gemm_only") == cases


def test_many_kernels_are_printed_soon(tmp_path: Path) -> None:
    """When rich laid out the tables, 300 points of 20 implementations took half a minute."""
    measured = {f"ring{i}": implementation(150.0 + i) for i in range(20)}
    for m in range(1, 61):
        make_point("kernel", tmp_path, kernel_config(64 * m), implementations=measured)
    analyses, stream = analyse_kernels(read_points(tmp_path).points), io.StringIO()
    start_s = time.process_time()
    kernels.print_analyses(analyses, console_for(stream))
    assert time.process_time() - start_s < 2
    assert len(stream.getvalue().splitlines()) > 60 * 23


def test_of_many_settings_the_fastest_are_printed(tmp_path: Path, no_page: None) -> None:
    for ahead in range(training.MOST_ROWS + 6):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), step_us=1500.0 - 10 * ahead)
    printed = analyze(tmp_path).stdout
    # The simplest, which gains are told against, is the slowest.
    assert "\ndefaults" in printed
    assert "... and 5 more" in printed
    assert "and 5 more" not in (tmp_path / "summary.txt").read_text()


@pytest.mark.parametrize(
    ("workload", "points"),
    [
        ("kernel", [kernel_config(), kernel_config(backend="symm_mem")]),
        ("tp_training", [stack_config("autotp"), stack_config("megatron")]),
    ],
)
def test_connections_make_no_other_environment(
    tmp_path: Path, workload: str, points: list[dict[str, Any]], no_page: None
) -> None:
    """Each is measured with its own, as it is trained."""
    for point, connections in zip(points, ("8", "1"), strict=True):
        variables = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "NCCL_NVLS_ENABLE": "0"}
        make_point(workload, tmp_path, point, environment={**ENVIRONMENT, "variables": variables})
    assert "environments" not in analyze(tmp_path).stdout
    make_point(workload, tmp_path, points[0], environment={**ENVIRONMENT, "packages": {"torch": "2.6.0"}})
    assert "different environments" in analyze(tmp_path).stdout


def test_a_terminal_of_140_columns_shows_every_column_of_stacks(tmp_path: Path) -> None:
    longest = {"tp_training.attn_impl": "eager", "tp_training.activation_checkpointing": True}
    directory = make_point("tp_training", tmp_path, stack_config("fsdp_dtensor", **longest), step_us=1_234_567.0)
    seen, stream = {directory: StepCommunication(100_000.0, 50_000.0)}, io.StringIO()
    analyses = analyse_tp_training(read_points(tmp_path).points, seen)
    tp_training.print_analyses(analyses, Console(file=stream, width=140, highlight=False, markup=False))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 140
    headers = next(line for line in lines if line.startswith("TP"))
    assert all(header in headers for header in tp_training.PRINTED if header != "note")


def test_names_of_columns_without_room_have_no_blanks() -> None:
    stream = io.StringIO()
    rows = [PlainRow(["1" * 20] * 3)]
    assert print_table(["a", "wide  ", "wider "], rows, [], Console(file=stream, width=40), ("wide  ", "wider "))
    assert "No room for wider, wide: a wider" in stream.getvalue()


def test_counts_in_words() -> None:
    assert [training.as_count(number) for number in (7, 1234, 12_345_678, 7_000_000_000)] == [
        "7",
        "1.23 k",
        "12.3 M",
        "7 B",
    ]


def test_progress_tells_what_each_workload_is_about_and_leaves_the_best_to_the_answers(tmp_path: Path) -> None:
    outcomes, stream = Outcomes(), io.StringIO()
    directories = [
        make_point("fsdp", tmp_path, step_us=1500.0, name="slow", none_us=3000.0),
        make_point("copy_engine", tmp_path, overlapped_us=1000.0, name="to_host"),
        make_point("tp_training", tmp_path, step_us=10_000.0, name="stack"),
        make_point("fsdp", tmp_path, name="failed", status="failed", error="CUDA out of memory\nat once"),
    ]
    with progress(4, outcomes, Console(file=stream, width=200)):
        for directory in directories:
            outcomes.add(Outcome.of(read_result(directory / "result.json"), directory))
    lines = [line.partition("  (elapsed")[0] for line in stream.getvalue().splitlines()]
    assert lines == [
        "[1/4] ok      slow  1.500 ms  2.000x none  170,667 samples/s",
        "[2/4] ok      to_host  1.000 ms  1.400x sequential",
        "[3/4] ok      stack  10.000 ms  102,400 tokens/s",
        "[4/4] failed  failed  CUDA out of memory",
    ]
    assert outcomes.best() is None
