"""On what the numbers were measured, in rows for a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import environments, measured_when

NAMES = {
    "gpu": "GPU",
    "gpu_count": "GPUs",
    "cpu": "CPU",
    "cpu_count": "CPU cores",
    "nccl": "NCCL",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
}


@dataclass(frozen=True)
class Machine:
    """One environment, and how many points it was recorded with."""

    points: int
    measured: str
    rows: list[tuple[str, str]]


def machines(points: Sequence[Point]) -> list[Machine]:
    """The most frequent first; what was never measured has none."""
    found = []
    with_result = [point for point in points if point.result and point.result.environment]
    for environment in environments(with_result):
        own = [point for point in with_result if point.result and point.result.environment == environment]
        found.append(Machine(len(own), measured_when(own), rows_of(environment)))
    return found


def rows_of(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """What is known of it, each with a name for people."""
    rows = []
    for name, value in environment.items():
        if isinstance(value, dict):
            told = {key: item for key, item in value.items() if item is not None}
            rows += [(_name(name), ", ".join(f"{key} {item}" for key, item in told.items()))] if told else []
        elif isinstance(value, list):
            rows.append((_name(name), "\n".join(map(str, value))))
        elif name == "cudnn" and isinstance(value, int):
            rows.append((_name(name), _dotted(value)))
        elif value is not None:
            rows.append((_name(name), str(value)))
    return rows


def _dotted(version: int) -> str:
    """cuDNN's number as people write it: 91900 is 9.19.0, and before version 9 8907 was 8.9.7."""
    if version < 10_000:
        return f"{version // 1000}.{version // 100 % 10}.{version % 100}"
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


def _name(key: str) -> str:
    return NAMES.get(key, key.replace("_", " "))
