"""Which times of jobs are compared with each other. How comparisons judge them: tests/compare."""

from __future__ import annotations

from pathlib import Path

from overlap_sweep.compare.datasets import read_dataset
from overlap_sweep.compare.sweeps import compare_sweeps
from tests.make_point import job_config, make_point

EDITED = {"job.command": "torchrun train.py --fused --bucket {bucket}"}


def test_a_sweep_is_compared_with_one_of_a_changed_command(tmp_path: Path) -> None:
    for repetition, verdict in enumerate(("unknown", "faster")):
        for bucket, step_us in ((25, 100_000.0), (100, 90_000.0)):
            for name, changed, times in (("old", {}, 1.0), ("new", EDITED, 0.8)):
                config = job_config({"bucket": bucket}, repetition=repetition, **changed)
                make_point("job", tmp_path / name, config, step_us=step_us * times)
        found = compare_sweeps([read_dataset(name, tmp_path / name) for name in ("old", "new")], "old")
        # One run each says nothing.
        assert {match.ours.key.setting: match.verdict for match in found.matches} == {
            "bucket=25": verdict,
            "bucket=100": verdict,
        }


def test_two_commands_of_one_script_do_not_hide_each_other(tmp_path: Path) -> None:
    make_point("job", tmp_path, job_config({"bucket": 25}), step_us=100_000.0)
    make_point("job", tmp_path, job_config({"bucket": 25}, **EDITED), step_us=80_000.0)
    found = read_dataset("both", tmp_path)
    assert sorted(time.time.time_us for time in found.found.times) == [80_000.0, 100_000.0]
    assert len(set(found.keys)) == 2
