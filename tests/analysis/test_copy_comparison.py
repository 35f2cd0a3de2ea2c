"""Copies of two machines beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.analysis.comparison.datasets import read_dataset
from overlap_sweep.analysis.comparison.sweeps import SweepComparison, compare_sweeps
from overlap_sweep.errors import UserError
from tests.make_point import ENVIRONMENT, copy_config, make_point


def compared(**paths: Path) -> SweepComparison:
    return compare_sweeps([read_dataset(label, path) for label, path in paths.items()], "old")


def test_copy_engines_of_two_machines(tmp_path: Path) -> None:
    """The new one's copies take half as long, and hide as well."""
    make_point("copy_engine", tmp_path / "old", overlapped_us=1080.0, copy_us=400.0)
    faster = {"environment": {**ENVIRONMENT, "gpu": "NVIDIA B200"}}
    make_point("copy_engine", tmp_path / "new", overlapped_us=1040.0, copy_us=200.0, **faster)
    for name, result in (("old", {}), ("new", faster)):
        make_point(
            "copy_engine",
            tmp_path / name,
            copy_config("device_to_device"),
            overlapped_us=1000.0,
            copy_us=100.0,
            **result,
        )
    both = compared(old=tmp_path / "old", new=tmp_path / "new")
    of_host = {m.ours.key.setting: m for m in both.matches if m.ours.key.operator.startswith("host_to_device")}
    assert of_host.keys() == {"gemm", "copy", "sequential", "overlapped"}
    assert of_host["copy"].ratio == 0.5
    assert of_host["copy"].verdict == "faster"
    assert of_host["gemm"].verdict == "same"
    overlapped = of_host["overlapped"]
    assert overlapped.ours.hidden_fraction == pytest.approx(0.8)
    assert overlapped.theirs.hidden_fraction == pytest.approx(0.8)
    assert overlapped.none_ratio == pytest.approx(1200 / 1400)
    assert overlapped.floor_ratio == 1
    assert both.compared["device"] == {"old": "NVIDIA H200", "new": "NVIDIA B200"}
    assert len(both.matches) == 8
    assert both.unmatched == []


def test_sizes_match_and_repetitions_are_pooled(tmp_path: Path) -> None:
    for repetition in (0, 1):
        make_point("copy_engine", tmp_path / "old", copy_config(repetition=repetition), overlapped_us=1100.0)
    make_point("copy_engine", tmp_path / "new", overlapped_us=1100.0)
    make_point("copy_engine", tmp_path / "new", copy_config(copy_mb=16.0), overlapped_us=1100.0)
    both = compared(old=tmp_path / "old", new=tmp_path / "new")
    assert {match.theirs.time.repeats for match in both.matches} == {10}
    (only,) = both.unmatched
    assert len(only.names) == 4
    assert all("4 x 16 MiB" in name for name in only.names)


def test_launch_bound_copies_say_nothing(tmp_path: Path) -> None:
    bound = dict.fromkeys(("copy", "sequential"), True)
    make_point("copy_engine", tmp_path / "old", overlapped_us=1100.0, launch_bound=bound)
    make_point("copy_engine", tmp_path / "new", overlapped_us=1100.0)
    both = compared(old=tmp_path / "old", new=tmp_path / "new")
    assert [match.ours.key.setting for match in both.matches] == ["gemm", "overlapped"]
    assert both.matches[1].theirs.none_us is None


def test_training_without_telemetry_is_to_be_copied_not_measured_again(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path / "old")
    with pytest.raises(UserError, match=r"copy the rank_<r>_metrics\.jsonl"):
        read_dataset("old", tmp_path / "old")
