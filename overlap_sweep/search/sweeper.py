"""Search the space that a multirun's values span, through any Hydra launcher, and leave search.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

from overlap_sweep import backends, workloads
from overlap_sweep.analysis.sweep import Analysis, analyse
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.results.points import Case, Point
from overlap_sweep.results.records import PassSearch, SearchRecord, TriedSetting, write_search_record
from overlap_sweep.results.run_directory import SEARCH_FILE
from overlap_sweep.results.traces import own_traces
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import resolve
from overlap_sweep.search.bisect import Effort
from overlap_sweep.search.cell import NONE, STARTS, Candidate, Cell, Trail
from overlap_sweep.search.choices import Choices, candidates, combined, compose, read_choices
from overlap_sweep.search.measured import Job, Measurements, swept_values
from overlap_sweep.search.rounds import Request, Task, collective_us, measured, next_round
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.choice import Candidate as Measured
from overlap_sweep.workloads.operator.choice import PassChoice

Gate = Callable[[Sequence[Task]], str | None]
"""Given the operators of a case, measured without overlap: why they are not worth a search, or None."""

Asked = set[tuple[str, str, frozenset[tuple[str, Candidate]]]]
"""By task, what its passes were given."""


@dataclass(frozen=True)
class Sweep:
    """What is to be searched, and how."""

    config: DictConfig
    context: HydraContext
    tasks: list[Task]
    measurements: Measurements
    report: SearchReport

    @property
    def stages(self) -> list[list[Task]]:
        """What advances together: a TP size at a time, smallest first, or everything."""
        if self.config.search.tp_sizes == "together":
            return [self.tasks]
        ordered = sorted(self.tasks, key=lambda task: workloads.world_size(task.point))
        return [list(group) for _, group in groupby(ordered, key=lambda task: workloads.world_size(task.point))]


def set_up(config: DictConfig, context: HydraContext, launcher: Launcher, values: Mapping[str, Sequence[str]]) -> Sweep:
    """UserError when there is nothing to search, or a value is wrong; nothing was started then."""
    tasks = find_tasks(config, context, values)
    measurements = Measurements.begin(config, launcher)
    report = SearchReport(measurements, [task for task in tasks if task.cells])
    for task in (task for task in tasks if not task.cells):
        report.drop(task.label, "; ".join(task.refused) or "no swept method fits any of its slots")
    return Sweep(config, context, report.tasks, measurements, report)


def sweep(
    config: DictConfig, context: HydraContext, launcher: Launcher, params: Mapping[str, Any], arguments: Sequence[str]
) -> None:
    """Search all cells, print the answers, and leave `search.json` beside the points."""
    whole = set_up(config, context, launcher, swept_values(context, params, arguments))
    for stage in whole.stages:
        search(whole, stage)
        profile_answers(stage, whole.measurements, lambda: analyse(whole.measurements.directory, AnalysisConfig()))
    whole.report.conclude()


def search(whole: Sweep, tasks: Sequence[Task], gate: Gate = lambda _: None) -> None:
    """Advance all searches of these tasks together until they or the budget end."""
    settings, measurements, report = whole.config.search, whole.measurements, whole.report
    effort = Effort(reach=settings.reach, worth=settings.worth, repeats=settings.repeats)
    for case_tasks in cases(measure_baselines(tasks, measurements, report)):
        if reason := gate(case_tasks):
            report.drop(case_tasks[0].case_label, reason)
            continue
        rate_us = collective_us(case_tasks)
        for task in case_tasks:
            task.begin(rate_us, effort, STARTS[settings.start])
    begun = [task for task in tasks if task.running]
    while (requests := next_round(begun)) and not measurements.budget.why_spent:
        for request, result in measured(requests, measurements):
            request.task.answer(request, result)
        report.round_done(begun)
    for running in (running for task in begun for running in task.running.values()):
        running.stop(measurements.budget.why_spent)


def measure_baselines(tasks: Sequence[Task], measurements: Measurements, report: SearchReport) -> list[Task]:
    """Measure every task's operator without overlap; the tasks for which that worked."""
    for request, result in measured([task.baseline_request() for task in tasks], measurements):
        if result.status == "ok" and result.launch_bound:
            report.drop(request.task.label, "it is launch-bound: no time says anything about the device")
        elif result.status == "ok":
            request.task.baseline = result
        else:
            reason = (result.error or result.status).splitlines()[0]
            report.drop(request.task.label, f"it cannot be measured without overlap: {reason}")
    for task in tasks:
        if not task.baseline and task.label not in report.dropped:
            report.drop(task.label, measurements.budget.why_spent)
    return [task for task in tasks if task.baseline]


