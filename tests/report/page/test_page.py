"""The page as a whole, parts of its charts, and PNGs; golden files hold what is drawn."""

import itertools
import json
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.report.charts import (
    COLOURS,
    LOST,
    Lines,
    chart_config,
    colour,
    cut,
    figures,
    in_light,
    looks_of,
    style_sheet,
)
from overlap_sweep.report.charts.figures import Figure, figure, png
from overlap_sweep.report.iterations import CLASSES, MOST_SPANS, timeline
from overlap_sweep.results.points import read_points
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.study.exhibits import MOST_BARS, settings_bars
from overlap_sweep.workloads.fsdp.study import STUDY
from overlap_sweep.workloads.kernel.answer import analyse_kernels
from overlap_sweep.workloads.kernel.section import kernel_lines
from overlap_sweep.workloads.layer.section import layer_timeline
from overlap_sweep.workloads.operator.chart import hidden_bars
from overlap_sweep.workloads.tp_training.study import MOST_CURVES, MOST_POINTS, loss_lines
from tests.analyze import analyze, analyze_process
from tests.commands.test_query import DEFAULT, NONE
from tests.golden.archives import unpack
from tests.golden.made_report import BEST_TRACE, NONE_TRACE, write_traced
from tests.made_sweeps import rounds, write_every_workload, write_sweep
from tests.make_point import (
    baselines,
    default_timing,
    falling,
    implementation,
    kernel_config,
    make_point,
    operator_config,
    pass_times,
    resolved,
    stack_config,
)
from tests.report.conftest import Made
from tests.report.page.reports import Parsed, files_of, page_of
from tests.results.reading import layer_point, operators_of, stacks_of, training_of


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    """Of every workload, with timelines."""
    directory = tmp_path_factory.mktemp("everything")
    write_every_workload(directory)
    write_traced(directory / "traced")
    return Parsed(page_of(directory))


def test_needs_nothing_from_anywhere(page: Parsed) -> None:
    assert all(not re.match(r"(?i)[a-z]+:|//", address) or address == "data:," for address in page.addresses)
    in_styles = re.findall(r"url\(\s*['\"]?([^)]{0,10})", "".join(page.styles))
    assert all(address.startswith("data:") for address in in_styles)
    assert "@import" not in "".join(page.styles)


def test_every_link_leads_somewhere_and_every_chart_can_be_heard(page: Parsed) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    tables = {"operators-table", "kernels-table", "training-table"}
    assert {"kernels", "training", "copies", "tp_training", *tables} <= set(ids)
    assert {address.removeprefix("#") for address in page.addresses if address.startswith("#")} - set(ids) == set()
    labels = {attributes["id"]: attributes["aria-label"] for tag, attributes in page.tags if tag == "figure"}
    assert len(labels) > 15
    assert all(labels.values())


def test_every_kind_of_chart_is_what_vega_lite_takes(page: Parsed, made: Made, tmp_path: Path) -> None:
    import altair as alt

    of_page = [script for script in page.scripts if '"$schema"' in script]
    names = [attributes["id"] or "" for tag, attributes in page.tags if tag == "figure"]
    found = {re.sub("_[0-9]+|_tp[248].*|_n[0-9].*", "", name): spec for name, spec in zip(names, of_page, strict=True)}
    for kind, pair in {"points": ("old", "new"), "runs": ("cuda", "rocm"), "traces": (NONE, DEFAULT)}.items():
        analyze("compare", *(made("compared") / one for one in pair), "--output", tmp_path / kind, "--plots")
        found |= {f"{kind} {path.name}": path.read_text() for path in (tmp_path / kind).glob("*.png")}
    assert len(found) > 14
    for text in found.values():
        spec = json.loads(text)
        (alt.TopLevelConcatSpec if "concat" in spec else alt.TopLevelLayerSpec).validate(spec)
        assert all(_titles(spec)), spec


def _titles(spec: Any) -> Iterator[str | None]:
    """Yields the titles of all axes of numbers."""
    for one in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        if isinstance(one, dict) and one.get("axis"):
            yield one["title"] if one["type"] == "quantitative" else "names"
        yield from _titles(one)


def test_colours_are_those_of_the_palette() -> None:
    text = json.dumps(chart_config())
    assert set(re.findall(r"var\(--([a-z0-9]+)\)", text)) <= COLOURS.keys()
    assert "var(" not in in_light(text)
    assert "#fff" not in text
    assert all(f"--{name}: light-dark(" in style_sheet() for name in COLOURS)
    with pytest.raises(KeyError):
        colour("mauve")


# Parts of charts, and what is left out of those with too much in them.


