"""From recordings and traces to what a run measured."""

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.diagnosis import RECORDING_SLOWS
from overlap_sweep.diagnosis.runs import read_runs
from overlap_sweep.results.measured import summarise
from overlap_sweep.workloads.job.result import FoundCause, JobRun, memory_share
from overlap_sweep.workloads.job.steps import is_launch_bound, read_traces, without_profiler
from tests.make_point import made_result
from tests.timeline import write_trace


def test_a_step_is_launch_bound_if_the_host_costs_a_tenth() -> None:
    def run(lost_us: float, timed_by: str = "gpu") -> JobRun:
        cause = FoundCause(cause="host_bound", lost_us=lost_us, share=0.5)
        return JobRun(causes=[cause], step=summarise([100.0, 100.0]), timed_by=timed_by, profiled_us=100.0)  # type: ignore[arg-type]

    assert is_launch_bound(run(10.0))
    assert not is_launch_bound(run(9.0))
    assert not is_launch_bound(run(20.0, "host"))
    assert not is_launch_bound(JobRun(step=summarise([100.0, 100.0]), timed_by="gpu", profiled_us=100.0))


def test_the_host_is_late_by_what_the_profiler_does_not_add() -> None:
    def found(profiled_us: float) -> dict[str, float]:
        causes = [
            FoundCause(cause="host_bound", lost_us=22.0, share=22.0 / profiled_us),
            FoundCause(cause="bandwidth", lost_us=6.0, share=6.0 / profiled_us),
        ]
        return {one.cause: one.lost_us for one in without_profiler(causes, profiled_us, 100.0)}

    assert found(100.0) == found(90.0) == {"host_bound": 22.0, "bandwidth": 6.0}
    assert [*found(120.0).items()] == [("bandwidth", 6.0), ("host_bound", 2.0)]
    assert found(130.0) == {"bandwidth": 6.0}


def test_what_every_recording_has_is_no_warning_but_a_missing_rank_is(tmp_path: Path) -> None:
    ranks = [write_trace(tmp_path / f"trace_rank{rank}.json", rank, [800.0, 100.0, 110.0], 10.0) for rank in range(2)]
    (run,) = read_runs(ranks)
    assert run.found
    slows, forward_alone, start = run.found.diagnosis.notes
    assert slows == RECORDING_SLOWS
    assert forward_alone.startswith("The recording shows no backward pass")
    assert start.startswith("Step 0 left out: it contains the profiler's start")
    fields, warnings = read_traces(ranks)
    assert [cause.cause for cause in fields["causes"]] == ["host_bound"]
    assert warnings == []
    _, warnings = read_traces(ranks[:1])
    assert warnings == ["No trace of rank 1: whether the other ranks wait for it is unknown."]


@pytest.mark.parametrize(
    ("peak_gb", "environment", "share"),
    [(75.0, {"memory_gb": 150.0}, 0.5), (75.0, {}, None), (None, {"memory_gb": 150.0}, None)],
)
def test_the_share_of_memory_is_known_with_both_numbers(
    peak_gb: float | None, environment: dict[str, Any], share: float | None
) -> None:
    assert memory_share(made_result("job", peak_memory_gb=peak_gb, environment=environment)) == share
    assert memory_share(made_result("job", status="failed", environment=environment)) is None
