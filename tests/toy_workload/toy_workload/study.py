"""Into how many chunks to cut the output of all-reduces."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.table import MODEL, asked, attribute
from overlap_sweep.results.comparable import WHOLE, Key, Sample, key_of_pass
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result
from overlap_sweep.study import CaseAnalysis, SettingRow, Study, Times, step_times, time_of_point
from overlap_sweep.study.section import NOISE, case_columns, tables
from overlap_sweep.study.settings import Naming, Options
from toy_workload.config import Resolved
from toy_workload.result import ToyTimes


class ToyCase(NamedTuple):
    model: str
    tp_size: int
    device: str
    nodes: int

    @property
    def brief(self) -> str:
        return f"All-reduce of {self.model}, TP={self.tp_size}"

    def __str__(self) -> str:
        return f"{self.brief} on {self.device}"


def timing(point: Point) -> Any:
    return point.measured_as(ToyTimes).time


TIME = attribute("time_us", "All chunks of one output.", header="time us", show=as_us)
TABLES = tables(
    "toy",
    case_columns(("model", "device"), ("tp_size", "nodes")),
    (
        MODEL,
        asked("tp_size", kind="count", header="TP"),
        asked("chunks", "toy", "chunks", kind="count", header="chunks"),
    ),
    (TIME, NOISE),
    reference="the whole output",
)


class ToyStudy(Study[ToyCase, SettingRow[Times]]):
    workload = name = "toy"
    row = SettingRow[Times]
    naming = Naming(usual=lambda options, name: 1)
    reference = "simplest"
    what = topic = "all-reduces"
    heading = "All-reduces"
    legend = "One all-reduce for each chunk of the output."
    points_key = "toy_points"
    points_table, compared, answers = TABLES

    def case(self, point: Point) -> ToyCase:
        return ToyCase(point.case.model, point.config.tp_size, point.case.device, point.case.nodes)

    def options(self, point: Point) -> Options:
        return {"toy.chunks": point.config_as(Resolved).toy.chunks}

    def times(self, settings: Sequence[Sequence[Point]]) -> list[Times]:
        return step_times(settings, timing)

    def times_of_point(self, point: Point) -> Times:
        return time_of_point(timing(point))

    def key(self, analysis: CaseAnalysis[ToyCase, SettingRow[Times]], row: SettingRow[Times]) -> Key:
        return key_of_pass(row.points[0].case, analysis.case.tp_size, "all-reduce", WHOLE)

    def samples(self, result: Result) -> dict[str, Sample]:
        sample = Sample((result.measured_as(ToyTimes).time,), None, WHOLE, tokens=result.recorded["workload"]["tokens"])
        return {"all-reduce": sample}


STUDY = ToyStudy()