def curves_of(directory: Path) -> Lines:
    (analysis,) = stacks_of(directory)
    return loss_lines(analysis)


def test_no_two_lines_of_a_panel_look_the_same() -> None:
    assert looks_of(["arm0", "arm1"]) == {"arm0": ("series1", "circle"), "arm1": ("series2", "square")}
    assert len(set(looks_of([f"arm{i}" for i in range(36)]).values())) == 36


# Kernels.


def test_charts_have_titles_only_where_they_stand_alone(made: Made) -> None:
    chart = figure("kernel_1", kernel_lines(analyse_kernels(read_points(made("kernels")).points)[0]))
    assert ("title" in chart.spec, "title" in chart.untitled.spec) == (True, False)


def test_kernels_are_drawn_against_their_bound_and_the_subtitle_is_cut(tmp_path: Path) -> None:
    for i in range(1, 51):
        # The communication takes longer up to 25, and the fastest changes at every m.
        comm_us = 120.0 if i <= 25 else 80.0
        measured = {"a": implementation(150.0 + 6 * (i % 2)), "b": implementation(156.0 - 6 * (i % 2))}
        make_point("kernel", tmp_path, kernel_config(64 * i), implementations=baselines(comm_us=comm_us) | measured)
    chart = kernel_lines(analyse_kernels(read_points(tmp_path).points)[0])
    # The bound is the longer of the two.
    assert next(line.points[0].y for line in chart.lines if line.name == "torch") == pytest.approx(150.0 / 120.0)
    title = figure("kernel", chart).spec["title"]
    assert len(chart.subtitle) > 300
    assert len(title["subtitle"]) == 3
    assert title["subtitle"][-1].endswith(" ...")


def test_a_page_has_charts_of_some_kernels_and_answers_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(4):
        make_point("kernel", tmp_path, kernel_config(n=4096 * (i + 1)), implementations={"ring": implementation(150.0)})
    monkeypatch.setattr("overlap_sweep.workloads.kernel.section.MOST_CHARTS", 3)
    files = files_of(tmp_path)
    page = files["report.html"].decode()
    assert page.count('<figure class="chart') == sum(name.startswith("plots/kernels_") for name in files) == 3
    assert len(re.findall('id="kernels-[0-9]-table"', page)) == 4
    assert "Only the first 3 answers have charts." in page


