"""What analysis reads and chooses in a directory of one case."""

from __future__ import annotations

from pathlib import Path

from overlap_sweep.analysis.choice import PassChoice, choose_all
from overlap_sweep.analysis.points import Point, group_cases, read_points
from overlap_sweep.analysis.traces import read_traces


def layer_point(directory: Path) -> Point:
    """The directory's only point."""
    (point,) = read_points(directory).points
    return point


def only_case(directory: Path) -> list[Point]:
    (points,) = group_cases(read_points(directory).points).values()
    return points


def choices(directory: Path, objective: str = "time") -> dict[tuple[int, str, str], PassChoice]:
    """What is chosen for the directory's only case, by TP size, operator and pass."""
    points = only_case(directory)
    chosen = choose_all(points, read_traces(points), objective)
    return {(choice.tp_size, choice.operator, choice.pass_name): choice for choice in chosen}
