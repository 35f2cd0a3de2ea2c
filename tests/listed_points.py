"""Points as YAML lists them: the options in which each differs from the usual one of its workload, and what was
measured, as tests/make_point.py takes it. A number alone: the first argument."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from overlap_sweep.recorder.recording import TrainingState
from overlap_sweep.results.registry import types_of
from overlap_sweep.results.run_directory import Result
from tests import make_point as made

DATA = Path(__file__).parent / "data" / "points"
Point = Mapping[str, Any]
USUAL: dict[str, Callable[..., Any]] = {
    "operator": made.operator_config,
    "layer": made.layer_config,
    "kernel": made.kernel_config,
    "fsdp": partial(made.resolved, "fsdp"),
    "copy_engine": made.copy_config,
    "tp_training": made.stack_config,
    "job": made.job_config,
}


def write_sweep_of(name: str, directory: Path) -> Path:
    """Writes the points of a file in data/points, which lists them by workload, and returns the directory."""
    for workload, points in yaml.safe_load((DATA / f"{name}.yaml").read_text()).items():
        write_points(workload, directory, points)
    return directory


def write_points(workload: str, directory: Path, points: Iterable[Point]) -> None:
    """Writes each point into a folder of the directory, or of the `folder` in it. `workload` is that of points that
    don't say it; a list of repetitions are points that are alike. Jobs start a minute after each other, others at
    their `minute` of an hour."""
    for point, repetition in ((one, each) for one in points for each in _repetitions(one)):
        of_point, taken = {"workload": workload, **point, "repetition": repetition}, dict[str, Any]()
        kind, place = of_point.pop("workload"), directory / of_point.pop("folder", "")
        if kind == "job":
            hours, minutes = divmod(len(list(place.glob("*"))), 60)
            taken["started"] = f"2026-11-20T{21 + hours}:{minutes:02}:00+00:00"
        elif "minute" in of_point:
            taken["started"] = f"2026-11-20T21:{of_point.pop('minute'):02}:00+00:00"
        measured = {*Result.__struct_fields__, *types_of(kind).measured.__struct_fields__}
        for name in (measured | inspect.signature(made.MEASURED[kind]).parameters.keys()) & of_point.keys():
            taken[name] = MEASURED.get(name, lambda given: given)(of_point.pop(name))
        made.make_point(kind, place, USUAL[kind](**of_point), **taken)


def _repetitions(point: Point) -> Sequence[int]:
    found = point.get("repetition", 0)
    return found if isinstance(found, list) else [found]


def _each(build: Callable[[Any], Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: build(one) for name, one in given.items()}


def _built(build: Callable[..., Any], given: Any) -> Any:
    """Calls `build` with the arguments, or with the only one."""
    return build(**given) if isinstance(given, dict) else build(given)


def _pass(given: Any) -> Any:
    if isinstance(given, dict) and "default" in given:
        given = {**given, "default": _built(made.default_timing, given["default"])}
    return _built(made.pass_times, given)


def _implementations(given: dict[str, Any]) -> dict[str, Any]:
    own = {name: one for name, one in given.items() if name != "baselines"}
    return {**made.baselines(**given.get("baselines", {})), **_each(partial(_built, made.implementation), own)}


def _variant(given: Any) -> Any:
    """A number is the time of each of six rounds."""
    changed = given if isinstance(given, dict) else {"whole_us": given}
    whole_us = changed["whole_us"]
    return made.variant(**{**changed, "whole_us": whole_us if isinstance(whole_us, list) else [whole_us] * 6})


def _environment(changed: dict[str, Any]) -> dict[str, Any]:
    """The usual one with changes; null: it is unknown."""
    return {name: value for name, value in {**made.ENVIRONMENT, **changed}.items() if value is not None}


MEASURED: dict[str, Callable[[Any], Any]] = {
    "environment": _environment,
    "fwd": _pass,
    "bwd": _pass,
    "implementations": _implementations,
    "variants": partial(_each, _variant),
    "step": partial(_each, lambda given: made.timing_of(given) if isinstance(given, list) else made.timing(**given)),
    "state": lambda given: TrainingState(**{"step": 5, "is_short": False, **given}),
    "losses": lambda given: made.falling(**given) if isinstance(given, dict) else given,
}