def cases(tasks: Sequence[Task]) -> list[list[Task]]:
    """The tasks by what they have in common but the operator."""
    by_case: dict[str, list[Task]] = {}
    for task in tasks:
        by_case.setdefault(task.case, []).append(task)
    return list(by_case.values())


def find_tasks(config: DictConfig, context: HydraContext, values: Mapping[str, Sequence[str]]) -> list[Task]:
    """One task for each operator of each combination of what is not searched, also where it has no cells.

    UserError when there is nothing to search in any of them.
    """
    combinations = combined(values)
    for overrides in combinations:
        workload = compose(config, context, overrides).workload.name
        if workload != "operator":
            raise UserError(f"a search is for settings of operators, not for workload={workload}.")

    def composed(searched: list[str]) -> DictConfig:
        job = compose(config, context, [*combinations[0], *searched])
        # Only for what it has to say of wrong values: minutes later it would be too late.
        resolve(job)
        return job

    choices = read_choices(config, composed, values)
    tasks = [_task(config, context, overrides, choices) for overrides in combinations]
    if not any(task.cells for task in tasks):
        refused = dict.fromkeys(reason for task in tasks for reason in task.refused)
        reasons = "; ".join(refused) or "no swept method fits any of the operator's slots"
        raise UserError(f"there is nothing to search: {reasons}.")
    return tasks


def _task(config: DictConfig, context: HydraContext, overrides: list[str], choices: Choices) -> Task:
    """The operator's cells. What may not be combined is left out, as a launcher would skip it."""
    job = compose(config, context, [*overrides, "phases={fprop:{method:none}}"])
    point = resolve(job)
    backend, workload = backends.load(point["backend"]), workloads.load("operator")

    def refusal(phases: Mapping[str, space.Setting]) -> str | None:
        reason: str | None = workload.refusal({**point, "phases": phases})
        return reason

    found, refused = candidates(point["operator"], choices, backend.default_knobs, backend.knobs(point), refusal)
    label = f"{point['model']['name']} TP={point['tp_size']} {point['operator']}"
    cells = {name: Cell(f"{label} {name}", tuple(found[name])) for name in space.PASSES if found[name]}
    return Task(point, overrides, cells, refused)


def profile_answers(tasks: Sequence[Task], measurements: Measurements, analysed: Callable[[], Analysis]) -> None:
    """Measure once more, with `profile=all`, each chosen setting that has no trace, and each operator without overlap.

    What that says of the times may change what is chosen, which is profiled then, too. A point is asked for once,
    whatever comes of it; the search's budget does not count it. Nothing with `profile=none`.
    """
    asked: Asked = set()
    wanted = [task for task in tasks if task.running and task.point["profile"] == "best"]
    while wanted:
        analysis = analysed()
        jobs = [
            _profiled_job(request)
            for task in wanted
            for request in _untraced_requests(task, case_of(task, analysis), asked)
        ]
        if not jobs:
            return
        with measurements.budget.paused():
            measurements.run(jobs)


def case_of(task: Task, analysis: Analysis) -> CaseAnalysis:
    """The analysis of the points that may be compared with the task's, which has a baseline."""
    assert task.baseline
    environment, point = task.baseline.environment, task.point
    case = Case(
        model=point["model"]["name"],
        backend=point["backend"],
        device=environment.get("gpu") or point["runtime"]["device"],
        precision=point["precision"],
        tokens=point["workload"]["tokens"],
    )
    return next(found for found in analysis.operators.cases if found.case == case)


def _profiled_job(request: Request) -> Job:
    job = request.job
    others = [override for override in job.overrides if not override.startswith("profile=")]
    return Job([*others, "profile=all"], {**job.point, "profile": "all"})


