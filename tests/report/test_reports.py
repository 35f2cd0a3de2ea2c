"""`analyze.py DIR`: what every report has in common, and what is printed of large sweeps."""

import json
import shutil
import signal
from pathlib import Path

import pandas as pd
import pytest
import yaml

from overlap_sweep.results.points import read_points
from overlap_sweep.results.provenance import launch_commands
from overlap_sweep.results.run_directory import RESULT_FILE, find_points, read_result
from overlap_sweep.runtime.outcome import Outcome, Outcomes
from overlap_sweep.runtime.progress import progress
from overlap_sweep.study.section import MOST_ROWS
from overlap_sweep.workloads import names
from tests.analyze import analyze, analyzing, files_below, rows
from tests.golden.made_report import BEST_TRACE
from tests.made_sweeps import write_every_workload, write_tuner
from tests.make_point import implementation, kernel_config, make_point, operator_config, pass_times, resolved
from tests.report.conftest import Made
from tests.sweeps import SMALL, Launch


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


def state(directory: Path) -> dict[Path, tuple[bytes, int]]:
    """Content and time of all files of the points at or below the directory."""
    points = find_points(directory)
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for point in points for path in files_below(point)}


@pytest.mark.parametrize(
    "arguments", ["{0}", "query {0}", "query {0} --stacks", "compare {0}/operators {0}/operators", "diagnose {0}"]
)
def test_analysis_changes_no_run_directory(tmp_path: Path, arguments: str, no_page: None) -> None:
    write_every_workload(tmp_path)
    before = state(tmp_path)
    assert {read_result(path).recorded["workload"]["name"] for path in before if path.name == RESULT_FILE} == {*names()}
    analyze(*arguments.format(tmp_path).split())
    assert state(tmp_path) == before


def test_what_launching_writes_into_run_directories_goes_elsewhere_with_output(tmp_path: Path, no_page: None) -> None:
    make_point("tp_training", tmp_path / "sweep", name="point")
    assert "results_*.json of 1 run directories" in analyze(tmp_path / "sweep", "--output", tmp_path / "out").stdout
    assert [path.name for path in (tmp_path / "out" / "point").iterdir()] == ["results_fsdp_dtensor_tp2_dp1.json"]


def test_who_stops_reading_gets_all_files_and_a_usual_ending(tmp_path: Path) -> None:
    """As of `git log | head`."""
    make_point("operator", tmp_path, name="point")
    with analyzing(tmp_path, "--output", tmp_path / "out") as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.wait(timeout=60) == -signal.SIGPIPE
        assert process.stderr.read() == ""
    assert {"summary.txt", "report.html", "points.csv"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_a_run_directory_has_a_report_of_its_own(tmp_path: Path, no_page: None) -> None:
    bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4)
    directory = make_point("operator", tmp_path, bulk, bwd=pass_times(80.0))
    assert analyze(directory).returncode == 0
    slots = yaml.safe_load((directory / "optimal_tp_comm_overlap_cfg.yaml").read_text())
    assert slots.keys() == {"fc1_dgrad", "fc1_wgrad"}


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
    assert "Faster than the bound" in printed
    assert (tmp_path / "summary.txt").read_text().count("gemm_only") == cases


def test_of_many_settings_the_fastest_are_printed(tmp_path: Path, no_page: None) -> None:
    for ahead in range(MOST_ROWS + 6):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), step_us=1500.0 - 10 * ahead)
    printed = analyze(tmp_path).stdout
    # The simplest, which is the reference, is the slowest.
    assert "\ndefaults" in printed
    assert "... and 5 more" in printed
    assert "and 5 more" not in (tmp_path / "summary.txt").read_text()


def test_progress_tells_what_each_workload_is_about_and_leaves_the_best_to_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = Outcomes()
    directories = [
        make_point("fsdp", tmp_path, step_us=1500.0, objective_us=1500.0, name="slow", none_us=3000.0),
        make_point("copy_engine", tmp_path, overlapped_us=1000.0, objective_us=1000.0, name="to_host"),
        make_point("tp_training", tmp_path, step_us=10_000.0, objective_us=10_000.0, name="stack"),
        make_point("fsdp", tmp_path, name="failed", status="failed", error="CUDA out of memory\nat once"),
    ]
    with progress(4, outcomes):
        for directory in directories:
            outcomes.add(Outcome(directory, read_result(directory / "result.json")))
    lines = [line.partition("  (0 s")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "[1/4] ok      slow  1,500 us  50.0% faster than no overlap (49.7 to 50.3%)  170,667 samples/s",
        "[2/4] ok      to_host  1,000 us  28.6% faster than sequential (28.2 to 29.0%)",
        "[3/4] ok      stack  10,000 us  102,400 tokens/s",
        "[4/4] failed  failed  CUDA out of memory",
    ]


# From launch.py to reports and comparisons, in real processes that communicate by gloo.

SMALL_STEPS = ("ranking.num_layers=2", "ranking.sequence_length=16", "training.batch_size=2", "training.max_steps=6")
SWEEPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "operators": (4, (*SMALL, "tp_size=2", "method=none,bulk", "num_sm=1,2")),
    "training": (
        2,
        ("workload=fsdp", "model=ranking_tiny", *SMALL_STEPS, "workload.repeats=3", "fsdp.forward_prefetch=false,true"),
    ),
}
"""How many points, and what is given to launch.py."""


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", SWEEPS)
def test_from_launch_to_report_and_comparison(tmp_path: Path, name: str, images: None) -> None:
    points, overrides = SWEEPS[name]
    launch = Launch(tmp_path / "sweep")
    process = launch.run("-m", *overrides, "runtime.device=cpu", *(["profile=none"] if name == "training" else []))
    assert (process.returncode, process.stderr) == (0, "")
    assert f"[{points}/{points}]" in process.stdout
    report = analyze(launch.directory, "--plots")
    assert (report.returncode, report.stderr) == (0, "")
    assert list((launch.directory / "plots").glob("*.png"))
    if name != "operators":
        # A sweep prints at its end what a report begins with.
        answers = report.stdout.partition(f"\n{points} point")[0].splitlines()
        assert len(answers) > 5
        assert set(answers) <= set(process.stdout.splitlines())
    results = sorted(path.parent for path in launch.directory.rglob("result.json"))
    assert len(results) == points
    # A sweep is the same as itself.
    same = rows("compare", f"one={launch.directory}", f"other={launch.directory}")
    assert {row["verdict"] for row in same} <= {"same", None}
    if name == "operators":
        one, two = (next(launch.directory.glob(f"*bulk_sm{number}*")) for number in (1, 2))
        assert "setting: " in analyze("compare", one, two).stdout
        traces = analyze("compare", one / "trace_rank0.json.gz", two / "trace_rank0.json.gz", "--by", "class")
        assert (traces.returncode, "gloo" in traces.stdout) == (0, True)
    if name == "training":
        assert {"step_ms", "hidden_comm_fraction", "samples_per_s", "final_loss"} <= {row["quantity"] for row in same}
        one, two = results
        pair = analyze("compare", f"a={one}", f"b={two}", "--output", tmp_path / "out")
        assert "fsdp.forward_prefetch: " in pair.stdout
        known = json.loads((tmp_path / "out" / "summary.json").read_text())["datasets"]["a"]["runs"][one.name]
        medians = {quantity: aggregate["median"] for quantity, aggregate in known["aggregates"].items()}
        assert 0 < medians["compute_ms"] < medians["step_ms"]
        assert 0 <= medians["hidden_comm_fraction"] < 1
        assert medians["samples_per_s"] == pytest.approx(4e3 / medians["step_ms"], rel=0.2)
