"""What a job's result says of its traces."""

from __future__ import annotations

from pathlib import Path

from overlap_sweep.diagnosis import RECORDING_SLOWS
from overlap_sweep.diagnosis.runs import read_runs
from overlap_sweep.workloads.job.steps import of_traces
from tests.results.traces_by_hand import write_trace


def test_what_every_recording_has_is_no_warning_but_a_missing_rank_is(tmp_path: Path) -> None:
    ranks = [write_trace(tmp_path / f"trace_rank{rank}.json", rank, [800.0, 100.0, 110.0], 10.0) for rank in range(2)]
    (run,) = read_runs(ranks)
    assert run.found
    start, slows = run.found.diagnosis.notes[::-1]
    assert start.startswith("Step 0 left out: it contains the profiler's start")
    assert slows == RECORDING_SLOWS
    fields, warnings = of_traces(ranks)
    assert [cause.cause for cause in fields["causes"]] == ["host_bound"]
    assert warnings == []
    _, warnings = of_traces(ranks[:1])
    assert warnings == ["No trace of rank 1: whether the other ranks wait for it is unknown."]
