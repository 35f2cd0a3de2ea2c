"""What is said of all-reduces: for each TP size how many chunks to cut the output into."""

from overlap_sweep.report.charts import Axis, Key, Row, Rows
from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.section import Answer, Exhibit, Section, Sources
from overlap_sweep.report.table import (
    DIRECTORY,
    ERROR,
    MODEL,
    POINT,
    STATUS,
    Column,
    Listing,
    PointRow,
    Table,
    asked,
    points_table,
)
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.points import Point
from overlap_sweep.results.verdict import choose
from toy_workload.result import ToyTimes


def time(point: Point) -> Estimate:
    return estimate(point.measured_as(ToyTimes).time.samples_us)


def chunks(point: Point) -> int:
    return int(point.config["toy"]["chunks"])


CHUNKS = Column("", chunks, kind="count", header="chunks")
TIME = Column("time_us", lambda point: time(point).time_us, "All chunks of one output.", header="time us", show=as_us)
ASKED = asked("tp_size", kind="count", header="TP"), asked("chunks", "toy", "chunks", kind="count", header="chunks")
TABLE = points_table("toy", "one row per point", (POINT, DIRECTORY, MODEL, *ASKED, STATUS, ERROR), (TIME,))


def section(sources: Sources) -> Section | None:
    points = sources.points("toy")
    ok = sorted((point for point in points if point.status == "ok"), key=chunks)
    rows = [PointRow(point, sources.reading.root, point if point in ok else None) for point in points]
    sizes = sorted({point.config["tp_size"] for point in ok})
    found = Section(
        name="toy",
        what="all-reduces",
        title="All-reduces",
        explained="One all-reduce for each chunk of the output.",
        answers=[_answer(tp_size, [point for point in ok if point.config["tp_size"] == tp_size]) for tp_size in sizes],
        points=Listing(TABLE, rows, "Every point."),
        report={"toy_points": TABLE.records(rows)},
    )
    return found if points else None


def _answer(tp_size: int, points: list[Point]) -> Answer:
    chosen = choose(points, time).chosen
    rows = [Row(name=f"{chunks(point)} chunks", ends=[time(point).time_us]) for point in points]
    parts, axis = [Key("all-reduce", "comm")], Axis("us")
    chart = Rows(title="All-reduce", subtitle="by chunks", axis=axis, parts=parts, rows=rows)
    return Answer(
        title=f"All-reduce of TP={tp_size}",
        sentences=[f"Cut it into {chunks(chosen)} chunks: {as_us(time(chosen).time_us)} us."],
        cautions=[],
        compared=Listing(Table("toy", "one row per setting", (CHUNKS, TIME)), points, chosen=lambda p: p is chosen),
        points=points,
        charts=[Exhibit(chart=lambda: chart)],
    )
