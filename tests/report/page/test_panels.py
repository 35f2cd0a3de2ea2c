"""What the charts are drawn from."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from overlap_sweep.analysis.sweep import CaseAnalysis
from overlap_sweep.report.page import hidden_fraction, layer_chart, num_sm, tp_scaling
from overlap_sweep.report.page.hidden_fraction import hidden_panels
from overlap_sweep.report.page.label_places import spread
from overlap_sweep.report.page.layer_chart import layer_panel
from overlap_sweep.report.page.log_ticks import log_ticks
from overlap_sweep.report.page.num_sm import HEIGHT_PX, Level, NumSmPanel, looks_of, num_sm_panels
from overlap_sweep.report.page.tp_scaling import scaling_panels
from tests.made_sweeps import rounds, write_sweep
from tests.make_point import default_timing, layer_config, make_point, operator_config, pass_times
from tests.report.page.reports import analysis_of, page_of


def test_charts_are_what_vega_lite_takes(tmp_path: Path) -> None:
    case = case_of(write_sweep(tmp_path / "sweep"))
    make_point("layer", tmp_path / "layer", layer_config(), variants={"none": rounds(1.0), "default": rounds(0.97)})
    (layer,) = analysis_of(tmp_path / "layer").layers
    charts = [hidden_fraction.chart(panel) for panel in hidden_panels(case)]
    charts += [num_sm.chart(panel) for tp_size in (2, 4) for panel in num_sm_panels(case, tp_size)]
    charts += [tp_scaling.chart(panel) for panel in scaling_panels(case)]
    charts += [layer_chart.chart(layer_panel("layer", layer, "default"))]
    assert len(charts) > 5
    for chart in charts:
        chart.to_dict(validate=True)


def case_of(directory: Path) -> CaseAnalysis:
    (case,) = analysis_of(directory).cases
    return case


def panel_of(directory: Path, name: str, tp_size: int = 2) -> NumSmPanel:
    return next(panel for panel in num_sm_panels(case_of(directory), tp_size) if panel.name == name)


def level(panel: NumSmPanel, name: str) -> Level:
    return next(level for level in panel.levels if level.name == name)


def test_hidden_fractions_of_what_was_chosen(tmp_path: Path) -> None:
    two, four = hidden_panels(case_of(write_sweep(tmp_path)))
    found = {row.slots: (row.setting, row.hidden, row.speedup_text) for row in two.rows}
    assert found == {
        "fc1_fprop": ("no overlap", 0.0, "1.00x"),
        "fc1_dgrad + wgrad": ("bulk_sm4", 80.0, "1.25x"),
        "fc2_fprop": ("pipeline_sm8_split4", 50.0, "1.33x"),
    }
    assert [row.setting for row in four.rows] == ["no overlap"]
    assert two.lowest == four.lowest < 0


def test_noise_and_a_harmful_default(tmp_path: Path) -> None:
    default = default_timing(260.0, 200.0)
    bwd = pass_times(160.0, 200.0, 150.0, spread_us=5.0, default=default)
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4), bwd=bwd)
    (panel,) = hidden_panels(case_of(tmp_path))
    (row,) = panel.rows
    assert row.hidden == 80.0
    assert row.default == pytest.approx(-120.0)
    assert panel.lowest == -100.0
    assert row.default_label == "\N{BLACK LEFT-POINTING TRIANGLE} default \N{MINUS SIGN}120 %"
    assert not panel.beyond_floor
    assert row.low is not None
    assert row.high is not None
    assert row.low < 80.0 < row.high
    assert row.high - 80.0 == pytest.approx(80.0 - row.low)


def test_more_than_all_of_it_is_no_number(tmp_path: Path) -> None:
    make_point(
        "operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4), bwd=pass_times(90.0, 200.0, 140.0)
    )
    (panel,) = hidden_panels(case_of(tmp_path))
    assert panel.rows[0].hidden_text == ">100%"
    assert panel.beyond_floor
    assert "a time below that of the GEMMs alone" in page_of(tmp_path)


def test_no_communication_to_hide(tmp_path: Path) -> None:
    make_point(
        "operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4), bwd=pass_times(90.0, 100.0, 100.0)
    )
    (panel,) = hidden_panels(case_of(tmp_path))
    assert [(row.hidden, row.hidden_text) for row in panel.rows] == [(None, "-")]


def test_time_over_num_sm(tmp_path: Path) -> None:
    panel = panel_of(write_sweep(tmp_path), "fc1_bwd")
    assert [(mark.line, mark.num_sm, mark.time_us, mark.chosen) for mark in panel.marks] == [
        ("bulk", 4, 320.0, True),
        ("bulk", 8, 360.0, False),
    ]
    assert {(level.name, level.time_us) for level in panel.levels} == {("no overlap", 400.0), ("GEMMs alone", 300.0)}
    assert panel.num_sms == [4, 8]
    assert not panel.logarithmic
    assert panel.time_range_us[0] < 300.0
    assert panel.time_range_us[1] > 400.0
    assert {label.text for label in panel.labels} == {"bulk", "no overlap", "GEMMs alone"}
    assert panel.subtitle == "chosen: bulk_sm4, 320.0 us, 1.25x, hides 80%"


def test_quartiles_are_scaled_to_the_none_time_of_the_panel(tmp_path: Path) -> None:
    bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4)
    make_point("operator", tmp_path, bulk, bwd=pass_times(150.0, 200.0, 100.0, spread_us=2.0))
    # Another day the machine takes twice as long.
    make_point("operator", tmp_path, bulk, bwd=pass_times(300.0, 400.0, 200.0, spread_us=4.0))
    (mark,) = panel_of(tmp_path, "fc1_bwd").marks
    none_us = 300.0
    assert mark.time_us == pytest.approx(150.0 / 200.0 * none_us)
    assert (mark.q1_us, mark.q3_us) == (pytest.approx(mark.time_us - 3.0), pytest.approx(mark.time_us + 3.0))
    assert mark.measured_text == "10 repeats in 2 points"


def test_copy_engines_make_nothing_of_num_sm(tmp_path: Path) -> None:
    for sms, use_ce in ((1, True), (2, False), (4, False)):
        ring = operator_config(2, "fc1", "fprop", "ring_exchange", num_sm=sms, aggregate=False, use_ce=use_ce)
        make_point("operator", tmp_path, ring, fwd=pass_times(80.0 + sms))
    panel = panel_of(tmp_path, "fc1_fwd")
    assert [(mark.line, mark.num_sm) for mark in panel.marks] == [("ring_agg0_ce0", 2), ("ring_agg0_ce0", 4)]
    engines = level(panel, "ring_agg0")
    assert (engines.time_us, engines.baseline, engines.chosen) == (81.0, False, True)
    assert "ring_agg0 (chosen)" in {label.text for label in panel.labels}


def test_a_setting_that_num_sm_does_not_change_is_one_level(tmp_path: Path) -> None:
    for sms in (1, 2, 4, 8):
        ring = operator_config(2, "fc1", "fprop", "ring_exchange", num_sm=sms, aggregate=False, use_ce=True)
        make_point("operator", tmp_path, ring, fwd=pass_times(80.0 - sms))
    panel = panel_of(tmp_path, "fc1_fwd")
    assert [level.name for level in panel.levels] == ["no overlap", "GEMMs alone", "ring_agg0"]
    assert level(panel, "ring_agg0").chosen
    assert level(panel, "ring_agg0").time_us == 72.0
    assert panel.height_px < HEIGHT_PX


def test_nothing_in_a_panel_looks_the_same() -> None:
    wanted = {f"arm{i}": i for i in range(40)}
    assert looks_of(["arm0", "arm1"], wanted) == {"arm0": ("series1", "circle"), "arm1": ("series2", "square")}
    far_apart = looks_of(["arm0", "arm6", "arm12"], wanted)
    assert len({series for series, _ in far_apart.values()}) == 3
    many = looks_of(list(wanted)[:36], wanted)
    assert len(set(many.values())) == 36


def test_dgrad_and_wgrad_with_a_num_sm_each_make_no_line(tmp_path: Path) -> None:
    for dgrad, wgrad in ((4, 8), (4, 16), (8, 16)):
        settings = {"dgrad": {"method": "bulk", "num_sm": dgrad}, "wgrad": {"method": "bulk", "num_sm": wgrad}}
        point = operator_config(2, "fc1", "all", "none", phases=settings)
        make_point("operator", tmp_path, point, bwd=pass_times(150.0 + wgrad, 200.0, 100.0))
    panel = panel_of(tmp_path, "fc1_bwd")
    assert {mark.line for mark in panel.marks} == {"bulk, dgrad and wgrad apart"}
    assert sorted(mark.num_sm for mark in panel.marks) == [4, 4, 8]
    assert panel.connected == []


def test_what_failed_or_was_launch_bound_is_no_time(tmp_path: Path) -> None:
    bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4)
    make_point("operator", tmp_path, bulk, bwd=pass_times(150.0, 200.0, 100.0))
    make_point("operator", tmp_path, {**bulk, "num_sm": 8}, status="failed", error="no")
    make_point("operator", tmp_path, {**bulk, "num_sm": 16}, bwd=pass_times(1.0, 200.0, 100.0), launch_bound=True)
    assert [mark.num_sm for mark in panel_of(tmp_path, "fc1_bwd").marks] == [4]


def test_a_wide_range_of_times_is_logarithmic(tmp_path: Path) -> None:
    bulk = operator_config(2, "fc1", "all", "bulk", num_sm=4)
    make_point("operator", tmp_path, bulk, bwd=pass_times(1500.0, 200.0, 100.0))
    panel = panel_of(tmp_path, "fc1_bwd")
    assert panel.logarithmic
    assert panel.subtitle.startswith("chosen: no overlap; the best overlap, dgrad bulk_sm4 + wgrad bulk_sm4, is")


def test_labels_keep_apart_and_near() -> None:
    assert spread([10.0, 50.0], 14.0, 0.0, 100.0) == [10.0, 50.0]
    assert spread([50.0, 50.0], 14.0, 0.0, 100.0) == [43.0, 57.0]
    assert spread([99.0, 98.0, 20.0], 14.0, 0.0, 100.0) == [100.0, 86.0, 20.0]
    crowded = spread([1.0, 2.0, 3.0, 30.0, 35.0], 14.0, 0.0, 100.0)
    assert all(later - earlier >= 14.0 - 1e-9 for earlier, later in itertools.pairwise(crowded))
    assert crowded[0] == 0.0


def test_ticks_of_a_logarithmic_axis() -> None:
    assert log_ticks(8.0, 600.0) == [10.0, 20.0, 50.0, 100.0, 200.0, 500.0]
    assert len(log_ticks(110.0, 190.0)) > 2
    assert all(110.0 <= tick <= 190.0 for tick in log_ticks(110.0, 190.0))


def test_scaling_beside_the_ideal(tmp_path: Path) -> None:
    panels = {panel.operator: panel for panel in scaling_panels(case_of(write_sweep(tmp_path)))}
    fc1 = panels["fc1"]
    assert [(size.tp_size, size.time_us, size.ratio_text) for size in fc1.sizes] == [
        (1, 1000.0, ""),
        (2, 520.0, "1.04"),
        (4, 600.0, "2.40"),
    ]
    assert [size.verdict for size in fc1.sizes] == ["", "efficient", "not efficient"]
    assert [(ideal.tp_size, ideal.ideal_us, ideal.tolerated_us) for ideal in fc1.ideals] == [
        (1, 1000.0, 1200.0),
        (2, 500.0, 600.0),
        (4, 250.0, 300.0),
    ]
    assert fc1.subtitle == "scales up to TP=2"


def test_one_tp_size_alone_does_not_scale(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=4))
    assert scaling_panels(case_of(tmp_path)) == []


def test_variants_of_a_layer(tmp_path: Path) -> None:
    variants = {
        "none": rounds(1.0),
        "file:/far/away/tp4.yaml": rounds(0.9, 0.01),
        "default": rounds(1.1, launch_bound=True),
        "floor": rounds(0.8),
    }
    make_point("layer", tmp_path, layer_config(), variants=variants)
    (layer,) = analysis_of(tmp_path).layers
    panel = layer_panel("layer", layer, "file:/far/away/tp4.yaml")
    found = {bar.name: (round(bar.change, 6), bar.best, bar.change_text) for bar in panel.bars}
    assert found == {
        "floor (GEMMs alone)": (-20.0, False, "-20.0 % [-20.0, -20.0]"),
        "tp4.yaml": (-10.0, True, "-10.0 % [-11.0, -9.0]"),
        "none": (0.0, False, "reference"),
        "default (launch-bound)": (10.0, False, "+10.0 % [+10.0, +10.0]"),
    }
    assert list(found) == ["floor (GEMMs alone)", "tp4.yaml", "none", "default (launch-bound)"]


def test_files_of_the_same_name_keep_their_folders(tmp_path: Path) -> None:
    variants = {"none": rounds(1.0), "file:/one/a.yaml": rounds(0.9), "file:/two/a.yaml": rounds(0.95)}
    make_point("layer", tmp_path, layer_config(), variants=variants)
    (layer,) = analysis_of(tmp_path).layers
    assert {bar.name for bar in layer_panel("layer", layer, None).bars} == variants.keys()
