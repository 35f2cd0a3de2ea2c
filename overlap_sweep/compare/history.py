"""How the time of a point moved: what a store kept of it, by the versions of driver and libraries it was measured with;
and how people are shown it, the points that moved first.

Only measurements on the same kind of machine are compared with each other: that another GPU is faster is no history.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from rich.console import Console

from overlap_sweep import workloads
from overlap_sweep.report.comparison import counted, print_table, ratio_column
from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.table import Column, Row, Table, through
from overlap_sweep.results.comparable import Sample
from overlap_sweep.results.estimate import Estimate, estimate, pooled_none
from overlap_sweep.results.identity import environment_identity, key_of, point_identity
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import MARGIN, VERDICTS, Verdict, ratio, verdict

CHANGES_NOTHING = ("repetition", "profile")
"""Of a point: measured again, or looked at before or after its time was taken."""

MOST_POINTS = 40
"""In a table; the other formats have all."""
_TELLING = ("model", "tokens", "precision", "backend", "device")
_VERSIONS = ("torch", "transformer-engine", "megatron-core", "nccl", "driver")

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

    @property
    def device(self) -> str | None:
        return self.environment.get("gpu") or self.environment.get("device")

    def version(self, package: str) -> str | None:
        """Returns the version of the driver, or of a library."""
        found = {**self.environment.get("packages", {}), "driver": self.environment.get("driver")}.get(package)
        return None if found is None else str(found)


@dataclass(frozen=True)
class Series:
    """One point on one kind of machine."""

    point: Mapping[str, Any]
    setting: str
    """What is told apart within a point, in a word: the settings of slots, a variant, an implementation, knobs."""
    pass_name: str
    tokens: int | None
    times: tuple[Times, ...]
    """By environment, in the order in which they were first measured."""

    @property
    def key(self) -> str:
        """Short, and different for every point."""
        return key_of({"point": _without_what_changes_nothing(self.point), "setting": self.setting})[:8]

    @property
    def subject(self) -> str:
        return workloads.of(self.point).subject(self.point)


class Moment(NamedTuple):
    """A row: one point in one environment."""

    series: Series
    times: Times


@dataclass(frozen=True)
class History:
    series: list[Series]
    """Those that moved most first."""
    left_out: Counter[str]
    """By why, how many measurements have no time to be told: `failed`, `launch-bound` and the like."""

    @property
    def moments(self) -> list[Moment]:
        return [Moment(series, times) for series in self.series for times in series.times]


def _version(name: str, package: str = "") -> Column[Moment]:
    return Column(name, lambda moment: moment.times.version(package or name), kind="text")


RATIO: Column[Moment] = ratio_column("ratio", lambda moment: moment.times.ratio, "ratio")
NONE_RATIO: Column[Moment] = ratio_column("none_ratio", lambda moment: moment.times.none_ratio, "none", dropped=1)
MOMENTS: Table[Moment] = Table(
    "rows",
    "one row per point and environment",
    (
        Column("point", lambda moment: moment.series.key, kind="text"),
        Column("model", lambda moment: moment.series.point["model"]["name"], kind="text"),
        Column("backend", lambda moment: moment.series.point["backend"], kind="text"),
        Column("precision", lambda moment: moment.series.point["precision"], kind="text"),
        Column("tokens", lambda moment: moment.series.tokens, kind="count"),
        Column("tp_size", lambda moment: moment.series.point["tp_size"], kind="count"),
        Column("operator", lambda moment: moment.series.subject, kind="text"),
        Column("pass", lambda moment: moment.series.pass_name, kind="text"),
        Column("setting", lambda moment: moment.series.setting, kind="text"),
        Column("device", lambda moment: moment.times.device, kind="text"),
        *(_version("driver"), _version("torch"), _version("transformer_engine", "transformer-engine")),
        *(_version("megatron_core", "megatron-core"), _version("nccl")),
        Column("hosts", lambda moment: ", ".join(moment.times.hosts), kind="text"),
        Column("measurements", lambda moment: moment.times.measurements, kind="count"),
        Column("first", lambda moment: moment.times.first, kind="text"),
        Column("last", lambda moment: moment.times.last, kind="text"),
        Column("time_us", lambda moment: moment.times.time.time_us),
        Column("noise_us", lambda moment: moment.times.time.noise_us),
        Column("none_us", lambda moment: moment.times.none_us),
        *(RATIO, NONE_RATIO),
        Column("verdict", lambda moment: moment.times.verdict, kind="text"),
        Column("changed", lambda moment: moment.times.changed, kind="text"),
        Column("directory", lambda moment: moment.times.directory, kind="text"),
    ),
)
"""Times are microseconds; ratio is time_us over that of the same point in the environment before, on the same kind of
machine: below 1 is faster."""


class _Measurement(NamedTuple):
    kept: Kept
    sample: Sample


class _SeriesKey(NamedTuple):
    point: str
    setting: str
    machine: str


def history(measurements: Iterable[Kept]) -> History:
    """Of measurements in the order in which they were made, oldest first."""
    found: dict[_SeriesKey, dict[str, list[_Measurement]]] = defaultdict(lambda: defaultdict(list))
    left_out: Counter[str] = Counter()
    for kept in measurements:
        result = kept.result
        comparing = workloads.comparing(str(result.point["workload"]["name"]))
        samples = comparing.samples(result) if comparing and result.status == "ok" else {}
        if not samples:
            left_out["launch-bound" if result.status == "ok" else result.status] += 1
            continue
        point, environment = _without_what_changes_nothing(result.point), environment_identity(result.environment)
        machine = {name: environment.get(name) for name in MACHINE}
        for setting, sample in samples.items():
            key = _SeriesKey(key_of(point), setting, key_of(machine))
            found[key][key_of(environment)].append(_Measurement(kept, sample))
    series = [_series(key.setting, list(of_one.values())) for key, of_one in found.items()]
    return History(sorted(series, key=_order), left_out)


def describe_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """`torch 2.10.0 -> 2.11.0, driver 570 -> 580`, of two identities of environments."""
    one, other = _named_values(before), _named_values(after)
    names = dict.fromkeys([*one, *other])
    return ", ".join(
        f"{name} {_in_words(one.get(name))} -> {_in_words(other.get(name))}"
        for name in names
        if one.get(name) != other.get(name)
    )


def _order(series: Series) -> tuple[Any, ...]:
    """First what moved, by how much; then by model, TP size, operator and setting."""
    moves = [abs(math.log(times.ratio)) for times in series.times if times.verdict in ("faster", "slower")]
    point = series.point
    place = (point["model"]["name"], point["backend"], str(point["precision"]), series.tokens or 0, point["tp_size"])
    return (-max(moves, default=0.0), *place, series.subject, series.setting)


def _without_what_changes_nothing(point: Mapping[str, Any]) -> dict[str, Any]:
    comparing = workloads.comparing(str(point["workload"]["name"]))
    identity = point_identity(point)
    for option in (*CHANGES_NOTHING, *(comparing.changes_nothing if comparing else ())):
        group, _, name = option.partition(".")
        if name:
            identity[group] = {key: value for key, value in identity[group].items() if key != name}
        else:
            identity.pop(group, None)
    return identity


def _series(setting: str, of_environments: Sequence[Sequence[_Measurement]]) -> Series:
    times: list[Times] = []
    for measurements in of_environments:
        times.append(replace(_times(measurements), previous=times[-1] if times else None))
    kept, sample = of_environments[-1][-1]
    return Series(kept.result.point, setting, sample.pass_name, sample.tokens, tuple(times))


def _times(measurements: Sequence[_Measurement]) -> Times:
    latest = measurements[-1].kept
    nones_us = [sample.none_us for _, sample in measurements if sample.none_us is not None]
    started = sorted(kept.result.started for kept, _ in measurements if kept.result.started)
    return Times(
        environment=latest.result.environment,
        identity=environment_identity(latest.result.environment),
        time=_estimate([sample for _, sample in measurements]),
        none_us=statistics.median(nones_us) if nones_us else None,
        measurements=len(measurements),
        first=started[0] if started else None,
        last=started[-1] if started else None,
        hosts=tuple(dict.fromkeys(kept.host for kept, _ in measurements)),
        directory=latest.directory,
    )


def _estimate(samples: Sequence[Sample]) -> Estimate:
    """What differs from one measurement to the next is noise too: it would differ in the next environment as well."""
    totals_us = [sum(timing.median_us for timing in sample.timings) for sample in samples]
    of_passes = [pooled_none(timings) for timings in zip(*(sample.timings for sample in samples), strict=True)]
    between_us = estimate(totals_us).noise_us if len(totals_us) > 1 else 0.0
    noise_us = math.hypot(between_us, *(of_pass.noise_us for of_pass in of_passes))
    return Estimate(statistics.median(totals_us), noise_us, sum(of_pass.repeats for of_pass in of_passes))


def _named_values(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Libraries first, since they change most often."""
    own = {name: value for name, value in identity.items() if name not in ("packages", "variables")}
    return {**identity.get("packages", {}), **own, **identity.get("variables", {})}


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


