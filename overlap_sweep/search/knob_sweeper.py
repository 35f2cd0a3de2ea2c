"""`hydra/sweeper=knobs`: search knobs through any Hydra launcher; see knobs.py and knob_space.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

from overlap_sweep.config import NO_PART_OF_A_POINT
from overlap_sweep.results.records import KnobRecord, KnobSearch
from overlap_sweep.results.run_directory import Result
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.search.choices import swept_values
from overlap_sweep.search.knob_space import KnobSpace, find_spaces, measured
from overlap_sweep.search.knob_trail import Answer, KnobTrail, Setting
from overlap_sweep.search.knobs import KnobEffort, answer, search
from overlap_sweep.search.measured import Measurements
from overlap_sweep.search.text import knob_lines, write_knobs

EXPERIMENT = "experiment=fsdp_overlap"


class Searching:
    """The search of one case, under way."""

    def __init__(self, space: KnobSpace, measurements: Measurements, effort: KnobEffort, share: float) -> None:
        """`share`: of the budget that is left, for this search."""
        self.space, self._measurements, self._effort = space, measurements, effort
        self.trail = KnobTrail(space.knobs, self._refusal, self._room)
        self.ended = False
        self._refused: dict[Setting, str] = {}
        self._asked: Counter[Setting] = Counter()
        self._results: list[Result] = []
        budget = measurements.budget
        self._most_points = math.inf if budget.points_left is None else budget.points + share * budget.points_left
        limit_s = math.inf if budget.max_minutes is None else 60 * budget.max_minutes
        self._ends_s = budget.elapsed_s + share * (limit_s - budget.elapsed_s)

    def run(self, after_batch: Callable[[Searching], None]) -> None:
        """To its end, or that of the budget."""
        steps = search(self.trail, self._effort)
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(self._measure(wanted))
                after_batch(self)
        except StopIteration:
            self.ended = True

    @property
    def found(self) -> KnobSearch:
        """As far as it is known."""
        why = self._measurements.budget.why_spent or "search.max_points or search.max_minutes is nearly used up"
        stopped = "" if self.ended and not self.trail.cut else why if self.trail.cut else "not yet"
        refused = Counter(self._refused.values())
        found = answer(self.trail, self.space.label, _typed(self.space), stopped, refused)
        found.left_out, found.points = self.space.left_out, len(self._results)
        found.host_bound = sum(result.launch_bound for result in self._results)
        return found

    def _refusal(self, setting: Setting) -> str | None:
        reason = self.space.refusal(setting)
        if reason:
            self._refused[setting] = reason
        return reason

    def _room(self) -> float:
        """By the points that are left, and by the time that those so far took."""
        budget = self._measurements.budget
        points = self._most_points - budget.points
        new = budget.points - self._measurements.reused
        return min(points, (self._ends_s - budget.elapsed_s) * new / budget.elapsed_s) if new else points

    def _measure(self, settings: Sequence[Setting]) -> list[Answer]:
        jobs = []
        for setting in settings:
            jobs.append(self.space.job(setting, self._asked[setting]))
            self._asked[setting] += 1
        results = self._measurements.measure(jobs)
        self._results += results
        answers: list[Answer] = [measured(result, self._samples_per_step) for result in results]
        return answers + [None] * (len(settings) - len(results))

    @property
    def _samples_per_step(self) -> int | None:
        """The baseline's; None where points of the workload do not differ in it."""
        return getattr(self._results[0].measured, "samples_per_step", None) if self._results else None


def _typed(space: KnobSpace) -> list[str]:
    """What a single run of the baseline is typed as. Our experiment only searches; another may set more."""
    no_part = tuple(name + end for name in NO_PART_OF_A_POINT for end in "=.")
    overrides = [override for override in space.overrides if not override.startswith(no_part)]
    kept = [override for override in overrides if override.lstrip("+") != EXPERIMENT]
    if any(override.lstrip("+").startswith("experiment=") for override in kept):
        return [*kept, "hydra.mode=RUN"]
    named = any(override.startswith("workload=") for override in kept)
    return kept if len(kept) == len(overrides) or named else ["workload=fsdp", *kept]


class _Report:
    """Lines of progress, and knobs.json, always whole, after every batch."""

    def __init__(self, measurements: Measurements) -> None:
        self._measurements = measurements
        self.searches: list[Searching] = []

    @property
    def record(self) -> KnobRecord:
        budget = self._measurements.budget
        found = [searching.found for searching in self.searches]
        return KnobRecord(
            points=budget.points, reused=self._measurements.reused, elapsed_s=budget.elapsed_s, searches=found
        )

    def batch_done(self, searching: Searching) -> None:
        write_knobs(self._measurements.directory, self.record)
        trail, budget = searching.trail, self._measurements.budget
        if trail.baseline not in trail.found.of:
            return
        gain = 1 - trail.found.time_us(trail.best) / trail.found.time_us(trail.baseline)
        stage = "proving" if trail.proof.of else "best so far"
        print(
            f"knobs: {budget.points} points in {budget.elapsed_s:.0f} s; {stage}: {trail.name(trail.best)}"
            + (f" ({100 * gain:.1f} % less time)" if trail.best != trail.baseline else ""),
            flush=True,
        )

    def conclude(self) -> None:
        record = self.record
        path = write_knobs(self._measurements.directory, record)
        outcomes.answered = any(found.time_us is not None for found in record.searches)
        print("\n".join(knob_lines(record)))
        print(f"knobs: {path} has all that was tried", flush=True)


def sweep(
    config: DictConfig, context: HydraContext, launcher: Launcher, params: Mapping[str, Any], arguments: Sequence[str]
) -> None:
    """Search every case, print the answers, and leave `knobs.json` beside the points. UserError when there is nothing
    to search, or a value is wrong; nothing was started then."""
    values = swept_values(context, params, arguments)
    spaces = find_spaces(config, context, values, set(params))
    settings, measurements = config.search, Measurements.begin(config, launcher)
    effort = KnobEffort(reach=settings.reach, repeats=settings.repeats, worth=settings.worth)
    report = _Report(measurements)
    for index, space in enumerate(spaces):
        reasons = "; ".join(f"{key}: {why}" for key, why in space.left_out.items())
        if not space.knobs:
            print(f"knobs: {space.label} is not searched: {reasons}", flush=True)
            continue
        knobs = ", ".join(f"{knob.key}={','.join(knob.values)}" for knob in space.knobs)
        print(f"knobs: {space.label}: {knobs}", flush=True)
        report.searches.append(Searching(space, measurements, effort, 1 / (len(spaces) - index)))
        report.searches[-1].run(report.batch_done)
    report.conclude()
