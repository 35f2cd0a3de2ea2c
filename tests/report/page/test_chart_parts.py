"""Parts of charts, and what is left out of those that would have too much in them; golden files hold what is drawn."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from overlap_sweep.report.page import kernel_chart
from overlap_sweep.report.page.case_figures import kernel_figure
from overlap_sweep.report.page.kernel_chart import HEIGHT_PX, KernelPanel, kernel_panel
from overlap_sweep.report.page.label_places import spread
from overlap_sweep.report.page.log_ticks import log_ticks
from overlap_sweep.report.page.loss_curves import MOST_CURVES, MOST_POINTS, CurvesPanel, curves_panel
from overlap_sweep.report.page.num_sm import LABEL_GAP_PX, looks_of
from overlap_sweep.report.page.stacks_chart import MOST_BARS as MOST_STACKS
from overlap_sweep.report.page.stacks_chart import stacks_panel
from overlap_sweep.report.page.time_bars import cut, lines_of
from overlap_sweep.report.page.training_chart import MOST_BARS, training_panel
from tests.make_point import baselines, falling, implementation, kernel_config, make_point, resolved, stack_config
from tests.report.conftest import Made
from tests.report.page.reports import analysis_of, files_of, page_of


def panel_of(directory: Path) -> KernelPanel:
    (analysis,) = analysis_of(directory).kernels
    return kernel_panel(analysis)


def curves_of(directory: Path) -> CurvesPanel:
    (analysis,) = analysis_of(directory).tp_training
    return curves_panel(analysis)


def test_nothing_in_a_panel_looks_the_same() -> None:
    wanted = {f"arm{i}": i for i in range(40)}
    assert looks_of(["arm0", "arm1"], wanted) == {"arm0": ("series1", "circle"), "arm1": ("series2", "square")}
    assert len({series for series, _ in looks_of(["arm0", "arm6", "arm12"], wanted).values()}) == 3
    assert len(set(looks_of(list(wanted)[:36], wanted).values())) == 36


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


def test_charts_have_titles_only_where_they_stand_alone(made: Made) -> None:
    chart = kernel_figure(analysis_of(made("kernels")).kernels[0], "kernel_1")
    assert ("title" in chart.spec, "title" in chart.untitled.spec) == (True, False)


def test_labels_of_lines_that_end_together_stand_apart(tmp_path: Path) -> None:
    for m in (1024, 2048):
        for backend in ("torch", "symm_mem", "transformer_engine", "flux", "mine"):
            make_point("kernel", tmp_path, kernel_config(m, backend), implementations={"a": implementation(150.0)})
    panel = panel_of(tmp_path)
    low, high = panel.range
    places = sorted((label.label_ratio - low) / (high - low) * HEIGHT_PX for label in panel.labels)
    assert len(places) == 7
    assert min(b - a for a, b in itertools.pairwise(places)) >= LABEL_GAP_PX - 1e-6


def test_words_only_where_the_bound_changes_and_a_short_subtitle(tmp_path: Path) -> None:
    for i in range(1, 51):
        # The communication takes longer up to 25, and the fastest changes at every m.
        comm_us = 120.0 if i <= 25 else 80.0
        measured = {"a": implementation(150.0 + i % 2), "b": implementation(151.0 - i % 2)}
        make_point("kernel", tmp_path, kernel_config(64 * i), implementations=baselines(comm_us=comm_us) | measured)
    panel = panel_of(tmp_path)
    assert [(binding.m, binding.what) for binding in panel.bindings] == [(64, "comm."), (64 * 26, "GEMM")]
    # The bound is the longer of the two.
    assert next(mark.ratio for mark in panel.marks if mark.line == "torch") == pytest.approx(150.0 / 120.0)
    title = kernel_chart.chart(panel).to_dict(validate=False)["title"]
    assert len(panel.subtitle) > 300
    assert len(title["subtitle"]) == 2
    assert title["subtitle"][1].endswith(" ...")


def test_of_many_kernels_the_page_has_some_charts_and_all_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 4
    for i in range(count):
        make_point("kernel", tmp_path, kernel_config(n=4096 * (i + 1)), implementations={"ring": implementation(150.0)})
    monkeypatch.setattr("overlap_sweep.report.page.page.MOST_KERNEL_CHARTS", count - 1)
    files = files_of(tmp_path)
    page = files["report.html"].decode()
    assert page.count('<figure class="chart') == count - 1
    assert sum(name.startswith("plots/kernel_") for name in files) == count - 1
    assert page.count('id="kernel-table-') == count


def test_too_many_rows_are_left_to_the_tables_beside_the_page(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'id="kernels-table"' in page_of(made("kernels"))
    monkeypatch.setattr("overlap_sweep.report.page.page.MOST_KERNEL_ROWS", 10)
    page = page_of(made("kernels"))
    assert 'id="kernels-table"' not in page
    assert "21 rows here: see kernels.csv" in page


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


def test_of_many_settings_the_fastest_and_the_simplest_are_drawn(tmp_path: Path) -> None:
    for ahead in range(MOST_BARS + 5):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), step_us=1500.0 - 10 * ahead)
    panel = training_panel(analysis_of(tmp_path).training[0])
    assert (len(panel.bars), panel.bars[-1].name) == (MOST_BARS + 1, "defaults")
    assert f"{MOST_BARS + 1} of {MOST_BARS + 5} settings" in panel.axis


def test_no_two_rows_have_one_name() -> None:
    long = ", ".join(f"a_knob_with_a_name_{i}=1" for i in range(20))
    names = lines_of(["short", long, f"{long}, and=more"])
    assert names[0] == "short"
    assert len(set(names)) == 3
    assert max(len(line) for name in names for line in name.splitlines()) <= 52


def test_of_many_stacks_the_first_are_drawn(tmp_path: Path) -> None:
    for dp_size in range(1, MOST_STACKS + 3):
        make_point("tp_training", tmp_path, stack_config("megatron", 1, dp_size))
    panel = stacks_panel(analysis_of(tmp_path).tp_training[0])
    assert len(panel.bars) == MOST_STACKS
    assert f"first {MOST_STACKS} of {MOST_STACKS + 2}" in panel.axis
    assert len(curves_of(tmp_path).looks) == MOST_CURVES


def test_curves_that_lie_on_each_other_are_all_seen(made: Made) -> None:
    panel = curves_of(made("stacks"))
    one, two = panel.looks[:4], panel.looks[4:]
    assert {name.split()[1] for name in (look.name for look in one)} == {"DP=1"}
    for of_same_data in (one, two):
        widths = [look.width_px for look in of_same_data]
        assert widths == sorted(set(widths), reverse=True)
        assert len({tuple(look.dash) for look in of_same_data}) == 1
        assert len({look.colour for look in of_same_data}) == len(of_same_data)
    assert one[0].dash != two[0].dash
    assert len(panel.looks) == 9


def test_who_deviates_is_drawn_among_many(tmp_path: Path) -> None:
    for tp_size in range(1, MOST_CURVES + 3):
        for impl in ("megatron", "fsdp_dtensor"):
            make_point("tp_training", tmp_path, stack_config(impl, tp_size))
    off = falling(off={3: None, 6: 9.0})
    make_point("tp_training", tmp_path, stack_config("autotp", MOST_CURVES + 2), losses=off)
    panel = curves_of(tmp_path)
    assert len(panel.looks) == MOST_CURVES
    assert f"{MOST_CURVES} of {2 * MOST_CURVES + 5} are drawn" in panel.subtitle
    assert [point.step for point in panel.points if "autotp" in point.name] == [0, 1, 2, 4, 5, 6]


def test_long_runs_are_thinned_and_keep_their_end(tmp_path: Path) -> None:
    steps = 3 * MOST_POINTS
    point = stack_config(**{"tp_training.num_training_steps": steps})
    make_point("tp_training", tmp_path, point, losses=[7.0 - step / steps for step in range(steps)])
    points = curves_of(tmp_path).points
    assert len(points) <= MOST_POINTS + 1
    assert points[-1].step == steps - 1
