"""What is made of squeue's answers, whatever they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.slurm.queue import ENDED, JobState, job_states

FOLDER = Path("/sweep/.submitit")


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `say` puts what squeue answers, and where it notes what it was asked."""
    program = tmp_path / "squeue"
    program.write_text(
        f"""#!/bin/sh
echo "$@" >>{tmp_path}/asked
for argument; do case $argument in --jobs=*) id={tmp_path}/${{argument#*=}} ;; esac; done
[ ! -e $id.err ] || {{ cat $id.err >&2; exit 1; }}
[ ! -e $id.out ] || cat $id.out
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def say(squeue: Path, job_id: str, *rows: str, error: str = "") -> None:
    (squeue / f"{job_id}.out").write_text("".join(f"{row}\n" for row in rows))
    if error:
        (squeue / f"{job_id}.err").write_text(f"slurm_load_jobs error: {error}\n")


def row(job_id: str, state: str, reason: str = "None", folder: Path = FOLDER) -> str:
    return f"{job_id}|{state}|{reason}|{folder}/.submission_file_1a2b.sh"


def logs(*job_ids: str) -> dict[str, Path]:
    """As submitit names them."""
    return {job_id: FOLDER / job_id / f"{job_id}_0_log.err" for job_id in job_ids}


def test_states_and_reasons_of_jobs_and_elements_of_arrays(squeue: Path) -> None:
    say(squeue, "7", row("7_0", "RUNNING"), row("7_1", "PENDING", "Resources"), row("7_2", "COMPLETED"))
    say(squeue, "9", row("9", "FAILED", "NonZeroExitCode"))
    states = job_states(logs("7_0", "7_1", "9"))
    # Each array is asked for once.
    asked = (squeue / "asked").read_text().splitlines()
    assert [line.split("--jobs=")[1].split()[0] for line in asked] == ["7", "9"]
    assert states is not None
    assert {job_id: str(state) for job_id, state in states.items()} == {
        "7_0": "RUNNING",
        "7_1": "PENDING (Resources)",
        "9": "FAILED (NonZeroExitCode)",
    }
    assert [state.ended for state in states.values()] == [False, False, True]


def test_a_forgotten_job_is_gone(squeue: Path) -> None:
    say(squeue, "7", error="Invalid job id specified")
    # Of an array, some elements may be forgotten before others; of a job that just ended, squeue may say nothing.
    say(squeue, "8", row("8_1", "RUNNING", folder=squeue))
    ran = squeue / "8_0" / "8_0_0_log.err"
    ran.parent.mkdir()
    ran.touch()
    states = job_states({**logs("7_0", "9"), "8_0": ran, "8_1": squeue / "8_1" / "8_1_0_log.err"})
    assert states == {
        "7_0": JobState("GONE"),
        "9": JobState("GONE"),
        "8_0": JobState("GONE"),
        "8_1": JobState("RUNNING", "None"),
    }
    assert states["9"].ended


def test_an_element_that_slurm_forgot_before_it_began_was_cancelled(squeue: Path) -> None:
    say(squeue, "7", row("7_1", "PENDING", "Resources"))
    states = job_states(logs("7_0", "7_1"))
    assert states == {"7_0": JobState("CANCELLED"), "7_1": JobState("PENDING", "Resources")}
    say(squeue, "7", row("7_1", "PENDING", "Resources", folder=Path("/elsewhere")))
    assert job_states(logs("7_0", "7_1")) == dict.fromkeys(("7_0", "7_1"), JobState("GONE"))


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
    (squeue / "sacct").write_text(f"#!/bin/sh\n{answer}\n")
    (squeue / "sacct").chmod(0o755)
    assert job_states(logs("7")) == {"7": JobState(state)}


def test_a_job_is_ours_by_its_folder_whatever_its_characters(squeue: Path) -> None:
    folder = Path("/runs/a|b c=1/.submitit")
    say(squeue, "6", row("6", "RUNNING", folder=folder))
    assert job_states({"6": folder / "6" / "6_0_log.err"}) == {"6": JobState("RUNNING", "None")}
    # Another's job that got the id.
    say(squeue, "7", row("7", "RUNNING", folder=Path("/elsewhere/.submitit")))
    say(squeue, "8", "8|RUNNING|None|(null)")
    assert job_states(logs("7", "8")) == {"7": JobState("GONE"), "8": JobState("GONE")}


def test_no_answer_is_no_news_of_any_job(squeue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(squeue, "7", row("7", "RUNNING"))
    for error in ("Unable to contact slurm controller (connect failure)", "Socket timed out on send/recv", "odd"):
        say(squeue, "8", error=error)
        assert job_states(logs("7", "8")) is None
    # One that hangs.
    (squeue / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("overlap_sweep.runtime.slurm.queue.TIMEOUT_S", 0.2)
    assert job_states(logs("7")) is None


def test_without_slurm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no squeue"):
        job_states(logs("7"))


def test_what_counts_as_ended() -> None:
    assert all(JobState(state).ended for state in ENDED)
    for state in ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD"):
        assert not JobState(state).ended
    assert [state for state in ENDED if JobState(state).cancelled] == ["CANCELLED"]
