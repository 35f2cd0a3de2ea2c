"""Telemetry of training runs: read in whatever state it is, and put together over ranks and steps. What is said of
runs that are left out: made/telemetry_troubles among the golden files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.analysis import telemetry
from overlap_sweep.analysis.step_hidden import hidden
from overlap_sweep.analysis.telemetry import Run, read_telemetry
from overlap_sweep.analysis.telemetry_dips import find_dips
from overlap_sweep.analysis.telemetry_steps import aggregate, aggregates, select, series
from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import Timing
from tests.analysis.telemetry_logs import record, wobbling, write_logs, write_run
from tests.make_point import make_point, resolved

TWO_RANKS = resolved("fsdp", **{"distributed.dp_size": 2})


def only_run(directory: Path) -> Run:
    (run,) = read_telemetry(directory).runs
    return run


def measured_of(run: Run) -> dict[str, float]:
    """The medians."""
    selection = select(run)
    found = aggregates(run, series(run, selection.measured), selection, dips=0)
    return {name: known.median for name, known in found.items()}


def test_logs_alone_are_enough(tmp_path: Path) -> None:
    run = only_run(write_run(tmp_path / "run", steps=10, ranks=3))
    assert (run.name, run.ranks, run.point, run.environment) == ("run", [0, 1, 2], None, {})
    assert sorted(run.steps[2]) == list(range(10))
    step = run.steps[1][4]
    assert step.step_ms == pytest.approx(sum(wobbling(4, 1).values()))
    assert step.hidden_share == pytest.approx(32 / (32 + step.exposed_comm_ms))


def test_a_result_beside_the_logs_tells_more(tmp_path: Path) -> None:
    run = only_run(write_run(make_point("fsdp", tmp_path, TWO_RANKS, step_us=1500.0, spread_us=10.0)))
    assert run.point
    assert run.environment["host"] == "node7"
    selection = select(run)
    found = aggregates(run, series(run, selection.measured, samples_per_step=64), selection, dips=0)
    assert found["samples_per_s"].median == pytest.approx(64e3 / found["step_ms"].median, rel=1e-3)
    assert found["point_ms"].median == 1.5
    assert found["speedup"].median == pytest.approx(2000 / 1500, rel=0.02)
    assert found["hidden_fraction"].median == pytest.approx(0.5, abs=0.03)
    assert (found["peak_memory_gb"].median, found["peak_memory_gb"].noise) == (11.5, None)


def test_the_hidden_fraction_selects_no_rounds(tmp_path: Path) -> None:
    """The floor was disturbed in half of the rounds: ratios of the others alone would say 0.4."""
    floor_us = [*[1000.0, 2001.0] * 7, 1500.0]
    samples_us = {"point": [1600.0] * 15, "none": [2000.0] * 15, "floor": floor_us}
    times = {name: Timing(sorted(of)[7], min(of), max(of), of) for name, of in samples_us.items()}
    run = only_run(write_run(make_point("fsdp", tmp_path, step=times)))
    selection = select(run)
    known = aggregates(run, series(run, selection.measured), selection, dips=0)
    expected = hidden(times)
    assert expected
    assert (known["hidden_fraction"].median, known["hidden_fraction"].noise) == expected
    assert expected.fraction == pytest.approx(0.8)
    assert known["speedup"].median == pytest.approx(1.25)


def test_a_hidden_fraction_that_says_nothing_is_left_out(tmp_path: Path) -> None:
    noisy = make_point("fsdp", tmp_path, step_us=1500.0, name="noisy", spread_us=600.0)
    free = make_point("fsdp", tmp_path, step_us=1000.0, name="free", none_us=1000.0, floor_us=1000.0)
    for directory in (noisy, free):
        assert "hidden_fraction" not in measured_of(only_run(write_run(directory)))


def test_every_field_of_a_record_is_read(tmp_path: Path) -> None:
    records = [record(number, grad_norm=2.5 + number / 100) for number in range(8)]
    medians = measured_of(only_run(write_logs(tmp_path, records)))
    one = records[4]
    assert medians["grad_norm"] == pytest.approx(2.54)
    assert medians["compute_allreduce_ms"] == one.compute_allreduce_ms == 0
    assert medians["compute_reducescatter_ms"] == pytest.approx(one.compute_reducescatter_ms)
    assert medians["compute_auxiliary_ms"] == pytest.approx(one.compute_auxiliary_ms)
    assert medians["mean_concurrency"] == pytest.approx(one.mean_concurrency)
    assert medians["max_concurrency"] == one.max_concurrency == 2
    for name, share in one.utilisation.items():
        assert medians[f"utilisation_{name}"] == pytest.approx(share)


def test_what_the_steps_come_to(tmp_path: Path) -> None:
    records = [
        record(number, rank, compute_ms=80.0 + 10 * rank, hidden_ms=30.0, exposed_ms=10.0 - 4 * rank)
        for number in range(6)
        for rank in range(2)
    ]
    medians = measured_of(only_run(write_logs(tmp_path / "run", records)))
    # The slowest rank's step; all else is the mean over the ranks.
    assert medians["step_ms"] == pytest.approx(96.0)
    assert medians["compute_ms"] == pytest.approx(85.0)
    assert medians["exposed_comm_ms"] == pytest.approx(8.0)
    assert medians["comm_ms"] == pytest.approx(38.0)
    assert medians["hidden_comm_ms"] + medians["exposed_comm_ms"] == pytest.approx(medians["comm_ms"])
    assert medians["hidden_share"] == pytest.approx(30 / 38)
    assert medians["all_reduce_ms"] == 0
    assert medians["auxiliary_ms"] == pytest.approx(15.0)
    assert medians["final_loss"] == pytest.approx(0.7 - 5 / 1000)
    assert medians["sm_clock_mhz"] == 1980
    assert "samples_per_s" not in medians


def test_quartiles_mean_and_noise() -> None:
    found = aggregate([1.0, 2.0, 3.0, 4.0, math.nan, 10.0])
    assert found
    assert (found.q1, found.median, found.q3, found.mean, found.count) == (2.0, 3.0, 4.0, 4.0, 5)
    assert found.noise == pytest.approx(1.57 * 2 / math.sqrt(5))
    assert aggregate([math.nan, 1.0]) is None


def test_without_communication_nothing_is_hidden(tmp_path: Path) -> None:
    records = [record(number, hidden_ms=0.0, exposed_ms=0.0) for number in range(8)]
    run = only_run(write_logs(tmp_path, records))
    medians = measured_of(run)
    assert medians["comm_ms"] == 0
    assert not medians.keys() & {"hidden_share", "overlap_ratio"}
    assert find_dips(run, select(run).measured) == []


@pytest.mark.parametrize(
    ("slow", "expected"),
    [([], [0]), ([0], [0]), ([0, 1, 2], [0, 1, 2]), ([0, 1, 2, 3, 4], [0, 1, 2]), ([2], [0])],
)
def test_warm_up_is_the_first_step_and_slow_ones_after_it_up_to_a_tenth(
    tmp_path: Path, slow: list[int], expected: list[int]
) -> None:
    records = [
        record(number, idle_ms=100.0 if number in slow else 0.0, **wobbling(number))  # type: ignore[arg-type]
        for number in range(30)
    ]
    selection = select(only_run(write_logs(tmp_path, records)))
    assert selection.warm_up == expected
    assert selection.measured == list(range(len(expected), 30))


def test_profiled_and_incomplete_steps_are_left_out(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=10, profiled=3)
    path = directory / "rank_1_metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], *lines[5:-1]]))
    selection = select(only_run(directory))
    assert selection.profiled == [10, 11]
    assert selection.incomplete == [4, 12]
    assert selection.measured == [1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_first_of_few_steps_is_warm_up_too(tmp_path: Path, steps: int) -> None:
    run = only_run(write_logs(tmp_path, [record(number) for number in range(steps)]))
    assert (select(run).warm_up, select(run).measured) == ([0], list(range(1, steps)))
    assert find_dips(run, list(range(steps))) == []


def test_many_runs_of_a_sweep_and_their_names(tmp_path: Path) -> None:
    for place in ("a/fsdp_1", "a/fsdp_2", "b/fsdp_2"):
        write_run(tmp_path / place, steps=5)
    assert [run.name for run in read_telemetry(tmp_path).runs] == ["fsdp_1", "a/fsdp_2", "b/fsdp_2"]


def test_runs_are_read_that_have_telemetry_and_succeeded(tmp_path: Path) -> None:
    write_run(make_point("fsdp", tmp_path, TWO_RANKS, name="good"), steps=5)
    write_run(make_point("fsdp", tmp_path, TWO_RANKS, name="bad", status="failed", error="CUDA out of memory"))
    make_point("fsdp", tmp_path, TWO_RANKS, name="bare")
    write_run(make_point("fsdp", tmp_path, name="half"), steps=5)
    make_point("operator", tmp_path)
    (write_run(tmp_path / "lost", steps=5, ranks=3) / "rank_1_metrics.jsonl").unlink()
    reading = read_telemetry(tmp_path)
    assert {run.name: run.ranks for run in reading.runs} == {"good": [0, 1], "half": [0, 1], "lost": [0, 2]}
    assert reading.problems == []
    # Of the failed one, the bare one, the operator, and both that lack ranks.
    assert len(reading.warnings) == 5


@pytest.mark.parametrize("cut", [1, 20, 400])
def test_a_cut_off_last_line_is_no_problem(tmp_path: Path, cut: int) -> None:
    path = write_run(tmp_path, steps=6, ranks=1) / "rank_0_metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    reading = read_telemetry(tmp_path)
    assert reading.problems == []
    assert sorted(reading.runs[0].steps[0]) == list(range(5))


Change = Callable[[dict[str, Any]], Any]

BAD_LINES: dict[str, Change | bytes] = {
    "no JSON": b"hello",
    "empty": b"",
    "binary": b"\0\1\xff",
    "a list": b"[1, 2]",
    "NaN": b'{"step": 3, "rank": 0, "step_ms": NaN}',
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "negative time": lambda r: r.update(step_ms=-1.0),
    "no time": lambda r: r.update(step_ms=0.0),
    "endless time": lambda r: r.update(step_ms=1e300),
    "negative overlap": lambda r: r.update(overlap_ms=-5.0),
    "no number": lambda r: r.update(exposed_comm_ms="7"),
    "no streams": lambda r: r.update(streams_ms=[1.0]),
    "an endless stream": lambda r: r["streams_ms"].update(compute=1e200),
    "more overlap than there is": lambda r: r.update(overlap_ratio=7.0),
    "negative step": lambda r: r.update(step=-1),
    "huge step": lambda r: r.update(step=10**30),
    "a fraction of a step": lambda r: r.update(step=1.5),
    "another rank": lambda r: r.update(rank=5),
    "a step once more": lambda r: r.update(step=2),
    "a hot device": lambda r: r["device"].update(temperature_c=1e30),
    "no clock": lambda r: r["device"].update(sm_clock_mhz="fast"),
    "bits without end": lambda r: r["device"].update(throttle_reasons=2.0**80),
    "negative bits": lambda r: r["device"].update(throttle_reasons=-1),
}


@pytest.mark.parametrize("change", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_one_sentence_and_the_rest_is_read(tmp_path: Path, change: Change | bytes) -> None:
    path = write_run(tmp_path, steps=6, ranks=1) / "rank_0_metrics.jsonl"
    lines = path.read_bytes().splitlines()
    if isinstance(change, bytes):
        lines[3] = change
    else:
        content = json.loads(lines[3])
        change(content)
        lines[3] = json.dumps(content).encode()
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    reading = read_telemetry(tmp_path)
    (problem,) = reading.problems
    assert problem.startswith(f"{path}: line 4 ")
    assert len(problem) < 500
    assert sorted(reading.runs[0].steps[0]) == [0, 1, 2, 4, 5]


def test_a_file_of_nonsense_is_one_sentence(tmp_path: Path) -> None:
    write_run(tmp_path / "good", steps=6)
    (tmp_path / "bad").mkdir()
    for content, said in ((b"nonsense\n" * 1000, "and 999 more lines"), (b"\n" * 1_000_000, "line 1001 and what")):
        (tmp_path / "bad" / "rank_0_metrics.jsonl").write_bytes(content)
        reading = read_telemetry(tmp_path)
        assert [run.name for run in reading.runs] == ["good"]
        assert [said in problem for problem in reading.problems] == [True]


def test_large_files_and_lines_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path, steps=6, ranks=2) / "rank_0_metrics.jsonl"
    content = path.read_bytes()
    with path.open("ab") as file:
        file.truncate(telemetry.MOST_BYTES + 1)
    assert ["1024 MiB" in problem for problem in read_telemetry(tmp_path).problems] == [True]
    monkeypatch.setattr(telemetry, "MOST_LINE_BYTES", 1 << 20)
    path.write_bytes(content + b" " * (2 << 20))
    reading = read_telemetry(tmp_path)
    assert ["line 7 has more than 1 MiB" in problem for problem in reading.problems] == [True]
    assert len(reading.runs[0].steps[0]) == 6


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    elsewhere = write_run(tmp_path / "elsewhere", steps=6)
    root = tmp_path / "root"
    write_run(root / "run", steps=6, ranks=1)
    (root / "run" / "rank_1_metrics.jsonl").symlink_to(elsewhere / "rank_1_metrics.jsonl")
    (root / "linked").symlink_to(elsewhere)
    reading = read_telemetry(root)
    assert [run.ranks for run in reading.runs] == [[0]]
    assert len(reading.problems) == 2
    assert all("leads out of" in problem for problem in reading.problems)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=6, ranks=1)
    os.mkfifo(tmp_path / "run" / "rank_1_metrics.jsonl")
    (tmp_path / "run" / "rank_2_metrics.jsonl").mkdir()
    assert read_telemetry(tmp_path).runs[0].ranks == [0]


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "rank_0_metrics.jsonl").write_bytes(b"{")
    with pytest.raises(UserError, match="has no whole step"):
        read_telemetry(tmp_path)


def test_a_loss_that_is_no_number_any_more(tmp_path: Path) -> None:
    records = [record(number, loss=math.nan if number > 3 else 0.5, **wobbling(number)) for number in range(8)]  # type: ignore[arg-type]
    run = only_run(write_logs(tmp_path, records))
    assert run.steps[0][7].loss is None
    assert "final_loss" not in measured_of(run)
