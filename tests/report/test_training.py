from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from overlap_sweep.analysis.knob_search import Gain, KnobRecord, KnobSearch, TriedKnobs
from overlap_sweep.analysis.points import read_points
from overlap_sweep.analysis.training import analyse_training
from overlap_sweep.report.console import console_for
from overlap_sweep.report.knob_search import write_knobs
from overlap_sweep.report.page.training_chart import training_panel
from overlap_sweep.report.plain_table import PlainRow, print_table
from overlap_sweep.report.training import MOST_ROWS, as_count, print_analyses, print_training
from overlap_sweep.run_directory import read_result
from overlap_sweep.runtime.outcome import Outcome, Outcomes
from overlap_sweep.runtime.progress import progress
from tests.analyze import analyze
from tests.made_sweeps import write_sweep, write_sweep_of_training
from tests.make_point import make_point, resolved, timing_of
from tests.sweeps import Launch

RULE = {"\N{BOX DRAWINGS LIGHT HORIZONTAL}"}


def shown(directory: Path, width: int | None = None) -> str:
    stream = io.StringIO()
    console = console_for(stream) if width is None else Console(file=stream, width=width, highlight=False, markup=False)
    print_training(read_points(directory).points, console)
    return stream.getvalue()


def line_with(text: str, *words: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if all(word in line for word in words))


def test_the_answer_stands_before_the_tables(tmp_path: Path) -> None:
    lines = [line for line in shown(write_sweep_of_training(tmp_path)).splitlines() if line.strip()]
    assert lines[:3] == [
        "Training ranking, 4 ranks on NVIDIA H200: 8 layers, 128 events, 16 + 32 features, 12.3 M parameters",
        "  best: forward_prefetch=1, reshard_after_forward=false, gradient_accumulation=2, +42.9% samples/s (243,810 "
        "instead of 170,667 with defaults); 2.100 ms a step, 1.33x none, hidden 88%; fastest of 7",
        "  to set: fsdp.forward_prefetch=1 fsdp.reshard_after_forward=false training.gradient_accumulation=2",
    ]
    assert lines[3].split()[:3] == ["setting", "step", "ms"]


def test_the_tables(tmp_path: Path) -> None:
    text = shown(write_sweep_of_training(tmp_path))
    assert line_with(text, "defaults  ") == [
        *("defaults", "1.500", "0.019", "2.000", "1.000", "0.500", "50%", "1.33x", "170,667", "24,746,667"),
        *("0.300", "11.5", "0.5"),
    ]
    assert line_with(text, "2.100", "35,352,381")[-1] == "best"
    assert line_with(text, "reshard_after_forward  true") == [
        *("reshard_after_forward", "true", "\N{RIGHTWARDS ARROW}", "false", "3", "-4.2%", "1.5%"),
        *("-4.5%", "to", "-3.3%", "-4.5%", "taken"),
    ]
    assert line_with(text, "gradient_accumulation  1")[-4:] == ["taken,", "changes", "the", "training"]
    assert "of those that compute the same, forward_prefetch=1, reshard_after_forward=false is the best, 1.30x" in text


def test_a_single_setting_is_no_best(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, host_us={}, peak_memory_gb=None)
    text = shown(tmp_path)
    assert "  measured: defaults, 170,667 samples/s; 1.500 ms a step" in text
    assert "best" not in text
    assert "What each knob" not in text
    assert "memory GB" not in text


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_shows_all_of_it(tmp_path: Path, width: int) -> None:
    text = shown(write_sweep_of_training(tmp_path), width)
    assert max(map(len, text.splitlines())) <= width
    joined = " ".join(text.split())
    assert "gradient_accumulation=2 (best): 2.100 ms, noise 0.015" in joined
    assert "none 2.800 ms, floor 2.000 ms, hidden 88%" in joined


def test_a_terminal_that_is_too_narrow_has_fewer_columns(tmp_path: Path) -> None:
    write_sweep_of_training(tmp_path)
    whole = max(len(line) for line in shown(tmp_path).splitlines() if set(line) == RULE)
    text = shown(tmp_path, whole - 1)
    assert max(map(len, text.splitlines())) < whole
    header = next(line for line in text.splitlines() if line.startswith("setting"))
    assert "loss" not in header
    assert "tokens/s" in header
    assert "No room for loss: a wider terminal shows them." in text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_list_of_knobs_keeps_noise_and_pairs(tmp_path: Path, width: int) -> None:
    text = shown(write_sweep_of_training(tmp_path), width).partition("What each knob contributed")[2]
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert ("-4.2%, noise 1.5%, pairs 3" if width == 40 else "3 -4.2% 1.5%") in words


