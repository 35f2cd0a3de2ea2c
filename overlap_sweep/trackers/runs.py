"""What is logged of a point: its configuration, and the numbers that its workload's columns say of it."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from overlap_sweep.report.section import Section
from overlap_sweep.report.table import PointRow, Table, is_unknown
from overlap_sweep.results.identity import key_of, point_identity
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import describe_machine
from overlap_sweep.trackers import Run

V = TypeVar("V")

HIDDEN = "(not logged)"
_SECRET = re.compile(r"\.env\.\w*(TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL|KEY)", re.IGNORECASE)
"""Options that are environment variables with a secret, by their names."""
SHORTEST_SECRET = 6
"""Length from which a secret is also replaced within other texts."""
MOST_ERROR = 4000
"""Longest error, in characters: what trackers accept everywhere. The end of the log is its end."""


def rows_by_point(section: Section) -> dict[Path, list[PointRow]]:
    """Returns the rows of the section's table of points, by run directory."""
    found: dict[Path, list[PointRow]] = {}
    for row in section.points.rows:
        found.setdefault(row.point.directory, []).append(row)
    return found


def run_of(rows: Sequence[PointRow], table: Table[PointRow], directory_key: str) -> Run:
    """Returns what is logged of a point that has a result. `rows`: its rows; `directory_key`: of its run directory."""
    point = rows[0].point
    assert point.result
    result, secrets, began = point.result, secrets_of(point), _unix_time(point.result.started)
    texts = {
        "workload": point.workload,
        "status": point.status,
        "error": "" if point.status == "ok" else _shortened(result.error or point.why_not_ok),
        "machine": describe_machine(result.machine),
        "reused_from": result.reused_from or "",
    }
    return Run(
        key=key_of({"directory": directory_key, "point": point_identity(point.recorded)}),
        name=point.name,
        # A point that was skipped makes no sense here, which is no failure.
        ok=point.status in ("ok", "skipped"),
        params={
            name: HIDDEN if _SECRET.search(name) else without(secrets, value)
            for name, value in _flat(point_identity(point.recorded))
        },
        metrics={
            **({} if result.objective_us is None else {"objective_us": result.objective_us}),
            **metrics(rows, table),
        },
        texts={name: without(secrets, text) for name, text in texts.items() if text},
        files=tuple(path for name in result.traces if (path := point.directory.absolute() / name).is_file()),
        started_s=began,
        ended_s=None if began is None else began + (result.wall_s or 0.0),
    )


def metrics(rows: Sequence[PointRow], table: Table[PointRow]) -> dict[str, float]:
    """Returns the measured numbers by column, below `<part>/` for points with several rows."""
    found = {}
    for row in rows:
        unmeasured, part = replace(row, measured=None), row.part or row.variant
        for column in table.written:
            # What a point has without being measured is its configuration.
            if not column.is_number or is_unknown(value := column.value(row)) or column.value(unmeasured) == value:
                continue
            assert value is not None
            found[f"{part}/{column.name}" if part else column.name] = float(value)
    return found


def _flat(options: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Scalar]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{start}{name}.")
        else:
            yield f"{start}{name}", value if isinstance(value, Scalar) else json.dumps(value)


def secrets_of(point: Point) -> set[str]:
    """Returns the values of the point's environment variables that are secrets by their names."""
    values = (str(value) for name, value in _flat(point_identity(point.recorded)) if _SECRET.search(name))
    return {value for value in values if len(value) >= SHORTEST_SECRET}


def without(secrets: Collection[str], value: V) -> V | str:
    """Returns the value; in a text, secrets are replaced."""
    if not isinstance(value, str):
        return value
    return reduce(lambda text, secret: text.replace(secret, HIDDEN), secrets, str(value))


def _unix_time(started: str | None) -> float | None:
    try:
        return datetime.fromisoformat(started or "").timestamp()
    except ValueError:
        # In results of others it may be any text; trackers then take the time at which it is logged.
        return None


def _shortened(error: str) -> str:
    first, _, rest = error.partition("\n")
    return error if len(error) <= MOST_ERROR else f"{first[:500]}\n...\n{rest[-MOST_ERROR + 510 :]}"
