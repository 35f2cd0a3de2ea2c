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
from tests.diagnosis.planted import Planted, archives, scenarios

PLANTED = {(archive, each.name): each for archive in archives() for each in scenarios(archive)}

LEAST = 0.02
"""Least share of a step that a planted cause costs, if a cause that holds besides may cost more."""

UNPLANNED = 0.08
"""Most that a cause may cost which nobody planted: one GPU is some percent slower than the other."""

Recorded = Callable[[str, str], Run]


@pytest.fixture(scope="session")
def recorded(directories: dict[str, Path]) -> Recorded:
    """Gives the diagnosed run of a scenario."""
    runs = {
        (archive, Path(run.name).parent.name): run
        for archive, directory in directories.items()
        for run in read_runs(sorted(directory.glob("*/trace_rank*.json")))
    }
    return lambda archive, name: runs[archive, name]


def cases(where: Callable[[Planted], object] = lambda planted: True) -> pytest.MarkDecorator:
    chosen = [key for key, planted in PLANTED.items() if where(planted)]
    return pytest.mark.parametrize(("archive", "name"), chosen, ids=["-".join(key) for key in chosen])


def gains(planted: Planted) -> list[Gain]:
    """What changes gained that do as much in a step as the scenario itself."""
    others = {name: each.described for (archive, name), each in PLANTED.items() if archive == planted.archive}
    return [gain for gain in gains_of(planted.described, others) if gain.work == 1]


def diagnosis_of(run: Run) -> Diagnosis:
    assert run.found
    return run.found.diagnosis


def shares(findings: list[Finding]) -> Counter[str]:
    found: Counter[str] = Counter()
    for finding in findings:
        found[finding.cause] += finding.share  # type: ignore[assignment]
    return found


def findings_of(diagnosis: Diagnosis, cause: str) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.cause == cause]


@cases()
def test_the_planted_cause_is_found_first(recorded: Recorded, archive: str, name: str) -> None:
    planted, diagnosis = PLANTED[archive, name], diagnosis_of(recorded(archive, name))
    found = shares(diagnosis.findings)
    if diagnosis.findings[0].cause == planted.cause:
        return
    assert diagnosis.findings[0].cause in planted.also
    assert planted.cause in found if planted.cause == "none" else found[planted.cause] >= LEAST


@cases()
def test_nothing_else_costs_much(recorded: Recorded, archive: str, name: str) -> None:
    planted, found = PLANTED[archive, name], shares(diagnosis_of(recorded(archive, name)).findings)
    unplanned = {cause: share for cause, share in found.items() if cause not in (planted.cause, *planted.also)}
    assert max(unplanned.values(), default=0) < UNPLANNED, unplanned


@cases(lambda planted: planted.late_rank is not None)
def test_a_straggler_is_the_late_rank(recorded: Recorded, archive: str, name: str) -> None:
    stragglers = findings_of(diagnosis_of(recorded(archive, name)), "straggler")
    assert stragglers[0].rank == PLANTED[archive, name].late_rank


# Traces of gloo do not name process groups.
@cases(lambda planted: planted.cause_by_group and planted.device == "cuda")
def test_process_groups_of_the_same_ranks_are_told_apart(recorded: Recorded, archive: str, name: str) -> None:
    findings = [each for each in diagnosis_of(recorded(archive, name)).findings if each.process_group]
    for group, cause in PLANTED[archive, name].cause_by_group.items():
        assert next(each.cause for each in findings if f"({group})" in each.process_group) == cause


@cases(gains)
def test_lost_time_bounds_what_following_the_advice_gained(recorded: Recorded, archive: str, name: str) -> None:
    planted, diagnosis = PLANTED[archive, name], diagnosis_of(recorded(archive, name))
    lost_ms = sum(finding.lost_us for finding in findings_of(diagnosis, planted.cause)) / 1000
    for gain in gains(planted):
        assert lost_ms > gain.gained_ms - gain.uncertain_ms, gain


@cases()
def test_one_rank_alone_tells_what_it_can(
    recorded: Recorded, directories: dict[str, Path], archive: str, name: str
) -> None:
    """What needs the other ranks is said to be unknown, and no rank is blamed."""
    (run,) = read_runs([directories[archive] / name / "trace_rank0.json"])
    diagnosis, both = diagnosis_of(run), diagnosis_of(recorded(archive, name))
    assert run.missing == [1]
    assert diagnosis.findings
    assert set(diagnosis.notes) - set(both.notes)
    assert all(finding.rank is None for finding in findings_of(diagnosis, "straggler"))


WITHOUT_STEPS = (
    "ddp_overlapped",
    "ddp_one_bucket",
    "ddp_tiny_batch",
    "ddp_straggler",
    "manual_connections_1",
    "tp_blocking",
)


@cases(lambda planted: planted.name in WITHOUT_STEPS and planted.device == "cuda")
def test_without_profiler_steps_the_cause_is_the_same(
    directories: dict[str, Path], tmp_path: Path, archive: str, name: str
) -> None:
    for path in (directories[archive] / name).glob("trace_rank*.json"):
        trace = json.loads(path.read_text())
        events = [event for event in trace["traceEvents"] if not event.get("name", "").startswith("ProfilerStep")]
        (tmp_path / path.name).write_text(json.dumps(trace | {"traceEvents": events}))
    (run,) = read_runs(sorted(tmp_path.glob("*.json")))
    assert diagnosis_of(run).findings[0].cause == PLANTED[archive, name].cause


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_is_planted_and_found_first_and_not_everywhere(recorded: Recorded, cause: str) -> None:
    found = [[finding.cause for finding in diagnosis_of(recorded(*key)).findings] for key in PLANTED]
    assert any(causes[0] == cause for causes in found)
    assert any(cause not in causes for causes in found)
