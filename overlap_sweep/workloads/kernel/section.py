"""The report on kernels: columns, the implementation to use at each m, cautions, chart, and times for comparisons."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from overlap_sweep.overlap.models import COLLECTIVES, COMM_ONLY, GEMM_ONLY, KERNELS, SEQUENTIAL
from overlap_sweep.report import causes, charts
from overlap_sweep.report.charts import looks_of
from overlap_sweep.report.comparison import Comparing
from overlap_sweep.report.diagnosis import NODES
from overlap_sweep.report.numbers import as_percent, as_rate, some_of
from overlap_sweep.report.section import Answer, Card, Exhibit, File, Section, Sources
from overlap_sweep.report.table import (
    BACKEND,
    DEVICE,
    MODEL,
    PRECISION,
    Column,
    Listing,
    PointRow,
    Table,
    asked,
    attribute,
    measured_column,
    points_table,
    through,
)
from overlap_sweep.results.comparable import WHOLE, Comparable, Key, KeyedTime, Sample
from overlap_sweep.results.points import Point, group_points
from overlap_sweep.results.provenance import different_environments, measured_on, recorded, recorded_warnings
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.study.section import NOTE, case_columns, knob_columns
from overlap_sweep.study.words import LAUNCH_BOUND
from overlap_sweep.workloads.kernel.answer import (
    SIMPLEST_FIRST,
    ImplementationRow,
    KernelAnalysis,
    ShapeAnalysis,
    analyse_kernels,
    kernel_rows,
    name_in_tables,
    subjects,
)
from overlap_sweep.workloads.kernel.collectives import (
    BESIDE,
    SIZE_MB,
    CollectivesAnalysis,
    analyse_collectives,
    collective_rows,
    collectives_answer,
)
from overlap_sweep.workloads.kernel.collectives import LEGEND as LEGEND_ALONE
from overlap_sweep.workloads.kernel.collectives import TABLE as TABLE_ALONE
from overlap_sweep.workloads.kernel.config import Resolved
from overlap_sweep.workloads.kernel.result import KernelTimes

MOST_CHARTS = 12
"""Charts on a page; each takes half a second to draw."""

C = Column[ImplementationRow]

IMPLEMENTATION = attribute("implementation", read="name", kind="text", header="implementation", style="setting")
IMPLEMENTATION_BACKEND = attribute(
    "backend",
    "Library of the implementation; empty for a baseline, which every backend measures.",
    "text",
    header="backend",
)
TIMES = (
    C("method", lambda row: row.setting.get("method"), kind="text"),
    *knob_columns(attrgetter("setting")),
    attribute("time_us", header="time us"),
    attribute("noise_us", read="estimate.noise_us", header="noise us", dropped=2),
    C("none_us", lambda row: row.baselines_us[SEQUENTIAL]),
    C("floor_us", lambda row: row.baselines_us[GEMM_ONLY]),
    C("comm_only_us", lambda row: row.baselines_us[COMM_ONLY]),
    attribute("tflops", header="TFLOP/s", show=as_rate, high_first=True),
    attribute(
        "link_gb_per_s",
        "Bytes that one rank receives from the others, divided by time_us.",
        header="GB/s",
        show=as_rate,
        dropped=3,
        queried=True,
        high_first=True,
    ),
    attribute("hidden_fraction", header="hidden", show=as_percent, dropped=4, queried=True, high_first=True),
    attribute(
        "speedup",
        "none_us / time_us; none_us is the GEMM and the collective in sequence, measured in the same point.",
        header="speedup",
        show="{:.2f}x".format,
        high_first=True,
    ),
    attribute(
        "over_bound",
        "time_us over the longer of floor_us and comm_only_us, minus 1: the room for improvement.",
        header="vs bound",
        show="{:+.0%}".format,
    ),
    attribute(
        "relative_error",
        "Largest difference from the float32 result, relative to its largest magnitude.",
        header="error",
        show="{:.0e}".format,
        dropped=1,
    ),
)
FLAGS = (
    attribute(
        "independent",
        "The GEMM and the communication don't depend on each other: this does not compute the kernel, never chosen.",
        "flag",
        queried=True,
    ),
    attribute(
        "launch_bound", "The CPU enqueued it, or its sequential baseline, more slowly than the GPU ran it.", "flag"
    ),
    attribute("chosen", "The implementation to use for this kernel and m, over all backends.", "flag", queried=True),
    NOTE,
)
TABLE = points_table(
    "kernels",
    "one row per point and implementation",
    (
        replace(MODEL, header=""),
        asked("operator", kind="text", about="Operator that n and k are from; empty if they were given."),
        asked("kernel", kind="text", header="kernel", differing=True),
        asked("m", kind="count", header="m"),
        *(asked(name, kind="count", header=name, differing=True) for name in ("n", "k")),
        asked("tp_size", kind="count", header="TP", differing=True),
        NODES,
        replace(PRECISION, differing=True, dropped=1),
        DEVICE,
        replace(BACKEND, queried=True),
        measured_column(IMPLEMENTATION),
    ),
    (SIZE_MB, *TIMES, *BESIDE, *FLAGS),
)
IMPLEMENTATIONS = Table(
    "kernels",
    "one row per implementation and m",
    (attribute("m", kind="count", header="m"), IMPLEMENTATION, IMPLEMENTATION_BACKEND, *TIMES, *FLAGS),
)
ANSWERS = Table(
    "answers",
    "one row per kernel and m: the implementation to use",
    (
        attribute("kernel", kind="text", read="case.kernel", header="kernel", words=attrgetter("case.brief")),
        Column("", lambda s: ", ".join(subjects(s.points)), kind="text", header="operator", dropped=1),
        attribute("m", kind="count", header="m"),
        *case_columns((), ("n", "k", "tp_size", "nodes")),
        attribute("precision", kind="text", read="case.precision"),
        attribute("device", kind="text", read="case.device", header="device", differing=True),
        attribute("", kind="text", read="advice", header="use"),
        *(through(column, lambda s: s.chosen, header="") for column in (IMPLEMENTATION_BACKEND, IMPLEMENTATION)),
        *(through(column, lambda s: s.chosen) for column in TIMES),
        attribute("reason", kind="text"),
    ),
)

LEGEND = (
    "Times are normalised by the sequential time of the same point; TFLOP/s and GB/s (received) are per rank. bound: "
    "the longer of GEMM alone and communication alone; hidden: (sequential - time) / (sequential - GEMM alone). "
    "independent: GEMM and communication don't depend on each other, so this does not compute the kernel."
)


def section(sources: Sources) -> Section | None:
    """Returns the section on kernels, with an answer for each case; None if there are no kernel points."""
    points = sources.points("kernel")
    if not points:
        return None
    analyses = analyse_kernels(points)
    shapes = [shape for analysis in analyses for shape in analysis.shapes]
    number_of_case = {analysis.case: number for number, analysis in enumerate(analyses)}
    root, alone = sources.reading.root, analyse_collectives(points)
    rows = list(_point_rows(points, shapes, root))
    kept, offers = _calibrations(alone, root)
    answers = [*map(_answer, analyses), *map(collectives_answer, alone, offers)]
    return Section(
        name="kernels",
        what="kernels",
        title="Kernels",
        topic="overlapped kernels",
        explained=f"{LEGEND} Collectives {LEGEND_ALONE}" if alone else LEGEND,
        answers=answers,
        points=Listing(
            TABLE,
            rows,
            "Every implementation in every kernel point, as measured there.",
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
                    "implementations": IMPLEMENTATIONS.records(analysis.rows),
                }
                for analysis in analyses
            ],
            "collectives": [
                {**one.case._asdict(), **recorded(one.points), "collectives": TABLE_ALONE.records(one.rows)}
                for one in alone
            ],
            "kernel_points": TABLE.records(rows),
        },
        decided=Listing(
            ANSWERS,
            shapes,
            "Kernels: the implementation to use. Times in us; speedup over sequential.",
            chosen=lambda shape: shape.chosen is not None and shape.chosen.name != SEQUENTIAL,
            link=lambda shape: number_of_case[shape.case],
        )
        if shapes
        else None,
        files=kept,
        # Of single cases, on a terminal; more would not be read.
        most_tables=3,
        most_charts=MOST_CHARTS,
        subjects=list(dict.fromkeys(analysis.case.kernel for analysis in analyses if not subjects(analysis.points))),
    )


def _calibrations(alone: Sequence[CollectivesAnalysis], root: Path) -> tuple[list[File], list[list[str]]]:
    """Returns the files of what `predict` needs to know, and of each case the sentences on how to keep its own."""
    # It needs numpy, which help has no use for.
    from overlap_sweep.workloads.kernel.calibration import calibration_file, how_to_keep

    files = [calibration_file(analysis, root) for analysis in alone]
    return [file for file in files if file], [[how_to_keep(file)] if file else [] for file in files]


def _point_rows(
    points: Iterable[Point], shapes: Iterable[ShapeAnalysis], root: Path
) -> Iterator[PointRow[ImplementationRow]]:
    """Yields one row for each implementation of an `ok` point, as measured there, and one row for any other point."""
    chosen_rows = {point.directory: shape.chosen for shape in shapes for point in shape.points}
    for point in points:
        if point.status != "ok":
            yield PointRow(point, root, None)
            continue
        chosen = chosen_rows.get(point.directory)
        for row in (collective_rows if point.config_as(Resolved).kernel in COLLECTIVES else kernel_rows)([point]):
            measured = replace(row, chosen=chosen is not None and chosen.label == row.label)
            yield PointRow(point, root, measured, variant=row.name)


def _answer(analysis: KernelAnalysis) -> Answer:
    case = analysis.case
    operators = f" ({', '.join(found)})" if (found := subjects(analysis.points)) else ""
    answers, largest = [shape.answer for shape in analysis.shapes], analysis.shapes[-1]
    return Answer(
        title=f"{case.brief} on {case.device}{operators}: {KERNELS[case.kernel]}",
        brief=case.brief,
        sentences=[f"{analysis.in_words}.", *answers] if len(answers) > 1 else answers,
        card=Card(case.brief, analysis.in_words, answers),
        cautions=cautions(analysis),
        compared=Listing(
            IMPLEMENTATIONS,
            analysis.rows,
            "Every implementation at each m.",
            chosen=lambda row: row.chosen,
            faint=lambda row: row.backend is None,
            group=lambda row: row.m,
        ),
        points=analysis.points,
        legend=LEGEND,
        charts=[
            Exhibit(partial(kernel_lines, analysis), f"{case.kernel}_n{case.n}_k{case.k}_tp{case.tp_size}", small=True),
            # What is used at the largest m, and the GEMM and the collective in sequence.
            causes.exhibit(
                {
                    "": {
                        f"m={largest.m}, {row.label}": causes.first_traced(largest.points, row.name)
                        for row in largest.rows
                        if row.chosen or row.name == SEQUENTIAL
                    }
                }
            ),
        ],
        details=[measured_on(analysis.points)],
    )


def cautions(analysis: KernelAnalysis) -> list[str]:
    """Returns the caveats of the answers, and the implementations that were left out, a sentence each."""
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for shape in analysis.shapes:
        for row in shape.rows:
            if row.launch_bound:
                found[LAUNCH_BOUND][row.label].append(shape.m)
            elif row.usable and row.time_us + row.estimate.noise_us < row.bound_us:
                found["Faster than the bound: its own GEMM or communication is faster than the baseline's"][
                    row.label
                ].append(shape.m)
        for label, reason in shape.left_out.items():
            found[f"Left out ({' '.join(reason.split()).removesuffix('.')})"][label].append(shape.m)
    return [
        *(
            f"{caution}: {some_of(f'{label} at m={some_of(ms)}' for label, ms in ms_by_label.items())}."
            for caution, ms_by_label in found.items()
        ),
        *recorded_warnings(analysis.points),
        *different_environments(analysis.points),
    ]


def kernel_lines(analysis: KernelAnalysis) -> charts.Lines:
    """Returns time over bound against m: a line for the best usable implementation of each backend, and one for
    `sequential`. Times and TFLOP/s change too much with m to be compared in one chart."""
    points: dict[str, list[charts.LinePoint]] = defaultdict(list)
    for shape in analysis.shapes:
        best: dict[str, ImplementationRow] = {}
        # The chosen one first: a less simple one within the noise may be faster.
        for row in sorted(shape.rows, key=lambda row: not row.chosen):
            if row.usable:
                best.setdefault(row.backend or SEQUENTIAL, row)
        for name, row in best.items():
            ratio, noise = row.over_bound + 1, row.estimate.noise_us / row.bound_us
            around = max(ratio / 2, ratio - noise), ratio + noise
            details = IMPLEMENTATIONS.details(row)
            points[name].append(charts.LinePoint(row.m, ratio, *around, ringed=row.chosen, details=details))
    backends = sorted(points.keys() - {SEQUENTIAL})
    # Each backend has its own colour in all charts.
    looks = looks_of(list(dict.fromkeys([*SIMPLEST_FIRST, *backends]))) | {SEQUENTIAL: ("muted", "stroke")}
    return charts.Lines(
        title=", ".join([analysis.case.brief, *subjects(analysis.points)]),
        subtitle=analysis.in_words,
        x=charts.Axis("m, rows", logarithmic=True),
        y=charts.Axis("time / bound", format=".3~g", logarithmic=True),
        lines=[
            charts.Line(name, points[name], *looks[name], dash=charts.DASHED if name == SEQUENTIAL else charts.SOLID)
            for name in sorted(points, key=lambda name: name != SEQUENTIAL)
        ],
        references=[charts.Reference("the bound", 1.0)],
    )


def _measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns the measurements that are not launch-bound, pooled over all points of the same backend and shape. The
    baselines, which every backend measured, are the `none_us` and `floor_us` of the others. Kernels match by their
    sizes, whatever the model."""
    by_backend = group_points(points, "kernel", lambda point: point.config.backend)
    times = []
    for analysis in (one for own in by_backend.values() for one in analyse_kernels(own)):
        case = analysis.case
        for row in analysis.rows:
            if row.backend and not row.launch_bound:
                key = Key(
                    model=None,
                    tokens=row.m,
                    precision=case.precision,
                    backend=row.backend,
                    device=case.device,
                    tp_size=case.tp_size,
                    operator=f"{case.kernel} n={case.n} k={case.k}",
                    pass_name=WHOLE,
                    setting=row.name,
                    nodes=case.nodes,
                )
                none_us, floor_us = row.baselines_us[SEQUENTIAL], row.baselines_us[GEMM_ONLY]
                times.append(KeyedTime(key, row.estimate, none_us, floor_us, row.points))
    return Comparable(times)


def _samples(result: Result) -> dict[str, Sample]:
    """Returns the sample of each implementation that is not launch-bound, and of `sequential`; none of a collective
    alone."""
    point, implementations = result.point_as(Resolved), result.measured_as(KernelTimes).implementations
    if SEQUENTIAL not in implementations:
        return {}
    sequential_us = implementations[SEQUENTIAL].time.median_us
    return {
        name_in_tables(name, point): Sample((one.time,), sequential_us, "fwd", point.workload.tokens)
        for name, one in implementations.items()
        if name not in (GEMM_ONLY, COMM_ONLY) and not one.launch_bound
    }


COMPARING = Comparing(
    _measured, _samples, matched=("operator", "kernel", "m", "n", "k", "size_mb", "num_sm", "implementations")
)
