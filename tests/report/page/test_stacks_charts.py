"""What the charts of tensor-parallel stacks are drawn from, and the page's section about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.report.page import time_bars
from overlap_sweep.report.page.loss_curves import MOST_CURVES, MOST_POINTS, curves_panel, describe
from overlap_sweep.report.page.stacks_chart import MOST_BARS, stacks_panel
from overlap_sweep.report.page.stacks_tables import stack_points_table, stacks_table
from tests.made_sweeps import write_sweep_of_stacks
from tests.make_point import falling, make_point, stack_config
from tests.report.page.reports import analysis_of, files_of, parsed


def test_a_bar_is_cut_into_the_parts_of_a_step(tmp_path: Path) -> None:
    analysis = analysis_of(write_sweep_of_stacks(tmp_path)).tp_training[0]
    panel = stacks_panel(analysis)
    first, *others = panel.bars
    assert first.name == "TP=2 DP=2 megatron"
    assert first.ends == pytest.approx([3.0, 8.0, 9.0, 10.0])
    assert first.low < 10.0 < first.high
    assert first.cells == ["10.000", "51,200", "10.1%"]
    assert [bar.name for bar in others if bar.chosen] == ["TP=4 DP=1 megatron"]
    assert "TP=4 DP=1 megatron: 7.000, 36,571, 7.2%" in time_bars.describe(panel)


def test_a_peak_that_is_not_known_takes_no_column(tmp_path: Path) -> None:
    make_point("tp_training", tmp_path, environment={"gpu": "something else"})
    panel = stacks_panel(analysis_of(tmp_path).tp_training[0])
    assert panel.columns == ["step ms", "tokens/s/GPU"]
    assert len(panel.bars[0].cells) == len(panel.widths_px) == 2


def test_of_many_settings_the_first_are_drawn(tmp_path: Path) -> None:
    for dp_size in range(1, MOST_BARS + 3):
        make_point("tp_training", tmp_path, stack_config("megatron", 1, dp_size))
    analysis = analysis_of(tmp_path).tp_training[0]
    panel = stacks_panel(analysis)
    assert len(panel.bars) == MOST_BARS
    assert panel.axis == f"ms a step; the first {MOST_BARS} of {MOST_BARS + 2}"
    assert len(curves_panel(analysis).looks) == MOST_CURVES


def test_curves_that_lie_on_each_other_are_all_seen(tmp_path: Path) -> None:
    panel = curves_panel(analysis_of(write_sweep_of_stacks(tmp_path)).tp_training[0])
    one, two = panel.looks[:4], panel.looks[4:]
    assert {name.split()[1] for name in (look.name for look in one)} == {"DP=1"}
    for of_same_data in (one, two):
        widths = [look.width_px for look in of_same_data]
        assert widths == sorted(set(widths), reverse=True)
        assert len({tuple(look.dash) for look in of_same_data}) == 1
        assert len({look.colour for look in of_same_data}) == len(of_same_data)
    assert one[0].dash != two[0].dash
    assert len(panel.looks) == 9
    assert panel.subtitle.startswith("DP=1: the losses agree")
    assert "TP=2 DP=2 megatron 6.4048 at step 6" in describe(panel)


def test_who_deviates_is_drawn_among_many(tmp_path: Path) -> None:
    for tp_size in range(1, MOST_CURVES + 3):
        make_point("tp_training", tmp_path, stack_config("megatron", tp_size))
        make_point("tp_training", tmp_path, stack_config("fsdp_dtensor", tp_size))
    off = falling(off={3: None, 6: 9.0})
    make_point("tp_training", tmp_path, stack_config("autotp", MOST_CURVES + 2), losses=off)
    panel = curves_panel(analysis_of(tmp_path).tp_training[0])
    assert len(panel.looks) == MOST_CURVES
    assert f"{MOST_CURVES} of {2 * MOST_CURVES + 5} are drawn" in panel.subtitle
    deviating = [point for point in panel.points if "autotp" in point.name]
    assert [point.step for point in deviating] == [0, 1, 2, 4, 5, 6]


def test_long_runs_are_thinned_and_keep_their_end(tmp_path: Path) -> None:
    steps = 3 * MOST_POINTS
    point = stack_config(**{"tp_training.num_training_steps": steps})
    make_point("tp_training", tmp_path, point, losses=[7.0 - step / steps for step in range(steps)])
    points = curves_panel(analysis_of(tmp_path).tp_training[0]).points
    assert len(points) <= MOST_POINTS + 1
    assert points[-1].step == steps - 1


def test_tables_have_what_could_not_be_measured_too(tmp_path: Path) -> None:
    analysis = analysis_of(write_sweep_of_stacks(tmp_path))
    table = stacks_table(analysis.tp_training[0])
    assert len(table.rows) == 9
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert table.rows[0][-1].text == "best of all, fastest"
    points = stack_points_table(analysis)
    assert {len(row) for row in points.rows} == {len(points.columns)}
    reasons = {row[-2].text for row in points.rows}
    assert {"fastest", "CUDA out of memory"} < reasons


def test_the_page_has_a_section(tmp_path: Path) -> None:
    files = files_of(write_sweep_of_stacks(tmp_path))
    assert {"plots/tp_training_1.png", "plots/tp_training_1_losses.png"} < files.keys()
    page = parsed(files["report.html"].decode())
    ids = {attrs.get("id") for _, attrs in page.tags}
    assert {"stacks", "stacks-1", "tp_training_1", "tp_training_1_losses", "stack-points-table"} <= ids
    text = " ".join(" ".join(page.text).split())
    assert "megatron is fastest, 1.10x [1.09, 1.11] as fast as async_tp" in text
    assert "No answer" not in text