def test_what_is_within_the_noise_is_marked(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1500.0, spread_us=30.0)
    make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": 1}), step_us=1490.0, spread_us=30.0)
    assert line_with(shown(tmp_path), "forward_prefetch  0")[4:8] == ["1", "-0.7%", "(noise)", "7.1%"]


def test_how_times_are_told_is_said(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1500.0)
    assert "Times are as measured in each point." in shown(tmp_path)
    make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": 1}), step_us=1400.0)
    assert "Times are relative to the common floor, by the floor that was measured beside each." in shown(tmp_path)
    make_point("fsdp", tmp_path, resolved("fsdp", **{"compile.enabled": True}), step_us=1300.0)
    assert "beside each; those of 1 settings are as measured: the host limits them, or no" in shown(tmp_path)


def test_hidden_fractions_that_are_all_noise_are_nowhere(tmp_path: Path) -> None:
    step = {
        "point": timing_of([1000.0, 1020.0, 980.0, 1040.0, 960.0]),
        "none": timing_of([990.0, 1040.0, 1010.0, 960.0, 1030.0]),
        "floor": timing_of([1030.0, 970.0, 1000.0, 1010.0, 960.0]),
    }
    make_point("fsdp", tmp_path, step=step)
    process = analyze(tmp_path)
    assert (process.returncode, process.stderr) == (0, "")
    assert "x none, hidden -" in process.stdout
    row = pd.read_csv(tmp_path / "training.csv").iloc[0]
    assert pd.isna(row["hidden_fraction"])
    assert pd.isna(row["hidden_noise"])
    report = json.loads((tmp_path / "tuning_report.json").read_text())
    assert report["training"][0]["best"]["hidden_fraction"] is None
    assert report["training_points"][0]["hidden_fraction"] is None
    bar = training_panel(analyse_training(read_points(tmp_path).points)[0]).bars[0]
    assert bar.told["hidden"] == "-"


def test_the_search_s_answer_is_printed_and_on_the_page(tmp_path: Path) -> None:
    for ahead, step_us in ((0, 1500.0), (1, 1200.0), (2, 1100.0)):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), step_us=step_us)
    found = KnobSearch(
        label="ranking fsdp2 step on 4 ranks",
        overrides=["workload=fsdp", "model=ranking"],
        knobs={"fsdp.forward_prefetch": ["false", "1", "2"], "fsdp.limit_all_gathers": ["false", "true"]},
        best={"fsdp.forward_prefetch": "1"},
        time_us=1200.0,
        baseline_us=1500.0,
        gain=Gain(0.2, 0.03),
        proven=True,
        stopped="search.max_points is used up",
        tried=[TriedKnobs(changed={"fsdp.forward_prefetch": "1"}, time_us=1200.0, noise_us=9.0, measurements=1)],
    )
    write_knobs(tmp_path, KnobRecord(searches=[found]))
    printed, page = analyze(tmp_path).stdout, (tmp_path / "report.html").read_text()
    for text in (printed, (tmp_path / "summary.txt").read_text(), page):
        assert text.count("20.0 % (\N{PLUS-MINUS SIGN} 3.0) less time than the baseline") == 1
        assert "Stopped early: search.max_points is used up" in text
        assert "fsdp.limit_all_gathers=true" in text.partition("never tried")[2]
        assert "forward_prefetch=1, +25.0% samples/s" in text
    assert line_with(printed, "forward_prefetch=1  ")[-2:] == ["best,", "proven"]


def test_names_of_columns_without_room_have_no_blanks() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=40)
    assert print_table(["a", "wide  ", "wider "], [PlainRow(["1" * 20] * 3)], [], console, ("wide  ", "wider "))
    assert "No room for wider, wide: a wider" in stream.getvalue()


def test_of_many_settings_the_fastest_are_printed(tmp_path: Path) -> None:
    for ahead in range(MOST_ROWS + 6):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), step_us=1500.0 - 10 * ahead)
    text = shown(tmp_path)
    assert text.count("forward_prefetch=") > MOST_ROWS
    # The simplest, which gains are told against, is the slowest.
    assert line_with(text, "defaults  ")[:2] == ["defaults", "1.500"]
    assert "... and 5 more, all in training.csv" in text
    stream = io.StringIO()
    print_analyses(analyse_training(read_points(tmp_path).points), console_for(stream), most_rows=None)
    assert "and 5 more" not in stream.getvalue()


