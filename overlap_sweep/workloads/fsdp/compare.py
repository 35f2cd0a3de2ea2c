"""Training runs in comparisons, which are of their telemetry, and the step time for histories."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_sweep import workloads
from overlap_sweep.report.comparison import Comparing, Telemetry
from overlap_sweep.results.comparable import Comparable, Sample
from overlap_sweep.results.nodes import on_nodes
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.fsdp.compare_runs import ROWS, compare
from overlap_sweep.workloads.fsdp.knobs import NAMING, knobs_of
from overlap_sweep.workloads.fsdp.result import TrainingRun
from overlap_sweep.workloads.fsdp.runs import STEPS


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns nothing: training runs are compared by their telemetry."""
    trained = any(point.workload == "fsdp" and point.status == "ok" for point in points)
    lacking = (
        "has training results without telemetry; to compare them, copy the rank_<r>_metrics.jsonl files of their run "
        "directories too."
    )
    return Comparable([], lacking=lacking if trained else "")


def samples(result: Result) -> dict[str, Sample]:
    """Returns the sample of the step, even if it is launch-bound."""
    step = result.measured_as(TrainingRun).step
    ranks = f"{workloads.world_size(result.recorded)} ranks{on_nodes(workloads.nodes(result.recorded))}"
    setting = f"{ranks}, {NAMING.in_words(knobs_of(result.recorded))}"
    sample = Sample((step["point"],), step["none"].median_us, "step", result.recorded["workload"]["tokens"])
    return {setting: sample}


COMPARED = Comparing(
    measured,
    samples,
    # Length of the run before its steps are timed, output, profiling and telemetry don't change the step time.
    changes_nothing=("training.max_steps", "training.log_interval", "training.output_dir", "profiling", "telemetry"),
    telemetry=Telemetry(compare, {"of telemetry": ROWS, "of telemetry, file of its steps": STEPS}),
)
