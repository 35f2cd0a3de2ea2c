"""Search the space that a multirun's values span, through any Hydra launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from overlap_sweep import backends, space, workloads
from overlap_sweep.errors import UserError
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import resolve
from overlap_sweep.search.bisect import Effort
from overlap_sweep.search.budget import Budget
from overlap_sweep.search.candidates import Choices, candidates
from overlap_sweep.search.cell import Cell
from overlap_sweep.search.measured import Measurements
from overlap_sweep.search.report import SearchReport
from overlap_sweep.search.rounds import Task, collective_us, next_round
from overlap_sweep.search.start import STARTS

SEARCHED = ("phase", "method", *space.KNOBS)
"""Keys whose values a search chooses among; every other key's values make cases that are searched apart."""


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
        ordered = sorted(self.tasks, key=lambda task: space.world_size(task.point))
        return [list(group) for _, group in groupby(ordered, key=lambda task: space.world_size(task.point))]


def set_up(config: DictConfig, context: HydraContext, launcher: Launcher, values: Mapping[str, Sequence[str]]) -> Sweep:
    """UserError when there is nothing to search, or a value is wrong; nothing was started then."""
    tasks = find_tasks(config, context, values)
    directory = Path(str(config.hydra.sweep.dir))
    directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, directory / "multirun.yaml")
    budget = Budget(config.search.max_points, config.search.max_minutes)
    outcomes.searching = True
    return Sweep(config, context, tasks, Measurements(launcher, directory, budget), SearchReport(directory, tasks))


def sweep(
    config: DictConfig, context: HydraContext, launcher: Launcher, params: Mapping[str, Any], arguments: Sequence[str]
) -> None:
    """Search all cells, print the answers, and leave `search.json` beside the points."""
    whole = set_up(config, context, launcher, swept_values(context, params, arguments))
    for stage in whole.stages:
        search(whole, stage)
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
        if result.status == "ok":
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


def swept_values(context: HydraContext, params: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, list[str]]:
    """By key as it is typed, its values as text. UserError for ranges that are not counted out."""
    parser = OverridesParser.create(config_loader=context.config_loader)
    overrides = parser.parse_overrides([*(f"{key}={value}" for key, value in params.items()), *arguments])
    values: dict[str, list[str]] = {}
    for override in overrides:
        values[override.get_key_element()] = list(_texts(override))
    return values


def _texts(override: Override) -> Iterator[str]:
    if not override.is_sweep_override():
        yield override.get_value_element_as_str()
    elif override.is_discrete_sweep():
        yield from override.sweep_string_iterator()
    else:
        raise UserError(f"{override.input_line}: a search needs values that can be counted; list them.")


def find_tasks(config: DictConfig, context: HydraContext, values: Mapping[str, Sequence[str]]) -> list[Task]:
    """One task for each operator of each combination of what is not searched.

    UserError when there is nothing to search in any of them.
    """
    fixed = {key: of_key for key, of_key in values.items() if key not in SEARCHED}
    searched = {key: of_key for key, of_key in values.items() if key in SEARCHED}
    tasks: list[Task] = []
    refused: list[str] = []
    for combination in product(*fixed.values()):
        overrides = [f"{key}={value}" for key, value in zip(fixed, combination, strict=True)]
        task = _task(config, context, overrides, searched)
        if task.cells:
            tasks.append(task)
        refused += task.refused
    if not tasks:
        reasons = "; ".join(dict.fromkeys(refused)) or "no swept method fits any of the operator's slots"
        raise UserError(f"there is nothing to search: {reasons}.")
    return tasks


def _task(
    config: DictConfig, context: HydraContext, overrides: list[str], searched: Mapping[str, Sequence[str]]
) -> Task:
    """The operator's cells. What may not be varied together is left out, as a launcher would skip it."""
    # The first value of each knob stands for all: whether a value is one at all is found out by composing it.
    by_knob: dict[str, list[Any]] = {}
    job = None
    for key, texts in searched.items():
        jobs = [compose(config, context, [*overrides, f"{key}={text}"]) for text in texts]
        by_knob[key] = [job[key] for job in jobs]
    job = compose(config, context, [*overrides, "phases={fprop:{method:none}}"])
    if job.workload.name != "operator":
        raise UserError(f"hydra/sweeper=bisect searches settings of operators, not workload={job.workload.name}.")
    point = resolve(job)
    backend, workload = backends.load(point["backend"]), workloads.load("operator")
    choices = Choices(
        methods=[method for method in by_knob.get("method", [job.method]) if method != "none"],
        knobs={knob: by_knob.get(knob, [job[knob]]) for knob in space.KNOBS},
        phase=_only(by_knob.get("phase", [job.phase])),
    )
    counts = [n for n in choices.knobs["num_sm"] if config.search.min_num_sm <= n <= config.search.max_num_sm]
    if not counts:
        raise UserError(
            f"no num_sm of {', '.join(map(str, choices.knobs['num_sm']))} lies between search.min_num_sm="
            f"{config.search.min_num_sm} and search.max_num_sm={config.search.max_num_sm}; widen them."
        )
    choices = Choices(choices.methods, {**choices.knobs, "num_sm": counts}, choices.phase)

    def refusal(phases: Mapping[str, space.Setting]) -> str | None:
        reason: str | None = workload.refusal({**point, "phases": phases})
        return reason

    found, refused = candidates(point["operator"], choices, backend.default_knobs, backend.knobs(point), refusal)
    label = f"{point['model']['name']} TP={point['tp_size']} {point['operator']}"
    cells = {name: Cell(f"{label} {name}", tuple(found[name])) for name in space.PASSES if found[name]}
    return Task(point, overrides, cells, refused)


def _only(phases: Sequence[str]) -> str:
    if len(phases) > 1:
        raise UserError(f"phase={','.join(phases)} is searched at once with phase=all.")
    return phases[0]


def compose(config: DictConfig, context: HydraContext, overrides: list[str]) -> DictConfig:
    job = context.config_loader.load_sweep_config(config, overrides)
    return OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])
