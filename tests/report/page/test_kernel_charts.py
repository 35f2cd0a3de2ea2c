"""What the charts of kernels are drawn from, and the page's section about them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from overlap_sweep.analysis.kernels import KernelAnalysis
from overlap_sweep.report.page import kernel_chart, kernel_dots
from overlap_sweep.report.page.case_figures import kernel_figure
from overlap_sweep.report.page.kernel_chart import HEIGHT_PX, KernelPanel, kernel_panel
from overlap_sweep.report.page.kernel_dots import DotsPanel, dots_panel
from overlap_sweep.report.page.kernels_table import compared_table, kernels_table
from overlap_sweep.report.page.num_sm import LABEL_GAP_PX
from overlap_sweep.report.page.page import MOST_KERNEL_CHARTS
from tests.made_sweeps import write_sweep
from tests.make_point import baselines, implementation, kernel_config, make_point
from tests.report.page.reports import analysis_of, files_of, page_of, parsed
from tests.report.test_kernels import write_family


def only(directory: Path) -> KernelAnalysis:
    (analysis,) = analysis_of(directory).kernels
    return analysis


def panel_of(directory: Path) -> KernelPanel:
    return kernel_panel(only(directory))


def dots_of(directory: Path) -> DotsPanel:
    return dots_panel(only(directory))


def test_a_line_for_each_backend(tmp_path: Path) -> None:
    panel = panel_of(write_family(tmp_path))
    found = {(mark.line, mark.m): (mark.implementation, mark.ratio, mark.chosen) for mark in panel.marks}
    # bulk is faster than all of them, and no way to compute the kernel.
    assert found == {
        ("sequential", 1024): ("sequential", 2.0, False),
        ("sequential", 8192): ("sequential", 2.0, False),
        ("symm_mem", 1024): ("symm_mem fused", 1.2, True),
        ("symm_mem", 8192): ("symm_mem fused", 1.5, False),
        ("torch", 1024): ("torch ring", 1.6, False),
        ("torch", 8192): ("torch ring", 1.3, True),
    }
    assert panel.ms == [1024, 8192]
    assert {binding.what for binding in panel.bindings} == {"GEMM"}
    assert panel.colours["sequential"] == "muted"
    assert len(set(panel.colours.values())) == len(panel.colours) == 3
    assert panel.subtitle == "m=1024: symm_mem fused; 8192: torch ring"
    assert "torch at m=8192 30% above the bound" in kernel_chart.describe(panel)


def test_labels_of_lines_that_end_together_stand_apart(tmp_path: Path) -> None:
    for m in (1024, 2048):
        for backend in ("torch", "symm_mem", "transformer_engine", "flux", "mine"):
            make_point("kernel", tmp_path, kernel_config(m, backend), implementations={"a": implementation(150.0)})
    panel = panel_of(tmp_path)
    low, high = panel.range
    places = sorted((label.label_ratio - low) / (high - low) * HEIGHT_PX for label in panel.labels)
    assert len(places) == 7
    assert min(b - a for a, b in itertools.pairwise(places)) >= LABEL_GAP_PX - 1e-6
    assert panel.colours["torch"] == "series1"


@pytest.mark.parametrize(("slowest_us", "logarithmic"), [(210.0, False), (900.0, True)])
def test_what_is_very_slow_makes_the_axis_logarithmic(tmp_path: Path, slowest_us: float, logarithmic: bool) -> None:
    for m in (1024, 2048):
        make_point("kernel", tmp_path, kernel_config(m), implementations={"a": implementation(slowest_us)})
    panel = panel_of(tmp_path)
    assert panel.logarithmic == logarithmic
    assert panel.range[0] < 1.0 < slowest_us / 100 < panel.range[1]


def test_where_the_communication_takes_longer_the_bound_is_its_time(tmp_path: Path) -> None:
    for m in (1024, 2048):
        make_point(
            "kernel",
            tmp_path,
            kernel_config(m),
            implementations=baselines(300.0, 100.0, 160.0) | {"a": implementation(240.0)},
        )
    panel = panel_of(tmp_path)
    # Said once, since it does not change.
    assert [(binding.m, binding.what) for binding in panel.bindings] == [(1024, "comm.")]
    assert {mark.ratio for mark in panel.marks if mark.line == "torch"} == {1.5}


def test_a_backend_whose_best_is_launch_bound_is_drawn_with_another(tmp_path: Path) -> None:
    for m in (1024, 2048):
        measured = {"a": implementation(110.0, launch_bound=m == 1024), "b": implementation(150.0)}
        make_point("kernel", tmp_path, kernel_config(m), implementations=measured)
    marks = panel_of(tmp_path).marks
    assert [mark.implementation for mark in marks if mark.line == "torch"] == ["torch b", "torch a"]


def test_a_single_m_shows_every_implementation(tmp_path: Path) -> None:
    measured = {f"ring{i}": implementation(150.0 + 10 * i) for i in range(8)}
    make_point("kernel", tmp_path, implementations=measured | {"bulk": implementation(110.0, independent=True)})
    make_point("kernel", tmp_path, kernel_config(backend="symm_mem"), implementations={"fused": implementation(145.0)})
    panel = dots_of(tmp_path)
    assert [dot.name for dot in panel.dots][:3] == ["torch bulk", "symm_mem fused", "torch ring0"]
    assert len(panel.dots) == 11
    assert [dot.note for dot in panel.dots][:3] == ["independent", "use this", ""]
    assert [dot.filled for dot in panel.dots][:2] == [False, True]
    assert "symm_mem fused 145.0 us, noise 0.0, 45% above the bound" in kernel_dots.describe(panel)


def test_charts_are_what_vega_lite_takes(tmp_path: Path) -> None:
    make_point("kernel", tmp_path / "one", implementations={"a": implementation(150.0, 1.0)})
    make_point("kernel", tmp_path / "slow", implementations={"a": implementation(1500.0, 1.0)})
    for m in (1024, 2048):
        measured = baselines(launch_bound=True) | {"a": implementation(150.0)}
        make_point("kernel", tmp_path / "unknown", kernel_config(m), implementations=measured)
    charts = [kernel_chart.chart(panel_of(write_family(tmp_path / "family")))]
    charts += [kernel_chart.chart(panel_of(tmp_path / "unknown"))]
    charts += [kernel_dots.chart(dots_of(tmp_path / name)) for name in ("one", "slow")]
    for chart in charts:
        assert chart.to_dict(validate=True)["layer"]


def test_the_page_has_answers_charts_and_tables(tmp_path: Path) -> None:
    page = parsed(page_of(write_family(tmp_path)))
    text = " ".join(" ".join(page.text).split())
    assert "Communication overlap of llama3_70b" in text
    assert "m=1024: symm_mem fused; 8192: torch ring" in text
    assert "m=8192: torch ring, 130.0 us, 1.54x sequential" in text
    assert "symm_mem pipeline computed wrong numbers" in text
    assert "No answer" not in text
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert {"kernels", "kernel-table-1", "kernels-table", "kernel_1_ag_gemm_n57344_k8192_tp4"} <= ids
    assert "points-table" not in ids


def test_of_several_kernels_the_answers_stand_first_and_link(tmp_path: Path) -> None:
    write_family(tmp_path / "family")
    make_point("kernel", tmp_path, kernel_config(n=8192), implementations={"ring": implementation(250.0)})
    source = page_of(tmp_path)
    page = parsed(source)
    ids = [attributes.get("id") for tag, attributes in page.tags if tag == "h3"]
    assert {"kernel-1", "kernel-2"} <= set(ids)
    # Three answers, and the two of the navigation.
    assert [address for address in page.addresses if address.startswith("#kernel-")] == [
        "#kernel-1", "#kernel-2", "#kernel-1", "#kernel-2", "#kernel-2",
    ]  # fmt: skip
    assert source.index("What to use; times") < source.index('id="kernel-1"')
    text = " ".join(" ".join(page.text).split())
    assert "A chart over m shows of each backend the best" in text
    assert "A chart at one m shows every implementation" in text
    assert "within 0.5% of it" in text
    # A single m has its answer once.
    assert text.count("m=1024: don't overlap") == 1


def test_charts_have_their_titles_only_where_they_stand_alone(tmp_path: Path) -> None:
    chart = kernel_figure(only(write_family(tmp_path)), "kernel_1")
    assert chart.spec["title"]["text"].startswith("ag_gemm n=57344")
    assert "title" not in chart.untitled.spec
    assert '"title":{"text":"ag_gemm' not in page_of(tmp_path).replace(" ", "")


def test_many_m_have_short_subtitles_and_words_only_where_the_bound_changes(tmp_path: Path) -> None:
    for i in range(1, 51):
        # The communication takes longer up to 25, and the fastest changes at every m.
        comm_us = 120.0 if i <= 25 else 80.0
        measured = {"a": implementation(150.0 + i % 2), "b": implementation(151.0 - i % 2)}
        make_point("kernel", tmp_path, kernel_config(64 * i), implementations=baselines(comm_us=comm_us) | measured)
    panel = panel_of(tmp_path)
    assert [(binding.m, binding.what) for binding in panel.bindings] == [(64, "comm."), (64 * 26, "GEMM")]
    title = kernel_chart.chart(panel).to_dict(validate=False)["title"]
    assert len(panel.subtitle) > 300
    assert len(title["subtitle"]) == 2
    assert title["subtitle"][1].endswith(" ...")


def test_of_many_kernels_the_page_has_some_charts_and_all_answers(tmp_path: Path) -> None:
    count = MOST_KERNEL_CHARTS + 1
    for i in range(count):
        make_point("kernel", tmp_path, kernel_config(n=4096 * (i + 1)), implementations={"ring": implementation(150.0)})
    files = files_of(tmp_path)
    page = files["report.html"].decode()
    assert page.count('<figure class="chart') == MOST_KERNEL_CHARTS
    assert sum(name.startswith("plots/kernel_") for name in files) == MOST_KERNEL_CHARTS
    assert page.count('id="kernel-table-') == count
    assert f"Charts are drawn of the first {MOST_KERNEL_CHARTS} kernels" in page


def test_too_many_rows_are_left_to_the_tables_beside_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family(tmp_path)
    monkeypatch.setattr("overlap_sweep.report.page.page.MOST_KERNEL_ROWS", 10)
    page = page_of(tmp_path)
    assert 'id="kernels-table"' not in page
    assert "would be 21 rows here: see kernels.csv" in page


def test_pngs_of_a_single_m_and_of_several(tmp_path: Path) -> None:
    make_point("kernel", tmp_path / "one", kernel_config(tp_size=2), implementations={"a": implementation(150.0, 1.0)})
    write_family(tmp_path / "family")
    files = files_of(tmp_path)
    pngs = [content for name, content in files.items() if name.startswith("plots/kernel_")]
    assert len(pngs) == 2
    assert all(png.startswith(b"\x89PNG") and len(png) > 5000 for png in pngs)


def test_the_page_of_operators_is_the_same_beside_kernels(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep")
    alone = analysis_of(tmp_path)
    write_family(tmp_path / "kernels")
    beside = analysis_of(tmp_path)
    assert beside.rows == alone.rows
    assert [(case.case, case.plans) for case in beside.cases] == [(case.case, case.plans) for case in alone.cases]
    assert [case.drift for case in beside.cases] == [case.drift for case in alone.cases]
    assert "kernels-table" in page_of(tmp_path)


def test_tables_have_what_was_compared_and_what_was_measured(tmp_path: Path) -> None:
    analysis = analysis_of(write_family(tmp_path))
    compared = compared_table(analysis.kernels[0])
    assert [row[1].text for row in compared.rows[:6]] == [
        "sequential", "gemm_only", "comm_only", "bulk", "fused", "ring",
    ]  # fmt: skip
    assert [cell.text for cell in compared.rows[4]][-3:] == ["+20.0%", "1e-03", "use this"]
    points = kernels_table(analysis)
    # All but m is the same in all points.
    assert points.columns[:4] == ["m", "backend", "implementation", "status"]
    by_status = {row[3].text for row in points.rows}
    assert by_status == {"ok", "left out", "skipped"}
    assert len(points.rows) == len(analysis.kernel_rows)
