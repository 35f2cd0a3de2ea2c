"""How the time of a point moved: what a store kept of it, by the versions of driver and libraries it was measured with;
and how people are shown it, the points that moved first.

Only measurements on the same kind of machine are compared with each other: that another GPU is faster is no history.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from rich.console import Console

from overlap_sweep import workloads
from overlap_sweep.report.comparison import ratio_column, verdict_style
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.numbers import as_us, counted
from overlap_sweep.report.table import Column, Row, Table, attribute, through
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
    """The times of one setting of a point in one environment, over all measurements there, in microseconds."""

    latest: Kept
    setting: str
    """A word for the part of the point: the settings of slots, a variant, an implementation, knobs."""
    sample: Sample
    """Of the latest."""
    time: Estimate
    """The median over the measurements of their summed medians; its noise is that within them and that between them."""
    none_us: float | None
    """None where it was not measured without overlap."""
    measurements: int
    first: str | None
    last: str | None
    """UTC, ISO 8601; None where it is not recorded."""
    hosts: tuple[str, ...]
    previous: Times | None = None
    """On the same kind of machine; None of the first."""

    @property
    def point(self) -> Mapping[str, Any]:
        return self.latest.result.point

    @property
    def environment(self) -> Mapping[str, Any]:
        return self.latest.result.environment

    @property
    def identity(self) -> Mapping[str, Any]:
        """Returns the part of the environment that must be equal (`identity.environment_identity`)."""
        return environment_identity(self.environment)

    @property
    def key(self) -> str:
        """Short, and different for every point and setting."""
        return key_of({"point": _without_what_changes_nothing(self.point), "setting": self.setting})[:8]

    @property
    def subject(self) -> str:
        return workloads.of(self.point).subject(self.point)

    @property
    def ratio(self) -> float:
        """Time over that of the environment before: below 1 is faster. NaN of the first."""
        return ratio(self.time.time_us, self.previous.time.time_us if self.previous else None)

    @property
    def none_ratio(self) -> float:
        """The same without overlap: how much the machine moved by itself."""
        return ratio(self.none_us, self.previous.none_us if self.previous else None)

    @property
    def verdict(self) -> Verdict | None:
        """None of the first."""
        return verdict(self.time, self.previous.time) if self.previous else None

    @property
    def changed(self) -> str | None:
        """Returns in words what else differs from the environment before; None for the first."""
        return describe_change(self.previous.identity, self.identity) if self.previous else None

    def version(self, package: str) -> str | None:
        """Returns the version of the driver, or of a library."""
        found = {**self.environment.get("packages", {}), "driver": self.environment.get("driver")}.get(package)
        return None if found is None else str(found)


Series = list[Times]
"""One setting of one point on one kind of machine: by environment, in the order in which they were first measured."""


@dataclass(frozen=True)
class History:
    series: list[Series]
    """Those that moved most first."""
    left_out: Counter[str]
    """By why, how many measurements have no time to be told: `failed`, `launch-bound` and the like."""

    @property
    def rows(self) -> list[Times]:
        return [times for of_one in self.series for times in of_one]


def _version(name: str, package: str = "") -> Column[Times]:
    return Column(name, lambda times: times.version(package or name), kind="text")


RATIO: Column[Times] = ratio_column(
    "ratio", lambda times: times.ratio, "ratio", about="time_us over that of the environment before: below 1 is faster."
)
NONE_RATIO: Column[Times] = ratio_column(
    *("none_ratio", lambda times: times.none_ratio, "none"),
    about="The same ratio without overlap: what moved by itself.",
    dropped=1,
)
ROWS: Table[Times] = Table(
    "rows",
    "one row per point and environment",
    (
        attribute("point", "Short, and different for every resolved configuration and setting.", "text", "key"),
        Column("model", lambda times: times.point["model"]["name"], kind="text"),
        Column("backend", lambda times: times.point["backend"], kind="text"),
        Column("precision", lambda times: times.point["precision"], kind="text"),
        attribute("tokens", read="sample.tokens", kind="count"),
        Column("tp_size", lambda times: times.point["tp_size"], kind="count"),
        attribute("operator", read="subject", kind="text"),
        attribute("pass", read="sample.pass_name", kind="text"),
        attribute("setting", kind="text"),
        Column("device", lambda times: times.environment.get("gpu") or times.environment.get("device"), kind="text"),
        *(_version("driver"), _version("torch"), _version("transformer_engine", "transformer-engine")),
        *(_version("megatron_core", "megatron-core"), _version("nccl")),
        Column("hosts", lambda times: ", ".join(times.hosts), kind="text"),
        attribute("measurements", kind="count"),
        attribute("first", "When the first of its measurements began, UTC.", "text"),
        attribute("last", "When the last of them began.", "text"),
        attribute("time_us", read="time.time_us"),
        attribute("noise_us", read="time.noise_us"),
        attribute("none_us", "The same without overlap."),
        *(RATIO, NONE_RATIO),
        attribute("verdict", kind="text"),
        attribute("changed", "What is different from the environment before.", "text"),
        attribute("directory", "Of the last measurement, on its host.", "text", "latest.directory"),
    ),
)

_Measurement = tuple[Kept, Sample]
_SeriesKey = tuple[str, str, str]
"""Of the point and of the machine; between them the setting."""


def history(measurements: Iterable[Kept]) -> History:
    """Returns the rows of measurements, which are given oldest first."""
    found: dict[_SeriesKey, dict[str, list[_Measurement]]] = defaultdict(lambda: defaultdict(list))
    left_out: Counter[str] = Counter()
    for kept in measurements:
        result = kept.result
        comparing = workloads.comparing(str(result.point["workload"]["name"]))
        samples = comparing.samples(result) if comparing and result.status == "ok" else {}
        if not samples:
            left_out["launch-bound" if result.status == "ok" else result.status] += 1
            continue
        point, environment = (
            key_of(_without_what_changes_nothing(result.point)),
            environment_identity(result.environment),
        )
        for setting, sample in samples.items():
            found[point, setting, _machine(environment)][key_of(environment)].append((kept, sample))
    series = [_series(setting, of_one.values()) for (_, setting, _), of_one in found.items()]
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
    moves = [abs(math.log(times.ratio)) for times in series if times.verdict in ("faster", "slower")]
    last = series[-1]
    model, backend, precision = last.point["model"]["name"], last.point["backend"], str(last.point["precision"])
    place = (model, backend, precision, last.sample.tokens or 0, last.point["tp_size"])
    return (-max(moves, default=0.0), *place, last.subject, last.setting)


def _machine(identity: Mapping[str, Any]) -> str:
    return key_of({name: identity.get(name) for name in MACHINE})


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


def _series(setting: str, of_environments: Iterable[Sequence[_Measurement]]) -> Series:
    found: Series = []
    for measurements in of_environments:
        nones_us = [sample.none_us for _, sample in measurements if sample.none_us is not None]
        started = sorted(kept.result.started for kept, _ in measurements if kept.result.started)
        latest, sample = measurements[-1]
        found.append(
            Times(
                latest=latest,
                setting=setting,
                sample=sample,
                time=_estimate([sample for _, sample in measurements]),
                none_us=statistics.median(nones_us) if nones_us else None,
                measurements=len(measurements),
                first=started[0] if started else None,
                last=started[-1] if started else None,
                hosts=tuple(dict.fromkeys(kept.host for kept, _ in measurements)),
                previous=found[-1] if found else None,
            )
        )
    return found


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
    times: Times


COLUMNS: tuple[Column[_Line], ...] = (
    Column("", lambda line: line.times.point["tp_size"] if line.name else None, kind="count", header="TP"),
    Column("", lambda line: line.name, kind="text", header="point"),
    Column(
        "",
        lambda line: (line.times.first or "-")[:16].replace("T", " "),
        kind="text",
        header="first measured",
        dropped=3,
    ),
    Column("", lambda line: line.times.measurements, kind="count", header="n"),
    Column("", lambda line: as_us(line.times.time.time_us), header="time us"),
    Column("", lambda line: as_us(line.times.time.noise_us), header="noise us", dropped=2),
    through(RATIO, lambda line: line.times),
    through(NONE_RATIO, lambda line: line.times),
    Column("", lambda line: line.times.verdict or "-", kind="text", header="verdict"),
    Column("", lambda line: line.times.changed or _versions(line.times), kind="text", header="versions, what changed"),
)


def print_history(rows: Sequence[Times], left_out: Mapping[str, int], console: Console) -> None:
    """`rows`: at least one; `left_out`: by why, how many measurements have no time."""
    of_points = [list(of_one) for _, of_one in groupby(rows, key=lambda times: (times.key, _machine(times.identity)))]
    names = _names([of_one[0] for of_one in of_points])
    shown = of_points[:MOST_POINTS]
    lines = [
        _Line(name if times is of_one[0] else "", times)
        for of_one, name in zip(shown, names, strict=False)
        for times in of_one
    ]
    print_table("Points by environment", COLUMNS, lines, console, style=lambda line: verdict_style(line.times.verdict))
    said = [_summary(rows, len(of_points))]
    if len(shown) < len(of_points):
        said.insert(0, f"... and {len(of_points) - len(shown)} more; --format csv prints all of them")
    if left_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        said.append(f"without a time and left out: {reasons}")
    if any(times.previous for times in rows):
        said.append(
            "ratio: time over that in the environment before, below 1 is faster; none: the same without overlap; same: "
            f"inside the noise of both, or within {MARGIN:.1%}."
        )
    print_lines(said, console, indent=0)


def _versions(times: Times) -> str:
    """Of an environment that is compared with none; the machine's own switches are in the JSON of its results."""
    return ", ".join(f"{name} {version}" for name in _VERSIONS if (version := times.version(name)))


def _names(points: Sequence[Times]) -> list[str]:
    """What tells each point from the others; its key where names are not enough."""
    cells = ROWS.records(points)
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
