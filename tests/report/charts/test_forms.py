"""The four forms as an outside workload would use them: built of plain values, drawn, described."""

from __future__ import annotations

import json

import altair as alt
import pytest

from overlap_sweep.report.charts import (
    Area,
    Axis,
    Bar,
    Bars,
    Column,
    Dot,
    DotRow,
    Dots,
    Event,
    Extent,
    Form,
    Gantt,
    GanttBar,
    Group,
    Key,
    Lane,
    Level,
    Line,
    LinePoint,
    Lines,
    Note,
    Reference,
)
from overlap_sweep.report.charts.figures import figure
from overlap_sweep.report.charts.vega import fitted, log_ticks

BARS = Bars(
    title="steps",
    subtitle="median",
    axis=Axis("ms"),
    parts=[Key("computed", "gemm"), Key("exposed", "comm")],
    columns=[Column("ms"), Column("setting", "left")],
    bars=[
        Bar(
            **{"name": "fast", "ends": [1.0, 1.5], "cells": ["1.5", "a"], "low": 1.4, "high": 1.6, "bold": True},
            marker=Dot(1.2, label="default", shape="tick"),
        ),
        Bar(name="not known", ends=[], cells=["-", ""], details={"why": "no trace"}),
    ],
    references=[Reference(1.0, "floor", above="slower")],
)
DOTS = Dots(
    title="ratios",
    subtitle="",
    axis=Axis("time / bound"),
    columns=[Column("ratio")],
    rows=[
        DotRow(name="forward", bold=True),
        DotRow(name="GEMM", dots=[Dot(1.0, shape="ring"), Dot(9.0, 8.0, 9.5)], cells=["9x"], note="!"),
    ],
    references=[Reference(1.0, "the bound")],
    connected=True,
)
LINES = Lines(
    title="time",
    subtitle="",
    x=Axis("m", logarithmic=True),
    y=Axis("us"),
    lines=[
        Line("ring", [LinePoint(64, 10.0, 9.0, 11.0), LinePoint(128, 20.0, ringed=True, label="chosen")], "series1")
    ],
    levels=[Level("no overlap", 25.0, "muted", low=24.0, high=26.0)],
    areas=[Area("tolerated", [LinePoint(64, 1, 10.0, 12.0), LinePoint(128, 1, 20.0, 24.0)], "good", 0.2, 24.0)],
    events=[Event(64, "dip")],
    notes=[Note(64, "GEMM")],
    shaded=[(60, 64)],
)
GANTT = Gantt(
    "iteration", "us", [Group("none", [Lane("GEMM", [GanttBar(0.0, 4.0, "gemm")])], [Extent(0.0, 5.0, "fwd 5 us")])]
)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (BARS, "steps, ms: median. fast: ms 1.5, setting a; not known: ms -."),
        (DOTS, "ratios, time / bound. forward; GEMM: ratio 9x."),
        (LINES, "time, us over m. ring 10 at 64, 20 at 128 (chosen); no overlap 25; dip stands out."),
        (GANTT, "Timeline of streams, iteration. none: fwd 5 us."),
    ],
    ids=["bars", "dots", "lines", "gantt"],
)
def test_a_form_is_drawn_and_described_from_plain_values(form: Form, said: str) -> None:
    drawn = figure("chart", form)
    alt.TopLevelLayerSpec.validate(drawn.spec)
    assert drawn.spec["$schema"] == alt.SCHEMA_URL
    assert drawn.description == said
    # Where a part has no length nothing is drawn of it.
    assert "undefined" not in json.dumps(drawn.spec)


def test_an_axis_is_logarithmic_where_values_are_far_apart() -> None:
    assert fitted(Axis(), [1.0, 4.1]).logarithmic
    assert not fitted(Axis(), [1.0, 4.0]).logarithmic
    assert not fitted(Axis(from_zero=True), [1.0, 40.0]).logarithmic
    assert not fitted(Axis(), [-1.0, 40.0]).logarithmic
    assert fitted(Axis(domain=(0.0, 9.0)), [1.0, 40.0]).high == 9.0


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_share_of_an_axis_leads_back_to_the_value(logarithmic: bool) -> None:
    scaled = fitted(Axis(logarithmic=logarithmic), [2.0, 50.0])
    assert scaled.at(scaled.share(7.0)) == pytest.approx(7.0)
    assert scaled.share(scaled.low) == 0.0


def test_logarithmic_axes_have_ticks_in_narrow_ranges_too() -> None:
    assert log_ticks(0.9, 110.0) == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    assert len(log_ticks(230.0, 1350.0)) > 2
    assert len(log_ticks(1.0, 1.5)) > 2


def test_of_a_single_place_an_axis_has_a_range() -> None:
    one = Lines("", "", Axis("num_sm", logarithmic=True), Axis("us"), [Line("bulk", [LinePoint(4, 9.0)], "series1")])
    spec = figure("one", one).spec
    assert "title" not in spec
    domains = [
        layer["encoding"]["x"]["scale"]["domain"]
        for layer in spec["layer"]
        if "scale" in layer["encoding"].get("x", {})
    ]
    assert domains
    assert all(low < 4 < high for low, high in domains)
