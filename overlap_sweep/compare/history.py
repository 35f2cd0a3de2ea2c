"""Compares a store's measurements of each point across versions of driver and libraries, and prints those that changed
most first.

Only measurements on the same kind of machine are compared with each other.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from rich.console import Console

from overlap_sweep import workloads
from overlap_sweep.config import ResolvedPoint
from overlap_sweep.report.comparison import ratio_column, verdict_style
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.numbers import counted
from overlap_sweep.report.table import Column, Listing, Table, attribute
from overlap_sweep.results.comparable import Sample
from overlap_sweep.results.estimate import Estimate, estimate, pooled_none
from overlap_sweep.results.identity import environment_identity, key_of, point_identity
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.verdict import MARGIN, VERDICTS, Verdict, ratio, verdict
from overlap_sweep.store import Measurement

CHANGES_NOTHING = ("repetition", "profile")
"""Options of a point that do not change its time."""

MOST_ROWS = 80
"""Rows printed as a table; the other formats have all."""
VERSIONS = ("torch", "transformer-engine", "megatron-core", "nccl", "driver")
MACHINE = ("device", "gpus", "links", "cpu", "cpu_count")
"""The hardware fields of an environment's identity; the others are versions."""


_Measured = tuple[Measurement, Sample]


@dataclass(frozen=True)
class Times:
    """The times of one setting of a point in one environment, over all measurements there, in microseconds."""

    setting: str
    """Name of the part of the point: settings of slots, a variant, an implementation, or knobs."""
    measured: Sequence[_Measured]
    """Oldest first; the last one is shown where only one can be."""
    previous: Times | None = None
    """Times in the previous environment on the same kind of machine; None for the first."""

    @property
    def latest(self) -> Measurement:
        return self.measured[-1][0]

    @property
    def sample(self) -> Sample:
        return self.measured[-1][1]

    @cached_property
    def time(self) -> Estimate:
        """Returns the median over the measurements of the sum of their medians. Its noise is that within them and that
        between them, which would occur between environments, too."""
        timings = [sample.timings for _, sample in self.measured]
        totals_us = [sum(timing.median_us for timing in passes) for passes in timings]
        passes = [pooled_none(own) for own in zip(*timings, strict=True)]
        between_us = estimate(totals_us).noise_us if len(totals_us) > 1 else 0.0
        noise_us = math.hypot(between_us, *(one.noise_us for one in passes))
        return Estimate(statistics.median(totals_us), noise_us, sum(one.repeats for one in passes))

    @property
    def none_us(self) -> float | None:
        known = [sample.none_us for _, sample in self.measured if sample.none_us is not None]
        return statistics.median(known) if known else None

    @property
    def started(self) -> list[str]:
        """Returns the known starts of the measurements in UTC, ISO 8601, sorted."""
        return sorted(kept.result.started for kept, _ in self.measured if kept.result.started)

    @property
    def hosts(self) -> list[str]:
        return [host for kept, _ in self.measured for host in kept.result.machine.hosts or [kept.host]]

    @property
    def point(self) -> ResolvedPoint:
        return self.latest.result.point

    @property
    def environment(self) -> Mapping[str, object]:
        return self.latest.result.environment

    @property
    def key(self) -> str:
        """Returns a short text, different for every point and setting."""
        return key_of({"point": _timed_configuration(self.point), "setting": self.setting})[:8]

    @property
    def ratio(self) -> float:
        """Returns the time over the previous environment's: below 1 is faster. NaN for the first."""
        return ratio(self.time.time_us, self.previous.time.time_us if self.previous else None)

    @property
    def verdict(self) -> Verdict | None:
        """Returns the verdict on the change; None for the first."""
        return verdict(self.time, self.previous.time) if self.previous else None

    @property
    def changed(self) -> str | None:
        """Returns what differs from the previous environment, in words; None for the first."""
        return describe_change(self.previous.environment, self.environment) if self.previous else None

    @property
    def versions(self) -> dict[str, str]:
        """Returns the known versions of libraries and driver."""
        machine = self.latest.result.machine
        found = {**machine.packages, "driver": machine.driver}
        return {name: str(found[name]) for name in VERSIONS if found.get(name) is not None}


Series = list[Times]
"""Times of one setting of one point on one kind of machine, by environment in order of first measurement."""


@dataclass(frozen=True)
class History:
    series: list[Series]
    """Sorted by largest change."""
    left_out: Counter[str]
    """Number of measurements without a usable time, by reason, such as `failed` or `launch-bound`."""

    @property
    def rows(self) -> list[Times]:
        return [times for series in self.series for times in series]


def _point_column(name: str, value: Callable[[ResolvedPoint], Scalar]) -> Column[Times]:
    return Column(name, lambda times: value(times.point), kind="text", header=name, differing=True)


def _version(name: str) -> Column[Times]:
    return Column(name, lambda times: times.versions.get(name.replace("_", "-")), kind="text")


