"""The three forms as an outside workload would use them: built of plain values, drawn."""

import json

import pytest

from overlap_sweep.report.charts import (
    TICK,
    Axis,
    Dot,
    Form,
    Gantt,
    Key,
    Lane,
    Line,
    LinePoint,
    Lines,
    Reference,
    Row,
    Rows,
    Span,
)
from overlap_sweep.report.charts.figures import figure

BARS = Rows(
    title="steps",
    subtitle="median",
    axis=Axis("ms"),
    parts=[Key("computed", "gemm"), Key("exposed", "comm")],
    columns=["ms", "setting"],
    rows=[
        Row(
            **{"name": "fast", "ends": [1.0, 1.5], "cells": ["1.5", "a"], "low": 1.4, "high": 1.6, "bold": True},
            dots=[Dot(1.2, shape=TICK)],
        ),
        Row(name="not known", cells=["-", ""], details={"why": "no trace"}),
    ],
    references=[Reference("floor", 1.0)],
)
DOTS = Rows(
    title="ratios",
    subtitle="",
    axis=Axis("time / bound", logarithmic=True),
    columns=["ratio"],
    rows=[
        Row(name="forward", bold=True),
        Row(name="GEMM", dots=[Dot(1.0, shape="cross"), Dot(9.0, 8.0, 9.5)], cells=["9x"]),
    ],
    references=[Reference("the bound", 1.0)],
)
LINES = Lines(
    title="time",
    subtitle="",
    x=Axis("m", logarithmic=True),
    y=Axis("us"),
    lines=[
        Line("ring", [LinePoint(64, 10.0, 9.0, 11.0), LinePoint(128, 20.0, ringed=True, label="chosen")], "series1")
    ],
    references=[Reference("no overlap", 25.0, "muted")],
)
GANTT = Gantt(
    "iteration",
    "us",
    [Lane("none", [Span(0.0, 5.0, "faint", "fwd 5 us")], bold=True), Lane("GEMM", [Span(0, 4, "gemm")])],
)


@pytest.mark.parametrize(
    ("form", "said"),
    [(BARS, "steps: median"), (DOTS, "ratios"), (LINES, "time"), (GANTT, "iteration")],
    ids=["bars", "dots", "lines", "gantt"],
)
def test_a_form_is_drawn_from_plain_values(form: Form, said: str) -> None:
    import altair as alt

    drawn = figure("chart", form)
    alt.TopLevelLayerSpec.validate(drawn.spec)
    assert drawn.spec["$schema"] == alt.SCHEMA_URL
    assert drawn.description == said
    # Where a part has no length nothing is drawn of it.
    assert "undefined" not in json.dumps(drawn.spec)


def test_colours_are_explained_where_there_are_several() -> None:
    def explained(form: Form) -> list[list[str]]:
        channels = [layer["encoding"].get("color", {}) for layer in figure("chart", form).spec["layer"]]
        return [channel["scale"]["domain"] for channel in channels if "legend" in channel]

    assert explained(BARS) == [["computed", "exposed"]]
    assert explained(DOTS) == []
    assert explained(LINES) == [["ring", "no overlap"]]


def test_a_chart_below_another_has_no_title() -> None:
    one = Lines("", "", Axis("num_sm", logarithmic=True), Axis("us"), [Line("bulk", [LinePoint(4, 9.0)], "series1")])
    assert "title" not in figure("one", one).spec
