from collections.abc import Sequence

from overlap_sweep.report.comparison import Comparing
from overlap_sweep.results.comparable import WHOLE, Comparable, KeyedTime, Sample, key_of_pass
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result
from toy_workload.result import ToyTimes
from toy_workload.section import chunks, time


def measured(points: Sequence[Point], records: object) -> Comparable:
    return Comparable([_time(point) for point in points if point.workload == "toy" and point.status == "ok"])


def _time(point: Point) -> KeyedTime:
    key = key_of_pass(point.case, point.config["tp_size"], "all-reduce", WHOLE)
    return KeyedTime(key._replace(setting=f"{chunks(point)} chunks"), time(point), None, None, (point.name,))


def samples(result: Result) -> dict[str, Sample]:
    times = (result.measured_as(ToyTimes).time,)
    return {"all-reduce": Sample(times, None, WHOLE, tokens=result.point["workload"]["tokens"])}


COMPARED = Comparing(measured, samples)
