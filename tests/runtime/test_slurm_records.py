"""What a launch knows of the Slurm jobs of an earlier one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import Result, write_result
from overlap_sweep.runtime.slurm import records
from overlap_sweep.runtime.slurm.queue import JobState
from overlap_sweep.runtime.slurm.records import (
    JobRecord,
    forget,
    forget_if_done,
    living_jobs,
    record_path,
    write_record,
)
from tests.points import operator_point


def record(directory: Path, job_id: str) -> JobRecord:
    log = directory / ".submitit" / job_id / f"{job_id}_0_log.err"
    return JobRecord(job_id, "launch", {f"point_of_{job_id}": "key"}, str(log))


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, JobState]:
    """What Slurm says."""
    said: dict[str, JobState] = {}
    monkeypatch.setattr(records, "job_states", lambda logs: {job_id: said[job_id] for job_id in logs})
    return said


def test_living_jobs_are_found_and_ended_ones_forgotten(tmp_path: Path, states: dict[str, JobState]) -> None:
    states |= {
        "7_0": JobState("RUNNING"),
        "7_1": JobState("COMPLETED"),
        "8": JobState("PENDING"),
        "9": JobState("GONE"),
    }
    for job_id in states:
        write_record(tmp_path, record(tmp_path, job_id))
    assert living_jobs(tmp_path) == [record(tmp_path, "7_0"), record(tmp_path, "8")]
    assert {path.name for path in (tmp_path / ".slurm").iterdir()} == {"7_0.json", "8.json"}
    forget(tmp_path, "9")


def test_where_slurm_does_not_answer_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert living_jobs(tmp_path) == []
    records.refuse_living_jobs(tmp_path)
    write_record(tmp_path, record(tmp_path, "7"))
    with pytest.raises(UserError, match=r"Slurm jobs \(7\) may be working in"):
        living_jobs(tmp_path)
    # As while the controller is away.
    monkeypatch.setattr(records, "job_states", lambda logs: None)
    with pytest.raises(UserError, match="Slurm does not answer"):
        living_jobs(tmp_path)
    assert record_path(tmp_path, "7").exists()


def test_another_launcher_is_refused_while_jobs_live(tmp_path: Path, states: dict[str, JobState]) -> None:
    states |= {"7_0": JobState("RUNNING"), "7_1": JobState("PENDING")}
    for job_id in states:
        write_record(tmp_path, record(tmp_path, job_id))
    with pytest.raises(UserError, match="scancel 7_0 7_1"):
        records.refuse_living_jobs(tmp_path)
    states |= {"7_0": JobState("COMPLETED"), "7_1": JobState("CANCELLED")}
    records.refuse_living_jobs(tmp_path)
    assert not list((tmp_path / ".slurm").iterdir())


def test_a_torn_record_is_named(tmp_path: Path) -> None:
    write_record(tmp_path, record(tmp_path, "7"))
    path = record_path(tmp_path, "7")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=f"{path} is no record of a Slurm job"):
        living_jobs(tmp_path)


def test_what_is_no_record_is_left_alone(tmp_path: Path, states: dict[str, JobState]) -> None:
    states |= {"7": JobState("RUNNING")}
    write_record(tmp_path, record(tmp_path, "7"))
    # A job's log of its workers, and a record that was being written when the machine went.
    (tmp_path / ".slurm" / "7_workers.log").touch()
    (tmp_path / ".slurm" / ".8.json.123.tmp").write_bytes(b"{")
    assert [found.job_id for found in living_jobs(tmp_path)] == ["7"]


@pytest.mark.parametrize(
    ("job_id", "log"), [("../../precious", "../../precious_0_log.err"), ("7", "/etc/passwd"), ("8", "8_0_log.err")]
)
def test_a_record_that_leads_elsewhere_is_none(tmp_path: Path, job_id: str, log: str) -> None:
    """In a directory that somebody else has sent."""
    (tmp_path / ".slurm").mkdir()
    crafted = JobRecord(job_id, "launch", {}, log)
    (tmp_path / ".slurm" / "7.json").write_bytes(msgspec.json.encode(crafted))
    with pytest.raises(UserError, match="is no record of a Slurm job"):
        living_jobs(tmp_path)


def test_a_job_is_forgotten_when_all_that_it_holds_is_there(tmp_path: Path) -> None:
    write_record(tmp_path, record(tmp_path, "7"))
    forget_if_done(tmp_path, "7")
    assert record_path(tmp_path, "7").exists()
    (tmp_path / "point_of_7").mkdir()
    result = Result(name="point_of_7", point=operator_point(), status="failed", launch="another")
    write_result(tmp_path / "point_of_7", result)
    forget_if_done(tmp_path, "7")
    assert record_path(tmp_path, "7").exists(), "what failed in another launch is measured again"
    write_result(tmp_path / "point_of_7", msgspec.structs.replace(result, launch="launch"))
    forget_if_done(tmp_path, "7")
    assert not record_path(tmp_path, "7").exists()
