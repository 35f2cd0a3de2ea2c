"""All cells of an operator, and of all operators, advance together: every round is one batch of points.

Forward and backward settings of an operator have nothing to do with each other, so that one point measures a candidate
of each.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from overlap_sweep import workloads
from overlap_sweep.overlap import space
from overlap_sweep.results.estimate import Estimate, estimate, normalised
from overlap_sweep.results.run_directory import Result
from overlap_sweep.search.bisect import Effort, bisect
from overlap_sweep.search.cell import Baselines, Candidate, Cell, Failure, Measured, Start, Trail, collectives
from overlap_sweep.search.measured import Job, Measurements, override_value
from overlap_sweep.workloads.operator.failures import wrong_passes
from overlap_sweep.workloads.operator.result import OperatorTimes


class Running:
    """The search of one cell, under way."""

    def __init__(self, trail: Trail, effort: Effort, start: Start) -> None:
        self.trail = trail
        self.pending: list[Candidate] = []
        self._answers: dict[Candidate, Measured] = {}
        self._steps = bisect(trail, effort, start)
        self._advance(None)

    def tell(self, candidate: Candidate, measured: Measured) -> None:
        """The answer for one of `pending`; after the last of them there are new ones, or the search has stopped."""
        self.pending.remove(candidate)
        self._answers[candidate] = measured
        if not self.pending:
            answers, self._answers = self._answers, {}
            self._advance(answers)

    def stop(self, reason: str) -> None:
        """Whatever would still be promising; what was answered of the last round counts."""
        if not self.trail.stopped:
            self.pending, self.trail.stopped = [], reason
            self._steps.close()
            self.trail.record(self._answers)

    def _advance(self, answers: Mapping[Candidate, Measured] | None) -> None:
        try:
            self.pending = list(next(self._steps) if answers is None else self._steps.send(answers))
        except StopIteration as stop:
            self.trail.stopped = str(stop.value)


@dataclass(frozen=True)
class Request:
    """One point to measure: what each phase of the task's operator is given."""

    task: Task
    of_pass: Mapping[str, Candidate]
    repetition: int = 0

    @property
    def phases(self) -> dict[str, space.Setting]:
        slots = {slot: setting for candidate in self.of_pass.values() for slot, setting in candidate.settings.items()}
        order = {space.slot(self.task.operator, phase): phase for phase in space.PHASES}
        return {phase: slots[slot] for slot, phase in order.items() if slot in slots}

    @property
    def job(self) -> Job:
        phases = self.phases or {"fprop": {"method": "none"}}
        repetition = [f"repetition={self.repetition}"] if self.repetition else []
        point = {**self.task.point, "phases": phases, "repetition": self.repetition}
        completed = workloads.load("operator").complete(point)
        return Job([*self.task.overrides, f"phases={override_value(phases)}", *repetition], completed)


