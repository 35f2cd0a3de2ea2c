"""The all-reduce of a tensor-parallel operator's output, cut into chunks: a workload in a package of its own."""

from overlap_sweep.overlap import models
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads import Sample, Searchable, Workload, run_of
from toy_workload.result import ToyTimes


def sample(result: Result) -> Sample:
    return Sample(tuple(result.measured_as(ToyTimes).time.samples_us))


WORKLOAD = Workload(
    name="toy",
    package=__name__,
    complete=lambda point: {**point, "backend": "torch"},
    refusal=lambda point: None if point["tp_size"] > 1 else "tp_size=1 communicates nothing",
    run=run_of(__name__),
    subject=lambda point: "all-reduce",
    words=lambda point, _: [models.short_name(point.model), f"tp{point['tp_size']}", f"x{point['toy']['chunks']}"],
    named={"tp_size", "toy.chunks"},
    searchable=Searchable(
        sample=sample, same_point=lambda point: f"{point['tp_size']} {point['toy']}", options=("toy.",)
    ),
)
