"""Measurements of a point of workload=fsdp: training steps as configured, with no overlap, and without communication.
Also step times with noise that are comparable between points measured minutes apart."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from overlap_sweep.overlap.overlap_cfg import NONE_IN_WORDS
from overlap_sweep.report.numbers import UNDEFINED
from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import Estimate, RunNoise, estimate, normalised, pooled_none
from overlap_sweep.results.measured import (
    ComposedConfig,
    Count,
    FileName,
    Gb,
    Measured,
    ModelConfig,
    Name,
    SizedWorkload,
    Timing,
    Total,
    check_pairs,
    options_type,
)
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads import Sample
from overlap_sweep.workloads.fsdp.config import (
    HOST_LIMITS,
    RANKING_ON,
    Compile,
    Distributed,
    Fsdp,
    Ranking,
    Streams,
    Training,
)
from overlap_sweep.workloads.fsdp.knobs import knobs_of, same_floor, sharding

VARIANTS = ("point", "none", "floor")
_MOST_VARIANTS = 20
_MOST_OTHER_KNOBS = 100
_LONGEST_OPTIONS = 2000
"""Longest options of torch.compile as JSON, in characters, since a setting's name has them all."""
_Losses = Annotated[list[float | None], msgspec.Meta(min_length=1, max_length=10**6)]


def _check_compile(compile_options: Any) -> None:
    if len(json.dumps(compile_options.options)) > _LONGEST_OPTIONS:
        raise ValueError("very long options of torch.compile")


_Replicas = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_RESOLVED: dict[str, Any] = {
    "forward_prefetch": bool | int,
    "reshard_after_forward": bool | int,
    "replicas": _Replicas,
}
_AS_GIVEN = _RESOLVED | {
    "reshard_after_forward": bool | int | Literal["node"],
    "replicas": _Replicas | Literal["nodes"],
}
"""Types of options of `fsdp`; as the user gives them they may refer to nodes."""
_Variables = Annotated[dict[Name, Name | int | float | bool | None], msgspec.Meta(max_length=_MOST_OTHER_KNOBS)]
_CompileOptions = Annotated[dict[Name, Any], msgspec.Meta(max_length=_MOST_OTHER_KNOBS)]

_BY_DEVICE = tuple(RANKING_ON["cpu"])
_ALWAYS = [declared.name for declared in fields(Ranking) if declared.name not in _BY_DEVICE]
ComposedTraining: Any = msgspec.defstruct(
    "ComposedTraining",
    [
        ("model", ModelConfig),
        ("ranking", options_type(Ranking, _ALWAYS)),
        ("fsdp", options_type(Fsdp, **_AS_GIVEN)),
        ("training", options_type(Training, ["batch_size", "gradient_accumulation", "mixed_precision"])),
        ("distributed", options_type(Distributed, ["strategy"], env=_Variables)),
        ("streams", options_type(Streams)),
        ("compile", options_type(Compile, options=_CompileOptions, check=_check_compile)),
    ],
    bases=(ComposedConfig,),
    kw_only=True,
)
ResolvedTraining: Any = msgspec.defstruct(
    "ResolvedTraining",
    [
        *(("tp_size", Count), ("workload", SizedWorkload), ("precision", str)),
        ("fsdp", options_type(Fsdp, **_RESOLVED)),
        ("ranking", options_type(Ranking, [*_ALWAYS, *_BY_DEVICE], num_layers=Count, sequence_length=Count)),
        ("distributed", options_type(Distributed, ["strategy", "dp_size"], env=_Variables, dp_size=Count)),
    ],
    bases=(ComposedTraining,),
    kw_only=True,
)


