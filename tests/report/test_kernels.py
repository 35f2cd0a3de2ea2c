from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from overlap_sweep.analysis.kernels import analyse_kernels
from overlap_sweep.analysis.points import read_points
from overlap_sweep.report.console import console_for
from overlap_sweep.report.kernels import answer, print_analyses, print_kernels, title
from tests.analyze import analyze
from tests.made_sweeps import write_sweep
from tests.make_point import ENVIRONMENT, baselines, implementation, kernel_config, make_point
from tests.sweeps import Launch

WRONG = "wrong numbers: relative error 0.5, tolerance 0.01"


def write_family(directory: Path) -> Path:
    """Two backends at m=1024 and 8192: symm_mem wins at the first, torch at the second; bulk is independent."""
    for m, ring_us, fused_us in ((1024, 160.0, 120.0), (8192, 130.0, 150.0)):
        torch = {"ring": implementation(ring_us, 1.0), "bulk": implementation(110.0, independent=True)}
        make_point("kernel", directory, kernel_config(m), implementations=torch, name=f"torch_{m}")
        left_out = {"refused": "too large\nfor it", "pipeline": WRONG} if m == 1024 else {}
        make_point(
            "kernel",
            directory,
            kernel_config(m, "symm_mem"),
            implementations={"fused": implementation(fused_us, 1.0)},
            name=f"symm_mem_{m}",
            left_out=left_out,
            relative_error={"pipeline": 0.5} if left_out else {},
        )
    make_point(
        "kernel",
        directory,
        kernel_config(backend="flux"),
        implementations={},
        name="flux",
        status="skipped",
        error="flux is not installed",
    )
    return directory


def shown(directory: Path, width: int | None = None) -> str:
    stream = io.StringIO()
    console = console_for(stream) if width is None else Console(file=stream, width=width, highlight=False, markup=False)
    print_kernels(read_points(directory).points, console)
    return stream.getvalue()


def line_with(text: str, *words: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if all(word in line for word in words))


def test_the_answer_stands_before_the_table(tmp_path: Path) -> None:
    lines = [line for line in shown(write_family(tmp_path)).splitlines() if line.strip()]
    assert lines[:4] == [
        "ag_gemm n=57344 k=8192 TP=4 bf16 on NVIDIA H200 (llama3_70b fc1): all-gather of the input, then the GEMM",
        "  m=1024: symm_mem fused; 8192: torch ring",
        "    m=1024: symm_mem fused, 120.0 us, 1.67x sequential, hidden 80%, 20% above the bound; fastest of 3, "
        "sequential included",
        "    m=8192: torch ring, 130.0 us, 1.54x sequential, hidden 70%, 30% above the bound; fastest of 3, "
        "sequential included",
    ]
    assert lines[4].split()[:3] == ["m", "implementation", "backend"]


def test_the_table_has_a_line_for_each_implementation(tmp_path: Path) -> None:
    text = shown(write_family(tmp_path))
    assert line_with(text, "8192", "sequential", "1.00x") == [
        "8192", "sequential", "200.0", "0.0", "9,621", "503", "0%", "1.00x", "+100%", "1e-03",
    ]  # fmt: skip
    assert line_with(text, "comm_only", "1,258") == ["comm_only", "80.0", "0.0", "1,258"]
    assert line_with(text, "gemm_only", "bound")[-2:] == ["the", "bound"]
    assert line_with(text, "bulk", "torch")[-1] == "independent"
    assert line_with(text, "130.0", "14,801")[-2:] == ["use", "this"]
    assert "symm_mem pipeline computed wrong numbers at m=1024 (relative error 0.5, tolerance 0.01): don't" in text
    assert "Left out: symm_mem refused at m=1024: too large." in text
    assert "independent: its GEMM does not wait for its communication" in text


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_shows_all_of_it(tmp_path: Path, width: int) -> None:
    text = shown(write_family(tmp_path), width)
    assert max(map(len, text.splitlines())) <= width
    joined = " ".join(text.split())
    assert "symm_mem fused (use this): 120.0 us" in joined
    assert "speedup 1.67x" in joined


def test_of_several_kernels_only_the_answers_are_printed(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, implementations={"ring": implementation(150.0)})
    make_point("kernel", tmp_path, kernel_config(n=8192), implementations={"ring": implementation(250.0)})
    lines = shown(tmp_path).splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("ag_gemm")] == [
        "ag_gemm n=8192 k=8192 TP=4 bf16",
        "ag_gemm n=57344 k=8192 TP=4 bf16",
    ]
    assert [line.split()[7:] for line in lines if line.startswith("ag_gemm")] == [
        ["1024", "don't", "overlap", "200.0", "1.00x", "+100%"],
        ["1024", "torch", "ring", "150.0", "1.33x", "+50%"],
    ]
    assert not any("gemm_only" in line for line in lines)


