"""One parallel linear operator: overlapped as the point says, beside the same without overlap and its floor."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep import backends
from overlap_sweep.errors import Refused, UserError, WrongNumbers
from overlap_sweep.overlap import models, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results.identity import key_of, point_identity
from overlap_sweep.workloads import Sample, Searchable, Workload
from overlap_sweep.workloads.operator.result import DefaultTiming, OperatorTimes, PassTimes

if TYPE_CHECKING:
    from overlap_sweep.measure.ranks import Ranks
    from overlap_sweep.results.run_directory import Result
    from overlap_sweep.workloads.operator.bench import Bench, DefaultOverlap

BEST_MARGIN = 0.01


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the backend, and give knobs left null the meaning that they have in it under their method. Those that it
    does not have, and that every point is given, are null."""
    backend = backends.choose(point["runtime"]["device"]) if point["backend"] == "auto" else point["backend"]
    own = {name: value for name, value in point.items() if name != "layer"} | {"backend": backend}
    own |= dict.fromkeys(space.absent_knobs(backend, own))
    if point["phases"] is None:
        return _with_knobs(own, backend)
    if mistake := space.phases_mistake(point["phases"]):
        raise UserError(f"{mistake}.")
    return {**own, "phases": {phase: _with_knobs(asked, backend) for phase, asked in point["phases"].items()}}


def _with_knobs(asked: Mapping[str, Any], backend: str) -> dict[str, Any]:
    defaults = backends.load(backend).default_knobs(asked["method"])
    known = {**asked, **{knob: value for knob, value in defaults.items() if asked.get(knob) is None}}
    return known | dict.fromkeys(space.absent_knobs(backend, asked) & known.keys())


def refusal(point: Mapping[str, Any]) -> str | None:
    tokens = point["workload"]["tokens"]
    return (
        space.refusal(point)
        or models.refusal(point["model"], point["operator"], tokens, point["tp_size"])
        or backends.load(point["backend"]).refusal(point)
    )


def overlap_configs(point: Mapping[str, Any]) -> dict[str, OverlapConfig]:
    """The operator's slots that are not configured are not overlapped, by its own switches."""
    return {"": OverlapConfig(space.settings(point), switches={})}


