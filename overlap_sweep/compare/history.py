"""How the time of a point moved: what a store kept of it, by the versions of driver and libraries it was measured with.

Only measurements on the same kind of machine are compared with each other: that another GPU is faster is no history.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from overlap_sweep import workloads
from overlap_sweep.compare.matching import Verdict, verdict
from overlap_sweep.compare.ratios import ratio
from overlap_sweep.overlap import space
from overlap_sweep.overlap.kernel_shape import COMM_ONLY, GEMM_ONLY, SEQUENTIAL
from overlap_sweep.overlap.variants import FLOOR, NONE
from overlap_sweep.report.frame import Row, column_types
from overlap_sweep.results.estimate import Estimate, estimate, pooled_none
from overlap_sweep.results.identity import environment_identity, key_of, point_identity
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.fsdp.knobs import knobs_of, setting_in_words
from overlap_sweep.workloads.fsdp.times import measured as measured_training
from overlap_sweep.workloads.kernel.answer import name_in_tables
from overlap_sweep.workloads.tp_training.rows import setting_of, step_timing

CHANGES_NOTHING = ("repetition", "profile", "profiling", "telemetry")
"""Of a point: measured again, or looked at before or after its time was taken."""

OF_THE_RECORDED_RUN = ("max_steps", "log_interval", "output_dir")
"""Of a point's `training`: how long it trains before its steps are timed, and where that is written."""

TOLD_ONLY = ("log_interval", "peak_tflops")
"""Of a point's `tp_training`: what is said of it."""

MACHINE = ("device", "gpus", "links", "cpu", "cpu_count")
"""Of an environment's identity the hardware; the rest are versions."""


class Kept(Protocol):
    """A measurement, as a store keeps it."""

    @property
    def result(self) -> Result: ...
    @property
    def directory(self) -> str: ...
    @property
    def host(self) -> str: ...


@dataclass(frozen=True)
class Times:
    """Of one point in one environment, over all its measurements there. Microseconds."""

    environment: Mapping[str, Any]
    """Of the latest."""
    identity: Mapping[str, Any]
    """What of it must be equal (`identity.environment_identity`)."""
    time: Estimate
    """The median over the measurements of their summed medians; its noise is that within them and that between them."""
    none_us: float | None
    """None where it was not measured without overlap."""
    measurements: int
    first: str | None
    last: str | None
    """UTC, ISO 8601; None where it is not recorded."""
    hosts: tuple[str, ...]
    directory: str
    """Of the latest."""
    previous: Times | None = None
    """On the same kind of machine; None of the first."""

    @property
    def ratio(self) -> float:
        """Time over that of the environment before: below 1 is faster. NaN of the first."""
        return self.time.time_us / self.previous.time.time_us if self.previous else math.nan

    @property
    def none_ratio(self) -> float:
        """The same without overlap: how much the machine moved by itself."""
        return ratio(self.none_us, self.previous.none_us) if self.previous else math.nan

    @property
    def verdict(self) -> Verdict | None:
        """None of the first."""
        return verdict(self.time, self.previous.time) if self.previous else None

    @property
    def changed(self) -> str | None:
        """What else is different from the environment before, in words; None of the first."""
        return describe_change(self.previous.identity, self.identity) if self.previous else None


@dataclass(frozen=True)
class Series:
    """One point on one kind of machine."""

    point: Mapping[str, Any]
    setting: str
    """What its slots are given, in a word; of a layer the variant, of a kernel the implementation, of a training step
    the knobs that were turned."""
    times: tuple[Times, ...]
    """By environment, in the order in which they were first measured."""

    @property
    def key(self) -> str:
        """Short, and different for every point."""
        return key_of({"point": _without_what_changes_nothing(self.point), "setting": self.setting})[:8]


@dataclass(frozen=True)
class History:
    series: list[Series]
    """Those that moved most first."""
    left_out: Counter[str]
    """By why, how many measurements have no time to be told: `failed`, `launch-bound` and the like."""


HISTORY_COLUMNS = {
    **column_types("point", "model", "backend", "precision", "tokens", "tp_size", "operator", "pass", "setting"),
    **column_types("device", "driver", "torch", "transformer_engine", "megatron_core", "nccl", "hosts"),
    **column_types("measurements", "first", "last", "time_us", "noise_us", "none_us"),
    **column_types("ratio", "none_ratio", "verdict", "changed", "directory"),
    **dict.fromkeys(("setting", "driver", "torch", "transformer_engine", "megatron_core", "nccl", "hosts"), "string"),
    **dict.fromkeys(("first", "last", "verdict", "changed"), "string"),
    "measurements": "Int64",
}
"""One row per point and environment. Times are microseconds; ratio is time_us over that of the same point in the
environment before, on the same kind of machine: below 1 is faster."""


