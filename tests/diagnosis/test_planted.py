"""Recordings of programs with planted causes (`benchmarks/causes/`): what was planted is found, and nothing else."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.causes.gains import Gain, gains_of
from overlap_sweep.diagnosis import Diagnosis, Finding
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.diagnosis.runs import Run, read_runs
from overlap_sweep.trace.files import read_trace_files
from overlap_sweep.trace.nsight_files import paths_in
from tests.diagnosis.planted import Planted, archives, scenarios
from tests.trace.nsight_export import export_of

PLANTED = [each for archive in archives() for each in scenarios(archive)]

LEAST = 0.02
"""Least share of a step that a planted cause costs, if a cause that holds besides may cost more."""

UNPLANNED = 0.08
"""Most that a cause may cost which nobody planted: one GPU is some percent slower than the other."""

Recorded = Callable[[Planted], Diagnosis]


def diagnosis_of(run: Run) -> Diagnosis:
    assert run.found
    return run.found.diagnosis


@pytest.fixture(scope="session")
def recorded(directories: dict[str, Path]) -> Recorded:
    """Gives the diagnosis of a scenario."""
    found = {
        Path(run.name).parent: diagnosis_of(run)
        for directory in directories.values()
        for run in read_runs(sorted(directory.glob("*/trace_rank*.json")))
    }
    return lambda planted: found[directories[planted.archive] / planted.name]


def cases(where: Callable[[Planted], object] = lambda planted: True) -> pytest.MarkDecorator:
    chosen = [planted for planted in PLANTED if where(planted)]
    return pytest.mark.parametrize("planted", chosen, ids=[f"{each.archive}-{each.name}" for each in chosen])


def gains(planted: Planted) -> list[Gain]:
    """What changes gained that do as much in a step as the scenario itself."""
    others = {each.name: each.described for each in PLANTED if each.archive == planted.archive}
    return [gain for gain in gains_of(planted.described, others) if gain.work == 1]


def shares(diagnosis: Diagnosis) -> Counter[str]:
    found: Counter[str] = Counter()
    for finding in diagnosis.findings:
        found[finding.cause] += finding.share  # type: ignore[assignment]
    return found


def findings_of(diagnosis: Diagnosis, cause: str) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.cause == cause]


@cases()
def test_the_planted_cause_is_found_first(recorded: Recorded, planted: Planted) -> None:
    diagnosis, first = recorded(planted), recorded(planted).findings[0].cause
    if first != planted.cause:
        found = shares(diagnosis)
        assert first in planted.also
        assert planted.cause in found if planted.cause == "none" else found[planted.cause] >= LEAST


@cases()
def test_nothing_else_costs_much(recorded: Recorded, planted: Planted) -> None:
    found = shares(recorded(planted))
    unplanned = {cause: share for cause, share in found.items() if cause not in (planted.cause, *planted.also)}
    assert max(unplanned.values(), default=0) < UNPLANNED, unplanned


@cases(lambda planted: planted.late_rank is not None)
def test_a_straggler_is_the_late_rank(recorded: Recorded, planted: Planted) -> None:
    assert findings_of(recorded(planted), "straggler")[0].rank == planted.late_rank


# One of each cause, and of each way to call NCCL.
SAME_WITH_NSIGHT = (
    *("cuda_graph", "ddp_accumulated", "fsdp2_connections_1", "fsdp2_straggler", "host_straggler", "hybrid"),
    *("moe_all_to_all", "pipeline", "sync_in_step", "tiny_kernels", "tp_dtensor", "zero1_gather_after_step"),
)


@cases(lambda planted: planted.archive == "h200x2" and planted.name in SAME_WITH_NSIGHT)
def test_nsight_systems_shows_the_same(
    recorded: Recorded, directories: dict[str, Path], planted: Planted, tmp_path: Path
) -> None:
    """Of the same events, in one file for both ranks."""
    traces = sorted((directories[planted.archive] / planted.name).glob("trace_rank*.json"))
    export = export_of(traces).write(tmp_path / "report.sqlite")
    (run,) = read_runs(paths_in(export))
    findings, expected = diagnosis_of(run).findings, recorded(planted).findings
    assert [(one.cause, one.rank) for one in findings] == [(one.cause, one.rank) for one in expected]
    assert [one.lost_us for one in findings] == pytest.approx([one.lost_us for one in expected], rel=0.02, abs=1)
    of_kineto = [row for file in read_trace_files(traces, with_parts=False) for row in file.rows]
    assert len(of_kineto) == sum(len(file.rows) for file in run.files)
    for row, own in zip((row for file in run.files for row in file.rows), of_kineto, strict=True):
        assert (row.rank, row.iteration, row.phase) == (own.rank, own.iteration, own.phase)
        for quantity in ("span_us", "gemm_us", "comm_us", "overlap_us", "exposed_comm_us", "idle_us"):
            assert getattr(row, quantity) == pytest.approx(getattr(own, quantity), rel=0.02, abs=1), quantity


# Traces of gloo do not name process groups.
@cases(lambda planted: planted.cause_by_group and planted.device == "cuda")
def test_process_groups_of_the_same_ranks_are_told_apart(recorded: Recorded, planted: Planted) -> None:
    for group, cause in planted.cause_by_group.items():
        assert next(each.cause for each in recorded(planted).findings if f"({group})" in each.process_group) == cause


@cases(gains)
def test_lost_time_bounds_what_following_the_advice_gained(recorded: Recorded, planted: Planted) -> None:
    lost_ms = sum(finding.lost_us for finding in findings_of(recorded(planted), planted.cause)) / 1000
    for gain in gains(planted):
        assert lost_ms > gain.gained_ms - gain.uncertain_ms, gain


@cases()
def test_one_rank_alone_tells_what_it_can(recorded: Recorded, directories: dict[str, Path], planted: Planted) -> None:
    """What needs the other ranks is said to be unknown, and no rank is blamed."""
    (run,) = read_runs([directories[planted.archive] / planted.name / "trace_rank0.json"])
    diagnosis = diagnosis_of(run)
    assert run.missing == [1]
    assert diagnosis.findings
    assert set(diagnosis.notes) - set(recorded(planted).notes)
    assert all(finding.rank is None for finding in findings_of(diagnosis, "straggler"))


WITHOUT_STEPS = {"ddp_overlapped", "ddp_one_bucket", "ddp_tiny_batch", "ddp_straggler"}
WITHOUT_STEPS |= {"manual_connections_1", "tp_blocking"}


@cases(lambda planted: planted.name in WITHOUT_STEPS and planted.device == "cuda")
def test_without_profiler_steps_the_cause_is_the_same(
    directories: dict[str, Path], tmp_path: Path, planted: Planted
) -> None:
    for path in (directories[planted.archive] / planted.name).glob("trace_rank*.json"):
        trace = json.loads(path.read_text())
        events = [event for event in trace["traceEvents"] if not event.get("name", "").startswith("ProfilerStep")]
        (tmp_path / path.name).write_text(json.dumps(trace | {"traceEvents": events}))
    (run,) = read_runs(sorted(tmp_path.glob("*.json")))
    assert diagnosis_of(run).findings[0].cause == planted.cause


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_is_planted_and_found_first_and_not_everywhere(recorded: Recorded, cause: str) -> None:
    found = [[finding.cause for finding in recorded(planted).findings] for planted in PLANTED]
    assert any(causes[0] == cause for causes in found)
    assert any(cause not in causes for causes in found)
