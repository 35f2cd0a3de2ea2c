"""What the charts of training steps and copies are drawn from, and the page's sections about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.report.page import knob_chart, time_bars
from overlap_sweep.report.page.copies_chart import copies_panel
from overlap_sweep.report.page.knob_chart import KnobPanel, knob_panel
from overlap_sweep.report.page.time_bars import BarsPanel, cut, lines_of
from overlap_sweep.report.page.training_chart import MOST_BARS, training_panel
from overlap_sweep.report.page.training_tables import copies_table, settings_table, sizes_table, training_table
from tests.made_sweeps import write_sweep, write_sweep_of_copies, write_sweep_of_training
from tests.make_point import make_point, resolved
from tests.report.page.reports import analysis_of, files_of, page_of, parsed


def training_of(directory: Path) -> BarsPanel:
    (analysis,) = analysis_of(directory).training
    return training_panel(analysis)


def knobs_of(directory: Path) -> KnobPanel | None:
    (analysis,) = analysis_of(directory).training
    return knob_panel(analysis)


def test_a_bar_is_cut_where_communication_begins_and_where_overlap_hides_it(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path, step_us=1500.0, spread_us=10.0)
    make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": 1}), step_us=1200.0)
    panel = training_of(tmp_path)
    assert panel.axis == "ms a step"
    first, second = panel.bars
    assert (first.name, first.ends, first.chosen) == ("forward_prefetch=1", [1.0, 1.2, 2.0], True)
    assert (second.name, second.ends, second.chosen) == ("defaults", [1.0, 1.5, 2.0], False)
    assert second.low < 1.5 < second.high
    assert first.cells == ["1.200", "80%", "1.67x", "213,333"]
    assert "forward_prefetch=1: 1.200, 80%, 1.67x, 213,333" in time_bars.describe(panel)


@pytest.mark.parametrize(
    ("floor", "time", "none", "ends"),
    [
        (1.0, 1.5, 2.0, [1.0, 1.5, 2.0]),
        # Overlap that harms hides nothing; noise may put the step below its floor.
        (1.0, 2.5, 2.0, [1.0, 2.5, 2.5]),
        (1.0, 0.9, 2.0, [0.9, 0.9, 2.0]),
    ],
)
def test_parts_follow_each_other(floor: float, time: float, none: float, ends: list[float]) -> None:
    assert cut(floor, time, none) == ends


def test_steps_of_different_size_are_drawn_by_the_sample(tmp_path: Path) -> None:
    panel = training_of(write_sweep_of_training(tmp_path))
    assert panel.axis == "us a sample"
    assert panel.bars[0].name == "forward_prefetch=1, reshard_after_forward=false,\ngradient_accumulation=2"
    assert panel.bars[0].at == pytest.approx(2100 / 512)
    assert [bar.at for bar in panel.bars] == sorted(bar.at for bar in panel.bars)


def test_of_many_settings_the_fastest_and_the_simplest_are_drawn(tmp_path: Path) -> None:
    for ahead in range(MOST_BARS + 5):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), step_us=1500.0 - 10 * ahead)
    panel = training_of(tmp_path)
    assert len(panel.bars) == MOST_BARS + 1
    assert panel.bars[-1].name == "defaults"
    assert panel.axis == f"ms a step; {MOST_BARS + 1} of {MOST_BARS + 5} settings, the fastest"


def test_no_two_rows_have_one_name() -> None:
    long = ", ".join(f"a_knob_with_a_name_{i}=1" for i in range(20))
    names = lines_of(["short", long, f"{long}, and=more"])
    assert names[0] == "short"
    assert len(set(names)) == 3
    assert max(len(line) for name in names for line in name.splitlines()) <= 52


def test_what_each_knob_contributed_is_drawn(tmp_path: Path) -> None:
    panel = knobs_of(write_sweep_of_training(tmp_path))
    assert panel
    assert [bar.name for bar in panel.bars] == [
        "forward_prefetch 0 \N{RIGHTWARDS ARROW} 1",
        "gradient_accumulation 1 \N{RIGHTWARDS ARROW} 2",
        "reshard_after_forward true \N{RIGHTWARDS ARROW} false",
    ]
    prefetch, accumulated, _ = panel.bars
    assert (accumulated.sure, accumulated.taken, accumulated.beside) == (True, True, pytest.approx(-8.69565))
    assert (prefetch.beside, prefetch.taken, prefetch.beside_text) == (None, False, "-")
    assert prefetch.low < -20.7 < -12.0 < prefetch.high
    assert "forward_prefetch 0 \N{RIGHTWARDS ARROW} 1 -20.0%" in knob_chart.describe(panel)


def test_a_single_setting_has_no_knobs(tmp_path: Path) -> None:
    make_point("fsdp", tmp_path)
    assert knobs_of(tmp_path) is None
    page = page_of(tmp_path)
    assert page.count('<figure class="chart') == 1
    assert "What each knob contributed" not in page


def test_copies_are_drawn_as_shares_of_one_after_the_other(tmp_path: Path) -> None:
    make_point("copy_engine", tmp_path, overlapped_us=1100.0)
    (analysis,) = analysis_of(tmp_path).copies
    (bar,) = copies_panel(analysis).bars
    assert bar.ends == pytest.approx([1000 / 14, 1100 / 14, 100.0])
    assert (bar.cells, bar.chosen) == (["1,100.0", "300.0", "75%"], True)


def test_charts_are_valid(tmp_path: Path) -> None:
    write_sweep_of_training(tmp_path / "training")
    write_sweep_of_copies(tmp_path / "copies")
    analysis = analysis_of(tmp_path)
    panels = [training_panel(of_case) for of_case in analysis.training]
    panels += [copies_panel(of_case) for of_case in analysis.copies]
    for panel in panels:
        assert time_bars.chart(panel).to_dict(validate=True)["layer"]
    knobs = knob_panel(analysis.training[0])
    assert knobs
    assert knob_chart.chart(knobs).to_dict(validate=True)["layer"]


def test_tables_have_what_was_compared_and_what_was_measured(tmp_path: Path) -> None:
    write_sweep_of_training(tmp_path / "training")
    write_sweep_of_copies(tmp_path / "copies")
    analysis = analysis_of(tmp_path)
    settings = settings_table(analysis.training[0])
    assert [cell.text for cell in settings.rows[0]][:3] == [
        *("forward_prefetch=1, reshard_after_forward=false, gradient_accumulation=2", "2.100", "0.015"),
    ]
    points = training_table(analysis)
    assert {row[5].text for row in points.rows} == {"ok", "failed", "skipped"}
    assert [row[-2].text for row in points.rows][-2:] == [
        *("CUDA out of memory", "fsdp.forward_prefetch changes nothing under DDP"),
    ]
    assert [len(sizes_table(of_case).rows) for of_case in analysis.copies] == [4, 4]
    assert len(copies_table(analysis).rows) == 9
    for table in (settings, points, copies_table(analysis), sizes_table(analysis.copies[0])):
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_the_page_has_a_section_for_each(tmp_path: Path) -> None:
    write_sweep_of_training(tmp_path / "training")
    write_sweep_of_copies(tmp_path / "copies")
    files = files_of(tmp_path)
    page = files["report.html"].decode()
    found = parsed(page)
    ids = {attributes.get("id") for _, attributes in found.tags}
    assert {"training", "training-1", "copies", "copies-1", "copies-2", "steps-table", "copies-table"} <= ids
    assert "Communication overlap of ranking, GEMMs and copies" in found.text
    assert any("to set: fsdp.forward_prefetch=1" in text for text in found.text)
    assert "None of the points is ok" not in page
    pngs = {name: content for name, content in files.items() if name.endswith(".png")}
    assert pngs.keys() == {f"plots/{name}.png" for name in ("training_1", "training_1_knobs", "copies_1", "copies_2")}
    assert all(png.startswith(b"\x89PNG") and len(png) > 5000 for png in pngs.values())


def test_the_page_of_operators_is_the_same_beside_them(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep")
    alone = analysis_of(tmp_path)
    write_sweep_of_training(tmp_path / "training")
    write_sweep_of_copies(tmp_path / "copies")
    beside = analysis_of(tmp_path)
    assert beside.rows == alone.rows
    assert [(case.case, case.plans) for case in beside.cases] == [(case.case, case.plans) for case in alone.cases]
    assert [case.drift for case in beside.cases] == [case.drift for case in alone.cases]
