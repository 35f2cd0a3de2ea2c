"""A store's history for people: the points that moved first, then the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from overlap_sweep.compare.history import Series, Times, environment_cells, point_cells
from overlap_sweep.compare.matching import MARGIN, VERDICTS
from overlap_sweep.compare.tables import as_ratio, counted, print_table, styled
from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_us
from overlap_sweep.results.identity import key_of

MOST_POINTS = 40
"""In a table; the other formats have all."""

_TELLING = ("model", "tokens", "precision", "backend")
_VERSIONS = ("torch", "transformer_engine", "megatron_core", "nccl", "driver")

HEADERS = (
    "TP",
    "point",
    "first measured",
    "n",
    "time us",
    "noise us",
    "ratio",
    "none",
    "verdict",
    "versions, what changed",
)
LEFT = {"point", "first measured", "verdict", "versions, what changed"}


def print_history(rows: Sequence[tuple[Series, Times]], left_out: Mapping[str, int], console: Console) -> None:
    """`rows`: at least one; `left_out`: by why, how many measurements have no time."""
    of_points = [(series, [times for _, times in pairs]) for series, pairs in groupby(rows, key=lambda row: row[0])]
    names = _names([series for series, _ in of_points])
    shown = of_points[:MOST_POINTS]
    cells = [row for (series, times), name in zip(shown, names, strict=False) for row in _rows(series, times, name)]
    print_table("Points by environment", HEADERS, cells, LEFT, console, optional=("none", "noise us", "first measured"))
    if len(shown) < len(of_points):
        print_lines([f"... and {len(of_points) - len(shown)} more; --format csv prints all of them"], console, indent=0)
    print_lines([*_summary([times for _, times in rows], len(of_points)), *_left_out(left_out)], console, indent=0)
    if any(times.previous for _, times in rows):
        notes = [
            "ratio: time over that in the environment before, below 1 is faster; none: the same without overlap; same: "
            f"inside the noise of both, or within {MARGIN:.1%}.",
        ]
        print_lines(notes, console, indent=0)


def _rows(series: Series, of_point: Sequence[Times], name: str) -> list[list[str | Text]]:
    return [
        [
            str(series.point["tp_size"]) if times is of_point[0] else "",
            name if times is of_point[0] else "",
            (times.first or "-")[:16].replace("T", " "),
            str(times.measurements),
            as_us(times.time.time_us),
            as_us(times.time.noise_us),
            as_ratio(times.ratio),
            as_ratio(times.none_ratio),
            styled(times.verdict or "-"),
            times.changed or _versions(times),
        ]
        for times in of_point
    ]


def _versions(times: Times) -> str:
    """Of an environment that is compared with none; the machine's own switches are in the JSON of its results."""
    cells = environment_cells(times)
    return ", ".join(f"{name.replace('_', '-')} {cells[name]}" for name in _VERSIONS if cells[name])


def _names(all_series: Sequence[Series]) -> list[str]:
    """What tells each from the others; the point's key where names are not enough."""
    cells = [{**point_cells(series), **_device(series)} for series in all_series]
    telling = [name for name in (*_TELLING, "device") if len({str(of_one[name]) for of_one in cells}) > 1]
    names = []
    for of_one in cells:
        names.append(" ".join([*_values(of_one, telling), of_one["setting"]]))
    shared = {
        place
        for place, count in Counter(_place(of_one, name) for of_one, name in zip(cells, names, strict=True)).items()
        if count > 1
    }
    return [
        f"{name} ({of_one['point']})" if _place(of_one, name) in shared else name
        for of_one, name in zip(cells, names, strict=True)
    ]


def _values(cells: Mapping[str, object], telling: Sequence[str]) -> list[str]:
    """What stands before the setting, nothing of it twice: a training step's names its strategy and its pass."""
    subject, of_pass = str(cells["operator"]), str(cells["pass"])
    values = [
        f"{cells[name]} tokens" if name == "tokens" else str(cells[name])
        for name in telling
        if cells[name] is not None and str(cells[name]) not in subject.split()
    ]
    return [*values, subject, *([] if of_pass in subject.split() else [of_pass])]


def _place(cells: Mapping[str, object], name: str) -> tuple[object, str]:
    return cells["tp_size"], name


def _device(series: Series) -> dict[str, object]:
    return {"device": environment_cells(series.times[-1])["device"]}


def _summary(rows: Sequence[Times], points: int) -> list[str]:
    environments = {key_of(times.identity) for times in rows}
    measurements = sum(times.measurements for times in rows)
    counts = Counter(times.verdict for times in rows)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    told = f"{counted(points, 'point')} in {counted(len(environments), 'environment')}"
    return [f"{told}, {counted(measurements, 'measurement')}{f': {verdicts}' if verdicts else ''}"]


def _left_out(left_out: Mapping[str, int]) -> list[str]:
    if not left_out:
        return []
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
    return [f"without a time and left out: {reasons}"]