def test_too_many_rows_of_kernels_are_left_to_the_csv_file(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'id="kernels-table"' in page_of(made("kernels"))
    monkeypatch.setattr("overlap_sweep.report.page.MOST_ROWS", 10)
    page = page_of(made("kernels"))
    assert 'id="kernels-table"' not in page
    assert "kernels.csv has all 19 rows of kernels" in page


def test_lines_to_copy_say_beside_them_where_they_hold(tmp_path: Path) -> None:
    """Of a CPU they hold for it alone; of userbuffers on GPUs everywhere."""
    for device, backend in (("cpu", "torch"), ("cuda", "transformer_engine")):
        changed = {"backend": backend, "runtime.device": device}
        point = operator_config(2, "fc1", "all", "bulk", num_sm=4, **changed)
        make_point("operator", tmp_path / device, point, bwd=pass_times(320.0, 400.0, 300.0))
    on_cpu, on_gpu = page_of(tmp_path / "cpu"), page_of(tmp_path / "cuda")
    warned, box = (
        on_cpu.index('<p class="limits">Measured on a CPU: the answer holds for this CPU only.'),
        '<div class="use">',
    )
    assert on_cpu[warned:].partition(box)[0].count("</") == 1
    assert box in on_gpu
    assert 'class="limits"' not in on_gpu


# Bars and curves of training.


def test_parts_of_a_bar_follow_each_other() -> None:
    assert cut(1.0, 1.5, 2.0) == [1.0, 1.5, 2.0, 2.0]
    # Overlap that harms hides nothing and loses 0.5; by noise the step or the time without overlap is below the floor.
    assert cut(1.0, 2.5, 2.0) == [1.0, 2.0, 2.0, 2.5]
    assert cut(1.0, 0.9, 2.0) == [0.9, 0.9, 2.0, 2.0]
    assert cut(1.0, 1.5, 0.9) == [1.0, 1.0, 1.0, 1.5]


def test_what_overlap_loses_has_a_bar_and_an_entry_of_the_legend_of_its_own(tmp_path: Path) -> None:
    for ahead, step_us in ((0, 1500.0), (1, 2300.0)):
        point = resolved("fsdp", **{"fsdp.forward_prefetch": ahead})
        make_point("fsdp", tmp_path / str(ahead), point, step_us=step_us, none_us=1800.0, floor_us=1000.0)
    slower = json.dumps(figure("slower", settings_bars(STUDY, training_of(tmp_path))).spec)
    faster = json.dumps(figure("faster", settings_bars(STUDY, training_of(tmp_path / "0"))).spec)
    assert (LOST.name in slower, LOST.name in faster) == (True, False)
    assert colour(LOST.colour) in slower


def test_an_overlap_that_harms_is_drawn_below_zero(tmp_path: Path) -> None:
    for num_sm, time_us in ((4, 460.0), (8, 520.0)):
        passes = pass_times(time_us, 400.0, 300.0, default=default_timing(900.0, 400.0))
        make_point("operator", tmp_path, operator_config(2, "fc1", "all", "bulk", num_sm=num_sm), bwd=passes)
    (analysis,) = operators_of(tmp_path).cases
    bars = hidden_bars(analysis)[2]
    (row,) = bars.rows
    assert row.ends == [0.0]
    assert [(dot.shape, round(dot.at, 3)) for dot in row.dots] == [("triangle-left", -5.0), ("diamond", -0.6)]
    assert bars.axis.domain == (-1.05, 1.05)
    assert [key.name for key in bars.legend] == ["default", "fastest overlap, not chosen"]


def test_of_many_settings_the_fastest_and_the_simplest_are_drawn(tmp_path: Path) -> None:
    for ahead in range(MOST_BARS + 5):
        make_point("fsdp", tmp_path, resolved("fsdp", **{"fsdp.forward_prefetch": ahead}), step_us=1500.0 - 10 * ahead)
    chart = settings_bars(STUDY, training_of(tmp_path))
    assert (len(chart.rows), chart.rows[-1].name) == (MOST_BARS + 1, "defaults")
    assert f"{MOST_BARS + 1} of {MOST_BARS + 5} settings" in chart.axis.title


def test_curves_that_lie_on_each_other_differ_in_width_and_colour(made: Made) -> None:
    curves = curves_of(made("stacks")).lines
    widths = [curve.width_px for curve in curves]
    assert widths == sorted(set(widths), reverse=True)
    assert all(one.colour != other.colour for one, other in itertools.pairwise(curves))


def test_a_curve_that_deviates_is_among_those_drawn(tmp_path: Path) -> None:
    for tp_size in range(1, MOST_CURVES + 3):
        for impl in ("megatron", "fsdp_dtensor"):
            make_point("tp_training", tmp_path, stack_config(impl, tp_size))
    off = falling(off={3: None, 6: 9.0})
    make_point("tp_training", tmp_path, stack_config("autotp", MOST_CURVES + 2), losses=off)
    chart = curves_of(tmp_path)
    assert len(chart.lines) == MOST_CURVES
    assert f"{MOST_CURVES} of {2 * MOST_CURVES + 5} settings" in chart.subtitle
    (deviating,) = (line for line in chart.lines if "autotp" in line.name)
    assert [point.x for point in deviating.points] == [0, 1, 2, 4, 5, 6]


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    steps = 3 * MOST_POINTS
    point = stack_config(**{"tp_training.num_training_steps": steps})
    make_point("tp_training", tmp_path, point, losses=[7.0 - step / steps for step in range(steps)])
    (curve,) = curves_of(tmp_path).lines
    assert len(curve.points) == MOST_POINTS


# Timelines.


def test_the_timeline_of_a_layer_has_no_overlap_above_the_best(tmp_path: Path) -> None:
    variants = {"none": rounds(1.0), "default": rounds(0.97), "floor": rounds(0.8)}
    traces = {trace_file(0, "none"): NONE_TRACE, trace_file(0, "default"): BEST_TRACE}
    written = make_point("layer", tmp_path, variants=variants, traces=list(traces))
    for name, path in traces.items():
        shutil.copy(path, written / name)
    drawn = layer_timeline("layer", layer_point(tmp_path), ("none", "none"), ("default", "default"))
    assert drawn
    none, best = (lane for lane in drawn.chart.lanes if lane.bold)
    assert (none.name, best.name) == ("none", "default")
    for passes in (none, best):
        assert [span.text.split()[0] for span in passes.spans] == ["forward", "backward"]
    assert best.spans[-1].end < none.spans[-1].end == pytest.approx(34076.02)
    kernels = [lane for lane in drawn.chart.lanes if not lane.bold]
    assert {lane.name for lane in kernels} == set(CLASSES.values())
    assert 0 < sum(len(lane.spans) for lane in kernels) <= 2 * MOST_SPANS
    for lane in kernels:
        assert all(earlier.end <= later.start for earlier, later in itertools.pairwise(lane.spans))
    assert layer_timeline("layer", layer_point(tmp_path), ("none", "none"), ("floor", "floor")) is None


def test_the_streams_of_a_training_step_say_when_communication_is_exposed(tmp_path: Path) -> None:
    traces = sorted(unpack("fsdp", tmp_path).glob("*/trace_*rank0.json.gz"))
    none, best = (next(one for one in traces if ("none" in one.name) is is_none) for is_none in (True, False))
    drawn = timeline("a step", {"no overlap": none, "best": best, "missing": None}, by_stream=True)
    assert drawn
    assert drawn.notes == ["Trace missing: missing."]
    names = [lane.name for lane in drawn.chart.lanes]
    assert [name.split(":")[0] for name in names if "step" in name] == ["no overlap", "best"]
    assert all("rank 0, step" in name for name in names if "step" in name)
    for what in ("compute", "all-gather", "reduce-scatter", "exposed"):
        assert sum(name.startswith(what) for name in names) >= 2
    for lane in drawn.chart.lanes:
        assert all(earlier.end <= later.start for earlier, later in itertools.pairwise(lane.spans))
    of_none = drawn.chart.lanes[: next(i for i, name in enumerate(names) if name.startswith("best"))]
    compute, exposed = (
        [span for lane in of_none for span in lane.spans if span.colour in colours]
        for colours in (("gemm", "compute"), ("bad",))
    )
    assert exposed
    # But for rounding.
    assert max(min(a.end, b.end) - max(a.start, b.start) for a in exposed for b in compute) < 0.02


# PNGs, which are not drawn elsewhere in these tests.


def dimensions(png: bytes) -> tuple[int, int]:
    """Width and height in pixels."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_pngs_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: None) -> None:
    """A file for each chart."""
    write_sweep(tmp_path / "sweep")
    make_point("layer", tmp_path / "sweep" / "layer", variants={"none": rounds(1.0), "default": rounds(0.97)})
    pngs = {name: png for name, png in files_of(tmp_path / "sweep").items() if name != "report.html"}
    one_by_tp_size = {f"plots/operators_1_hidden_tp{tp_size}.png" for tp_size in (2, 4)}
    assert {*one_by_tp_size, "plots/layers_1.png"} <= pngs.keys()
    for content in pngs.values():
        width, height = dimensions(content)
        assert (width >= 500, height >= 120, len(content) > 5000) == (True, True, True)

    def timelines_alone(chart: Figure) -> bytes:
        return png(chart) if "timeline" in chart.name else b""

    monkeypatch.setattr("overlap_sweep.report.page.png", timelines_alone)
    write_traced(tmp_path / "traced")
    timelines = [content for name, content in files_of(tmp_path / "traced").items() if "_timeline_" in name]
    assert len(timelines) > 4
    assert dimensions(timelines[0])[0] > 1300


def test_pngs_of_a_comparison(made: Made, tmp_path: Path, images: None) -> None:
    for one, two, least, count in (("old", "new", 500, 1), ("cuda", "rocm", 1200, 3)):
        analyze("compare", made("compared") / one, made("compared") / two, "--output", tmp_path / one, "--plots")
        sizes = [dimensions(path.read_bytes()) for path in (tmp_path / one).glob("*.png")]
        assert len(sizes) == count
        assert all(width > least and height > 200 for width, height in sizes)


# Where vl-convert cannot run


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was drawn here before."""
    monkeypatch.setenv("OVERLAP_SWEEP_CACHE", str(tmp_path / "cache"))
    for known in (figures.page_script, figures.why_it_cannot_run):
        known.cache_clear()
    yield
    for known in (figures.page_script, figures.why_it_cannot_run):
        known.cache_clear()


@pytest.mark.usefixtures("empty_cache")
def test_a_limit_of_address_space_leaves_charts_out(tmp_path: Path) -> None:
    """V8 would end the process by SIGTRAP."""
    make_point("operator", tmp_path / "sweep")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    done = analyze_process(tmp_path / "sweep", "--plots", preexec_fn=limit)
    why = "ulimit -v leaves vl-convert too little address space; use ulimit -v unlimited"
    assert (done.returncode, done.stderr) == (0, f"warning: Charts are left out: {why}.\n")
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert f"Charts are left out: {why}." in page
    assert "<figure" not in page


@pytest.mark.usefixtures("empty_cache")
def test_without_vl_convert_charts_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    make_point("operator", tmp_path / "sweep")
    done = analyze(tmp_path / "sweep", "--plots")
    why = "vl-convert is not installed; pip install vl-convert-python"
    assert (done.returncode, done.stderr) == (0, f"warning: Charts are left out: {why}.\n")
    assert "<figure" not in (tmp_path / "sweep" / "report.html").read_text()
    assert not (tmp_path / "sweep" / "plots").exists()
