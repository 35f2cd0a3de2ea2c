"""Kernels for people and programs: which implementation to use at which m, and what that comes from."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from overlap_sweep.overlap import space
from overlap_sweep.overlap.kernel_shape import BASELINES, COMM_ONLY, KERNELS, SEQUENTIAL
from overlap_sweep.report.numbers import as_percent, as_rate, as_us
from overlap_sweep.report.section import Answer, Exhibit, Section, Sources
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
    through,
)
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import measured_on, recorded, recorded_warnings
from overlap_sweep.workloads.kernel.answer import (
    Beside,
    ImplementationRow,
    KernelAnalysis,
    ShapeAnalysis,
    analyse_kernels,
    answers_in_words,
    name_in_tables,
    subjects,
)
from overlap_sweep.workloads.kernel.chart import kernel_chart
from overlap_sweep.workloads.kernel.result import KernelTimes

K = TypeVar("K")

MOST_TABLES = 3
"""More would not be read on a terminal."""
MOST_CHARTS = 12
"""As many as a page is scrolled through for; a chart takes half a second to draw."""

C = Column[ImplementationRow]
OfPoint = Column[PointRow[ImplementationRow]]
OfShape = Column[ShapeAnalysis]


def as_error(relative_error: float) -> str:
    return f"{relative_error:.0e}" if relative_error else "0"


def _other_knobs(setting: Mapping[str, Any]) -> str | None:
    others = [f"{name}={value}" for name, value in setting.items() if name not in ("method", *space.KNOBS)]
    return ", ".join(others) or None


OF_BACKEND = attribute("backend", "Empty for a baseline.", "text", header="backend")
IMPLEMENTATION = attribute("implementation", read="name", kind="text", header="implementation", style="setting")
SETTING: tuple[Column[Mapping[str, Any]], ...] = (
    Column("method", lambda setting: setting.get("method"), kind="text"),
    *(
        Column(knob, lambda setting, knob=knob: setting.get(knob), kind="count" if knob in space.COUNTS else "flag")  # type: ignore[misc]
        for knob in space.KNOBS
    ),
    Column("other_knobs", _other_knobs, "Knobs of a backend from elsewhere.", "text"),
)
TIME = attribute("time_us", "Of a point its median.", header="time us", show=as_us)
OF_ONE_POINT = (
    C("q1_us", lambda row: row.measured[0].times.time.q1_us),
    C("q3_us", lambda row: row.measured[0].times.time.q3_us),
    attribute("repeats", kind="count", read="estimate.repeats"),
)
NOISE = attribute("noise_us", "95 % of it.", read="estimate.noise_us", header="noise us", show=as_us, dropped=2)
COMPARED_WITH = (
    *(C(f"{name}_us", lambda row, name=name: row.baselines_us[name]) for name in BASELINES),  # type: ignore[misc]
    attribute("bound_us", "The longer of gemm_only_us and comm_only_us."),
)
RATES = (
    attribute("tflops", "Of one GPU.", header="TFLOP/s", show=as_rate, high_first=True),
    attribute(
        "link_gb_per_s",
        "What one GPU receives, over the whole time.",
        header="GB/s",
        show=as_rate,
        dropped=3,
        queried=True,
        high_first=True,
    ),
    attribute(
        "hidden_fraction",
        "(sequential - time) / (sequential - gemm_only).",
        header="hidden",
        show=as_percent,
        dropped=4,
        queried=True,
        high_first=True,
    ),
    attribute("speedup", "Over sequential.", header="speedup", show="{:.2f}x".format, high_first=True),
    attribute("over_bound", "time_us over bound_us, minus 1.", header="vs bound", show="{:+.0%}".format),
)
RELATIVE_ERROR = attribute("relative_error", "Against float32.", header="error", show=as_error, dropped=1)
FLAGS = (
    attribute("independent", "Its GEMM does not wait for its communication.", "flag", queried=True),
    attribute("launch_bound", "The times say nothing about the device.", "flag"),
)
CHOSEN = attribute("chosen", "The answer for its shape, over all backends.", "flag", queried=True)
NOTE = C("", lambda row: row.note, kind="text", header="note", style="reason")


def _part(row: PointRow[ImplementationRow]) -> str | None:
    return name_in_tables(row.part, row.point.config) if row.part else None


def _setting(row: PointRow[ImplementationRow]) -> Mapping[str, Any] | None:
    """Also of an implementation that was not timed."""
    return row.measured.setting if row.measured else (row.point.config.get("implementations") or {}).get(row.part)


def _relative_error(row: PointRow[ImplementationRow]) -> float | None:
    """Also of what was left out for it."""
    if row.measured:
        return row.measured.relative_error
    errors = row.point.result.relative_error if row.part and row.point.result else {}
    return (math.inf if errors[row.part] is None else errors[row.part]) if row.part in errors else None


TABLE: Table[PointRow[ImplementationRow]] = Table(
    *("kernels", "one row per point and implementation, those left out too"),
    (
        *(POINT, DIRECTORY, replace(MODEL, header="")),
        asked("operator", kind="text", about="Whose sizes these are; empty where sizes were given."),
        asked("kernel", kind="text", header="kernel", differing=True),
        asked("m", kind="count", header="m"),
        *(asked(name, kind="count", header=name, differing=True) for name in ("n", "k")),
        asked("tp_size", kind="count", header="TP", differing=True),
        *(replace(PRECISION, differing=True, dropped=1), DEVICE, replace(BACKEND, queried=True)),
        OfPoint("implementation", _part, kind="text", header="implementation", style="setting"),
        *(through(column, _setting) for column in SETTING),
        *(replace(STATUS, about="The point's, or left_out: error says why."), ERROR),
        *map(of_measured, (TIME, *OF_ONE_POINT, *COMPARED_WITH, *RATES)),
        OfPoint("relative_error", _relative_error, RELATIVE_ERROR.about, header="error", show=as_error, dropped=1),
        *map(of_measured, (*FLAGS, CHOSEN, NOTE)),
    ),
)

COMPARED = Table(
    *("kernels", "one row per implementation and m"),
    (
        C("m", lambda row: row.shape.m, kind="count", header="m"),
        *(IMPLEMENTATION, OF_BACKEND, TIME, NOISE, *RATES, RELATIVE_ERROR, *FLAGS, NOTE),
    ),
)


def _of_chosen(column: C, header: str = "") -> OfShape:
    return through(column, lambda shape: shape.chosen, header=header)


ANSWERS = Table(
    *("answers", "one row per kernel and m: what to use"),
    (
        OfShape("kernel", lambda s: s.case.kernel, kind="text", header="kernel", words=lambda s: s.case.brief),
        OfShape("", lambda s: ", ".join(subjects(s.points)), kind="text", header="operator", dropped=1),
        OfShape("m", lambda s: s.m, kind="count", header="m"),
        *(
            OfShape(name, lambda s, name=name: getattr(s.case, name), kind="count")  # type: ignore[misc]
            for name in ("n", "k", "tp_size")
        ),
        OfShape("precision", lambda s: s.case.precision, kind="text"),
        OfShape("device", lambda s: s.case.device, kind="text", header="device", differing=True),
        *(_of_chosen(column) for column in (OF_BACKEND, IMPLEMENTATION)),
        OfShape("", lambda s: s.chosen.advice if s.chosen else "no answer", kind="text", header="use"),
        *(through(column, lambda shape: shape.chosen and shape.chosen.setting) for column in SETTING),
        replace(_of_chosen(TIME, header=TIME.header), dropped=2),
        _of_chosen(NOISE),
        *(through(column, lambda shape: shape.sequential) for column in COMPARED_WITH),
        *(_of_chosen(column, column.header if column.name == "speedup" else "") for column in RATES[:-1]),
        replace(_of_chosen(RATES[-1], RATES[-1].header), dropped=3),
        _of_chosen(RELATIVE_ERROR),
        OfShape("reason", lambda s: s.reason, kind="text"),
    ),
)

LEGEND = (
    "Times are relative to the sequential beside them; TFLOP/s and GB/s (received) are of one rank. The bound is the "
    "longer of the GEMM alone and the communication alone; hidden is (sequential - time) / (sequential - GEMM). "
    "independent: its GEMM does not wait for its communication, so it is no way to compute this kernel."
)
EXPLAINED = (
    "One GEMM with one collective, by every implementation that was measured. The bound is the longer of the GEMM "
    "alone and the communication alone, as torch and the collective library have them: no overlap of these two takes "
    "less. An implementation is taken only if it beats no overlap beyond the noise; of those within the noise of the "
    "fastest, the simplest. A chart over m shows of each backend the best that can be used at each m, and rings the "
    "answer; a chart at one m shows every implementation: in green the answer, hollow what cannot be one."
)


def section(sources: Sources) -> Section | None:
    """Returns what to use of each kernel, an answer for each case; None where no kernel is among the points."""
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
        explained=EXPLAINED,
        answers=[_answer(analysis) for analysis in analyses],
        points=Listing(
            *(TABLE, rows, "Every implementation of every point of a kernel, as measured in that point."),
            chosen=lambda row: row.measured is not None and row.measured.chosen,
            order=_place,
        ),
        report={"kernels": [_report(analysis) for analysis in analyses], "kernel_points": TABLE.records(rows)},
        decided=Listing(
            *(ANSWERS, shapes, "Kernels: what to use; times in microseconds, speedups over the sequential."),
            chosen=lambda shape: shape.chosen is not None and shape.chosen.name != SEQUENTIAL,
            link=lambda shape: number_of_case[shape.case],
        ),
        most_tables=MOST_TABLES,
        most_charts=MOST_CHARTS,
        launch_bound=len({row.directory for row in rows if row.is_launch_bound}),
        subjects=list(dict.fromkeys(analysis.case.kernel for analysis in analyses if not analysis.subjects)),
    )


def _place(row: PointRow[ImplementationRow]) -> tuple[object, ...]:
    """A missing point may know nothing of its sizes."""
    config = row.point.config
    texts = (str(config[name] or "") for name in ("kernel", "precision"))
    return *texts, *(config[name] or 0 for name in ("n", "k", "tp_size", "m"))


def _point_rows(
    points: Iterable[Point], shapes: Iterable[ShapeAnalysis], root: Path
) -> Iterator[PointRow[ImplementationRow]]:
    """Yields one for each implementation of a point that is ok, those left out last; else one for the point."""
    answers = {point.directory: shape.chosen for shape in shapes for point in shape.points}
    for point in points:
        if point.status != "ok":
            yield PointRow(point, root, None)
            continue
        measured = _measured_rows(point, answers[point.directory])
        yield from (PointRow(point, root, row, part=name) for name, row in measured.items())
        for name, reason in point.measured_as(KernelTimes).left_out.items():
            if name not in measured:
                yield PointRow(point, root, None, part=name, left_out=reason)


def _measured_rows(point: Point, answer: ImplementationRow | None) -> dict[str, ImplementationRow]:
    """Returns what a point that is ok measured, by name, as it was measured there; `answer`: the one for its shape over
    the points of all backends."""
    measured = point.measured_as(KernelTimes).implementations
    baselines_us = {name: measured[name].time.median_us for name in BASELINES}
    rows = {}
    for name, times in measured.items():
        backend, told = None if name in BASELINES else point.config["backend"], name_in_tables(name, point.config)
        time = Estimate(times.time.median_us, math.nan, len(times.time.samples_us))
        alone = [Beside(point.name, times, measured[SEQUENTIAL])]
        chosen = answer is not None and (answer.backend, answer.name) == (backend, told)
        note = "use this" if chosen else ""
        rows[name] = ImplementationRow(backend, told, point.config, alone, time, baselines_us, chosen, note)
    return rows


def _answer(analysis: KernelAnalysis) -> Answer:
    case, single = analysis.case, len(analysis.shapes) == 1
    rows = [row for shape in analysis.shapes for row in shape.rows]
    of_operators = f" ({', '.join(analysis.subjects)})" if analysis.subjects else ""
    return Answer(
        title=f"{case}{of_operators}: {KERNELS[case.kernel]}",
        brief=case.brief,
        sentences=[*([] if single else [answers_in_words(analysis)]), *(shape.answer for shape in analysis.shapes)],
        cautions=cautions(analysis),
        compared=Listing(
            *(COMPARED, rows, f"Every implementation at each m. {LEGEND}"),
            chosen=lambda row: row.chosen,
            faint=lambda row: row.backend is None,
            group=lambda row: row.shape.m,
        ),
        points=analysis.points,
        legend=LEGEND,
        charts=[
            Exhibit(
                chart=partial(kernel_chart, analysis),
                name=f"{case.kernel}_n{case.n}_k{case.k}_tp{case.tp_size}",
                small=not single,
            )
        ],
        details=[measured_on(analysis.points)],
    )


def cautions(analysis: KernelAnalysis) -> list[str]:
    """Returns what to know before believing the answers, and what was left out: a sentence each."""
    shapes = analysis.shapes
    launch_bound = _ms_by((row.label, shape.m) for shape in shapes for row in shape.rows if row.launch_bound)
    bound = "; ".join(f"{label} at {ms}" for label, ms in launch_bound.items())
    left_out = _ms_by(
        ((label, next(iter(reason.splitlines()), "no reason given")), shape.m)
        for shape in shapes
        for label, reason in shape.left_out.items()
        if label not in shape.wrong
    )
    return [
        *_beyond_bound(shapes),
        *([f"Launch-bound, their times say nothing about the device: {bound}."] if bound else []),
        *_wrong_numbers(shapes),
        *recorded_warnings(analysis.points),
        *(f"Left out: {label} at {ms}: {reason.removesuffix('.')}." for (label, reason), ms in left_out.items()),
    ]


def _beyond_bound(shapes: Iterable[ShapeAnalysis]) -> Iterator[str]:
    for shape in shapes:
        faster = [
            row
            for row in sorted(shape.implementations, key=lambda row: row.time_us)
            if row.comparable and row.time_us < shape.bound_us and row.estimate.differs_from(shape.binding.estimate)
        ]
        if not faster or shape.binding.launch_bound:
            continue
        same_gemm = next((row for row in faster if row.backend == "torch"), None)
        if shape.binding.name == COMM_ONLY:
            why = "its communication is faster than the library's"
        elif same_gemm:
            why = f"{same_gemm.label} has the GEMM that was measured alone, so that one is doubtful; measure it again"
        else:
            why = "its GEMM is faster than torch's"
        several = f" ({len(faster)} of {len(shape.implementations)} do)" if len(faster) > 1 else ""
        yield f"m={shape.m}: {faster[0].label} beats the bound by {-faster[0].over_bound:.1%}{several}: {why}."


def _wrong_numbers(shapes: Iterable[ShapeAnalysis]) -> Iterator[str]:
    found = _ms_by((label, shape.m) for shape in shapes for label in sorted(shape.wrong))
    for label, ms in found.items():
        why = next(shape.left_out[label] for shape in shapes if label in shape.wrong)
        said = f"{label} computed wrong numbers at {ms} ({why.removeprefix('wrong numbers: ')})"
        yield f"{said}: don't trust it at any m before you know why."


def _ms_by(pairs: Iterable[tuple[K, int]]) -> dict[K, str]:
    """Returns by what was found at which m: `m=64, 128`."""
    found: dict[K, list[int]] = defaultdict(list)
    for what, m in pairs:
        found[what].append(m)
    return {what: f"m={', '.join(map(str, ms))}" for what, ms in found.items()}


def _report(analysis: KernelAnalysis) -> dict[str, Any]:
    return {
        **analysis.case._asdict(),
        "subjects": analysis.subjects,
        **recorded(analysis.points),
        "recommendation": f"{analysis.case.brief}: {answers_in_words(analysis)}",
        "warnings": cautions(analysis),
        "answers": [
            {
                **answer,
                "setting": shape.chosen.setting if shape.chosen else None,
                "implementations": [
                    {**cells, "setting": row.setting, "points": list(row.points)}
                    for row, cells in zip(shape.rows, COMPARED.records(shape.rows), strict=True)
                ],
                "left_out": shape.left_out,
            }
            for shape, answer in zip(analysis.shapes, ANSWERS.records(analysis.shapes), strict=True)
        ],
    }