class _Line(NamedTuple):
    name: str
    """The point's; empty but in its first line."""
    moment: Moment

    @property
    def times(self) -> Times:
        return self.moment.times


COLUMNS: tuple[Column[_Line], ...] = (
    Column("", lambda line: line.moment.series.point["tp_size"] if line.name else None, kind="count", header="TP"),
    Column("", lambda line: line.name, kind="text", header="point"),
    Column("", lambda line: _minute(line.times.first), kind="text", header="first measured", dropped=3),
    Column("", lambda line: line.times.measurements, kind="count", header="n"),
    Column("", lambda line: line.times.time.time_us, header="time us", show=as_us),
    Column(
        "",
        lambda line: line.times.time.noise_us,
        header="noise us",
        words=lambda line: as_us(line.times.time.noise_us),
        dropped=2,
    ),
    through(RATIO, lambda line: line.moment),
    through(NONE_RATIO, lambda line: line.moment),
    Column("", lambda line: line.times.verdict or "-", kind="text", header="verdict"),
    Column("", lambda line: line.times.changed or _versions(line.times), kind="text", header="versions, what changed"),
)


def print_history(moments: Sequence[Moment], left_out: Mapping[str, int], console: Console) -> None:
    """`moments`: at least one; `left_out`: by why, how many measurements have no time."""
    of_points = [list(of_one) for _, of_one in groupby(moments, key=lambda moment: moment.series)]
    names = _names([of_one[0] for of_one in of_points])
    shown = of_points[:MOST_POINTS]
    lines = [
        _Line(name if i == 0 else "", moment)
        for of_one, name in zip(shown, names, strict=False)
        for i, moment in enumerate(of_one)
    ]
    print_table("Points by environment", COLUMNS, lines, console)
    said = [_summary([moment.times for moment in moments], len(of_points))]
    if len(shown) < len(of_points):
        said.insert(0, f"... and {len(of_points) - len(shown)} more; --format csv prints all of them")
    if left_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        said.append(f"without a time and left out: {reasons}")
    if any(moment.times.previous for moment in moments):
        said.append(
            "ratio: time over that in the environment before, below 1 is faster; none: the same without overlap; same: "
            f"inside the noise of both, or within {MARGIN:.1%}."
        )
    print_lines(said, console, indent=0)


