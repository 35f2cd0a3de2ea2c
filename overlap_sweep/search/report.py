"""What a search tells while it runs, and leaves behind: search.json, always whole, after every round."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from overlap_sweep.results.records import PassSearch, SearchRecord, TriedSetting, write_search_record
from overlap_sweep.results.run_directory import SEARCH_FILE
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.search.cell import NONE, Candidate
from overlap_sweep.search.measured import Measurements
from overlap_sweep.search.rounds import Task
from overlap_sweep.search.trail import Trail


class SearchReport:
    """Of all tasks of one sweep."""

    def __init__(self, directory: Path, tasks: Sequence[Task]) -> None:
        self.directory, self.tasks = directory, list(tasks)
        self.dropped: dict[str, str] = {}
        """By label, why a task was not searched, or not to the end."""
        self._rounds = 0

    def drop(self, label: str, reason: str) -> None:
        self.dropped[label] = reason
        print(f"search: {label} is not searched: {reason}", flush=True)

    def round_done(self, tasks: Sequence[Task], measurements: Measurements) -> None:
        """Write the best so far, and say it in a line."""
        self._rounds += 1
        self._write(measurements)
        trails = [trail for task in tasks for trail in task.trails]
        open_trails = [trail for trail in trails if not trail.stopped]
        if len(open_trails) != len(trails) or self._rounds == 1:
            state = f"{len(open_trails)} of {len(trails)} searches go on" if open_trails else "all searches are done"
            budget = measurements.budget
            print(f"search: {budget.points} points in {budget.elapsed_s:.0f} s; {state}", flush=True)

    def conclude(self, measurements: Measurements) -> None:
        """Print every answer, and why it is one."""
        self._write(measurements)
        outcomes.answered = any(task.baseline for task in self.tasks)
        for trail in (trail for task in self.tasks for trail in task.trails):
            print(_line(trail))
        trails = [trail for task in self.tasks for trail in task.trails]
        tried, of = sum(trail.settings_tried for trail in trails), sum(len(t.cell.candidates) for t in trails)
        budget = measurements.budget
        reused = f", {measurements.reused} of them measured before" if measurements.reused else ""
        print(
            f"search: {budget.points} points{reused} in {budget.elapsed_s:.0f} s; "
            f"{tried} of {of} settings measured; {self.directory / SEARCH_FILE} says why",
            file=sys.stdout,
            flush=True,
        )

    def _write(self, measurements: Measurements) -> None:
        record = SearchRecord(
            points=measurements.budget.points,
            reused=measurements.reused,
            elapsed_s=measurements.budget.elapsed_s,
            rounds=self._rounds,
            dropped=self.dropped,
            searches=[search for task in self.tasks for search in _searches(task)],
        )
        write_search_record(self.directory, record)


def _searches(task: Task) -> list[PassSearch]:
    return [
        PassSearch(
            model=task.point["model"]["name"],
            tp_size=task.point["tp_size"],
            operator=task.operator,
            pass_name=pass_name,
            chosen=running.trail.best.settings,
            time_us=running.trail.time_us(running.trail.best),
            none_us=running.trail.time_us(NONE),
            floor_us=running.trail.baselines.floor_us,
            evaluations=running.trail.evaluations,
            exhaustive=len(running.trail.cell.candidates),
            stopped=running.trail.stopped or "not yet",
            notes=running.trail.notes,
            refused=dict(task.refused),
            tried=[_tried(running.trail, candidate) for candidate in running.trail.overlaps],
        )
        for pass_name, running in task.running.items()
    ]


def _tried(trail: Trail, candidate: Candidate) -> TriedSetting:
    estimate = trail.estimate(candidate)
    return TriedSetting(
        setting=str(candidate),
        time_us=estimate.time_us,
        noise_us=estimate.noise_us,
        measurements=len(trail.samples[candidate]),
    )


def _line(trail: Trail) -> str:
    best, none_us = trail.best, trail.time_us(NONE)
    time_us = trail.time_us(best)
    answer = f"{best}, {time_us / 1e3:.3f} ms, {none_us / time_us:.2f}x none" if best != NONE else "don't overlap"
    measured = f"{trail.settings_tried} of {len(trail.cell.candidates)} settings measured"
    return f"search: {trail.cell.label}: {answer} ({measured}; {trail.stopped or 'not stopped'})"
