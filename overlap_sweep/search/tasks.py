"""The operators whose passes are searched, with their candidates and points.

All passes of all operators advance together: every round is one batch of points. Forward and backward settings of an
operator are independent, so one point measures a candidate of each.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest

from omegaconf import DictConfig

from overlap_sweep import backends, workloads
from overlap_sweep.config import Search
from overlap_sweep.errors import UserError
from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import process_wide
from overlap_sweep.overlap.space import KnobValue, Setting
from overlap_sweep.results.estimate import estimate, normalised
from overlap_sweep.results.run_directory import Result
from overlap_sweep.runtime.point import resolve
from overlap_sweep.search import Failure
from overlap_sweep.search.bisect import bisect
from overlap_sweep.search.cell import Candidate, Cell, Measured, Trail
from overlap_sweep.search.known_wrong import KnownWrong
from overlap_sweep.search.measured import Job
from overlap_sweep.workloads.operator import NOISE_GOAL
from overlap_sweep.workloads.operator.choice import wrong_passes
from overlap_sweep.workloads.operator.config import Resolved
from overlap_sweep.workloads.operator.result import OperatorTimes

SEARCHED = ("phase", "method", *space.KNOBS)
"""Keys that a search chooses; combinations of other keys' values are searched separately."""

BASELINE_NOISE = 0.3
"""Noise of an operator's baseline that is enough, over that of its settings, which are all compared with it."""


Choices = Mapping[str, Sequence[KnobValue | None]]
"""Values of each key of SEARCHED, preferred ones first. None is the backend's default of a knob; `phase` has one
value."""


def read_choices(
    limits: Search, composed: Callable[[list[str]], DictConfig], values: Mapping[str, Sequence[str]]
) -> Choices:
    """Returns the searched keys' values from Hydra's configuration; keys that are not swept have one value.

    `composed` returns the configuration of a point with additional overrides. UserError if a value is wrong, or no
    num_sm is within the limits.
    """
    searched = {key: of_key for key, of_key in values.items() if key in SEARCHED}
    jobs = []
    # The keys are independent, so the n-th composition has the n-th value of each.
    for row in range(max(map(len, searched.values()), default=1)):
        jobs.append(composed([f"{key}={of_key[min(row, len(of_key) - 1)]}" for key, of_key in searched.items()]))
        # Refuses wrong values now instead of in the middle of the search.
        resolve(jobs[-1])
    found = {key: [job[key] for job in jobs[: len(searched[key]) if key in searched else 1]] for key in SEARCHED}
    counts = [count for count in found["num_sm"] if limits.min_num_sm <= count <= limits.max_num_sm]
    if not counts:
        raise UserError(
            f"None of num_sm={','.join(map(str, found['num_sm']))} is between search.min_num_sm={limits.min_num_sm} "
            f"and search.max_num_sm={limits.max_num_sm}; widen the limits."
        )
    if len(found["phase"]) > 1:
        raise UserError(f"phase={','.join(found['phase'])}: a search takes one phase; use phase=all.")
    return {**found, "num_sm": counts}


def candidates(point: Resolved, choices: Choices) -> tuple[dict[str, list[Candidate]], Counter[str]]:
    """Returns the valid settings of the point's operator by pass, without `none`, and the numbers of refused ones by
    reason."""
    operator, refusal = point.operator, workloads.load("operator").refusal
    (phase,) = map(str, choices["phase"])
    phases = space.PHASES if phase == "all" else (phase,)
    found: dict[str, list[Candidate]] = {name: [] for name in space.PASSES}
    refused: Counter[str] = Counter()
    for pass_name in space.PASSES:
        own = [phase for phase in phases if space.PASS_OF_PHASE[phase] == pass_name]
        # None comes last, so that both phases come before one of them.
        for combination in product(*([*_settings(point, phase, choices), None] for phase in own)):
            settings = {phase: setting for phase, setting in zip(own, combination, strict=True) if setting}
            slots = {space.slot(operator, phase): setting for phase, setting in settings.items()}
            if not settings or space.wgrad_refusal(operator, slots):
                continue
            if reason := refusal(replace(point, phases=settings)):
                refused[reason] += 1
            else:
                found[pass_name].append(Candidate.of(slots))
    return found, refused