def test_analyze_writes_tables_and_the_report(tmp_path: Path) -> None:
    process = analyze(write_sweep_of_training(tmp_path))
    assert (process.returncode, process.stderr) == (0, "")
    assert "9 points: 7 ok, 1 failed, 1 skipped" in process.stdout
    names = {path.name for path in tmp_path.rglob("*.*")} - {"result.json"}
    assert names == {
        *("summary.txt", "tuning_report.json", "training.csv", "training.parquet", "report.html"),
        *("training_1.png", "training_1_knobs.png"),
    }
    parquet, text = pd.read_parquet(tmp_path / "training.parquet"), pd.read_csv(tmp_path / "training.csv")
    assert list(parquet.columns) == list(text.columns)
    assert len(parquet) == len(text) == 9
    report = json.loads((tmp_path / "tuning_report.json").read_text())
    (case,) = report["training"]
    assert case["best"]["overrides"].endswith("training.gradient_accumulation=2")
    assert case["best"]["knobs"]["fsdp.reshard_after_forward"] is False
    assert [knob["knob"] for knob in case["knobs"]] == [
        *("fsdp.forward_prefetch", "training.gradient_accumulation", "fsdp.reshard_after_forward"),
    ]
    assert case["knobs"][0]["change_beside_best"] is None
    assert len(case["settings"]) == 7
    assert len(report["training_points"]) == 9
    assert "Details of Training ranking" in (tmp_path / "summary.txt").read_text()


def test_answers_for_programs(tmp_path: Path) -> None:
    process = analyze(write_sweep_of_training(tmp_path), "--format", "json", "--fail-if", "gain < 0.5")
    assert process.returncode == 3
    (best,) = json.loads(process.stdout)
    assert (best["setting"], best["turned"]) == (
        *("forward_prefetch=1, reshard_after_forward=false, gradient_accumulation=2", 3),
    )
    write_sweep(tmp_path / "operators")
    process = analyze(tmp_path, "--format", "json")
    assert "answers about operators; those about training runs are in training.csv" in process.stderr
    assert "operator" in json.loads(process.stdout)[0]


def test_the_launch_bound_are_counted(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1000.0, host_us={"point": 990.0})
    assert "1 point: 1 ok, 1 launch_bound" in analyze(tmp_path).stdout


def test_progress_tells_rates_and_leaves_the_best_to_the_answers(tmp_path: Path) -> None:
    outcomes, stream = Outcomes(), io.StringIO()
    slow = make_point("fsdp", tmp_path, step_us=1500.0, name="slow", none_us=3000.0)
    fast = make_point("fsdp", tmp_path, step_us=1200.0, name="fast", none_us=1500.0)
    failed = make_point("fsdp", tmp_path, name="failed", status="failed", error="CUDA out of memory\nat once")
    with progress(3, outcomes, Console(file=stream)):
        for directory in (slow, fast, failed):
            outcomes.add(Outcome.of(read_result(directory / "result.json"), directory))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("[1/3] ok      slow  1.500 ms  2.000x none  170,667 samples/s  (elapsed")
    assert lines[2].startswith("[3/3] failed  failed  CUDA out of memory  (elapsed")
    # What is printed about them next may choose the simpler one.
    assert len(lines) == 3
    assert outcomes.best() is None


def test_counts_in_words() -> None:
    assert [as_count(number) for number in (7, 1234, 12_345_678, 7_000_000_000)] == ["7", "1.23 k", "12.3 M", "7 B"]


@pytest.mark.end_to_end
def test_real_steps_from_launch_to_report(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "sweep")
    small = ("ranking.num_layers=2", "ranking.sequence_length=16", "training.batch_size=2", "training.max_steps=2")
    quick = ("workload.repeats=3", "workload.steps=1", "profile=none", "model=ranking_tiny", "runtime.device=cpu")
    process = launch.run("-m", "workload=fsdp", *small, *quick, "training.gradient_accumulation=1,2")
    assert (process.returncode, process.stderr) == (0, "")
    assert "Training ranking_tiny, 2 ranks on cpu: 2 layers, 16 events" in process.stdout
    assert line_with(process.stdout, "gradient_accumulation", "1 \N{RIGHTWARDS ARROW} 2")
    assert not [line for line in process.stdout.splitlines() if line.startswith("best  ")]
    (analysis,) = analyse_training(read_points(launch.directory).points)
    assert sorted(row.samples_per_step for row in analysis.rows) == [4, 8]
    assert all(row.host_us is None and 0 < row.loss < 5 for row in analysis.rows)
    process = analyze(launch.directory)
    assert (process.returncode, process.stderr) == (0, "")
    assert (launch.directory / "plots" / "training_1.png").exists()