def _minute(time: str | None) -> str:
    return (time or "-")[:16].replace("T", " ")


def _versions(times: Times) -> str:
    """Of an environment that is compared with none; the machine's own switches are in the JSON of its results."""
    return ", ".join(f"{name} {version}" for name in _VERSIONS if (version := times.version(name)))


def _names(moments: Sequence[Moment]) -> list[str]:
    """What tells each point from the others; its key where names are not enough."""
    cells = MOMENTS.records(moments)
    telling = [name for name in _TELLING if len({str(of_one[name]) for of_one in cells}) > 1]
    names = [" ".join([*_values(of_one, telling), of_one["setting"]]) for of_one in cells]
    places = [(of_one["tp_size"], name) for of_one, name in zip(cells, names, strict=True)]
    often = Counter(places)
    return [
        f"{name} ({of_one['point']})" if often[place] > 1 else name
        for of_one, name, place in zip(cells, names, places, strict=True)
    ]


def _values(cells: Row, telling: Sequence[str]) -> list[str]:
    """What stands before the setting, nothing of it twice: a training step's names its strategy and its pass."""
    subject, of_pass = str(cells["operator"]), str(cells["pass"])
    values = [
        f"{cells[name]} tokens" if name == "tokens" else str(cells[name])
        for name in telling
        if cells[name] is not None and str(cells[name]) not in subject.split()
    ]
    return [*values, subject, *([] if of_pass in subject.split() else [of_pass])]


def _summary(times: Sequence[Times], points: int) -> str:
    environments = {key_of(one.identity) for one in times}
    counts = Counter(one.verdict for one in times)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    measurements = counted(sum(one.measurements for one in times), "measurement")
    told = f"{counted(points, 'point')} in {counted(len(environments), 'environment')}, {measurements}"
    return f"{told}: {verdicts}" if verdicts else told
