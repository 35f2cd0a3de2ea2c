"""Read run directories: every point that launching left, whatever became of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import RESULT_FILE, Result, find_points, read_result
from overlap_sweep.space import METHODS, OPERATORS, PASSES, PHASES

HYDRA_CONFIG = ".hydra/config.yaml"

PointStatus = Literal["ok", "failed", "timeout", "skipped", "missing"]


class Case(NamedTuple):
    """What must be equal for two times to be compared at all."""

    model: str
    backend: str
    device: str
    precision: str | None
    tokens: int | None

    @property
    def name(self) -> str:
        """Fit for a folder."""
        model = self.model.rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1]
        name = f"{model}_{self.backend}_{self.device}_{self.precision}_tokens{self.tokens}"
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens} tokens, {self.precision}, backend {self.backend} on {self.device}"


@dataclass(frozen=True)
class Point:
    """One run directory as it was found."""

    directory: Path
    status: PointStatus
    """`missing`: the point was started, or is running still, but there is no result.json."""
    config: Mapping[str, Any]
    """The point's configuration as result.json records it, or of a missing point as Hydra composed it."""
    result: Result | None

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def case(self) -> Case:
        config, environment = self.config, self.result.environment if self.result else {}
        return Case(
            model=config["model"]["name"],
            backend=config["backend"],
            device=environment.get("gpu") or config["runtime"]["device"],
            precision=config["precision"],
            tokens=config["workload"]["tokens"],
        )


@dataclass(frozen=True)
class Reading:
    """All points below a directory, and one sentence for each that could not be read."""

    root: Path
    points: list[Point]
    problems: list[str]


def read_points(root: Path) -> Reading:
    """Read the run directories at or below `root`: a date's, a sweep's, or a single one.

    UserError when there is nothing to analyse. A result.json that cannot be read is no reason to lose the others:
    it becomes one of the problems.
    """
    if not root.exists():
        raise UserError(f"{root} does not exist; give a directory that launch.py wrote, such as multirun/<date>.")
    if root.is_file():
        raise UserError(f"{root} is a file; give its directory, or see `python analyze.py trace --help` for traces.")
    points, problems = [], []
    for directory in find_points(root):
        try:
            points.append(_read_point(directory))
        except UserError as error:
            problems.append(str(error))
    if not points and not problems:
        raise UserError(f"{root} holds no results; measure some with launch.py, or give the directory that has them.")
    return Reading(root, points, problems)


def group_cases(points: Iterable[Point]) -> dict[Case, list[Point]]:
    """The `ok` points by what must be equal for a comparison."""
    cases = defaultdict(list)
    for point in points:
        if point.status == "ok":
            cases[point.case].append(point)
    return {case: cases[case] for case in sorted(cases, key=str)}


def _read_point(directory: Path) -> Point:
    path = directory / RESULT_FILE
    if path.exists():
        result = read_result(path)
        _check_config(result.point, path)
        _check_times(result, path)
        return Point(directory, result.status, result.point, result)
    path = directory / HYDRA_CONFIG
    try:
        config = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read ({reason}); remove {directory} and measure the point again.") from None
    _check_config(config, path)
    return Point(directory, "missing", config, None)


class _Model(msgspec.Struct):
    name: str


class _Workload(msgspec.Struct):
    tokens: int | None


class _Runtime(msgspec.Struct):
    device: str


class _Config(msgspec.Struct):
    """The part of a point's configuration that analysis relies on."""

    model: _Model
    workload: _Workload
    runtime: _Runtime
    tp_size: int
    operator: str
    phase: str
    method: str
    backend: str
    precision: str | None


def _check_config(config: Any, path: Path) -> None:
    """UserError when this is no point's configuration: written by something else, or by a later version."""
    try:
        known = msgspec.convert(config, _Config)
    except msgspec.ValidationError as error:
        raise UserError(f"{path} describes no point ({error}); remove it and measure the point again.") from None
    for value, choices in (
        (known.operator, OPERATORS),
        (known.phase, (*PHASES, "all")),
        (known.method, METHODS),
    ):
        if value not in choices:
            raise UserError(f"{path} says {value}, which is none of {', '.join(choices)}; update overlap_sweep.")


def _check_times(result: Result, path: Path) -> None:
    """UserError when an `ok` point lacks what every comparison needs: edited by hand, or by another program."""
    for name in PASSES if result.status == "ok" else ():
        times = result.times.get(name)
        timings = [times.point, times.none, times.floor] if times else []
        if not timings or any(timing.median_us <= 0 or len(timing.samples_us) < 2 for timing in timings):
            raise UserError(f"{path} is ok without whole {name} times; remove it and measure the point again.")
