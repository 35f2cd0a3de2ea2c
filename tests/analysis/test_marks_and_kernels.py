"""Telemetry's marks against the kernels of real traces."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from overlap_sweep.analysis.marks_and_kernels import disagreements, exposed
from overlap_sweep.analysis.points import Point, read_points
from tests.sweeps import ROOT

RUNS = ROOT / "tests" / "data" / "h200x2_fsdp"
"""Real runs: of DDP with one CUDA connection, where nothing overlapped, and of FSDP2 with eight."""


def recorded(name: str) -> Point:
    (point,) = read_points(RUNS / name).points
    return point


def test_one_connection_is_found_out() -> None:
    found = exposed(recorded("ddp_one_connection"))
    assert found is not None
    assert found.by_marks_ms < 0.2
    assert found.by_kernels_ms == pytest.approx(2.73, abs=0.01)
    (said,) = disagreements([recorded("ddp_one_connection")])
    assert "believe the kernels" in said


def test_eight_connections_agree() -> None:
    found = exposed(recorded("fsdp2"))
    assert found is not None
    assert found.by_kernels_ms > 0
    assert list(disagreements([recorded("fsdp2")])) == []


@pytest.mark.parametrize("missing", ["rank_0_metrics.jsonl", "trace_rank0.json.gz"])
def test_without_one_of_them_nothing_is_said(missing: str, tmp_path: Path) -> None:
    shutil.copytree(RUNS / "ddp_one_connection", tmp_path / "run")
    (tmp_path / "run" / missing).unlink()
    (point,) = read_points(tmp_path / "run").points
    assert exposed(point) is None


def test_a_cpus_are_not_compared() -> None:
    point = recorded("ddp_one_connection")
    on_cpu = replace(point, config={**point.config, "runtime": {**point.config["runtime"], "device": "cpu"}})
    assert exposed(on_cpu) is None
