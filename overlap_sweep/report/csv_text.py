"""Tables as CSV that may be opened with anything: Parquet and JSON have the texts as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlap_sweep.report.numbers import visible

if TYPE_CHECKING:
    import pandas as pd

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet would compute instead of showing it."""


def csv_of(frame: pd.DataFrame) -> str:
    """With a row of names."""
    texts = frame.select_dtypes(["object", "string"]).columns
    shown = frame.assign(**{name: frame[name].map(csv_cell, na_action="ignore") for name in texts})
    return shown.to_csv(index=False, lineterminator="\n")


def csv_cell(value: Any) -> Any:
    """Of a text what can be shown, with an apostrophe before what would be a formula."""
    if not isinstance(value, str):
        return value
    return visible(f"'{value}" if value.startswith(_FORMULA) else value)
