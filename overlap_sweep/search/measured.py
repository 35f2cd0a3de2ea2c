"""Measures points through the launcher, in batches within a budget, and reuses existing results."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from overlap_sweep.config import INSTRUMENTS, NO_PART_OF_A_POINT, ResolvedPoint
from overlap_sweep.errors import UsageError, UserError
from overlap_sweep.hydra_adapter.composition import compose_point
from overlap_sweep.hydra_adapter.overrides import as_choice, parsed, texts
from overlap_sweep.hydra_adapter.plugins import error_of
from overlap_sweep.report.numbers import as_duration
from overlap_sweep.results.identity import point_key
from overlap_sweep.results.run_directory import RESULT_FILE, Result, find_points, read_result, write_result
from overlap_sweep.runtime.kept import LASTING, differs, whole_result
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import limits

CHUNK = 8
"""Points per launch if time is limited: launchers other than ours do not look at the limit themselves."""


@dataclass
class Budget:
    """Limits of points and minutes; None is unlimited."""

    max_points: int | None
    max_minutes: float | None
    points: int = 0
    began_s: float = field(default_factory=time.monotonic)
    other_s: float = 0.0
    """Seconds of it that went into something else than points."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def ends_s(self) -> float:
        """Returns the time of the monotonic clock at which its minutes are over."""
        return math.inf if self.max_minutes is None else self.began_s + 60 * self.max_minutes

    @property
    def points_left(self) -> int | None:
        return None if self.max_points is None else max(0, self.max_points - self.points)

    @property
    def in_words(self) -> str:
        """Returns the limits for a progress line; empty if there are none."""
        points = "" if self.max_points is None else f", at most {self.max_points} points"
        return points + ("" if self.max_minutes is None else f", at most {as_duration(60 * self.max_minutes)}")

    @property
    def why_spent(self) -> str:
        """Returns why the budget is used up; empty while it is not."""
        if self.points_left == 0:
            return f"{outcomes.option('search.max_points', self.max_points)} is used up"
        if self.max_minutes is not None and time.monotonic() >= self.ends_s:
            return f"{outcomes.option('search.max_minutes', self.max_minutes)} is used up"
        return ""


@dataclass(frozen=True)
class Job:
    """One point for the launcher."""

    overrides: Sequence[str]
    point: ResolvedPoint
    """The resolved configuration of the overrides."""


@dataclass(frozen=True)
class SearchInputs:
    """What Hydra gives to a search."""

    config: DictConfig
    """The whole sweep's configuration."""
    context: HydraContext
    launcher: Launcher
    params: Mapping[str, object]
    """Values to search, by key; those of `arguments` win."""
    arguments: Sequence[str]
    """The command line's overrides that are not Hydra's."""

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Returns Hydra's configuration of a point. UserError for a wrong override."""
        return compose_point(self.context.config_loader, self.config, overrides)

    def expect(self, point: ResolvedPoint) -> None:
        """Has our launchers begin what takes long of a point that will be measured soon."""
        if expect := getattr(self.launcher, "expect", None):
            expect(point)

    @cached_property
    def values(self) -> dict[str, list[str]]:
        """Returns each key's values as text, by key as typed. UserError for a continuous range, or what a search
        cannot vary."""
        typed = [*(f"{key}={value}" for key, value in self.params.items()), *self.arguments]
        values = {each.get_key_element(): list(texts(each)) for each in parsed(typed, self.context.config_loader)}
        for key, swept in values.items():
            name = key.lstrip("+~")
            wanted = ",".join(swept).lower()
            if name.removeprefix("runtime.") in INSTRUMENTS and wanted != "false":
                raise UsageError(f"{name}={wanted} costs time, so a search cannot compare; give it to one point.")
            if name in ("phases", "repetition"):
                raise UsageError(f"{name} is set by the search itself; leave it out.")
            if len(swept) > 1 and name.partition(".")[0] in NO_PART_OF_A_POINT:
                raise UsageError(f"{name}={','.join(swept)}: a search takes one value of {name}.")
        return values


