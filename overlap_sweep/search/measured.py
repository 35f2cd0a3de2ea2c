"""Have points measured by the launcher, in batches, unless their results are there already or the budget is spent."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf

from overlap_sweep.errors import UserError
from overlap_sweep.results.identity import key_of, point_identity
from overlap_sweep.results.run_directory import RESULT_FILE, Result, find_points, read_result, write_result
from overlap_sweep.runtime.kept import LASTING, stands_for, whole_result
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.workloads.operator.failures import wrong_passes

CHUNK = 8
"""Points that are launched at once where time is limited: a limit is looked at between launches only."""

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_NO_STRINGS = {"null", "true", "false", "nan", "inf"}
"""Words that Hydra's grammar reads as something else."""


@dataclass
class Budget:
    """Points and minutes; None is no limit."""

    max_points: int | None
    max_minutes: float | None
    points: int = 0
    began_s: float = field(default_factory=time.monotonic)
    _paused_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Without the pauses."""
        return time.monotonic() - self.began_s - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside costs nothing."""
        before_s = time.monotonic()
        try:
            yield
        finally:
            self._paused_s += time.monotonic() - before_s

    @property
    def points_left(self) -> int | None:
        return None if self.max_points is None else max(0, self.max_points - self.points)

    @property
    def spent(self) -> bool:
        return bool(self.why_spent)

    @property
    def why_spent(self) -> str:
        """Empty while it is not."""
        if self.points_left == 0:
            return f"search.max_points={self.max_points} is used up"
        if self.max_minutes is not None and self.elapsed_s >= 60 * self.max_minutes:
            return f"search.max_minutes={self.max_minutes:g} is used up"
        return ""


@dataclass(frozen=True)
class Job:
    """One point for the launcher."""

    overrides: Sequence[str]
    point: Mapping[str, Any]
    """The resolved configuration that the launcher will find for them."""


class Measurements:
    """All points of a sweep. Those that lie in its directory already are not measured again."""

    def __init__(self, launcher: Launcher, directory: Path, budget: Budget) -> None:
        self.budget, self.directory = budget, directory
        self.reused = 0
        """Of the budget's points, those that were not measured again."""
        self._launcher = launcher
        self._known = _known_results(directory)
        self._launched = 0

    @classmethod
    def begin(cls, config: DictConfig, launcher: Launcher) -> Measurements:
        """Makes the directory of a search, and starts its clock."""
        directory = Path(str(config.hydra.sweep.dir))
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, directory / "multirun.yaml")
        outcomes.searching = True
        return cls(launcher, directory, Budget(config.search.max_points, config.search.max_minutes))

    def measure(self, jobs: Sequence[Job]) -> list[Result]:
        """Returns the results of the first of them, as far as the budget goes."""
        jobs = jobs[: self.budget.points_left]
        size = CHUNK if self.budget.max_minutes is not None else max(1, len(jobs))
        results: list[Result] = []
        while len(results) < len(jobs) and not self.budget.spent:
            chunk = jobs[len(results) : len(results) + size]
            self.budget.points += len(chunk)
            self.reused += sum(self._known_result(job) is not None for job in chunk)
            results += self.run(chunk)
        return results

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Measures the jobs, whatever the budget says, unless their results are there already."""
        found = [self._known_result(job) for job in jobs]
        new = [job for job, result in zip(jobs, found, strict=True) if result is None]
        launched = iter(self._launch(new) if new else ())
        return [result or next(launched) for result in found]

    def _known_result(self, job: Job) -> Result | None:
        result = self._known.get(_key(job.point))
        return result if result and stands_for(result, job.point) else None

    def _launch(self, jobs: Sequence[Job]) -> list[Result]:
        returned = self._launcher.launch([list(job.overrides) for job in jobs], initial_job_idx=self._launched)
        self._launched += len(jobs)
        return [_result(one, job) for one, job in zip(returned, jobs, strict=True)]


def override_value(value: Any) -> str:
    """Returns the value as Hydra's grammar spells it in an override."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{override_value(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(override_value, value))}]"
    if isinstance(value, str) and not (_WORD.fullmatch(value) and value.lower() not in _NO_STRINGS):
        return QuotedString(value, Quote.double).with_quotes()
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _result(returned: JobReturn, job: Job) -> Result:
    """Returns what the job left in its directory."""
    directory = Path(str(returned.hydra_cfg.hydra.runtime.output_dir)) if returned.hydra_cfg else None
    if returned.status == JobStatus.COMPLETED and directory and (directory / RESULT_FILE).exists():
        return read_result(directory / RESULT_FILE)
    if directory in outcomes.given_up:
        raise UserError(f"{directory.name} was not measured: {outcomes.given_up[directory]}.")
    error = str(returned._return_value) if returned.status == JobStatus.FAILED else "the job left no result"
    result = Result(name=directory.name if directory else "", point=dict(job.point), status="failed", error=error)
    if directory and directory.is_dir():
        write_result(directory, result)
    return result


def _known_results(directory: Path) -> Mapping[str, Result]:
    found = {}
    for point_directory in find_points(directory):
        result = whole_result(point_directory)
        if result and (result.status in LASTING or wrong_passes(result)):
            found[_key(result.point)] = result
    return found


def _key(point: Mapping[str, Any]) -> str:
    return key_of(point_identity(point))
