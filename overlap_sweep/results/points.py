"""Reads run directories: every launched point, whatever its status."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from overlap_sweep.config import ResolvedPoint
from overlap_sweep.errors import UserError
from overlap_sweep.overlap.overlap_cfg import process_wide
from overlap_sweep.program import analyze_program
from overlap_sweep.results.checks import MOST_YAML_BYTES, check_place, read_yaml
from overlap_sweep.results.identity import instrumented
from overlap_sweep.results.measured import Measured
from overlap_sweep.results.run_directory import RESULT_FILE, Result, asked_point, find_points, read_result
from overlap_sweep.trace.disk import links_out

HYDRA_CONFIG = ".hydra/config.yaml"
LONGEST_NAME = 160
"""Longest name of a folder; file systems allow 255 bytes."""

M = TypeVar("M", bound=Measured)
G = TypeVar("G")
C = TypeVar("C", bound=ResolvedPoint)
PointStatus = Literal["ok", "failed", "timeout", "skipped", "missing"]


def fitting(name: str) -> str:
    """Returns the name, shortened for a folder: a long one ends in a digest."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}_{digest}"


class Case(NamedTuple):
    """The conditions that must be equal to compare two times."""

    model: str
    backend: str
    device: str
    precision: str | None
    tokens: int | None
    nodes: int = 1
    process_wide: str = ""
    """Unusual settings of whole processes, such as `CUDA_DEVICE_MAX_CONNECTIONS=8`."""

    @property
    def name(self) -> str:
        model = self.model.rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1]
        nodes = f"_nodes{self.nodes}" if self.nodes > 1 else ""
        more = f"_{self.process_wide}" if self.process_wide else ""
        name = f"{model}_{self.backend}_{self.device}_{self.precision}_tokens{self.tokens}{nodes}{more}"
        return fitting(re.sub(r"[^A-Za-z0-9_.-]+", "-", name))

    def __str__(self) -> str:
        nodes = f", {self.nodes} nodes" if self.nodes > 1 else ""
        more = f", {self.process_wide}" if self.process_wide else ""
        on = f"backend {self.backend} on {self.device}{nodes}{more}"
        return f"{self.model}, {self.tokens} tokens, {self.precision}, {on}"


@dataclass(frozen=True)
class Point:
    """One run directory."""

    directory: Path
    status: PointStatus
    """Status of the result; `missing` if there is no result.json: the point was aborted or is still running. `skipped`
    also where something looked into an ok point at the cost of its times (`instrumented`)."""
    config: ResolvedPoint
    """The configuration that result.json records; for a missing point the one that Hydra composed."""
    result: Result | None

    @property
    def recorded(self) -> Mapping[str, Any]:
        """Returns the configuration as plain data."""
        return self.config

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def workload(self) -> str:
        return str(self.config.workload.name)

    @property
    def launch_bound(self) -> bool:
        return bool(self.result and self.result.launch_bound)

    def measured_as(self, kind: type[M]) -> M:
        """Returns the measurements of an ok point."""
        assert self.result
        return self.result.measured_as(kind)

    def config_as(self, kind: type[C]) -> C:
        """Returns the configuration of a point of this workload."""
        assert isinstance(self.config, kind)
        return self.config

    @property
    def why_not_ok(self) -> str:
        """Returns the reason of a point that is not ok, in one line."""
        if not self.result:
            return "no result.json: aborted or still running"
        return (instrumented(self.config) if self.result.status == "ok" else None) or self.result.reason

    @property
    def case(self) -> Case:
        config, gpu = self.config, self.result.machine.gpu if self.result else None
        return Case(
            model=config.model.name,
            backend=config.backend,
            device=gpu or config.runtime.device,
            precision=config.precision,
            tokens=getattr(config.workload, "tokens", None),
            nodes=config.runtime.nodes or 1,
            process_wide=process_wide(config),
        )


@dataclass(frozen=True)
class Reading:
    """All points below a directory, and one sentence per problem in reading them."""

    root: Path
    points: list[Point]
    problems: list[str]


def read_points(root: Path) -> Reading:
    """Returns the points at or below `root`: the directory of a date, a sweep or a point.

    UserError if there is nothing to analyse. A result.json that cannot be read becomes one of the problems.
    """
    if not root.exists():
        raise UserError(f"{root} does not exist; give a directory that launch.py wrote, such as multirun/<date>.")
    if root.is_file():
        raise UserError(f"{root} is a file; give its directory, or for a trace see `{analyze_program()} trace --help`.")
    points, problems = [], []
    denied: list[OSError] = []
    for directory in find_points(root):
        try:
            points.append(_read_point(directory, root))
        except UserError as error:
            problems.append(str(error))
        except OSError as error:
            denied.append(error)
        except RecursionError:
            problems.append(f"{directory} has a file that is nested too deeply to be read; move it elsewhere.")
    for link in links_out(root, denied.append):
        if (link / RESULT_FILE).exists() or (link / HYDRA_CONFIG).exists():
            problems.append(f"{link} is a link that leads out of {root}, so it is not read; copy the directory there.")
    problems += [f"{error.filename} cannot be read ({error.strerror}); make it readable." for error in denied]
    if not points and not problems:
        raise UserError(f"{root} holds no results; measure some with launch.py, or give the directory that has them.")
    return Reading(root, points, problems)


def group_points(points: Iterable[Point], workload: str, group: Callable[[Point], G]) -> dict[G, list[Point]]:
    """Returns the workload's `ok` points by what `group` returns for them, in the order of their first points."""
    groups: dict[G, list[Point]] = defaultdict(list)
    for point in points:
        if point.status == "ok" and point.workload == workload:
            groups[group(point)].append(point)
    return dict(groups)


def group_cases(points: Iterable[Point], workload: str) -> dict[Case, list[Point]]:
    """Returns the workload's `ok` points by case."""
    cases = group_points(points, workload, lambda point: point.case)
    return {case: cases[case] for case in sorted(cases, key=str)}


def _read_point(directory: Path, root: Path) -> Point:
    if not directory.relative_to(root).as_posix().isprintable():
        raise UserError(f"{str(directory)!a} has unprintable characters in its name, so it is not read; rename it.")
    path = directory / RESULT_FILE
    # A broken link must be refused, too.
    if path.exists() or path.is_symlink():
        check_place(path, root)
        result = read_result(path)
        for name in result.traces:
            check_place(directory / name, root, most_bytes=None)
        status: PointStatus = "skipped" if result.status == "ok" and instrumented(result.point) else result.status
        return Point(directory, status, result.point, result)
    path = directory / HYDRA_CONFIG
    check_place(path, root, MOST_YAML_BYTES)
    return Point(directory, "missing", asked_point(read_yaml(path), path), None)