class _Sample(NamedTuple):
    """One measurement of one setting."""

    kept: Kept
    timings: tuple[Timing, ...]
    """Of the passes whose times add up to the point's."""
    none_us: float | None


class _SeriesKey(NamedTuple):
    point: str
    setting: str
    machine: str


def history(measurements: Iterable[Kept]) -> History:
    """Of measurements in the order in which they were made, oldest first."""
    samples: dict[_SeriesKey, dict[str, list[_Sample]]] = defaultdict(lambda: defaultdict(list))
    left_out: Counter[str] = Counter()
    for kept in measurements:
        result = kept.result
        # Of a kernel, and of a layer, it is told of each; a training step takes what it takes, whoever limits it.
        launch_bound = result.launch_bound and _workload(result.point) in ("operator", "copy_engine")
        if result.status != "ok" or launch_bound:
            left_out["launch-bound" if result.status == "ok" else result.status] += 1
            continue
        found = _samples(kept)
        point, environment = _without_what_changes_nothing(result.point), environment_identity(result.environment)
        for setting, sample in found.items():
            key = _SeriesKey(key_of(point), setting, key_of(_hardware(environment)))
            samples[key][key_of(environment)].append(sample)
    series = [_series(key.setting, list(of_one.values())) for key, of_one in samples.items()]
    return History(sorted(series, key=order), left_out)


def order(series: Series) -> tuple[Any, ...]:
    """First what moved, by how much; then by model, TP size, operator and setting."""
    moves = [abs(math.log(times.ratio)) for times in series.times if times.verdict in ("faster", "slower")]
    cells = point_cells(series)
    place = [str(cells[name]) for name in ("model", "backend", "precision")]
    return (-max(moves, default=0.0), *place, cells["tokens"] or 0, cells["tp_size"], cells["operator"], series.setting)


def history_rows(series: Iterable[Series]) -> list[Row]:
    """With exactly the keys of HISTORY_COLUMNS."""
    rows = [
        {**point_cells(of_point), **_times_cells(times), **environment_cells(times)}
        for of_point, times in every_time(series)
    ]
    return [{column: row[column] for column in HISTORY_COLUMNS} for row in rows]


def every_time(series: Iterable[Series]) -> list[tuple[Series, Times]]:
    """In the order of the rows."""
    return [(of_point, times) for of_point in series for times in of_point.times]


def describe_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """`torch 2.10.0 -> 2.11.0, driver 570 -> 580`, of two identities of environments."""
    one, other = _named_values(before), _named_values(after)
    names = dict.fromkeys([*one, *other])
    return ", ".join(
        f"{name} {_in_words(one.get(name))} -> {_in_words(other.get(name))}"
        for name in names
        if one.get(name) != other.get(name)
    )


def _samples(kept: Kept) -> dict[str, _Sample]:
    """By setting; of a layer each of its variants but the floor, of a kernel each of its implementations beside the
    parts that they are made of, of an operator, a training step or a tensor-parallel stack the one that it was given,
    of GEMMs beside copies both at once."""
    result = kept.result
    if _workload(result.point) == "fsdp":
        step = measured_training(result).step
        ranks, knobs = workloads.world_size(result.point), knobs_of(result.point)
        setting = f"{ranks} ranks, {setting_in_words(knobs, knobs)}"
        return {setting: _Sample(kept, (step["point"],), step["none"].median_us)}
    if _workload(result.point) == "tp_training":
        options = setting_of(result.point).removeprefix(result.point["impl"])
        setting = f"dp{result.point['dp_size']}{options}"
        return {setting: _Sample(kept, (step_timing(result),), None)}
    if _workload(result.point) == "copy_engine":
        times = result.measured.times
        return {"overlapped": _Sample(kept, (times["overlapped"],), times["sequential"].median_us)}
    if _workload(result.point) == "kernel":
        sequential_us = result.measured.implementations[SEQUENTIAL].time.median_us
        return {
            name_in_tables(name, result.point): _Sample(kept, (measured.time,), sequential_us)
            for name, measured in result.measured.implementations.items()
            if name not in (GEMM_ONLY, COMM_ONLY) and not measured.launch_bound
        }
    if _workload(result.point) == "layer":
        none = result.measured.variants.get(NONE)
        none_us = none.times["all"].median_us if none else None
        return {
            name: _Sample(kept, (variant.times["all"],), none_us)
            for name, variant in result.measured.variants.items()
            if name != FLOOR and not variant.launch_bound
        }
    passes = [result.measured.times[name] for name in space.passes(result.point)]
    none_us = sum(of_pass.none.median_us for of_pass in passes)
    return {space.settings_name(result.settings): _Sample(kept, tuple(of_pass.point for of_pass in passes), none_us)}