def _untraced_requests(task: Task, case: CaseAnalysis, asked: Asked) -> Iterator[Request]:
    """One point for a setting of each pass; they have nothing to do with each other."""
    tp_size = task.point["tp_size"]
    plan, of_task = case.plans.get(tp_size), [point for point in case.points if _is_of(point, task)]
    traced = {point.name for point in of_task if own_traces(point)}
    lacking: dict[str, list[Candidate]] = {}
    for choice, final in zip(plan.choices, plan.finals, strict=True) if plan else ():
        if choice.operator == task.operator:
            answers = [choice.chosen, final, *_decided(choice, case, tp_size)]
            lacking[choice.pass_name] = [
                Candidate.of(one.settings) for one in answers if one.settings and traced.isdisjoint(one.points)
            ]
    none_is_traced = any(point.name in traced and point.result and not point.result.settings for point in of_task)
    wanted = [] if none_is_traced else [task.baseline_request()]
    for together in zip_longest(*([(name, one) for one in dict.fromkeys(found)] for name, found in lacking.items())):
        wanted.append(Request(task, dict(pair for pair in together if pair)))
    for request in wanted:
        key = task.label, task.case, frozenset(request.of_pass.items())
        if key not in asked:
            asked.add(key)
            yield request


def _is_of(point: Point, task: Task) -> bool:
    return point.config["operator"] == task.operator and point.config["tp_size"] == task.point["tp_size"]


def _decided(choice: PassChoice, case: CaseAnalysis, tp_size: int) -> list[Measured]:
    """What the whole layer's proof gave the pass, if that was measured by itself."""
    config = case.decided(tp_size)
    if config is None or not config.switches["tp_comm_overlap"]:
        return []
    phases = [phase for phase, pass_name in space.PASS_OF_PHASE.items() if pass_name == choice.pass_name]
    slots = [space.slot(choice.operator, phase) for phase in phases]
    own = {slot: config.slots[slot] for slot in slots if slot in config.slots}
    # Files that others wrote leave knobs open.
    whole = overlap_cfg.settings_of_pass(config.slots, choice.operator, choice.pass_name)
    return [candidate for candidate in choice.candidates if dict(candidate.settings) in (own, whole)]


class SearchReport:
    """Says what a sweep's tasks come to while they run, and leaves search.json, always whole, after every round."""

    def __init__(self, measurements: Measurements, tasks: Sequence[Task]) -> None:
        self.tasks, self._measurements = list(tasks), measurements
        self.dropped: dict[str, str] = {}
        """By label, why a task was not searched, or not to the end."""
        self._rounds = 0

    def drop(self, label: str, reason: str) -> None:
        self.dropped[label] = reason
        print(f"search: {label} is not searched: {reason}", flush=True)

    def round_done(self, tasks: Sequence[Task]) -> None:
        """Write the best so far, and say it in a line."""
        self._rounds += 1
        self._write()
        trails = [trail for task in tasks for trail in task.trails]
        open_trails = [trail for trail in trails if not trail.stopped]
        if len(open_trails) != len(trails) or self._rounds == 1:
            state = f"{len(open_trails)} of {len(trails)} searches go on" if open_trails else "all searches are done"
            budget = self._measurements.budget
            print(f"search: {budget.points} points in {budget.elapsed_s:.0f} s; {state}", flush=True)

    def conclude(self) -> None:
        """Print every answer, and why it is one."""
        self._write()
        outcomes.answered = any(task.baseline for task in self.tasks)
        trails = [trail for task in self.tasks for trail in task.trails]
        for trail in trails:
            print(_answer_line(trail))
        tried, of = sum(trail.settings_tried for trail in trails), sum(len(t.cell.candidates) for t in trails)
        budget, reused = self._measurements.budget, self._measurements.reused
        before = f", {reused} of them measured before" if reused else ""
        print(
            f"search: {budget.points} points{before} in {budget.elapsed_s:.0f} s; "
            f"{tried} of {of} settings measured; {self._measurements.directory / SEARCH_FILE} says why",
            flush=True,
        )

    def _write(self) -> None:
        measurements = self._measurements
        record = SearchRecord(
            points=measurements.budget.points,
            reused=measurements.reused,
            elapsed_s=measurements.budget.elapsed_s,
            rounds=self._rounds,
            dropped=self.dropped,
            searches=[search for task in self.tasks for search in _pass_searches(task)],
        )
        write_search_record(measurements.directory, record)


def _pass_searches(task: Task) -> list[PassSearch]:
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


def _answer_line(trail: Trail) -> str:
    best, none_us = trail.best, trail.time_us(NONE)
    time_us = trail.time_us(best)
    answer = f"{best}, {time_us / 1e3:.3f} ms, {none_us / time_us:.2f}x none" if best != NONE else "don't overlap"
    measured = f"{trail.settings_tried} of {len(trail.cell.candidates)} settings measured"
    return f"search: {trail.cell.label}: {answer} ({measured}; {trail.stopped or 'not stopped'})"
