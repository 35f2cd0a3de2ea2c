"""The table of predictions: what changes would gain, from a recording."""

from __future__ import annotations

from functools import partial

from overlap_sweep.report.table import Row, Table, item

_text = partial(item, kind="text")

PREDICTIONS: Table[Row] = Table(
    "predictions",
    "one row per change, as they are named, or of each run the best first",
    (
        _text("run", "Common name of the traces of all ranks, with their directory.", queried=True),
        _text("change", "NAME=VALUE, several joined by +.", "change"),
        item(
            "step_us", "Time of a recorded step, the mean, of the slowest rank; `diagnose` has the median.", "step us"
        ),
        item(
            "predicted_us",
            "Time of the step with the change; of a bound the least. Empty if it cannot be told.",
            "predicted us",
        ),
        item("low_us", "Least predicted_us that the recording leaves open.", "low us"),
        item("high_us", "Longest that it leaves open; empty if nothing says how long.", "high us"),
        item(
            "gain_us",
            "step_us - predicted_us; with more samples in a step for as many as now.",
            "gain us",
            high_first=True,
        ),
        item("gain_low_us", "Least gain_us that the recording leaves open; empty if nothing says how little."),
        item("gain_high_us", "Largest gain_us that it leaves open."),
        _text("status", "predicted, bound or cannot tell.", "status"),
        _text(
            "critical",
            "What the step's time then consists of: shares of the longest chain of what waits for each other.",
            "then critical",
            dropped=1,
        ),
        _text("reason", "Why it cannot be told, or what else to know.", "note", dropped=2),
        item("measured_us", "Time of a step of the recording --against.", "measured us", dropped=3),
        item("error_share", "predicted_us / measured_us - 1.", "error", dropped=3, show="{:+.1%}".format),
        item("within", "Whether measured_us is from low_us to high_us.", "in interval", kind="flag", dropped=3),
        _text("wrong", "Parts of the step that take longer or shorter than predicted.", "wrong", dropped=3),
    ),
)
