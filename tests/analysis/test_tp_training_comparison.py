"""Tensor-parallel stacks of two sweeps beside each other, and over the versions that a store has seen."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.analysis.comparison.datasets import read_dataset
from overlap_sweep.analysis.comparison.sweeps import SweepComparison, compare_sweeps
from overlap_sweep.analysis.history import history, history_rows
from overlap_sweep.errors import UserError
from overlap_sweep.report.comparison.sweep_text import print_sweeps
from overlap_sweep.report.console import console_for
from overlap_sweep.run_directory import RESULT_FILE, Result, read_result
from tests.make_point import ENVIRONMENT, falling, make_point, stack_config


def compared(directory: Path) -> SweepComparison:
    return compare_sweeps([read_dataset(label, directory / label) for label in ("old", "new")], "old")


def test_a_newer_version_of_the_same_stacks(tmp_path: Path) -> None:
    for impl, old_us, new_us in (("autotp", 10_000.0, 8_000.0), ("megatron", 7_000.0, 7_010.0)):
        for label, step_us in (("old", old_us), ("new", new_us)):
            make_point("tp_training", tmp_path / label, stack_config(impl), step_us=step_us)
    both = compared(tmp_path)
    found = {match.ours.key.backend: (match.ratio, match.verdict) for match in both.matches}
    assert found == {"autotp": (0.8, "faster"), "megatron": (pytest.approx(1.0014, abs=1e-4), "same")}
    assert both.unmatched == []
    assert both.compared == {}


def test_a_sweep_of_one_stack_against_a_sweep_of_another(tmp_path: Path) -> None:
    for tp_size in (2, 4):
        make_point("tp_training", tmp_path / "old", stack_config("autotp", tp_size), step_us=10_000.0)
        make_point("tp_training", tmp_path / "new", stack_config("megatron", tp_size), step_us=5_000.0)
    both = compared(tmp_path)
    assert [match.ratio for match in both.matches] == [0.5, 0.5]
    assert both.compared == {"backend": {"old": "autotp", "new": "megatron"}}


def test_a_version_that_computes_something_else_is_told(tmp_path: Path) -> None:
    for impl in ("autotp", "megatron"):
        make_point("tp_training", tmp_path / "old", stack_config(impl))
    make_point("tp_training", tmp_path / "new", stack_config("autotp"))
    make_point("tp_training", tmp_path / "new", stack_config("megatron"), losses=falling(off={4: 6.3}))
    both = compared(tmp_path)
    assert both.deviations == [
        "new does not compute what old does: the loss of TP=2 DP=1 megatron deviates from step 4 on, there by 0.05"
    ]
    stream = io.StringIO()
    print_sweeps(both, console_for(stream))
    assert both.deviations[0] in stream.getvalue()


@pytest.mark.parametrize("other", [{"tp_training.seed": 1}, {"tp_training.learning_rate": 0.1}], ids=str)
def test_losses_of_other_data_are_not_compared(tmp_path: Path, other: dict[str, Any]) -> None:
    make_point("tp_training", tmp_path / "old", stack_config())
    make_point("tp_training", tmp_path / "new", stack_config(**other), losses=falling(times=2.0))
    both = compared(tmp_path)
    assert (len(both.matches), both.deviations) == (1, [])


def test_a_device_that_rounds_otherwise_computes_the_same(tmp_path: Path) -> None:
    other = {**ENVIRONMENT, "gpu": "NVIDIA B200"}
    make_point("tp_training", tmp_path / "old", stack_config())
    make_point("tp_training", tmp_path / "new", stack_config(), losses=falling(times=1.003), environment=other)
    both = compared(tmp_path)
    assert (list(both.compared), both.deviations) == (["device"], [])


def test_several_stacks_against_another_one_are_refused_with_their_names(tmp_path: Path) -> None:
    for impl in ("autotp", "megatron"):
        make_point("tp_training", tmp_path / "old", stack_config(impl))
    make_point("tp_training", tmp_path / "new", stack_config("async_tp"))
    with pytest.raises(UserError, match=r"old has .*backend autotp/megatron; new has .*backend async_tp\."):
        compared(tmp_path)


def test_other_sizes_and_settings_do_not_match(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path / "old", stack_config("autotp"))
    make_point("tp_training", tmp_path / "old", stack_config("autotp", **{"tp_training.zero_stage": 2}))
    make_point("tp_training", tmp_path / "new", stack_config("autotp"))
    make_point("tp_training", tmp_path / "new", stack_config("autotp", 2, 2))
    both = compared(tmp_path)
    (match,) = both.matches
    assert (match.ours.key.setting, match.ours.key.operator) == ("defaults", "DP=1, 2 layers, batch 2")
    names = {found.only_in: found.names for found in both.unmatched}
    assert "zero2" in names["old"][0]
    assert "DP=2" in names["new"][0]


@dataclass(frozen=True)
class Kept:
    result: Result
    directory: str = "/results"
    host: str = "node7"


def kept(directory: Path, step_us: float, torch: str, **changes: object) -> Kept:
    environment = {**ENVIRONMENT, "packages": {"torch": torch}}
    point = stack_config("autotp", 2, 2, **changes)
    # A stack that waits for the device by itself is launch-bound, and has a history no less.
    written = make_point("tp_training", directory, point, step_us=step_us, environment=environment, launch_bound=True)
    return Kept(read_result(written / RESULT_FILE))


def test_history_has_the_step(tmp_path: Path) -> None:
    found = history(
        [
            kept(tmp_path, 10_000.0, "2.12.0"),
            kept(tmp_path, 9_000.0, "2.13.0", **{"tp_training.log_interval": 5}),
            kept(tmp_path, 12_000.0, "2.13.0", **{"tp_training.zero_stage": 2}),
        ]
    )
    assert (found.problems, found.left_out) == ([], {})
    rows = {(row["setting"], row["torch"]): row for row in history_rows(found.series)}
    assert rows.keys() == {("dp2", "2.12.0"), ("dp2", "2.13.0"), ("dp2 zero2", "2.13.0")}
    moved = rows["dp2", "2.13.0"]
    assert (moved["operator"], moved["pass"], moved["verdict"]) == ("autotp step", "step", "faster")
    assert moved["ratio"] == pytest.approx(0.9)
    assert moved["none_us"] is None
