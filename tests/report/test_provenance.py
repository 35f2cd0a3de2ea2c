from __future__ import annotations

from pathlib import Path

import yaml

from overlap_sweep.analysis.points import read_points
from overlap_sweep.report.provenance import launch_commands
from tests.made_sweeps import write_tuner
from tests.make_point import make_point, operator_config


def write_points(directory: Path) -> None:
    """Two, as Hydra leaves them in a sweep."""
    overrides = {"task": ["tp_size=2", "method=none,bulk"], "hydra": ["hydra.mode=MULTIRUN", "hydra/launcher=torchrun"]}
    for method in ("none", "bulk"):
        point = make_point("operator", directory, operator_config(method=method), name=method)
        (point / ".hydra").mkdir()
        (point / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(["tp_size=2", f"method={method}"]))
    (directory / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": overrides}}))


def commands(directory: Path) -> list[str]:
    return launch_commands(read_points(directory).points)


def test_one_command_for_each_sweep(tmp_path: Path) -> None:
    write_points(tmp_path)
    assert commands(tmp_path) == ["python launch.py -m tp_size=2 method=none,bulk hydra/launcher=torchrun"]


def test_the_tuner_s_own_record_comes_first(tmp_path: Path) -> None:
    write_points(tmp_path)
    write_tuner(tmp_path)
    assert commands(tmp_path) == ["python launch.py +experiment=tp_overlap_tuner"]


def test_points_that_were_run_alone_have_their_own(tmp_path: Path) -> None:
    write_points(tmp_path)
    (tmp_path / "multirun.yaml").unlink()
    assert commands(tmp_path) == [f"python launch.py tp_size=2 method={method}" for method in ("bulk", "none")]


def test_a_record_that_was_cut_short_costs_the_comment(tmp_path: Path) -> None:
    write_points(tmp_path)
    (tmp_path / "multirun.yaml").write_text("hydra: {")
    assert commands(tmp_path) == []
