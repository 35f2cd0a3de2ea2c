"""A store's history for people: the points that moved first, then the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Console

from overlap_sweep.compare.history import MOMENTS, NONE_RATIO, RATIO, Moment, Times
from overlap_sweep.report.comparison import counted, print_table
from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.table import Column, Row, through
from overlap_sweep.results.identity import key_of
from overlap_sweep.results.verdict import MARGIN, VERDICTS

MOST_POINTS = 40
"""In a table; the other formats have all."""
_TELLING = ("model", "tokens", "precision", "backend", "device")
_VERSIONS = ("torch", "transformer-engine", "megatron-core", "nccl", "driver")


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
