"""Telemetry of training runs: read in whatever state it is, its warm-up, and the steps that hide less. What its numbers
are, and what is said of runs that are left out: telemetry, made/compared and
made/telemetry_troubles among the golden files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.workloads.fsdp import telemetry
from overlap_sweep.workloads.fsdp.runs import Dataset, Run, read_dataset
from tests.make_point import make_point
from tests.workloads.fsdp.telemetry_logs import SLOW_DEVICE, record, wobbling, write_logs, write_run


def read(directory: Path) -> Dataset:
    return read_dataset("a", directory)


def only_run(directory: Path) -> Run:
    (run,) = read(directory).runs
    return run


def counted(run: Run) -> list[int]:
    return list(run.counted.index)


@pytest.mark.parametrize("step", [{"spread_us": 600.0}, {"step_us": 1000.0, "none_us": 1000.0, "floor_us": 1000.0}])
def test_a_hidden_fraction_that_says_nothing_is_left_out(tmp_path: Path, step: dict[str, float]) -> None:
    """All noise, or without communication."""
    assert "hidden_fraction" not in only_run(write_run(make_point("fsdp", tmp_path, **step))).estimates


def test_without_communication_nothing_is_hidden(tmp_path: Path) -> None:
    records = [record(number, hidden_ms=0.0, exposed_ms=0.0) for number in range(8)]
    run = only_run(write_logs(tmp_path, records))
    assert run.estimates["comm_ms"].time_us == 0
    assert not run.estimates.keys() & {"hidden_comm_fraction", "overlap_ratio"}
    assert run.dips == []


@pytest.mark.parametrize(("steps", "warm_up"), [(3, 1), (8, 1), (10, 1), (30, 3), (31, 4)])
def test_warm_up_is_the_first_tenth_of_the_steps(tmp_path: Path, steps: int, warm_up: int) -> None:
    run = only_run(write_logs(tmp_path, [record(number) for number in range(steps)]))
    assert counted(run) == list(range(warm_up, steps))


def test_profiled_and_incomplete_steps_are_left_out(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=10, profiled=3)
    path = directory / "rank_1_metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], *lines[5:-1]]))
    assert counted(only_run(directory)) == [1, 2, 3, 5, 6, 7, 8, 9]


def test_many_runs_of_a_sweep_and_their_names(tmp_path: Path) -> None:
    for place in ("a/fsdp_1", "a/fsdp_2", "b/fsdp_2"):
        write_run(tmp_path / place, steps=5)
    assert [run.name for run in read(tmp_path).runs] == ["fsdp_1", "a/fsdp_2", "b/fsdp_2"]


@pytest.mark.parametrize("cut", [1, 400])
def test_a_cut_off_last_line_is_no_problem(tmp_path: Path, cut: int) -> None:
    path = write_run(tmp_path, steps=6, ranks=1) / "rank_0_metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    reading = read(tmp_path)
    assert reading.problems == []
    assert sorted(reading.runs[0].by_rank[0]) == list(range(5))


Change = Callable[[dict[str, Any]], Any]
Dips = Mapping[tuple[int, int], Mapping[str, Any]]

BAD_LINES: dict[str, Change | bytes] = {
    "binary": b"\0\1\xff",
    "NaN": b'{"step": 3, "rank": 0, "step_ms": NaN}',
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no time": lambda r: r.update(step_ms=0.0),
    "endless time": lambda r: r.update(step_ms=1e300),
    "negative overlap": lambda r: r.update(overlap_ms=-5.0),
    "no streams": lambda r: r.update(streams_ms=[1.0]),
    "an endless stream": lambda r: r["streams_ms"].update(compute=1e200),
    "more overlap than there is": lambda r: r.update(overlap_ratio=7.0),
    "negative step": lambda r: r.update(step=-1),
    "huge step": lambda r: r.update(step=10**30),
    "a fraction of a step": lambda r: r.update(step=1.5),
    "another rank": lambda r: r.update(rank=5),
    "a step once more": lambda r: r.update(step=2),
    "a hot device": lambda r: r["device"].update(temperature_c=1e30),
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
    reading = read(tmp_path)
    (problem,) = reading.problems
    assert problem.startswith(f"{path}: line 4 ")
    assert len(problem) < 500
    assert sorted(reading.runs[0].by_rank[0]) == [0, 1, 2, 4, 5]


def test_a_file_of_nonsense_is_one_sentence(tmp_path: Path) -> None:
    write_run(tmp_path / "good", steps=6)
    (tmp_path / "bad").mkdir()
    for content, said in ((b"nonsense\n" * 1000, "and 999 more lines"), (b"\n" * 1_000_000, "and 999999 more lines")):
        (tmp_path / "bad" / "rank_0_metrics.jsonl").write_bytes(content)
        reading = read(tmp_path)
        assert [run.name for run in reading.runs] == ["good"]
        assert [said in problem for problem in reading.problems] == [True]


def test_large_files_are_not_read(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=6, ranks=2) / "rank_0_metrics.jsonl"
    with path.open("ab") as file:
        file.truncate(telemetry.MOST_BYTES + 1)
    assert ["1024 MiB" in problem for problem in read(tmp_path).problems] == [True]


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    elsewhere = write_run(tmp_path / "elsewhere", steps=6)
    root = tmp_path / "root"
    write_run(root / "run", steps=6, ranks=1)
    (root / "run" / "rank_1_metrics.jsonl").symlink_to(elsewhere / "rank_1_metrics.jsonl")
    (root / "linked").symlink_to(elsewhere)
    reading = read(root)
    assert [run.ranks for run in reading.runs] == [[0]]
    assert ["leads out of" in problem for problem in reading.problems] == [True]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=6, ranks=1)
    os.mkfifo(tmp_path / "run" / "rank_1_metrics.jsonl")
    (tmp_path / "run" / "rank_2_metrics.jsonl").mkdir()
    assert read(tmp_path).runs[0].ranks == [0]


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "rank_0_metrics.jsonl").write_bytes(b"{")
    with pytest.raises(UserError, match="has no complete step"):
        read(tmp_path)


def test_a_loss_that_is_no_number_any_more(tmp_path: Path) -> None:
    records = [record(number, loss=math.nan if number > 3 else 0.5, **wobbling(number)) for number in range(8)]  # type: ignore[arg-type]
    run = only_run(write_logs(tmp_path, records))
    assert run.by_rank[0][7].loss is None
    assert "final_loss" not in run.estimates


EXPOSED = {"hidden_ms": 10.0, "exposed_ms": 30.0, "device": SLOW_DEVICE}
NOISY = {(n, r): {"hidden_ms": 20.0 + (n * 37 % 11) * 2} for n in range(1, 30) for r in range(2)}


@pytest.mark.parametrize(
    ("dips", "expected"),
    [
        ({}, []),
        ({(9, rank): EXPOSED for rank in range(2)}, [9]),
        # Slower, with as much hidden.
        ({(11, 0): {"idle_ms": 40.0}}, []),
        # Noisy steps dip only far beyond their noise.
        (NOISY, []),
        # Far beyond the noise here, but nothing to look at.
        ({(12, rank): {"hidden_ms": 30.0} for rank in range(2)}, []),
    ],
    ids=["all alike", "exposed", "slower", "noisy", "small"],
)
def test_steps_that_hide_much_less_are_found(tmp_path: Path, dips: Dips, expected: list[int]) -> None:
    assert only_run(write_run(tmp_path, dips=dips)).dips == expected


def test_dips_are_described_with_their_clock(tmp_path: Path) -> None:
    dips = {(9, rank): EXPOSED for rank in range(2)}
    described = only_run(write_run(tmp_path / "run", dips=dips)).dips_in_words
    clock = "SM clock 1,410 MHz, median of the run 1,980 MHz"
    assert described == f"run: step 9 hides much less communication than the other 26 ({clock})."
