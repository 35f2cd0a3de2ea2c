"""Run directories with numbers that one can compute with by hand."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap_sweep import space
from overlap_sweep.analysis.choice import PassChoice, choose_all
from overlap_sweep.analysis.points import Point, group_cases, read_points
from overlap_sweep.analysis.traces import read_traces
from overlap_sweep.run_directory import (
    SEARCH_FILE,
    DefaultTiming,
    LayerTrial,
    PassTimes,
    Result,
    Status,
    Timing,
    TunerRecord,
    VariantTimes,
    write_result,
    write_tuner_record,
)

ENVIRONMENT = {
    "host": "node7",
    "gpu": "NVIDIA H200",
    "gpu_count": 8,
    "driver": "580.1",
    "packages": {"torch": "2.13.0"},
}


def timing(median_us: float, spread_us: float = 0.0) -> Timing:
    """Five samples around the median: their interquartile range is twice the spread."""
    samples = [median_us + step * spread_us for step in (-2, -1, 0, 1, 2)]
    return Timing(median_us, median_us - spread_us, median_us + spread_us, samples)


def default_timing(default_us: float, none_us: float = 100.0, minute: int = 0, spread_us: float = 0.0) -> DefaultTiming:
    """Measured at that minute of the hour."""
    measured = f"2026-11-20T21:{minute:02}:30+00:00"
    return DefaultTiming(timing(default_us, spread_us), timing(none_us, spread_us), measured)


def pass_times(
    point_us: float,
    none_us: float = 100.0,
    floor_us: float = 50.0,
    tp1_us: float | None = None,
    spread_us: float = 0.0,
    default: DefaultTiming | None = None,
) -> PassTimes:
    tp1 = None if tp1_us is None else timing(tp1_us)
    return PassTimes(timing(point_us, spread_us), timing(none_us, spread_us), timing(floor_us), tp1, default)


def config(
    tp_size: int = 2, operator: str = "fc1", phase: str = "all", method: str = "none", **knobs: Any
) -> dict[str, Any]:
    changed = {name: knobs.pop(name) for name in ("backend", "precision") if name in knobs}
    tokens, model = knobs.pop("tokens", 8192), knobs.pop("model", "llama3_8b")
    return {
        "model": {"name": model, "source": "sizes"},
        "workload": {"name": "operator", "tokens": tokens},
        "runtime": {"device": "cuda"},
        "backend": "transformer_engine",
        "precision": "bf16",
        **changed,
        "tp_size": tp_size,
        "operator": operator,
        "phase": phase,
        "method": method,
        **dict.fromkeys(space.KNOBS),
        **knobs,
    }


def write_point(
    directory: Path,
    point: Mapping[str, Any],
    fwd: PassTimes | None = None,
    bwd: PassTimes | None = None,
    status: Status = "ok",
    **result: Any,
) -> Path:
    """Write result.json of a point into a new folder of `directory`; passes that are not given took as long as none."""
    name = result.pop("name", space.point_name(point, []) + f"_{len(list(directory.glob('*')))}")
    times = {"fwd": fwd or pass_times(100.0), "bwd": bwd or pass_times(200.0, none_us=200.0, floor_us=150.0)}
    (directory / name).mkdir(parents=True)
    write_result(
        directory / name,
        Result(
            name=name,
            point=dict(point),
            status=status,
            settings=space.settings(point),
            times=times if status == "ok" else {},
            environment=ENVIRONMENT,
            **result,
        ),
    )
    return directory / name


def layer_config(
    kind: str = "transformer_layer", tp_size: int = 4, num_replicas: int = 1, training: bool = False, **changed: Any
) -> dict[str, Any]:
    tokens = changed.pop("tokens", 8192)
    return {
        **config(tp_size, backend="megatron", **changed),
        "workload": {"name": "layer", "tokens": tokens},
        "layer": {"kind": kind, "num_replicas": num_replicas, "training": training, "recompute": None},
    }


def variant(whole_us: Sequence[float], step_us: float | None = None, **changed: Any) -> VariantTimes:
    """`whole_us` by round; a third of it is forward, and the rest but for the optimizer's step is backward."""
    parts = {
        "fwd": [time_us / 3 for time_us in whole_us],
        "bwd": [time_us * 2 / 3 - (step_us or 0.0) for time_us in whole_us],
        "all": list(whole_us),
    }
    if step_us is not None:
        parts["step"] = [step_us] * len(whole_us)
    return VariantTimes(times={name: timing_of(samples) for name, samples in parts.items()}, **changed)


def timing_of(samples_us: list[float]) -> Timing:
    q1_us, median_us, q3_us = statistics.quantiles(samples_us, n=4, method="inclusive")
    return Timing(median_us, q1_us, q3_us, samples_us)


def write_layer(
    directory: Path,
    variants: Mapping[str, VariantTimes],
    point: Mapping[str, Any] | None = None,
    name: str = "layer",
    status: Status = "ok",
    **result: Any,
) -> Path:
    """Write result.json of a layer point into a folder of `directory`."""
    (directory / name).mkdir(parents=True)
    point = dict(point or layer_config())
    written = Result(name=name, point=point, status=status, variants=dict(variants), environment=ENVIRONMENT, **result)
    write_result(directory / name, written)
    return directory / name


def trial(point: str, variants: Mapping[str, str], tp_size: int = 4) -> LayerTrial:
    """`variants` by label the name in the point."""
    return LayerTrial(tp_size=tp_size, point=point, variants=dict(variants))


def write_tuner(directory: Path, **fields: Any) -> None:
    """tuner.json beside the points of `directory`."""
    known = {"command": "python launch.py +experiment=tp_overlap_tuner", "started": "2026-11-20T21:00:00+00:00"}
    numbers = {"wall_s": 750.0, "search_s": 485.0, "points": 143}
    write_tuner_record(directory, TunerRecord(**{**known, **numbers, **fields}))


def write_search(directory: Path, searches: Sequence[Mapping[str, Any]], **fields: Any) -> None:
    """search.json as a search leaves it, with what analysis does not read."""
    content = {"schema": 1, "points": 143, "reused": 0, "elapsed_s": 485.0, "rounds": 9, "dropped": {}, **fields}
    (directory / SEARCH_FILE).write_text(json.dumps({**content, "searches": list(searches)}))


def layer_point(directory: Path) -> Point:
    """The directory's only point."""
    (point,) = read_points(directory).points
    return point


def only_case(directory: Path) -> list[Point]:
    (points,) = group_cases(read_points(directory).points).values()
    return points


def choices(directory: Path, objective: str = "time") -> dict[tuple[int, str, str], PassChoice]:
    """What is chosen for the directory's only case, by TP size, operator and pass."""
    points = only_case(directory)
    chosen = choose_all(points, read_traces(points), objective)
    return {(choice.tp_size, choice.operator, choice.pass_name): choice for choice in chosen}
