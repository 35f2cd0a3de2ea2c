"""Sweeps' comparisons as tables: a row for each matching point, or for each slot."""

from __future__ import annotations

from overlap_sweep.compare.matching import Match
from overlap_sweep.compare.sweeps import SweepComparison
from overlap_sweep.report.frame import Row, column_types

_OF_KEY = ("model", "tokens", "precision", "backend", "device", "tp_size", "operator", "pass")
_TEXT = ("dataset", "reference", "setting", "reference_setting", "verdict")
_TIMES = (
    *("dataset", "reference", "time_us", "noise_us", "reference_us", "reference_noise_us", "ratio", "verdict"),
    *("hidden_fraction", "reference_hidden_fraction", "none_us", "reference_none_us", "none_ratio"),
    *("floor_us", "reference_floor_us", "floor_ratio"),
)

POINT_COLUMNS = {
    **column_types(*_OF_KEY, "setting", "reference_setting", *_TIMES, "measurements", "reference_measurements"),
    **dict.fromkeys(_TEXT, "string"),
    **dict.fromkeys(("measurements", "reference_measurements"), "Int64"),
}
"""One row per matching point and dataset. Times are microseconds, noise is the half-width of a 95 % interval; ratio is
time_us over reference_us, below 1 is faster."""

SLOT_COLUMNS = {
    **column_types(*_OF_KEY, "phase", "slot", "setting", "reference_setting", "changed", *_TIMES),
    **column_types("reference_choice_us", "regret"),
    **dict.fromkeys(_TEXT, "string"),
    "changed": "boolean",
}
"""One row per slot and dataset: the best setting of each. Times are those of the slot's whole pass.

reference_choice_us: what is best in the reference, measured in the dataset; regret: how much longer than the best that
takes, as a fraction.
"""


def point_rows(comparison: SweepComparison) -> list[Row]:
    """With exactly the keys of POINT_COLUMNS."""
    rows = [
        {
            **_cells(match),
            "measurements": len(match.ours.points),
            "reference_measurements": len(match.theirs.points),
            "setting": match.ours.key.setting,
            "reference_setting": match.theirs.key.setting,
        }
        for match in comparison.matches
    ]
    return [{column: row[column] for column in POINT_COLUMNS} for row in rows]


def slot_rows(comparison: SweepComparison) -> list[Row]:
    """With exactly the keys of SLOT_COLUMNS."""
    rows = [
        {
            **_cells(change),
            "slot": change.slot,
            "phase": change.slot.partition("_")[2],
            "setting": change.setting,
            "reference_setting": change.reference_setting,
            "changed": change.changed,
            "reference_choice_us": change.reference_choice_us,
            "regret": change.regret,
        }
        for change in comparison.slots
    ]
    return [{column: row[column] for column in SLOT_COLUMNS} for row in rows]


def _cells(match: Match) -> Row:
    key, ours, theirs = match.ours.key, match.ours, match.theirs
    return {
        **key._asdict(),
        "pass": key.pass_name,
        "dataset": match.dataset,
        "reference": match.reference,
        "time_us": ours.time.time_us,
        "noise_us": ours.time.noise_us,
        "reference_us": theirs.time.time_us,
        "reference_noise_us": theirs.time.noise_us,
        "ratio": match.ratio,
        "verdict": match.verdict,
        "hidden_fraction": ours.hidden_fraction,
        "reference_hidden_fraction": theirs.hidden_fraction,
        "none_us": ours.none_us,
        "reference_none_us": theirs.none_us,
        "none_ratio": match.none_ratio,
        "floor_us": ours.floor_us,
        "reference_floor_us": theirs.floor_us,
        "floor_ratio": match.floor_ratio,
    }
