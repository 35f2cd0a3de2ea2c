"""What is made of squeue's answers, and which task of which job a process is; what a launch knows of an earlier one's
jobs, and what becomes of the points that an ended job leaves. No Slurm is asked."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from omegaconf import OmegaConf

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import write_result
from overlap_sweep.runtime.cluster import End, JobHere, JobState
from overlap_sweep.runtime.cluster.launcher import Watch
from overlap_sweep.runtime.cluster.packs import Pack, Submitted
from overlap_sweep.runtime.cluster.records import (
    JobRecord,
    given_up_path,
    living_jobs,
    refuse_living_jobs,
    write_record,
)
from overlap_sweep.runtime.cluster.slurm import CLUSTER, ENDS, GONE, here, states
from overlap_sweep.runtime.jobs import Job
from overlap_sweep.runtime.lock import CLAIM_FILE
from overlap_sweep.runtime.outcome import Outcomes
from tests.make_point import made_result, operator_config

FOLDER = Path("/sweep/.submitit")
RUNNING = JobState("RUNNING")

# --- the queue


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `say` puts what squeue answers, and where it notes what it was asked."""
    program(
        tmp_path / "squeue",
        f'echo "$@" >>{tmp_path}/asked\n'
        f"for argument; do case $argument in --jobs=*) id={tmp_path}/${{argument#*=}} ;; esac; done\n"
        "[ ! -e $id.err ] || { cat $id.err >&2; exit 1; }\n"
        "[ ! -e $id.out ] || cat $id.out",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def say(squeue: Path, job_id: str, *rows: str, error: str = "") -> None:
    (squeue / f"{job_id}.out").write_text("".join(f"{row}\n" for row in rows))
    if error:
        (squeue / f"{job_id}.err").write_text(f"slurm_load_jobs error: {error}\n")


def row(job_id: str, state: str, reason: str = "None") -> str:
    return f"{job_id}|{state}|{reason}"


def logs(*job_ids: str, folder: Path = FOLDER) -> dict[str, Path]:
    """As submitit names them."""
    return {job_id: folder / job_id / f"{job_id}_0_log.err" for job_id in job_ids}


def test_states_and_reasons_of_jobs_and_elements_of_arrays(squeue: Path) -> None:
    say(squeue, "7", row("7_0", "RUNNING"), row("7_1", "PENDING", "Resources"), row("7_2", "COMPLETED"))
    say(squeue, "9", row("9", "FAILED", "NonZeroExitCode"))
    found = states(logs("7_0", "7_1", "9"))
    # Each array is asked for once.
    asked = (squeue / "asked").read_text().splitlines()
    assert [line.split("--jobs=")[1].split()[0] for line in asked] == ["7", "9"]
    assert found is not None
    assert {job_id: (str(state), state.end) for job_id, state in found.items()} == {
        "7_0": ("RUNNING", None),
        "7_1": ("PENDING (Resources)", None),
        "9": ("FAILED (NonZeroExitCode)", "failed"),
    }


def test_a_forgotten_job_is_gone_and_an_element_that_had_not_begun_was_cancelled(squeue: Path) -> None:
    say(squeue, "7", error="Invalid job id specified")
    # Of an array, some elements may be forgotten before others; of a job that just ended, squeue may say nothing.
    say(squeue, "8", row("8_1", "RUNNING"))
    of_array = logs("8_0", "8_1", folder=squeue)
    of_array["8_0"].parent.mkdir()
    of_array["8_0"].touch()
    running = {"8_1": RUNNING}
    assert states({**logs("7_0", "9"), **of_array}) == {**dict.fromkeys(("7_0", "9", "8_0"), GONE), **running}
    of_array["8_0"].unlink()
    assert states(of_array) == {"8_0": JobState("CANCELLED", "cancelled"), **running}


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("echo 'CANCELLED by 1000'", "CANCELLED"),
        ("echo TIMEOUT; echo COMPLETED", "TIMEOUT"),
        ("echo RUNNING", "GONE"),
        ("true", "GONE"),
        ("echo FAILED; exit 1", "GONE"),
    ],
)
def test_accounts_tell_how_a_forgotten_job_ended(squeue: Path, answer: str, state: str) -> None:
    say(squeue, "7", error="Invalid job id specified")
    program(squeue / "sacct", answer)
    assert states(logs("7")) == {"7": JobState(state, ENDS.get(state, "failed"))}


