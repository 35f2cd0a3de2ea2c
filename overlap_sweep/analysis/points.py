"""Read run directories: every point that launching left, whatever became of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import RESULT_FILE, Result, Timing, find_points, read_result
from overlap_sweep.space import METHODS, OPERATORS, PASSES, PHASES

HYDRA_CONFIG = ".hydra/config.yaml"
LAYER_PASSES = {"fwd", "bwd", "all"}
"""What every variant of a layer has times of; `step` only where an optimizer runs."""

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
    def is_layer(self) -> bool:
        """A whole layer under several configurations, not one operator under one."""
        return self.config["workload"]["name"] == "layer"

    @property
    def why_not_ok(self) -> str:
        """In one line; of a point that is not ok."""
        if not self.result:
            return "no result.json: given up, or still running"
        return next(iter((self.result.error or "").strip().splitlines()), "no reason given")

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
    """The `ok` points of operators by what must be equal for a comparison; a layer point holds its own."""
    cases = defaultdict(list)
    for point in points:
        if point.status == "ok" and not point.is_layer:
            cases[point.case].append(point)
    return {case: cases[case] for case in sorted(cases, key=str)}


def _read_point(directory: Path) -> Point:
    path = directory / RESULT_FILE
    if path.exists():
        result = read_result(path)
        _check_config(result.point, path)
        if result.status == "ok":
            check_whole = _check_variants if result.point["workload"]["name"] == "layer" else _check_times
            check_whole(result, path)
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
    name: str
    tokens: int | None


class _Runtime(msgspec.Struct):
    device: str


class _Layer(msgspec.Struct):
    kind: str
    num_replicas: int
    training: bool


class _Config(msgspec.Struct):
    """The part of a point's configuration that analysis relies on."""

    model: _Model
    workload: _Workload
    runtime: _Runtime
    tp_size: int
    backend: str
    precision: str | None


class _OperatorConfig(_Config):
    operator: str
    phase: str
    method: str


class _LayerConfig(_Config):
    layer: _Layer


_CONFIG_OF_WORKLOAD: dict[str, type[_Config]] = {"operator": _OperatorConfig, "layer": _LayerConfig}


def _check_config(config: Any, path: Path) -> None:
    """UserError when this is no point's configuration: written by something else, or by a later version."""
    try:
        workload = msgspec.convert(config, _Config).workload.name
        known = msgspec.convert(config, _CONFIG_OF_WORKLOAD.get(workload, _Config))
    except msgspec.ValidationError as error:
        raise UserError(f"{path} describes no point ({error}); remove it and measure the point again.") from None
    choices_of: list[tuple[str, Collection[str]]] = [(workload, _CONFIG_OF_WORKLOAD)]
    if isinstance(known, _OperatorConfig):
        choices_of += [(known.operator, OPERATORS), (known.phase, (*PHASES, "all")), (known.method, METHODS)]
    for value, choices in choices_of:
        if value not in choices:
            raise UserError(f"{path} says {value}, which is none of {', '.join(choices)}; update overlap_sweep.")


def _check_times(result: Result, path: Path) -> None:
    """UserError when an `ok` point lacks what every comparison needs: edited by hand, or by another program."""
    for name in PASSES:
        times = result.times.get(name)
        timings = [times.point, times.none, times.floor] if times else []
        if times and times.default:
            timings += [times.default.default, times.default.none]
        if not timings or not all(map(_is_whole, timings)):
            raise UserError(f"{path} is ok without whole {name} times; remove it and measure the point again.")


def _check_variants(result: Result, path: Path) -> None:
    """UserError when an `ok` layer lacks what pairing its variants round by round needs."""
    timings = [timing for variant in result.variants.values() for timing in variant.times.values()]
    complete = all(variant.times.keys() >= LAYER_PASSES for variant in result.variants.values())
    # Every sample is divided by, not only the medians.
    positive = all(min(timing.samples_us, default=0.0) > 0 for timing in timings)
    rounds = {len(timing.samples_us) for timing in timings}
    if len(rounds) != 1 or not (complete and positive and all(map(_is_whole, timings))):
        raise UserError(f"{path} is ok without whole times of its variants; remove it and measure the point again.")


def _is_whole(timing: Timing) -> bool:
    return timing.median_us > 0 and len(timing.samples_us) > 1