def _settings(point: Resolved, phase: str, choices: Choices) -> list[Setting]:
    """Returns the distinct settings of one slot. Only knobs that the backend supports are varied."""
    operator, supported = point.operator, backends.load(point.backend).knobs(point)
    found: dict[tuple[tuple[str, KnobValue], ...], Setting] = {}
    for method in (method for method in choices["method"] if method in space.methods_of(operator, phase)):
        names = [knob for knob in space.knobs_of(operator, phase, method) if knob in supported]
        for values in product(*(choices.get(name, (None,)) for name in names)):
            knobs = {name: value for name, value in zip(names, values, strict=True) if value is not None}
            setting = space.without_idle_knobs({"method": method, **backends.default_knobs(point, method), **knobs})
            known = {k: v for k, v in setting.items() if k == "method" or k in names}
            found.setdefault(tuple(sorted(known.items())), known)
    return list(found.values())


class Running:
    """The running search of one pass. `wanted` are its next candidates; once all are in `answers`, it can advance."""

    def __init__(self, trail: Trail, effort: Search) -> None:
        self.trail = trail
        self.answers: dict[Candidate, Measured] = {}
        self._steps = bisect(trail, effort)
        self.wanted = self._next(None)

    @property
    def unanswered(self) -> list[Candidate]:
        return [candidate for candidate in self.wanted if candidate not in self.answers]

    def skip(self, reason_of: Callable[[Candidate], str | None]) -> None:
        """Answers the wanted candidates that have a reason not to be measured: their wrong numbers are known."""
        while self.wanted:
            for candidate in self.unanswered:
                if reason := reason_of(candidate):
                    self.answers[candidate] = Failure(reason, wrong_numbers=True, measured=False)
            if self.unanswered:
                return
            self.advance("")

    def advance(self, why_spent: str) -> None:
        """Continues the search if all wanted candidates were measured, or ends it if the budget is used up."""
        if self.wanted and len(self.answers) == len(self.wanted):
            self.wanted, self.answers = self._next(self.answers), {}
        if self.wanted and why_spent:
            self.trail.record(self.answers)
            self.wanted, self.trail.stopped = [], why_spent

    def _next(self, answers: dict[Candidate, Measured] | None) -> Sequence[Candidate]:
        try:
            return next(self._steps) if answers is None else self._steps.send(answers)
        except StopIteration as stop:
            self.trail.stopped = str(stop.value)
            return []


@dataclass(frozen=True)
class Request:
    """One point to measure: the setting of each phase of the task's operator."""

    task: Task
    of_pass: Mapping[str, Candidate]
    repetition: int = 0

    @property
    def job(self) -> Job:
        slots = {slot: setting for candidate in self.of_pass.values() for slot, setting in candidate.settings.items()}
        order = {space.slot(self.task.operator, phase): phase for phase in space.PHASES}
        phases = {phase: slots[slot] for slot, phase in order.items() if slot in slots} or {"fprop": {"method": "none"}}
        more = [f"repetition={self.repetition}"] if self.repetition else []
        workload = self.task.point.workload
        if (goal := self.task.noise_goal) is not None:
            goal = goal if self.of_pass else round(goal * BASELINE_NOISE, 6)
            more.append(f"{NOISE_GOAL}={goal}")
            workload = replace(workload, noise_goal=goal)
        point = replace(self.task.point, phases=phases, repetition=self.repetition, workload=workload)
        return Job([*self.task.overrides, f"phases={override_value(phases)}", *more], workloads.completed(point))


