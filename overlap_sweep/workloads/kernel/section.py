"""Kernels for people and programs: which implementation to use at which m, the measurements, and its chart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from overlap_sweep.overlap import space
from overlap_sweep.overlap.kernel_shape import COMM_ONLY, GEMM_ONLY, KERNELS, SEQUENTIAL
from overlap_sweep.report import charts
from overlap_sweep.report.charts.palette import looks_of
from overlap_sweep.report.numbers import as_percent, as_rate, as_us, some_of
from overlap_sweep.report.section import Answer, Card, Exhibit, Section, Sources
from overlap_sweep.report.table import (
    BACKEND,
    DEVICE,
    DIRECTORY,
    ERROR,
    MODEL,
    POINT,
    PRECISION,
    STATUS,
    Column,
    Listing,
    PointRow,
    Table,
    asked,
    attribute,
    of_measured,
    points_table,
    through,
)
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import measured_on, recorded, recorded_warnings
from overlap_sweep.workloads.kernel.answer import (
    SIMPLEST_FIRST,
    ImplementationRow,
    KernelAnalysis,
    ShapeAnalysis,
    analyse_kernels,
    kernel_rows,
    subjects,
)

MOST_TABLES = 3
"""More would not be read on a terminal."""
MOST_CHARTS = 12
"""As many as a page is scrolled through for; a chart takes half a second to draw."""

C = Column[ImplementationRow]
OfShape = Column[ShapeAnalysis]


IMPLEMENTATION = attribute("implementation", read="name", kind="text", header="implementation", style="setting")
OF_BACKEND = attribute(
    "backend",
    "Library that the implementation is from; empty for a baseline, which every backend measures.",
    "text",
    header="backend",
)
TIMES = (
    C("method", lambda row: row.setting.get("method"), kind="text"),
    *(
        C(knob, lambda row, knob=knob: row.setting.get(knob), kind="count" if knob in space.COUNTS else "flag")  # type: ignore[misc]
        for knob in space.KNOBS
    ),
    attribute("time_us", header="time us", show=as_us),
    attribute("noise_us", read="estimate.noise_us", header="noise us", show=as_us, dropped=2),
    *(
        C(name, lambda row, baseline=baseline: row.baselines_us[baseline])  # type: ignore[misc]
        for name, baseline in {"none_us": SEQUENTIAL, "floor_us": GEMM_ONLY, "comm_only_us": COMM_ONLY}.items()
    ),
    attribute("tflops", header="TFLOP/s", show=as_rate, high_first=True),
    attribute(
        *("link_gb_per_s", "Bytes that one rank receives from the others, over time_us."),
        header="GB/s",
        show=as_rate,
        dropped=3,
        queried=True,
        high_first=True,
    ),
    attribute(
        "hidden_fraction",
        header="hidden",
        show=as_percent,
        dropped=4,
        queried=True,
        high_first=True,
    ),
    attribute(
        "speedup",
        "none_us / time_us; none_us is the collective, then the GEMM, measured beside it.",
        header="speedup",
        show="{:.2f}x".format,
        high_first=True,
    ),
    attribute(
        "over_bound",
        "time_us over the longer of floor_us and comm_only_us, minus 1: what is left to gain.",
        header="vs bound",
        show="{:+.0%}".format,
    ),
    attribute(
        "relative_error",
        "Largest difference from the result in float32, over its largest magnitude.",
        header="error",
        show="{:.0e}".format,
        dropped=1,
    ),
)
FLAGS = (
    attribute(
        "independent",
        "Its GEMM does not wait for its communication, so it does not compute this kernel and is never chosen.",
        "flag",
        queried=True,
    ),
    attribute(
        "launch_bound", "The CPU enqueued it, or the baseline beside it, more slowly than the GPU ran it.", "flag"
    ),
    attribute("chosen", "The implementation to use for this shape, over all backends.", "flag", queried=True),
    C("", lambda row: row.note, kind="text", header="note", style="reason"),
)
TABLE = points_table(
    "kernels",
    "one row per point and implementation",
    (
        *(POINT, DIRECTORY, replace(MODEL, header="")),
        asked("operator", kind="text", about="Operator whose sizes were taken; empty where m, n and k were given."),
        asked("kernel", kind="text", header="kernel", differing=True),
        asked("m", kind="count", header="m"),
        *(asked(name, kind="count", header=name, differing=True) for name in ("n", "k")),
        asked("tp_size", kind="count", header="TP", differing=True),
        *(replace(PRECISION, differing=True, dropped=1), DEVICE, replace(BACKEND, queried=True)),
        *(of_measured(IMPLEMENTATION), STATUS, ERROR),
    ),
    (*TIMES, *FLAGS),
)
COMPARED = Table(
    *("kernels", "one row per implementation and m"),
    (attribute("m", kind="count", header="m"), IMPLEMENTATION, OF_BACKEND, *TIMES, *FLAGS),
)
ANSWERS = Table(
    *("answers", "one row per kernel and m: what to use"),
    (
        OfShape("kernel", lambda s: s.case.kernel, kind="text", header="kernel", words=lambda s: s.case.brief),
        OfShape("", lambda s: ", ".join(subjects(s.points)), kind="text", header="operator", dropped=1),
        attribute("m", kind="count", header="m"),
        *(attribute(name, kind="count", read=f"case.{name}") for name in ("n", "k", "tp_size")),
        attribute("precision", kind="text", read="case.precision"),
        attribute("device", kind="text", read="case.device", header="device", differing=True),
        attribute("", kind="text", read="advice", header="use"),
        *(through(column, lambda s: s.chosen, header="") for column in (OF_BACKEND, IMPLEMENTATION)),
        *(through(column, lambda s: s.chosen) for column in TIMES),
        attribute("reason", kind="text"),
    ),
)

LEGEND = (
    "Times are relative to the sequential beside them; TFLOP/s and GB/s (received) are of one rank. The bound is the "
    "longer of the GEMM alone and the communication alone; hidden is (sequential - time) / (sequential - GEMM). "
    "independent: its GEMM does not wait for its communication, so it is no way to compute this kernel."
)


def section(sources: Sources) -> Section | None:
    """Returns the section on kernels, with an answer for each case; None without such points."""
    points = sources.points("kernel")
    if not points:
        return None
    analyses = analyse_kernels(points)
    shapes = [shape for analysis in analyses for shape in analysis.shapes]
    number_of_case = {analysis.case: number for number, analysis in enumerate(analyses)}
    rows = list(_point_rows(points, shapes, sources.reading.root))
    return Section(
        name="kernels",
        what="kernels",
        title="Kernels",
        topic="kernels that overlap",
        explained=LEGEND,
        answers=[_answer(analysis) for analysis in analyses],
        points=Listing(
            *(TABLE, rows, "Every implementation of every point of a kernel, as measured in that point."),
            chosen=lambda row: row.measured is not None and row.measured.chosen,
        ),
        report={
            "kernels": [
                {
                    **analysis.case._asdict(),
                    **recorded(analysis.points),
                    "recommendation": f"{analysis.case.brief}: {analysis.in_words}",
                    "warnings": cautions(analysis),
                    "answers": ANSWERS.records(analysis.shapes),
                    "implementations": COMPARED.records(row for shape in analysis.shapes for row in shape.rows),
                }
                for analysis in analyses
            ],
            "kernel_points": TABLE.records(rows),
        },
        decided=Listing(
            *(ANSWERS, shapes, "Kernels: what to use; times in microseconds, speedups over the sequential."),
            chosen=lambda shape: shape.chosen is not None and shape.chosen.name != SEQUENTIAL,
            link=lambda shape: number_of_case[shape.case],
        ),
        most_tables=MOST_TABLES,
        most_charts=MOST_CHARTS,
        launch_bound=len({row.directory for row in rows if row.is_launch_bound}),
        subjects=list(dict.fromkeys(analysis.case.kernel for analysis in analyses if not subjects(analysis.points))),
    )


def _point_rows(
    points: Iterable[Point], shapes: Iterable[ShapeAnalysis], root: Path
) -> Iterator[PointRow[ImplementationRow]]:
    """Yields one row for each implementation of an `ok` point, as measured there; else one for the point."""
    answers = {point.directory: shape.chosen for shape in shapes for point in shape.points}
    for point in points:
        if point.status != "ok":
            yield PointRow(point, root, None)
            continue
        answer = answers[point.directory]
        for row in kernel_rows([point]):
            yield PointRow(point, root, replace(row, chosen=answer is not None and answer.label == row.label))


def _answer(analysis: KernelAnalysis) -> Answer:
    case = analysis.case
    of_operators = f" ({', '.join(found)})" if (found := subjects(analysis.points)) else ""
    return Answer(
        title=f"{case.brief} on {case.device}{of_operators}: {KERNELS[case.kernel]}",
        brief=case.brief,
        sentences=[*([analysis.in_words] if len(analysis.shapes) > 1 else []), *(s.answer for s in analysis.shapes)],
        card=Card(case.brief, analysis.in_words, [f"{shape.answer}." for shape in analysis.shapes]),
        cautions=cautions(analysis),
        compared=Listing(
            COMPARED,
            [row for shape in analysis.shapes for row in shape.rows],
            "Every implementation at each m.",
            chosen=lambda row: row.chosen,
            faint=lambda row: row.backend is None,
            group=lambda row: row.m,
        ),
        points=analysis.points,
        legend=LEGEND,
        charts=[
            Exhibit(partial(kernel_lines, analysis), f"{case.kernel}_n{case.n}_k{case.k}_tp{case.tp_size}", small=True)
        ],
        details=[measured_on(analysis.points)],
    )


def cautions(analysis: KernelAnalysis) -> list[str]:
    """Returns what to know before believing the answers, and what was left out, a sentence each."""
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for shape in analysis.shapes:
        for row in shape.rows:
            if row.launch_bound:
                found["Launch-bound, their times say nothing about the device"][row.label].append(shape.m)
            elif row.usable and row.time_us + row.estimate.noise_us < row.bound_us:
                found["Faster than the bound, by a faster GEMM or communication"][row.label].append(shape.m)
        for label, reason in shape.left_out.items():
            found[f"Left out, {' '.join(reason.split()).removesuffix('.')}"][label].append(shape.m)
    return [
        *(
            f"{what}: {some_of(f'{label} at m={some_of(ms)}' for label, ms in of_labels.items())}."
            for what, of_labels in found.items()
        ),
        *recorded_warnings(analysis.points),
    ]


def kernel_lines(analysis: KernelAnalysis) -> charts.Lines:
    """Returns time over bound against m: a line for the best usable implementation of each backend, and one for
    `sequential`. Times, and TFLOP/s too, change so much with m that lines would overlap; the distance to the bound
    compares across m."""
    points: dict[str, list[charts.LinePoint]] = defaultdict(list)
    for shape in analysis.shapes:
        best: dict[str, ImplementationRow] = {}
        # Within the noise of what was chosen there may be a faster one that is less simple.
        for row in sorted(shape.rows, key=lambda row: not row.chosen):
            if row.usable:
                best.setdefault(row.backend or SEQUENTIAL, row)
        for name, row in best.items():
            ratio, noise = row.over_bound + 1, row.estimate.noise_us / row.bound_us
            around = max(ratio / 2, ratio - noise), ratio + noise
            details = COMPARED.details(row)
            points[name].append(charts.LinePoint(row.m, ratio, *around, ringed=row.chosen, details=details))
    backends = sorted(points.keys() - {SEQUENTIAL})
    # Each backend has its own colour in all charts.
    looks = looks_of(list(dict.fromkeys([*SIMPLEST_FIRST, *backends]))) | {SEQUENTIAL: ("muted", "stroke")}
    return charts.Lines(
        title=", ".join([analysis.case.brief, *subjects(analysis.points)]),
        subtitle=analysis.in_words,
        x=charts.Axis("m", logarithmic=True),
        y=charts.Axis("time / bound", format=".3~g", logarithmic=True),
        lines=[
            charts.Line(name, points[name], *looks[name], dash=charts.DASHED if name == SEQUENTIAL else charts.SOLID)
            for name in sorted(points, key=lambda name: name != SEQUENTIAL)
        ],
        references=[charts.Reference("the bound", 1.0)],
    )
