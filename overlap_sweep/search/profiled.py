"""A search's last step under `profile=best`: what was chosen has traces, though it may not have been the fastest so far
when it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.results.points import Case, Point
from overlap_sweep.results.traces import own_traces
from overlap_sweep.search.cell import Candidate
from overlap_sweep.search.measured import Job, Measurements
from overlap_sweep.search.rounds import Request, Task
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.choice import Candidate as Measured
from overlap_sweep.workloads.operator.choice import PassChoice

Asked = set[tuple[str, str, frozenset[tuple[str, Candidate]]]]
"""By task, what its passes were given."""


def profile_answers(tasks: Sequence[Task], measurements: Measurements, analysed: Callable[[], Analysis]) -> None:
    """Measure once more, with `profile=all`, each chosen setting that has no trace, and each operator without overlap.

    What that says of the times may change what is chosen, which is profiled then, too. A point is asked for once,
    whatever comes of it; the search's budget does not count it. Nothing with `profile=none`.
    """
    asked: Asked = set()
    wanted = [task for task in tasks if task.running and task.point["profile"] == "best"]
    while wanted:
        analysis = analysed()
        jobs = [_job(request) for task in wanted for request in _requests(task, case_of(task, analysis), asked)]
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


def _job(request: Request) -> Job:
    job = Job.of(request)
    others = [override for override in job.overrides if not override.startswith("profile=")]
    return Job([*others, "profile=all"], {**job.point, "profile": "all"})


def _requests(task: Task, case: CaseAnalysis, asked: Asked) -> Iterator[Request]:
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
