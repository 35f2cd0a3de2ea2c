"""Search the space that a multirun's values span, through any Hydra launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from overlap_sweep import backends, workloads
from overlap_sweep.analysis.sweep import analyse
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import resolve
from overlap_sweep.search.bisect import Effort
from overlap_sweep.search.budget import Budget
from overlap_sweep.search.candidates import candidates
from overlap_sweep.search.cell import Cell
from overlap_sweep.search.choices import Choices, combined, read_choices, swept_values
from overlap_sweep.search.measured import Measurements
from overlap_sweep.search.profiled import profile_answers
from overlap_sweep.search.report import SearchReport
from overlap_sweep.search.rounds import Task, collective_us, next_round
from overlap_sweep.search.start import STARTS

Gate = Callable[[Sequence[Task]], str | None]
"""Given the operators of a case, measured without overlap: why they are not worth a search, or None."""


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
    directory = Path(str(config.hydra.sweep.dir))
    directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, directory / "multirun.yaml")
    budget = Budget(config.search.max_points, config.search.max_minutes)
    outcomes.searching = True
    report = SearchReport(directory, [task for task in tasks if task.cells])
    for task in (task for task in tasks if not task.cells):
        report.drop(task.label, "; ".join(task.refused) or "no swept method fits any of its slots")
    return Sweep(config, context, report.tasks, Measurements(launcher, directory, budget), report)


def sweep(
    config: DictConfig, context: HydraContext, launcher: Launcher, params: Mapping[str, Any], arguments: Sequence[str]
) -> None:
    """Search all cells, print the answers, and leave `search.json` beside the points."""
    whole = set_up(config, context, launcher, swept_values(context, params, arguments))
    for stage in whole.stages:
        search(whole, stage)
        profile_answers(stage, whole.measurements, lambda: analyse(whole.measurements.directory, AnalysisConfig()))
    whole.report.conclude(whole.measurements)


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
    while (requests := next_round(begun)) and not measurements.budget.spent:
        for request, result in measurements.measure(requests):
            request.task.answer(request, result)
        report.round_done(begun, measurements)
    for running in (running for task in begun for running in task.running.values()):
        running.stop(measurements.budget.why_spent)


def measure_baselines(tasks: Sequence[Task], measurements: Measurements, report: SearchReport) -> list[Task]:
    """Measure every task's operator without overlap; the tasks for which that worked."""
    for request, result in measurements.measure([task.baseline_request() for task in tasks]):
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
    if job.workload.name != "operator":
        raise UserError(f"a search is for settings of operators, not for workload={job.workload.name}.")
    point = resolve(job)
    backend, workload = backends.load(point["backend"]), workloads.load("operator")

    def refusal(phases: Mapping[str, space.Setting]) -> str | None:
        reason: str | None = workload.refusal({**point, "phases": phases})
        return reason

    found, refused = candidates(point["operator"], choices, backend.default_knobs, backend.knobs(point), refusal)
    label = f"{point['model']['name']} TP={point['tp_size']} {point['operator']}"
    cells = {name: Cell(f"{label} {name}", tuple(found[name])) for name in space.PASSES if found[name]}
    return Task(point, overrides, cells, refused)


def compose(config: DictConfig, context: HydraContext, overrides: list[str]) -> DictConfig:
    job = context.config_loader.load_sweep_config(config, overrides)
    return OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])