@dataclass
class Task:
    """One operator of one case at one TP size: a search for each of its passes."""

    point: dict[str, Any]
    """The resolved configuration of its points, `phases` and `repetition` apart."""
    overrides: list[str]
    """What Hydra composes it from."""
    cells: dict[str, Cell]
    refused: Counter[str]
    """Candidates that cannot run, by reason."""
    seeds: dict[str, list[Candidate]] = field(default_factory=dict)
    """By pass what is measured in any case; each is among the cell's candidates."""
    baseline: Result | None = None
    running: dict[str, Running] = field(default_factory=dict)
    alone: list[tuple[str, Candidate]] = field(default_factory=list)
    """Candidates whose point failed together with another pass's: to be measured again without it."""
    asked: Counter[Any] = field(default_factory=Counter)
    """How often each combination was measured."""

    @property
    def operator(self) -> str:
        return str(self.point["operator"])

    @property
    def label(self) -> str:
        return f"{self.case_label} {self.operator}"

    @property
    def case_label(self) -> str:
        """Without the operator."""
        return f"{self.point['model']['name']} TP={self.point['tp_size']}"

    @property
    def case(self) -> str:
        """What it has in common with the other operators that are measured alike."""
        return json.dumps({name: value for name, value in self.point.items() if name != "operator"}, sort_keys=True)

    def baseline_request(self) -> Request:
        return Request(self, {})

    @property
    def trails(self) -> list[Trail]:
        return [running.trail for running in self.running.values()]

    def seed(self, pass_name: str, candidate: Candidate) -> None:
        """Have the search of this pass measure the candidate first, whether its choices lead to it or not."""
        cell = self.cells.get(pass_name, Cell(f"{self.label} {pass_name}", ()))
        if candidate not in cell.candidates:
            self.cells[pass_name] = Cell(cell.label, (*cell.candidates, candidate))
        self.seeds.setdefault(pass_name, []).append(candidate)

    def begin(self, collective_us: float, effort: Effort, start: Start) -> None:
        """Start the searches, once the operator was measured without overlap."""
        assert self.baseline
        for pass_name, cell in self.cells.items():
            times = self.baseline.measured_as(OperatorTimes).times[pass_name]
            none = estimate([*times.none.samples_us, *times.point.samples_us])
            baselines = Baselines(none, times.floor.median_us, collective_us)
            self.running[pass_name] = Running(
                Trail(cell, baselines, seeds=self.seeds.get(pass_name, ())), effort, start
            )

    def requests(self) -> list[Request]:
        """The points of the next round; none at all when every search has stopped."""
        if self.alone:
            asked = [{pass_name: candidate} for pass_name, candidate in self.alone]
            self.alone = []
        else:
            waiting = [[(name, c) for c in running.pending] for name, running in self.running.items()]
            asked = [dict(pair for pair in pairs if pair) for pairs in zip_longest(*waiting)]
        return [self._request(of_pass) for of_pass in asked]

    def _request(self, of_pass: Mapping[str, Candidate]) -> Request:
        key = frozenset(of_pass.items())
        self.asked[key] += 1
        return Request(self, of_pass, self.asked[key] - 1)

    def answer(self, request: Request, result: Result) -> None:
        """Tell the searches what came of a point. Where it is not clear whose fault a failure was, each pass is
        measured alone in the next round."""
        to_blame, late = wrong_passes(result), result.status == "ok" and result.launch_bound
        for pass_name, candidate in request.of_pass.items():
            running = self.running[pass_name]
            if result.status == "ok" and not late:
                running.tell(candidate, self._measured(result, pass_name))
            elif late and request.repetition:
                running.tell(candidate, Failure("launch-bound: its time says nothing about the device", by_chance=True))
            elif not late and (len(request.of_pass) == 1 or to_blame == {pass_name}):
                reason = (result.error or result.status).splitlines()[0]
                running.tell(candidate, Failure(reason, wrong_numbers=pass_name in to_blame))
            else:
                self.alone.append((pass_name, candidate))

    def _measured(self, result: Result, pass_name: str) -> Measured:
        times = result.measured_as(OperatorTimes).times[pass_name]
        scale = self.running[pass_name].trail.baselines.none
        return normalised([(times.point, times.none)], Estimate(scale.time_us, 0.0, scale.repeats))


def collective_us(tasks: Iterable[Task]) -> float:
    """The time of one collective at the full rate of the links: what `none` takes beyond the floor. The median over
    the operators' passes, since all of them move the same activations."""
    found = []
    for task in tasks:
        assert task.baseline
        for pass_name in space.PASSES:
            times = task.baseline.measured_as(OperatorTimes).times[pass_name]
            exposed_us = max(0.0, times.none.median_us - times.floor.median_us)
            found.append(exposed_us / collectives(space.OPERATORS[task.operator], pass_name))
    return statistics.median(found)


def measured(requests: Sequence[Request], measurements: Measurements) -> Iterable[tuple[Request, Result]]:
    """Returns the first requests with their results, as far as the budget goes."""
    return zip(requests, measurements.measure([request.job for request in requests]), strict=False)


def next_round(tasks: Sequence[Task]) -> list[Request]:
    """One batch: what all searches of all tasks want to know next."""
    return [request for task in tasks for request in task.requests()]