ROWS: Table[Times] = Table(
    "rows",
    "one row per point and environment",
    (
        attribute("point", "Short key of the point: different for every configuration and setting.", "text", "key"),
        _point_column("model", lambda point: point.model.name),
        _point_column("backend", attrgetter("backend")),
        _point_column("precision", attrgetter("precision")),
        attribute("tokens", read="sample.tokens", kind="count", header="tokens", differing=True),
        Column("tp_size", lambda times: times.point.tp_size, kind="count", header="TP"),
        Column(
            "operator", lambda times: workloads.of(times.point).subject(times.point), kind="text", header="operator"
        ),
        attribute("pass", read="sample.pass_name", kind="text", header="pass"),
        attribute("setting", kind="text", header="setting"),
        Column(
            "device",
            lambda times: times.latest.result.machine.gpu or times.latest.result.machine.device,
            kind="text",
            header="device",
            differing=True,
        ),
        *map(_version, ("driver", "torch", "transformer_engine", "megatron_core", "nccl")),
        Column("hosts", lambda times: ", ".join(dict.fromkeys(times.hosts)), kind="text"),
        Column(
            "first",
            lambda times: next(iter(times.started), None),
            "Start of the first measurement, UTC.",
            "text",
            header="first measured",
            show=lambda first: first[:16].replace("T", " "),
            dropped=3,
        ),
        Column("last", lambda times: next(reversed(times.started), None), kind="text"),
        Column("measurements", lambda times: len(times.measured), kind="count", header="n"),
        attribute("time_us", read="time.time_us", header="time us"),
        attribute("noise_us", read="time.noise_us", header="noise us", dropped=2),
        attribute("none_us"),
        ratio_column(
            "ratio",
            lambda times: times.ratio,
            "ratio",
            about="time_us / time_us in the previous environment; below 1 is faster.",
        ),
        ratio_column(
            "none_ratio",
            lambda times: ratio(times.none_us, times.previous.none_us if times.previous else None),
            "none",
            about="none_us / none_us in the previous environment: how much the machine itself changed.",
            dropped=1,
        ),
        attribute("verdict", kind="text", header="verdict"),
        attribute(
            "changed",
            kind="text",
            header="versions or changes",
            words=lambda times: times.changed or ", ".join(map(" ".join, times.versions.items())),
        ),
        attribute(
            "directory",
            "Run directory of the last measurement, on the machine that measured it.",
            "text",
            "latest.directory",
        ),
    ),
)


def history(measurements: Iterable[Measurement]) -> History:
    """Returns the history of measurements, which must be sorted oldest first."""
    # By key of the point, setting and key of the machine; then by key of the environment.
    found: dict[tuple[str, str, str], dict[str, list[_Measured]]] = defaultdict(lambda: defaultdict(list))
    left_out: Counter[str] = Counter()
    for kept in measurements:
        result = kept.result
        comparing = workloads.comparing(result.point.workload.name)
        samples = comparing.samples(result) if comparing and result.status == "ok" else {}
        if not samples:
            left_out["launch-bound" if result.status == "ok" else result.status] += 1
            continue
        point, environment = key_of(_timed_configuration(result.point)), environment_identity(result.environment)
        for setting, sample in samples.items():
            found[point, setting, _machine(environment)][key_of(environment)].append((kept, sample))
    series: list[Series] = []
    for (_, setting, _), environments in found.items():
        own: Series = []
        for measured in environments.values():
            own.append(Times(setting, measured, own[-1] if own else None))
        series.append(own)
    return History(sorted(series, key=_order), left_out)


def describe_change(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Returns `torch 2.10.0 -> 2.11.0, driver 570 -> 580`: libraries first, which change most often."""
    one, other = (
        {**identity.pop("packages", {}), **identity.pop("variables", {}), **identity}
        for identity in map(environment_identity, (before, after))
    )
    return ", ".join(
        f"{name} {one.get(name)} -> {other.get(name)}"
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    )


def _order(series: Series) -> tuple[object, ...]:
    """Returns a sort key: the largest change first; then by model, TP size, operator and setting."""
    moves = [abs(math.log(times.ratio)) for times in series if times.verdict in ("faster", "slower")]
    last = series[-1]
    model, backend, precision = last.point.model.name, last.point.backend, str(last.point.precision)
    place = (model, backend, precision, last.sample.tokens or 0, last.point.tp_size)
    return (-max(moves, default=0.0), *place, workloads.of(last.point).subject(last.point), last.setting)


def _machine(identity: Mapping[str, object]) -> str:
    return key_of({name: identity.get(name) for name in MACHINE})


def _timed_configuration(point: ResolvedPoint) -> dict[str, object]:
    comparing = workloads.comparing(point.workload.name)
    identity = point_identity(point)
    for option in (*CHANGES_NOTHING, *(comparing.changes_nothing if comparing else ())):
        group, _, name = option.partition(".")
        if name:
            identity[group] = {key: value for key, value in identity[group].items() if key != name}
        else:
            identity.pop(group, None)
    return identity


def print_history(rows: Sequence[Times], left_out: Mapping[str, int], console: Console) -> None:
    """Prints the history. `rows`: at least one; `left_out`: number of measurements without a time, by reason."""
    shown = rows[:MOST_ROWS]
    print_table(
        "Points by environment",
        Listing(ROWS, rows).columns,
        shown,
        console,
        style=lambda times: verdict_style(times.verdict),
        group=lambda times: (times.key, _machine(environment_identity(times.environment))),
    )
    if len(shown) < len(rows):
        console.print(f"... and {len(rows) - len(shown)} more; --format csv prints all")
    counts = Counter(times.verdict for times in rows)
    verdicts = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
    reasons = [f"{count} {reason} left out" for reason, count in sorted(left_out.items())]
    measurements = counted(sum(len(times.measured) for times in rows), "measurement")
    lines = [f"{measurements}: {', '.join([*verdicts, *reasons]) or 'nothing to compare'}"]
    if any(times.previous for times in rows):
        legend = "ratio: time / time in the previous environment, below 1 is faster. none: ratio of the none times."
        lines.append(f"{legend} same: within the noise of both, or within {MARGIN:.1%}.")
    print_lines(lines, console, indent=0)