@dataclass
class Task:
    """One operator of one case at one TP size: a search for each of its passes."""

    point: Resolved
    """The resolved configuration of its points, except `phases` and `repetition`."""
    overrides: list[str]
    """The overrides that Hydra composes `point` from."""
    cells: dict[str, Cell]
    refused: Counter[str]
    """Numbers of invalid candidates, by reason."""
    noise_goal: float | None = None
    """`workload.noise_goal` of its points; that of the baseline is BASELINE_NOISE times it."""
    baseline: Result | None = None
    running: dict[str, Running] = field(default_factory=dict)
    counts: Counter[frozenset[tuple[str, Candidate]]] = field(default_factory=Counter)
    """How often each combination was requested."""

    @property
    def operator(self) -> str:
        return self.point.operator

    @property
    def label(self) -> str:
        return f"{self.case_label} {self.operator}"

    @property
    def case_label(self) -> str:
        """Returns the case's label without the operator."""
        more = process_wide(self.point)
        return f"{self.point.model.name} TP={self.point.tp_size}{f' {more}' if more else ''}"

    @property
    def case(self) -> str:
        """Returns a key that is equal for the operators of a case."""
        return json.dumps({name: value for name, value in self.point.items() if name != "operator"}, sort_keys=True)

    def begin(self, effort: Search) -> None:
        """Starts the searches from the baseline."""
        assert self.baseline
        for pass_name, cell in self.cells.items():
            times = self.baseline.measured_as(OperatorTimes).times[pass_name]
            none = estimate([*times.none.samples_us, *times.point.samples_us])
            self.running[pass_name] = Running(Trail(cell, none, times.floor.median_us), effort)

    def requests(self, known: KnownWrong | None = None) -> list[Request]:
        """Returns the points of the next round; none if every search has ended. Settings that are `known` to compute
        wrong numbers are not among them."""
        for running in self.running.values():
            if known:
                running.skip(lambda candidate: known.reason(self.point, candidate.settings, self._environment))
        return [self.request(settings) for settings in side_by_side({n: r.unanswered for n, r in self.running.items()})]

    @property
    def _environment(self) -> Mapping[str, object]:
        assert self.baseline
        return self.baseline.environment

    def request(self, of_pass: Mapping[str, Candidate]) -> Request:
        key = frozenset(of_pass.items())
        self.counts[key] += 1
        return Request(self, of_pass, self.counts[key] - 1)

    def answer(self, request: Request, result: Result, *, final: bool = False) -> list[Request]:
        """Passes a point's result to the searches. Unless `final`, returns points to measure again: launch-bound ones,
        and each pass alone if a failure cannot be attributed to one of them."""
        again, to_blame, late = [], wrong_passes(result), result.status == "ok" and result.launch_bound
        for pass_name, candidate in request.of_pass.items():
            running = self.running[pass_name]
            if result.status == "ok" and not late:
                times = result.measured_as(OperatorTimes).times[pass_name]
                running.answers[candidate] = normalised([(times.point, times.none)], running.trail.none)
            elif final or (not late and (len(request.of_pass) == 1 or to_blame == {pass_name})):
                reason = "launch-bound: its time says nothing about the GPU" if late else result.reason
                running.answers[candidate] = Failure(reason, wrong_numbers=pass_name in to_blame)
            else:
                again.append(self.request({pass_name: candidate}))
        return again


def side_by_side(wanted: Mapping[str, Iterable[Candidate]]) -> list[dict[str, Candidate]]:
    """Returns points, by pass, that each measure one candidate of every pass."""
    rows = zip_longest(*([(name, candidate) for candidate in of_pass] for name, of_pass in wanted.items()))
    return [dict(pair for pair in row if pair) for row in rows]


def cases(tasks: Iterable[Task]) -> list[list[Task]]:
    """Returns the tasks grouped by case: those that differ only in the operator."""
    by_case: dict[str, list[Task]] = {}
    for task in tasks:
        by_case.setdefault(task.case, []).append(task)
    return list(by_case.values())