class Measurements:
    """All points of a search. Points with a result in its directory are not measured again."""

    def __init__(self, launcher: Launcher, directory: Path, budget: Budget) -> None:
        self.budget, self.directory = budget, directory
        self.reused = 0
        """Number of the budget's points whose results were reused."""
        self._launcher = launcher
        self._known = _known_results(directory)
        self._launched = 0
        self._counted: set[str] = set()
        """Keys of the points that the budget has counted."""

    @classmethod
    def begin(cls, inputs: SearchInputs) -> Measurements:
        """Records what is searched in the sweep's directory, and starts the clock."""
        config = inputs.config
        directory = Path(str(config.hydra.sweep.dir))
        OmegaConf.save(config, directory / "multirun.yaml")
        budget = Budget(config.search.max_points, config.search.max_minutes)
        outcomes.searching, outcomes.limits = True, budget.in_words
        return cls(inputs.launcher, directory, budget)

    def measure(self, jobs: Sequence[Job]) -> list[Result | None]:
        """Returns the result of each job; None if the budget ended before it was measured."""
        allowed = jobs[: self.budget.points_left]
        size = CHUNK if self.budget.max_minutes is not None else max(1, len(allowed))
        results: list[Result | None] = []
        while len(results) < len(allowed) and not self.budget.why_spent:
            chunk = allowed[len(results) : len(results) + size]
            known = {point_key(job.point) for job in chunk if self._known_result(job)}
            with limits.until(self.budget.ends_s):
                found = self._measure(chunk)
            results += found
            # A search may ask again for what was measured before it began.
            new = {point_key(job.point) for job, one in zip(chunk, found, strict=True) if one} - self._counted
            self._counted |= new
            self.reused += len(new & known)
            self.budget.points += len(new)
        return [*results, *[None] * (len(jobs) - len(results))]

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Returns the results of all jobs, regardless of the budget; existing ones are reused."""
        return [result for result in self._measure(jobs) if result]

    def _measure(self, jobs: Sequence[Job]) -> list[Result | None]:
        found = [self._known_result(job) for job in jobs]
        new = [job for job, result in zip(jobs, found, strict=True) if result is None]
        launched = iter(self._launch(new) if new else ())
        return [result or next(launched) for result in found]

    def _known_result(self, job: Job) -> Result | None:
        result = self._known.get(point_key(job.point))
        if result is None or differs(result, job.point):
            return None
        # What was given up has only its first steps: that counts where it would be given up again.
        return None if result.gave_up and not limits.gives_up(result) else result

    def _launch(self, jobs: Sequence[Job]) -> list[Result | None]:
        typed = [list(map(as_choice, job.overrides)) for job in jobs]
        returned = self._launcher.launch(typed, initial_job_idx=self._launched)
        self._launched += len(jobs)
        found = [_result(one, job) for one, job in zip(returned, jobs, strict=True)]
        self._known |= {point_key(one.point): one for one in found if one and _lasts(one)}
        return found


def _result(returned: JobReturn, job: Job) -> Result | None:
    """Returns the result in the job's directory; if there is none, a failed one, which is written there. None if the
    time was over before it was measured."""
    directory = Path(str(returned.hydra_cfg.hydra.runtime.output_dir)) if returned.hydra_cfg else None
    if limits.are_over and directory and not _is_measured(directory):
        return None
    raised = error_of(returned)
    if raised is None and directory and (directory / RESULT_FILE).exists():
        return read_result(directory / RESULT_FILE)
    if directory in outcomes.given_up:
        raise UserError(f"{directory.name} could not be measured: {outcomes.given_up[directory]}.")
    error = "the job wrote no result" if raised is None else str(raised)
    result = Result(name=directory.name if directory else "", recorded=dict(job.point), status="failed", error=error)
    if directory and directory.is_dir():
        write_result(directory, result)
    return result


def _is_measured(directory: Path) -> bool:
    result = whole_result(directory)
    return result is not None and result.status != "timeout"


def _lasts(result: Result) -> bool:
    """Returns whether the point would have no other result if it was measured again."""
    return result.status in LASTING or result.has_wrong_numbers


def _known_results(directory: Path) -> dict[str, Result]:
    found = {}
    for point_directory in find_points(directory):
        result = whole_result(point_directory)
        if result and _lasts(result):
            found[point_key(result.point)] = result
    return found
