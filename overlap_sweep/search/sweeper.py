"""`hydra/sweeper=bisect`: searches the settings of operators over the swept values, through any Hydra launcher."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path

from overlap_sweep import workloads
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.errors import UserError
from overlap_sweep.report.searches import pass_line
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import PassSearch, SearchRecord, TriedSetting, without_operator
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.traces import own_traces
from overlap_sweep.runtime.kept import wrong_results
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import resolve
from overlap_sweep.runtime.progress import announce, shown_waiting
from overlap_sweep.search.cell import NONE, Candidate, Cell, Trail
from overlap_sweep.search.known_wrong import KnownWrong
from overlap_sweep.search.measured import Job, Measurements, SearchInputs
from overlap_sweep.search.tasks import (
    SEARCHED,
    Request,
    Task,
    candidates,
    cases,
    read_choices,
    side_by_side,
)
from overlap_sweep.workloads import read_sources
from overlap_sweep.workloads.operator.answer import CaseAnalysis, OperatorAnalysis, analyse_operators
from overlap_sweep.workloads.operator.config import Resolved

Gate = Callable[[Sequence[Task]], str | None]
"""Takes the operators of a case with their baselines; returns why they are not worth a search, or None."""

Refusal = Callable[[Resolved], str | None]
"""Takes a resolved point; returns why its operator is not searched, though it could be measured, or None."""


def sweep(inputs: SearchInputs) -> None:
    """Searches all passes, prints the answers and writes `search.json`."""
    whole = Sweep(inputs, inputs.values)
    for stage in whole.stages:
        whole.search(stage)
        whole.profile_answers(stage, AnalysisConfig())
    whole.conclude()


class Sweep:
    """The searches of a sweep. Prints their progress and writes search.json after every round."""

    def __init__(
        self, inputs: SearchInputs, values: Mapping[str, Sequence[str]], refusal: Refusal = lambda _: None
    ) -> None:
        """Raises UserError, before anything runs, if there is nothing to search or a value is wrong."""
        self.config, self.compose, self._expect = inputs.config, inputs.compose, inputs.expect
        self._refusal = refusal
        with shown_waiting("composing what is searched"):
            found = self._find_tasks(values)
        self.tasks = [task for task in found if task.cells]
        self.measurements = Measurements.begin(inputs)
        announce([task.point for task in self.tasks], outcomes)
        self.dropped: dict[str, str] = {}
        """Reasons why tasks were not searched, by label."""
        self._rounds = 0
        self._known_wrong = KnownWrong()
        self._known_wrong.learn(wrong_results(inputs.config))
        for task in (task for task in found if not task.cells):
            self.drop(task.label, "; ".join(task.refused) or "none of its slots takes a swept method")

    def _find_tasks(self, values: Mapping[str, Sequence[str]]) -> list[Task]:
        """Returns a task, perhaps without cells, for each combination of the values that are not searched.

        UserError if there is nothing to search in any of them.
        """
        fixed = {key: texts for key, texts in values.items() if key not in SEARCHED}
        combinations = [
            [f"{key}={value}" for key, value in zip(fixed, combination, strict=True)]
            for combination in product(*fixed.values())
        ]
        self._refuse_another_workload(combinations[0])
        choices = read_choices(self.config.search, lambda more: self.compose([*combinations[0], *more]), values)
        tasks: list[Task] = []
        for overrides in combinations:
            self._refuse_another_workload(overrides)
            point = resolve(self.compose([*overrides, "phases={fprop:{method:none}}"]))
            assert isinstance(point, Resolved)
            # Invalid combinations are left out; a launcher would skip them.
            reason = self._refusal(point)
            found, refused = ({}, Counter([reason])) if reason else candidates(point, choices)
            cells = {name: Cell(tuple(own)) for name, own in found.items() if own}
            if cells and not tasks:
                # While workers start the rest is composed.
                self._expect(point)
            tasks.append(Task(point, overrides, cells, refused, self.config.search.noise_goal))
        if not any(task.cells for task in tasks):
            refusals = dict.fromkeys(reason for task in tasks for reason in task.refused)
            reasons = "; ".join(refusals) or "none of the operator's slots takes a swept method"
            raise UserError(f"There is nothing to search: {reasons}.")
        return tasks

    def _refuse_another_workload(self, overrides: Sequence[str]) -> None:
        workload = self.compose(overrides).workload.name
        if workload != "operator":
            searchable = workloads.load(workload).searchable
            mend = "use hydra/sweeper=knobs" if searchable else "sweep that without a search"
            raise UserError(f"This search is for workload=operator, not for workload={workload}; {mend}.")

    @property
    def stages(self) -> list[list[Task]]:
        """Returns the tasks that advance together: those of one TP size, smallest first."""
        ordered = sorted(self.tasks, key=lambda task: task.point.world_size)
        return [list(group) for _, group in groupby(ordered, key=lambda task: task.point.world_size)]

    def drop(self, label: str, reason: str) -> None:
        self.dropped[label] = reason
        print(f"search: {label} not searched: {without_operator(label, reason)}", flush=True)

    def search(self, tasks: Sequence[Task], gate: Gate = lambda _: None) -> None:
        """Runs all searches of these tasks together until they end or the budget is used up."""
        budget = self.measurements.budget
        begun: list[Task] = []
        for case_tasks in cases(self._measure_baselines(tasks)):
            if reason := gate(case_tasks):
                self.drop(case_tasks[0].case_label, reason)
            else:
                begun += case_tasks
        for task in begun:
            task.begin(self.config.search)
        searches = [running for task in begun for running in task.running.values()]
        known = None if self.config.search.retry_wrong else self._known_wrong
        while requests := [request for task in begun for request in task.requests(known)]:
            again = self._answer(requests, final=False)
            self._answer(again, final=True)
            for running in searches:
                running.advance(budget.why_spent)
            self._rounds += 1
            self._write()
        print(f"search: {budget.points} points in {budget.elapsed_s:.0f} s", flush=True)

    def _answer(self, requests: Sequence[Request], *, final: bool) -> list[Request]:
        results = self.measurements.measure([request.job for request in requests])
        answered = [(request, result) for request, result in zip(requests, results, strict=True) if result]
        self._known_wrong.learn([result for _, result in answered])
        return [more for request, result in answered for more in request.task.answer(request, result, final=final)]

    def _measure_baselines(self, tasks: Sequence[Task]) -> list[Task]:
        """Measures every task's operator without overlap; returns the tasks whose baseline is usable. UserError if the
        workers refuse all that the sweep asks for, such as a precision that the GPUs lack."""
        results = self.measurements.measure([Request(task, {}).job for task in tasks])
        if reason := self._refused_everywhere(tasks, results):
            raise UserError(f"Nothing can be measured: {reason}.")
        for task, result in zip(tasks, results, strict=True):
            if result is None:
                self.drop(task.label, self.measurements.budget.why_spent)
            elif result.status != "ok":
                self.drop(task.label, f"its baseline without overlap failed: {result.reason}")
            elif result.launch_bound:
                self.drop(task.label, "it is launch-bound: its times say nothing about the GPU")
            else:
                task.baseline = result
        return [task for task in tasks if task.baseline]

    def analysed(self, config: AnalysisConfig) -> OperatorAnalysis:
        """Returns the analysis of all measurements so far."""
        return analyse_operators(read_sources(self.measurements.directory, config))

    def _refused_everywhere(self, tasks: Sequence[Task], results: Sequence[Result | None]) -> str | None:
        """Returns the one reason for which these tasks were skipped, if it holds for the whole sweep; or None."""
        reasons = {result.reason if result and result.status == "skipped" else None for result in results}
        refused, asked = ({(t.point.backend, t.point.precision) for t in group} for group in (tasks, self.tasks))
        return reasons.pop() if len(reasons) == 1 and refused == asked else None

    def profile_answers(self, tasks: Sequence[Task], config: AnalysisConfig) -> None:
        """With `profile=best`, measures chosen settings and baselines that lack a trace once more, with a profile. The
        search's budget does not count these points."""
        wanted = [task for task in tasks if task.running and task.point.profile == "best"]
        if wanted:
            analysis = self.analysed(config)
            untraced = ((task, settings) for task in wanted for settings in _untraced(task, case_of(task, analysis)))
            self.measurements.run([_profiled(Request(task, settings).job) for task, settings in untraced])

    def conclude(self) -> None:
        """Prints every answer and why its search ended."""
        record = self._write()
        outcomes.answered = any(task.baseline for task in self.tasks)
        for search in record.searches:
            print(f"search: {pass_line(search)}")
        reused = f", {record.reused} of them measured before" if record.reused else ""
        path = self.measurements.directory / SearchRecord.FILE
        print(f"search: {record.points} points{reused} in {record.elapsed_s:.0f} s; details in {path}", flush=True)

    def _write(self) -> SearchRecord:
        measurements = self.measurements
        record = SearchRecord(
            points=measurements.budget.points,
            reused=measurements.reused,
            elapsed_s=measurements.budget.elapsed_s,
            rounds=self._rounds,
            dropped=self.dropped,
            searches=[
                _pass_search(task, pass_name, running.trail)
                for task in self.tasks
                for pass_name, running in task.running.items()
            ],
        )
        record.write(measurements.directory)
        return record