def test_no_answer_is_no_news_of_any_job_and_without_slurm_it_says_so(
    squeue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(squeue, "7", row("7", "RUNNING"))
    for error in ("Unable to contact slurm controller (connect failure)", "Socket timed out on send/recv", "odd"):
        say(squeue, "8", error=error)
        assert states(logs("7", "8")) is None
    # One that hangs.
    program(squeue / "squeue", "exec sleep 60")
    monkeypatch.setattr("overlap_sweep.runtime.cluster.slurm.TIMEOUT_S", 0.2)
    assert states(logs("7")) is None
    (squeue / "squeue").unlink()
    monkeypatch.setenv("PATH", str(squeue))
    with pytest.raises(UserError, match="squeue is not installed"):
        states(logs("7"))


def test_what_waits_or_comes_back_has_not_ended(squeue: Path) -> None:
    names = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD")
    say(squeue, "7", *(row(f"7_{number}", name) for number, name in enumerate(names)))
    found = states(logs(*(f"7_{number}" for number in range(len(names)))))
    assert found
    assert {state.end for state in found.values()} == {None}


# --- records


def record(directory: Path, job_id: str) -> JobRecord:
    log = logs(job_id, folder=directory / ".submitit")[job_id]
    return JobRecord(job_id, {f"point_of_{job_id}": "key"}, str(log))


def recorded(directory: Path) -> list[str]:
    return sorted(path.stem for path in (directory / ".slurm").glob("*.json"))


def test_where_slurm_does_not_answer_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refuse_living_jobs(tmp_path)
    write_record(CLUSTER, tmp_path, record(tmp_path, "7"))
    with pytest.raises(UserError, match=r"Slurm jobs \(7\) may be running in"):
        living_jobs(CLUSTER, tmp_path)
    # As while the controller is away.
    with pytest.raises(UserError, match="Slurm does not answer"):
        living_jobs(replace(CLUSTER, states=lambda logs: None), tmp_path)
    assert recorded(tmp_path) == ["7"]


def test_a_torn_record_and_one_of_another_job_are_none(tmp_path: Path) -> None:
    path = tmp_path / ".slurm" / "7.json"
    path.parent.mkdir()
    another = msgspec.json.encode(JobRecord("8", {}, "8_0_log.err"))
    for content in (another, another[:-5]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{path} is not (a|the) record of"):
            living_jobs(CLUSTER, tmp_path)


# --- ended jobs


@pytest.mark.parametrize(
    ("ends", "finished", "begun", "packs", "statuses"),
    [
        # What was begun may need more time than this job had left, but not more than a whole job.
        (["timeout"] * 2, 1, 2, [[1, 2, 3], [2, 3], [2, 3]], ["ok"] * 3),
        (["timeout"] * 2, 0, 1, [[1, 2, 3], [1, 2, 3], [2, 3]], ["timeout", "ok", "ok"]),
        # A point that kills its job is tried again as often as one that fails.
        (["failed"] * 2, 1, 2, [[1, 2, 3], [2, 3], [3]], ["ok", "failed", "ok"]),
        # A job that does nothing is replaced as often; one that had to go does not count.
        (["lost", "lost", "failed"], 0, 0, [[1, 2, 3]] * 4, ["ok"] * 3),
        (["failed"] * 2, 0, 0, [[1, 2, 3]] * 2, ["failed"] * 3),
        (["lost"] * 4, 0, 1, [[1, 2, 3]] * 4 + [[2, 3]], ["failed", "ok", "ok"]),
    ],
)
def test_what_an_ended_job_leaves_is_handed_on(
    tmp_path: Path,
    ends: list[End],
    finished: int,
    begun: int,
    packs: list[list[int]],
    statuses: list[str],
) -> None:
    """`packs`: the points of each job that is submitted; the first finishes one and is interrupted in another (0: in
    none), and the last one finishes those that are left."""
    submitted: list[list[int]] = []

    def submit(packs: Sequence[Pack]) -> dict[str, Submitted]:
        (pack,) = packs
        submitted.append([one.number for one in pack.jobs])
        for one in pack.jobs:
            if len(submitted) > len(ends) or one.number == finished:
                one.directory.mkdir(exist_ok=True)
                write_result(one.directory, made_result("operator", one.point, name=one.name))
            elif one.number == begun:
                one.directory.mkdir(exist_ok=True)
                (one.directory / CLAIM_FILE).touch()
        return {str(len(submitted)): Submitted(pack, tmp_path / "log")}

    def ended(logs: Mapping[str, Path]) -> dict[str, JobState]:
        return {job_id: JobState("", [*ends, None][int(job_id) - 1]) for job_id in logs}

    cluster = replace(CLUSTER, states=ended)
    config = OmegaConf.create({})
    points = [operator_config(num_sm=num_sm, runtime={"retries": 1}) for num_sm in (1, 2, 3)]
    jobs = [Job(point["num_sm"], [], config, point, tmp_path / f"sm{point['num_sm']}") for point in points]
    watch = Watch(cluster, tmp_path, submit([Pack({}, jobs)]), submit, Outcomes(), 0.0)
    watch.run()
    assert submitted == packs
    assert [watch.results[job.directory].status for job in jobs] == statuses


def test_the_points_of_a_job_whose_nodes_do_not_find_each_other_are_given_up_together(tmp_path: Path) -> None:
    """No other job would fare better, and no point is to blame."""
    cluster = replace(CLUSTER, states=lambda logs: dict.fromkeys(logs, JobState("FAILED", "failed")))
    points = [operator_config(num_sm=num_sm, runtime={"retries": 1}) for num_sm in (1, 2, 3)]
    jobs = [Job(one["num_sm"], [], OmegaConf.create({}), one, tmp_path / f"sm{one['num_sm']}") for one in points]
    write_record(CLUSTER, tmp_path, JobRecord("7", {}, str(tmp_path / "log")))
    given_up_path(CLUSTER, tmp_path, "7").write_text("node 1 of 2 has not joined")
    (jobs[0].directory).mkdir()
    (jobs[0].directory / CLAIM_FILE).touch()
    submitted = {"7": Submitted(Pack({}, jobs), tmp_path / "log")}
    watch = Watch(cluster, tmp_path, submitted, lambda packs: pytest.fail("submitted another job"), Outcomes(), 0.0)
    watch.run()
    assert watch.results == {}
    assert watch.outcomes.given_up == {job.directory: "Slurm job 7: node 1 of 2 has not joined" for job in jobs}
    assert list((tmp_path / ".slurm").iterdir()) == []


# --- inside a job


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_JOB_ID": "7"}, JobHere("7")),
        (
            {
                **{"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"},
                **{"SLURM_NNODES": "2", "SLURM_PROCID": "1", "SLURMD_NODENAME": "n2", "SLURM_RESTART_COUNT": "3"},
            },
            JobHere("7_2", restarts=3, node=1, nodes=2, host="n2"),
        ),
    ],
)
def test_a_process_knows_its_job(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: JobHere) -> None:
    for name in (name for name in os.environ if name.startswith("SLURM")):
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert here() == expected
