"""Training runs of real processes, as tests want them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from overlap_sweep.ranks import Ranks
from overlap_sweep.run_directory import metrics_file
from overlap_sweep.telemetry import StepRecord
from tests.processes import run_ranks
from tests.training.points import fsdp_point


def _train(ranks: Ranks, points: dict[str, dict[str, Any]], root: Path) -> dict[str, dict[str, Any]]:
    from overlap_sweep.workloads import fsdp

    found = {}
    for name, point in points.items():
        directory = root / name.replace(" ", "_")
        directory.mkdir(exist_ok=True)
        found[name] = fsdp.run(point, directory, ranks)
    return found


def train(root: Path, ranks: int, **overrides: list[str]) -> dict[str, dict[str, Any]]:
    """By name what rank 0 returns."""
    points = {name: fsdp_point(f"distributed.dp_size={ranks}", *given) for name, given in overrides.items()}
    found: dict[str, dict[str, Any]] = run_ranks(ranks, _train, points, root, keep="cpu")[0]
    return found


def losses(found: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    return {name: one["training"].losses for name, one in found.items()}


def telemetry(directory: Path, rank: int = 0) -> list[StepRecord]:
    lines = (directory / metrics_file(rank)).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=StepRecord) for line in lines]