def _pass_search(task: Task, pass_name: str, trail: Trail) -> PassSearch:
    estimates = {candidate: trail.estimate(candidate) for candidate in trail.overlaps}
    return PassSearch(
        model=task.point.model.name,
        tp_size=task.point.tp_size,
        operator=task.operator,
        pass_name=pass_name,
        chosen=trail.best.settings,
        time_us=trail.time_us(trail.best),
        none_us=trail.time_us(NONE),
        floor_us=trail.floor_us,
        evaluations=trail.evaluations,
        exhaustive=len(trail.cell.candidates),
        stopped=trail.stopped or "still running",
        notes=trail.notes,
        refused=dict(task.refused),
        tried=[
            TriedSetting(setting=str(c), time_us=e.time_us, noise_us=e.noise_us, measurements=len(trail.samples[c]))
            for c, e in estimates.items()
        ],
    )


def case_of(task: Task, analysis: OperatorAnalysis) -> CaseAnalysis:
    """Returns the analysis of the points that are comparable with the task's. The task must have a baseline."""
    assert task.baseline
    case = Point(Path(), task.baseline.status, task.baseline.point, task.baseline).case
    return next(found for found in analysis.cases if found.case == case)


def _profiled(job: Job) -> Job:
    others = [override for override in job.overrides if not override.startswith("profile=")]
    return Job([*others, "profile=all"], replace(job.point, profile="all"))


def _untraced(task: Task, case: CaseAnalysis) -> Iterator[Mapping[str, Candidate]]:
    """Yields the settings by pass that lack a trace: no overlap, and the chosen ones of both passes together."""
    tp_size = task.point.tp_size
    plan = case.plans.get(tp_size)
    points = [point for point in case.points if _belongs_to(point, task)]
    traced = {point.name for point in points if own_traces(point)}
    if not any(point.name in traced and point.result and not point.result.settings for point in points):
        yield {}
    lacking: dict[str, dict[Candidate, None]] = {}
    for choice, final in zip(plan.choices, plan.finals, strict=True) if plan else ():
        if choice.operator == task.operator:
            chosen = (choice.chosen, final)
            untraced = [one.settings for one in chosen if one.settings and traced.isdisjoint(one.points)]
            lacking[choice.pass_name] = dict.fromkeys(map(Candidate.of, untraced))
    yield from side_by_side(lacking)


def _belongs_to(point: Point, task: Task) -> bool:
    config = point.config_as(Resolved)
    return config.operator == task.operator and config.tp_size == task.point.tp_size