class TrainingRun(Measured, kw_only=True, tag="fsdp"):
    """A training run. Its telemetry lies beside it (telemetry.py)."""

    composed = ComposedTraining
    resolved = ResolvedTraining

    step: Annotated[dict[Name, Timing], msgspec.Meta(max_length=_MOST_VARIANTS)]
    """Time of a whole step with all its micro batches and the optimizer, by variant: `point`; `none`, each collective
    alone on the device; `floor`, without communication. Their i-th samples pair: they were taken in the same round."""
    host_us: dict[Name, Annotated[float, msgspec.Meta(ge=0)]]
    """Time in which the host enqueues a step, without waiting for the device, by variant: median, slowest rank. Empty
    on a CPU; without variants whose launches waited for the device."""
    samples_per_step: Total
    """Samples in a step, over all ranks and micro batches."""
    parameters: Total
    """Number of the whole model's parameters."""
    losses: _Losses
    """Loss after each step of the recorded run, mean over all ranks' samples; null if it is NaN or infinite."""
    peak_memory_gb: Gb | None = None
    """Peak memory of tensors on the GPU of any rank, 10^9 bytes; null on a CPU."""
    compiled: Annotated[str, msgspec.Meta(max_length=10_000)] = "no"
    """`no`; the backend that compiled the layers; or `no: ` and why it could not."""
    telemetry: list[FileName] = msgspec.field(default_factory=list)
    """File names in the run directory, one per rank."""

    def __post_init__(self) -> None:
        if missing := set(VARIANTS) - self.step.keys():
            raise ValueError(f"no {min(missing)} times of a step")
        check_pairs(self.step.values())

    def check(self, result: Result) -> None:
        training, ranks = result.point["training"], result.point["distributed"]["dp_size"]
        samples = (training["batch_size"] or 0) * training["gradient_accumulation"] * ranks
        if self.samples_per_step != samples:
            raise ValueError(f"{self.samples_per_step} samples in a step of {samples}")

    @classmethod
    def as_asked(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config with sharding, backend and precision filled in; a precision left to the device is
        unknown."""
        mixed_precision = config["training"]["mixed_precision"]
        precision = "fp32" if mixed_precision == "none" else mixed_precision
        return {
            **config,
            "fsdp": sharding(config),
            "backend": config["distributed"]["strategy"],
            "precision": precision,
            "tp_size": 1,
        }

    def compared(self, result: Result) -> str | None:
        gain = verdict.gain_of_point(self.step["point"], self.step["none"], result.point["runtime"]["device"])
        return gain.in_words(NONE_IN_WORDS)

    @property
    def rate(self) -> str:
        return f"{self.samples_per_step / self.step['point'].median_us * 1e6:,.0f} samples/s"


MEASURED = TrainingRun


def measured(result: Result | None) -> TrainingRun:
    """Returns the measurements of an `ok` point."""
    assert result
    return result.measured_as(TrainingRun)


def limited_by_host(result: Result) -> list[str]:
    """Returns the launch-bound variants, which the host enqueued hardly faster than the device ran them."""
    run = measured(result)
    limited = {name for name in VARIANTS if run.host_us.get(name, 0.0) >= HOST_LIMITS * run.step[name].median_us}
    return [name for name in VARIANTS if name in limited or (name == "point" and result.launch_bound)]


def sample(result: Result) -> Sample:
    """Returns the step's sample for a search over knobs. A launch-bound step counts, but not relative to its floor:
    that is the host's time, too, so that the slowest host would seem the fastest setting."""
    run = measured(result)
    point_us, none_us, floor_us = (tuple(run.step[name].samples_us) for name in ("point", "none", "floor"))
    work = str(sorted(same_floor(knobs_of(result.point)), key=str))
    return Sample(point_us, () if limited_by_host(result) else floor_us, none_us, work, run.samples_per_step)


class Hidden(NamedTuple):
    """The hidden fraction, (none - point) / (none - floor), with its noise."""

    fraction: float
    noise: float

    @property
    def known(self) -> bool:
        """Returns whether it is conclusive: its noise interval is narrower than the range from 0 to 1."""
        return self.noise < 0.5

    @property
    def in_words(self) -> str:
        """Returns `37% \N{PLUS-MINUS SIGN} 8%`; `-` if it is not conclusive."""
        return f"{self.fraction:.0%} \N{PLUS-MINUS SIGN} {self.noise:.0%}" if self.known else UNDEFINED


def hidden(step: Mapping[str, Timing]) -> Hidden:
    """Returns the hidden fraction, unknown if `none` takes no longer than `floor`: there is nothing to hide.

    It is the ratio of the medians of differences within rounds; its noise is theirs in quadrature.
    """
    samples = (step[name].samples_us for name in ("point", "none", "floor"))
    rounds = list(zip(*samples, strict=True))
    saved = [none - point for point, none, _ in rounds]
    comm = [none - floor for _, none, floor in rounds]
    comm_us = statistics.median(comm)
    if comm_us <= 0:
        return Hidden(math.nan, math.inf)
    fraction = statistics.median(saved) / comm_us
    return Hidden(fraction, math.hypot(estimate(saved).noise_us, fraction * estimate(comm).noise_us) / comm_us)


@dataclass(frozen=True)
class StepTimes:
    """The times of a step in one setting, over all its points."""

    step: Estimate
    """Time as configured; its noise includes the scatter between points of the same setting."""
    none: Estimate
    """Time with every collective alone on the device."""
    floor: Estimate
    """Time without communication."""
    hidden: Hidden
    """Hidden fraction from the rounds of its points."""
    relative: bool
    """Whether times are relative to the floors of the same points; else they are as measured."""

    @property
    def time_us(self) -> float:
        return self.step.time_us

    @property
    def none_us(self) -> float:
        return self.none.time_us

    @property
    def floor_us(self) -> float:
        return self.floor.time_us

    @property
    def speedup(self) -> float:
        """Returns the speedup over the same step with no overlap."""
        return self.none_us / self.time_us

    @property
    def exposed_us(self) -> float:
        """Returns the time that communication adds as configured."""
        return self.time_us - self.floor_us


def times_as_measured(point: Point) -> StepTimes:
    """Returns the times of a single `ok` point."""
    (steps,) = _steps([point])
    step, none, floor = (replace(estimate(steps[name].samples_us), time_us=steps[name].median_us) for name in VARIANTS)
    return StepTimes(step, none, floor, hidden(steps), relative=False)


def compared_times(settings: Sequence[Sequence[Point]]) -> list[StepTimes]:
    """Returns the times of each setting's points, for all settings of a case.

    A point's time can be given relative to its own floor, which was measured in turns with it: drift of the machine
    cancels, but the floor's noise is added. Settings measured in several points show which of the two is larger:
    relative times are used if they bring these points closer together, or if there are no such settings, since drift of
    some percent is common. Points with a launch-bound variant take no part: their floor is the host's time, and
    dividing by it would make the slowest host the fastest setting.
    """
    works = [same_floor(knobs_of(points[0].config)) for points in settings]
    floors: dict[frozenset[tuple[str, str]], list[Timing]] = defaultdict(list)
    for work, points in zip(works, settings, strict=True):
        floors[work] += [step["floor"] for step in _steps(point for point in points if not _limited([point]))]
    repeated = [(_steps(points), _limited(points)) for points in settings if len(points) > 1]
    free = [steps for steps, limited in repeated if not limited]
    as_measured = _scatter([step["point"].median_us for step in steps] for steps in free)
    to_floor = _scatter([step["point"].median_us / step["floor"].median_us for step in steps] for steps in free)
    relative = as_measured is None or to_floor is None or to_floor < as_measured
    between = verdict.noises_of_steps(
        (
            ([_time(step, over_floor=relative and not limited) for step in steps], limited)
            for steps, limited in repeated
        ),
        settings[0][0].config["runtime"]["device"],
    )
    # A floor that no other point shares would only add its noise.
    pools = [floors[work] if relative and len(floors[work]) > 1 else [] for work in works]
    return [
        _pooled(_steps(points), [] if (limited := _limited(points)) else pool, between[limited])
        for points, pool in zip(settings, pools, strict=True)
    ]


def _pooled(steps: Sequence[dict[str, Timing]], floors: Sequence[Timing], between: RunNoise) -> StepTimes:
    """Returns the times of one setting, relative to the `floors` if there are any."""
    if floors:
        floor = pooled_none(floors)
        step, none = (normalised([(one[name], one["floor"]) for one in steps], floor) for name in ("point", "none"))
    else:
        step, none, floor = (pooled_none([one[name] for one in steps]) for name in VARIANTS)
    rounds = {name: together([one[name] for one in steps]) for name in VARIANTS}
    level_us = floor.time_us if floors else 1.0
    runs_us = [level_us * _time(one, over_floor=bool(floors)) for one in steps]
    return StepTimes(between.of_runs(step, runs_us), none, floor, hidden(rounds), relative=bool(floors))


def _steps(points: Iterable[Point]) -> list[dict[str, Timing]]:
    return [measured(point.result).step for point in points]


def _limited(points: Iterable[Point]) -> bool:
    """Returns whether any variant of any of the points is launch-bound."""
    return any(limited_by_host(point.result) for point in points if point.result)


def _time(step: Mapping[str, Timing], *, over_floor: bool) -> float:
    """Returns the time of a point's step, or its ratio to the floor's."""
    return step["point"].median_us / (step["floor"].median_us if over_floor else 1.0)


def _scatter(times: Iterable[Sequence[float]]) -> float | None:
    """Returns the relative standard deviation within each sequence, pooled; None if none has two times."""
    squares, free = 0.0, 0
    for alike in times:
        mean = statistics.mean(alike)
        squares += sum((time / mean - 1) ** 2 for time in alike)
        free += len(alike) - 1
    return math.sqrt(squares / free) if free else None


def together(timings: Sequence[Timing]) -> Timing:
    """Returns one timing with the samples of all."""
    if len(timings) == 1:
        return timings[0]
    samples_us = [sample_us for timing in timings for sample_us in timing.samples_us]
    q1_us, median_us, q3_us = statistics.quantiles(samples_us, n=4, method="inclusive")
    return Timing(median_us, q1_us, q3_us, samples_us)