def run(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Check, time and profile the point; the fields of `Result` that were measured."""
    from overlap_sweep.measure.profile import capture_each
    from overlap_sweep.measure.timing import relative_error, summarise, time_variants
    from overlap_sweep.workloads.operator.bench import bench_for, tp1_times

    _check_sm_count(point, ranks)
    workload, backend = point["workload"], backends.load(point["backend"])
    bench = bench_for(point, ranks)
    default = _default_overlap(point, bench)
    backend.prepare(point, "point")
    variants = {"point": bench.variant(point, "point"), "none": bench.none, "floor": bench.floor}
    error = relative_error(variants["point"], variants["none"], ranks)
    allowed = space.tolerance(point)
    if max(error.values()) > allowed:
        shown = ", ".join(f"{name} {value:.2g}" for name, value in error.items() if value > allowed)
        raise WrongNumbers(f"wrong numbers: relative error {shown} against no overlap, tolerance {allowed:g}", error)
    samples = time_variants(variants, ranks, workload["warmup"], workload["repeats"])
    tp1 = tp1_times(point, ranks)
    times = {}
    for name in (*space.PASSES, "all"):
        timed = {variant: summarise(taken.us[name]) for variant, taken in samples.items()}
        times[name] = PassTimes(**timed, tp1=tp1[name], default=default.times.get(name))
    relative = {name: times[name].point.median_us / times[name].none.median_us for name in space.PASSES}
    bench.none_us = bench.none_us or {name: times[name].none.median_us for name in space.PASSES}
    among_best = bench.is_among_best(point, relative, BEST_MARGIN)
    traces = []
    if point["profile"] == "all" or (point["profile"] == "best" and among_best):
        # To be looked at beside the overlap; it hardly changes from point to point.
        profiled = {"": variants["point"], **({} if bench.none_profiled else {"none": variants["none"]})}
        traces = capture_each(profiled, ranks, workload["profiled"], directory)
        bench.none_profiled = True
    return {
        "measured": OperatorTimes(times=times),
        "objective_us": bench.objective_us(point, relative),
        "relative_error": error,
        "launch_bound": any(taken.launch_bound for taken in samples.values()),
        "traces": traces,
        "warnings": default.warnings,
    }


def _check_sm_count(point: Mapping[str, Any], ranks: Ranks) -> None:
    import torch

    most = max((setting.get("num_sm", 0) for setting in space.settings(point).values()), default=0)
    if ranks.device.type == "cuda":
        count = torch.cuda.get_device_properties(ranks.device).multi_processor_count
        if most > count:
            raise Refused(f"num_sm={most} is more than the GPU's {count}")


def _default_overlap(point: Mapping[str, Any], bench: Bench) -> DefaultOverlap:
    """Measured again when its last measurement has become too old."""
    if backends.load(point["backend"]).has_default(point):
        # One answer for all ranks, whose clocks differ.
        (age_s,) = bench.ranks.slowest([time.monotonic() - bench.default.measured_s])
        if age_s >= point["workload"]["default_every_s"]:
            bench.default = _measure_default(point, bench)
    return bench.default


def _measure_default(point: Mapping[str, Any], bench: Bench) -> DefaultOverlap:
    from overlap_sweep.measure.timing import relative_error, summarise, time_variants
    from overlap_sweep.workloads.operator.bench import DefaultOverlap

    backend, ranks, workload = backends.load(point["backend"]), bench.ranks, point["workload"]
    measured = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        backend.prepare(point, "default")
    except Refused as reason:
        return DefaultOverlap(time.monotonic(), warnings=[f"The library's default overlap was not measured: {reason}."])
    variants = {"default": bench.variant(point, "default"), "none": bench.none}
    error = relative_error(variants["default"], variants["none"], ranks)
    if max(error.values()) > space.DEFAULT_TOLERANCE:
        warning = f"The library's default overlap computes wrong numbers here: relative error {error}."
        return DefaultOverlap(time.monotonic(), warnings=[warning])
    samples = time_variants(variants, ranks, workload["warmup"], workload["repeats"])
    times = {}
    for name in (*space.PASSES, "all"):
        default, none = (summarise(samples[variant].us[name]) for variant in ("default", "none"))
        times[name] = DefaultTiming(default, none, measured)
    late = any(taken.launch_bound for taken in samples.values())
    warnings = ["The library's default overlap was launch-bound: its time says nothing about the GPU."] if late else []
    return DefaultOverlap(time.monotonic(), times, warnings)


def _words(point: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    begin = [models.short_name(point["model"]), f"tp{point['tp_size']}", point["operator"]]
    if point.get("phases"):
        given = (f"{phase}.{space.brief_name(asked)}" for phase, asked in point["phases"].items())
        return [*begin, "+".join(given)]
    absent = space.absent_knobs(point.get("backend"), point)
    knobs = {knob: point[knob] for knob in space.KNOBS if point.get(knob) is not None and knob not in absent}
    words = [*begin, *([point["phase"]] if point["phase"] != "all" else [])]
    if point["method"] != "none":
        return [*words, space.setting_name({"method": point["method"], **knobs})]
    was_asked = "num_sm" not in absent and any(override.startswith("num_sm=") for override in overrides)
    return [*words, "none", *([f"sm{point['num_sm']}"] if was_asked else [])]


def _sample(result: Result) -> Sample:
    """The passes that the point is about, beside the same without overlap."""
    times = [result.measured.times[name] for name in space.passes(result.point)]
    point_us, none_us = (
        tuple(map(sum, zip(*(getattr(of_pass, name).samples_us for of_pass in times), strict=True)))
        for name in ("point", "none")
    )
    overlap = {"phase", "method", "phases", "repetition", *space.KNOBS}
    return Sample(point_us, none_us, none_us, _identity(result.point, overlap))


def _same_point(point: Mapping[str, Any]) -> str:
    return _identity(point, set() if space.settings(point) else {"num_sm"})


def _identity(point: Mapping[str, Any], without: Collection[str]) -> str:
    return key_of({name: value for name, value in point_identity(point).items() if name not in without})


WORKLOAD = Workload(
    name="operator",
    package=__name__,
    complete=complete,
    refusal=refusal,
    overlap_configs=overlap_configs,
    run=run,
    subject=lambda point: str(point["operator"]),
    words=_words,
    named={"tp_size", "operator", "phase", "method", "phases", *space.KNOBS},
    searchable=Searchable(sample=_sample, same_point=_same_point),
    is_told_when_measured=False,
)
