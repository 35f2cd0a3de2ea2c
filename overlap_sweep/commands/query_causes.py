"""The columns that `analyze.py query` adds if they are named: what costs most in the traces of each point, and what its
communication between nodes costs. Reading the traces of all points may take minutes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_sweep.commands.expressions import names_in
from overlap_sweep.commands.frames import Rows
from overlap_sweep.errors import UserError
from overlap_sweep.report.causes import OF_POINT, of_points
from overlap_sweep.report.nodes import NODE_TIMES
from overlap_sweep.report.table import to_frame

if TYPE_CHECKING:
    import pandas as pd

TYPES = {**OF_POINT.types, **NODE_TIMES.types}
"""Types of the columns by name."""


def with_empty(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the frame with the columns, which have no values yet."""
    return frame.assign(**to_frame([{}] * len(frame), TYPES))


def found_for(frame: pd.DataFrame, rows: Rows, directory: Path) -> pd.DataFrame:
    """Returns the frame, some of the rows, with the values of the columns. UserError where there are no traces."""
    if not rows.points and len(frame):
        names = ", ".join(TYPES)
        raise UserError(f"{directory} has no traces, from which {names} are found; give the directory of the sweep.")
    values = to_frame(of_points([rows.points[place] for place in frame.index]), TYPES)
    return frame.assign(**values.set_index(frame.index))


def named_in(expressions: Iterable[str | None], lists: Iterable[str | None]) -> list[str]:
    """Returns the columns that the expressions mention, or the comma-separated lists of names."""
    named = {name for expression in expressions if expression for name in names_in(expression)}
    named |= {name.strip().removeprefix("-") for listed in lists if listed for name in listed.split(",")}
    return [name for name in TYPES if name in named]