@pytest.mark.parametrize("width", [40, 70, 100])
def test_the_answers_fit_a_terminal(tmp_path: Path, width: int) -> None:
    for n in (4096, 8192):
        make_point("kernel", tmp_path, kernel_config(n=n), implementations={"ring": implementation(150.0)})
    text = shown(tmp_path, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("torch ring") == 2
    assert text.count("1.33x") == 2


@pytest.mark.parametrize(("cases", "tables"), [(3, True), (4, False)])
def test_tables_of_few_kernels_are_printed_those_of_all_are_written(tmp_path: Path, cases: int, tables: bool) -> None:
    for i in range(cases):
        make_point("kernel", tmp_path, kernel_config(n=4096 * (i + 1)), implementations={"ring": implementation(150.0)})
    make_point(
        "kernel", tmp_path, kernel_config(n=4096, backend="flux"), implementations={"fused": implementation(90.0)}
    )
    process = analyze(tmp_path)
    assert process.stdout.lstrip().startswith("Kernels: what to use")
    assert ("gemm_only" in process.stdout) == tables
    assert ("summary.txt and report.html" in process.stdout) != tables
    # Whatever is printed, what makes an answer doubtful is.
    assert "flux fused beats the bound by 10.0%" in process.stdout
    assert (tmp_path / "summary.txt").read_text().count("gemm_only") == cases


@pytest.mark.parametrize(
    ("room", "missing"),
    [
        (0, []),
        (-1, ["error"]),
        (-12, ["error", "noise us"]),
        (-22, ["error", "noise us", "GB/s"]),
        (-28, ["error", "noise us", "GB/s", "hidden"]),
    ],
)
def test_a_terminal_that_is_too_narrow_has_fewer_columns(tmp_path: Path, room: int, missing: list[str]) -> None:
    write_family(tmp_path)
    whole = next(
        len(line) for line in shown(tmp_path).splitlines() if set(line) == {"\N{BOX DRAWINGS LIGHT HORIZONTAL}"}
    )
    text = shown(tmp_path, whole + room)
    header = next(line for line in text.splitlines() if "implementation  backend" in line)
    assert [name for name in ("error", "noise us", "GB/s", "hidden") if name not in header] == missing
    assert "time us" in header
    assert ("No room for" in text) == bool(missing)
    assert max(map(len, text.splitlines())) <= whole + room


def test_many_points_are_analysed_soon(tmp_path: Path) -> None:
    """When rich laid out the tables, 300 points of 20 implementations took half a minute."""
    for m in range(1, 61):
        make_point(
            "kernel",
            tmp_path,
            kernel_config(64 * m),
            implementations={f"ring{i}": implementation(150.0 + i) for i in range(20)},
        )
    analyses = analyse_kernels(read_points(tmp_path).points)
    stream = io.StringIO()
    start_s = time.process_time()
    print_analyses(analyses, console_for(stream))
    assert time.process_time() - start_s < 2
    assert len(stream.getvalue().splitlines()) > 60 * 23


def test_an_answer_in_words(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, kernel_config(operator=None), implementations={"ring": implementation(260.0)})
    make_point(
        "kernel",
        tmp_path,
        kernel_config(2048),
        implementations=baselines(launch_bound=True) | {"ring": implementation(1.0)},
    )
    first, second = (shape for one in analyse_kernels(read_points(tmp_path).points) for shape in one.shapes)
    assert answer(first) == "m=1024: don't overlap, 200.0 us; the best overlap, torch ring, is 30.0% slower"
    assert answer(second).startswith("m=2048: no answer, sequential was launch-bound")


def test_without_a_model_the_sizes_say_it_all(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, kernel_config(operator=None), implementations={"ring": implementation(150.0)})
    (analysis,) = analyse_kernels(read_points(tmp_path).points)
    assert title(analysis).startswith("ag_gemm n=57344 k=8192 TP=4 bf16 on NVIDIA H200: all-gather")


def test_analyze_writes_answers_and_tables(tmp_path: Path) -> None:
    process = analyze(write_family(tmp_path))
    assert (process.returncode, process.stderr) == (0, "")
    assert "m=1024: symm_mem fused; 8192: torch ring" in process.stdout
    assert "skipped: flux: flux is not installed" in process.stdout
    assert "5 points: 4 ok, 1 skipped" in process.stdout
    assert "m=1024: symm_mem fused; 8192" in (tmp_path / "summary.txt").read_text()
    rows = list(csv.DictReader((tmp_path / "kernels.csv").open()))
    # Four points with three baselines each, six implementations, two left out, and a skipped point.
    assert len(rows) == 4 * 3 + 6 + 2 + 1
    assert {(row["m"], row["backend"], row["implementation"]) for row in rows if row["chosen"] == "True"} == {
        ("1024", "symm_mem", "fused"),
        ("8192", "torch", "ring"),
    }
    assert (tmp_path / "kernels.parquet").exists()
    assert not (tmp_path / "points.csv").exists()
    report = json.loads((tmp_path / "tuning_report.json").read_text())
    (kernel,) = report["kernels"]
    assert kernel["recommendation"].endswith("m=1024: symm_mem fused; 8192: torch ring")
    assert [(answer["m"], answer["implementation"]) for answer in kernel["answers"]] == [
        (1024, "fused"),
        (8192, "ring"),
    ]
    assert [row["implementation"] for row in kernel["answers"][0]["implementations"]][-1] == "ring"
    assert kernel["answers"][0]["left_out"] == {"symm_mem refused": "too large\nfor it", "symm_mem pipeline": WRONG}
    assert len(report["kernel_points"]) == len(rows)


def test_answers_as_rows(tmp_path: Path) -> None:
    process = analyze(write_family(tmp_path), "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(process.stdout)))
    assert [(row["m"], row["backend"], row["implementation"], row["speedup"]) for row in rows] == [
        ("1024", "symm_mem", "fused", "1.6666666666666667"),
        ("8192", "torch", "ring", "1.5384615384615385"),
    ]
    failing = analyze(tmp_path, "--format", "csv", "--fail-if", "m > 1024 and speedup < 1.6")
    assert failing.returncode == 3
    assert "holds for 1 of 2 answers, first m 8192 ring at TP=4 (m 8192, speedup 1.538)" in failing.stderr


def test_where_no_kernel_was_measured_the_rows_are_those_of_kernels(tmp_path: Path) -> None:
    make_point(
        "kernel",
        tmp_path,
        kernel_config(backend="flux"),
        implementations={},
        name="flux",
        status="skipped",
        error="flux is not installed",
    )
    process = analyze(tmp_path, "--format", "csv")
    assert (process.returncode, process.stderr.count("error")) == (0, 0)
    assert process.stdout.startswith("kernel,m,n,k,tp_size")
    # The columns are known, although there is no answer.
    assert "has no answers to look at" in analyze(tmp_path, "--format", "csv", "--fail-if", "m > 1024").stderr


def test_beside_operators_their_answers_are_the_rows(tmp_path: Path) -> None:
    write_sweep(tmp_path / "operators")
    write_family(tmp_path / "kernels")
    process = analyze(tmp_path, "--format", "csv")
    assert "those about kernels are in kernels.csv" in process.stderr
    assert {row["slot"] for row in csv.DictReader(io.StringIO(process.stdout))} >= {"fc1_fprop", "fc2_fprop"}
    process = analyze(tmp_path)
    assert process.stderr == ""
    assert "llama3_8b, 8192 tokens, bf16, backend transformer_engine on NVIDIA H200" in process.stdout
    assert "m=1024: symm_mem fused; 8192" in process.stdout


def test_points_of_different_environments_say_so(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, implementations={"ring": implementation(150.0)})
    # Each backend's own, as it is trained with.
    connections = {**ENVIRONMENT, "variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}}
    make_point(
        "kernel",
        tmp_path,
        kernel_config(backend="symm_mem"),
        implementations={"ring": implementation(150.0)},
        environment=connections,
    )
    assert "different environments" not in shown(tmp_path)
    older = {**ENVIRONMENT, "packages": {"torch": "2.6.0"}}
    make_point(
        "kernel",
        tmp_path,
        kernel_config(backend="flux"),
        implementations={"fused": implementation(140.0)},
        environment=older,
    )
    assert "The points were measured in different environments, each beside a sequential of its own" in shown(tmp_path)


def test_of_two_machines_each_has_its_answer(tmp_path: Path) -> None:
    make_point("kernel", tmp_path, implementations={"ring": implementation(150.0)})
    make_point(
        "kernel",
        tmp_path,
        implementations={"ring": implementation(250.0)},
        environment={**ENVIRONMENT, "gpu": "NVIDIA H100"},
    )
    text = shown(tmp_path)
    assert text.index("on NVIDIA H100") < text.index("don't overlap") < text.index("on NVIDIA H200")
    assert "on NVIDIA H200  llama3_70b fc1  1024  torch ring" in text


def test_a_kernel_on_two_ranks_from_launch_to_report(tmp_path: Path) -> None:
    """Real processes that communicate by gloo."""
    launch = Launch(tmp_path / "sweep")
    shape = ("workload=kernel", "kernel=ag_gemm", "tp_size=2", "m=32", "n=64", "k=64", "iters=3", "profile=none")
    process = launch.run("-m", *shape, "backend=torch", "runtime.device=cpu")
    assert process.returncode == 0, process.stderr
    assert "ag_gemm n=64 k=64 TP=2 fp32 on cpu: all-gather of the input, then the GEMM" in process.stdout
    assert "gemm_only" in process.stdout
    analysed = analyze(tmp_path / "sweep")
    assert (analysed.returncode, analysed.stderr) == (0, "")
    (analysis,) = analyse_kernels(read_points(tmp_path / "sweep").points)
    assert [shape.m for shape in analysis.shapes] == [32]
    assert analysis.shapes[0].chosen
    assert analysis.shapes[0].implementations