def _workload(point: Mapping[str, Any]) -> str:
    return str(point["workload"]["name"])


def _without_what_changes_nothing(point: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in point_identity(point).items() if name not in CHANGES_NOTHING}
    if "training" in told:
        told["training"] = {name: value for name, value in told["training"].items() if name not in OF_THE_RECORDED_RUN}
    if "tp_training" in told:
        told["tp_training"] = {name: value for name, value in told["tp_training"].items() if name not in TOLD_ONLY}
    return told


def _hardware(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {name: environment.get(name) for name in MACHINE}


def _series(setting: str, of_environments: Sequence[Sequence[_Sample]]) -> Series:
    times: list[Times] = []
    for samples in of_environments:
        times.append(replace(_times(samples), previous=times[-1] if times else None))
    return Series(of_environments[-1][-1].kept.result.point, setting, tuple(times))


def _times(samples: Sequence[_Sample]) -> Times:
    results = [sample.kept.result for sample in samples]
    latest = samples[-1].kept
    nones_us = [sample.none_us for sample in samples if sample.none_us is not None]
    started = sorted(result.started for result in results if result.started)
    return Times(
        environment=latest.result.environment,
        identity=environment_identity(latest.result.environment),
        time=_estimate(samples),
        none_us=statistics.median(nones_us) if nones_us else None,
        measurements=len(samples),
        first=started[0] if started else None,
        last=started[-1] if started else None,
        hosts=tuple(dict.fromkeys(sample.kept.host for sample in samples)),
        directory=latest.directory,
    )


def _estimate(samples: Sequence[_Sample]) -> Estimate:
    """What differs from one measurement to the next is noise too: it would differ in the next environment as well."""
    totals_us = [sum(timing.median_us for timing in sample.timings) for sample in samples]
    of_passes = [pooled_none(timings) for timings in zip(*(sample.timings for sample in samples), strict=True)]
    between_us = estimate(totals_us).noise_us if len(totals_us) > 1 else 0.0
    noise_us = math.hypot(between_us, *(of_pass.noise_us for of_pass in of_passes))
    return Estimate(statistics.median(totals_us), noise_us, sum(of_pass.repeats for of_pass in of_passes))


def point_cells(series: Series) -> Row:
    """What tells the point from others."""
    point = series.point
    return {
        "point": series.key,
        "model": point["model"]["name"],
        "backend": point["backend"],
        "precision": point["precision"],
        # The rows of a copy point's matrices are nothing that a model reads.
        "tokens": None if _workload(point) == "copy_engine" else point["workload"]["tokens"],
        "tp_size": point["tp_size"],
        "operator": workloads.of(point).subject(point),
        "pass": _passes(point),
        "setting": series.setting,
    }


def _passes(point: Mapping[str, Any]) -> str:
    of_workload = {"layer": "all", "kernel": "fwd", "fsdp": "step", "tp_training": "step", "copy_engine": "all"}
    return of_workload.get(_workload(point)) or "+".join(space.passes(point))


def environment_cells(times: Times) -> Row:
    """Machine and versions."""
    environment = times.environment
    packages = environment.get("packages", {})
    return {
        "device": environment.get("gpu") or environment.get("device"),
        "driver": _text(environment.get("driver")),
        "torch": _text(packages.get("torch")),
        "transformer_engine": _text(packages.get("transformer-engine")),
        "megatron_core": _text(packages.get("megatron-core")),
        "nccl": _text(packages.get("nccl")),
        "hosts": ", ".join(times.hosts),
        "changed": times.changed,
    }


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _times_cells(times: Times) -> Row:
    return {
        "measurements": times.measurements,
        "first": times.first,
        "last": times.last,
        "time_us": times.time.time_us,
        "noise_us": times.time.noise_us,
        "none_us": times.none_us,
        "ratio": times.ratio,
        "none_ratio": times.none_ratio,
        "verdict": times.verdict,
        "directory": times.directory,
    }


def _named_values(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Libraries first, since they change most often."""
    own = {name: value for name, value in identity.items() if name not in ("packages", "variables")}
    return {**identity.get("packages", {}), **own, **identity.get("variables", {})}


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
