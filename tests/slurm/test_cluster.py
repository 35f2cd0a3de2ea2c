"""The cluster that the other tests here use does what a real one does."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import GPUS_PER_NODE, NODES, Slurm

UNTIL_USR2 = """#!/bin/bash
#SBATCH --requeue --signal=USR2@30
echo "run ${SLURM_RESTART_COUNT:-0}"
[ -z "${SLURM_RESTART_COUNT:-}" ] || exit 0
srun bash -c 'trap "echo got USR2; scontrol requeue $SLURM_JOB_ID; exit" USR2; while :; do sleep 0.1; done'
"""


def test_a_job_sees_the_gpus_it_asked_for(slurm: Slurm) -> None:
    job = slurm.submit("srun printenv CUDA_VISIBLE_DEVICES", gpus=2)
    slurm.wait_for_state(job, "COMPLETED")
    assert slurm.output(job) == "0,1\n"


def test_a_job_array_runs_on_both_nodes(slurm: Slurm) -> None:
    job = slurm.submit("echo $SLURM_ARRAY_TASK_ID $SLURMD_NODENAME; sleep 1", "--array=0-3", gpus=4)
    slurm.wait_for_state(job, "COMPLETED")
    said = [slurm.output(job, element).split() for element in range(4)]
    assert [element for element, _ in said] == ["0", "1", "2", "3"]
    assert {node for _, node in said} == set(NODES)


def test_a_job_of_more_gpus_than_a_node_has_is_refused(slurm: Slurm) -> None:
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        slurm.submit("true", gpus=GPUS_PER_NODE + 1)


def test_a_preempted_job_gets_usr2_and_runs_again(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(UNTIL_USR2)
    low = slurm.submit(script, "--nodelist=n1", gpus=1)
    slurm.wait_for(lambda: "run 0" in slurm.output(low) and len(slurm.node_processes("n1")) > 2, "the job's step")
    high = slurm.submit("sleep 1", "--nodelist=n1", partition="high", gpus=GPUS_PER_NODE)
    slurm.wait_for_state(high, "COMPLETED", timeout_s=45)
    slurm.wait_for_state(low, "COMPLETED", timeout_s=45)
    told = slurm.output(low)
    assert told.index("run 0") < told.index("got USR2") < told.index("run 1")


def test_a_restart_of_the_controller_loses_no_job(slurm: Slurm) -> None:
    running = slurm.submit("sleep 3; echo done", gpus=1)
    held = slurm.submit("true", "--hold")
    slurm.wait_for_state(running, "RUNNING")
    slurm.restart_controller()
    assert slurm.job_state(held) == "PENDING"
    slurm.wait_for_state(running, "COMPLETED")
    assert slurm.output(running) == "done\n"


def test_a_controller_that_is_killed_loses_no_running_job(slurm: Slurm) -> None:
    job = slurm.submit("sleep 10; echo done")
    slurm.wait_for_state(job, "RUNNING")
    # It saves its state some seconds after a change.
    began, state = time.time(), slurm.base / "state" / "job_state"
    slurm.wait_for(lambda: state.exists() and state.stat().st_mtime > began, "the saved state")
    slurm.kill_controller()
    slurm.start_controller()
    slurm.wait_for_state(job, "COMPLETED")
    assert slurm.output(job) == "done\n"


def test_a_cancelled_job_is_still_in_squeue(slurm: Slurm) -> None:
    job = slurm.submit("sleep 100")
    # The controller says RUNNING before the node has started anything.
    slurm.wait_for(slurm.node_processes, "the job's start")
    slurm.cancel(job)
    slurm.wait_for_state(job, "CANCELLED")
    slurm.wait_for(lambda: not slurm.node_processes(), "the end of the job's processes")
    assert slurm.squeue(job)[job].state == "CANCELLED"


def test_a_job_of_a_node_that_fails_runs_again_elsewhere(slurm: Slurm) -> None:
    job = slurm.submit("echo $SLURMD_NODENAME; sleep $((SLURM_RESTART_COUNT ? 0 : 100))", "--requeue")
    slurm.wait_for(lambda: slurm.output(job), "the job's start")
    node = slurm.output(job).strip()
    slurm.fail_node(node)
    assert not slurm.node_processes(node)
    slurm.wait_for_state(job, "COMPLETED")
    assert set(slurm.output(job).split()) == set(NODES)
    slurm.restore_node(node)
    slurm.wait_for(lambda: slurm.node_state(node) == "idle", f"{node} back")


def test_sacct_knows_an_ended_job(slurm: Slurm) -> None:
    job = slurm.submit("exit 3")
    slurm.wait_for_state(job, "FAILED")
    asked = ("sacct", "-X", "-n", "-P", "-j", job, "-o", "state,exitcode")
    slurm.wait_for(lambda: slurm.run(*asked).startswith("FAILED"), "the job's end in sacct")
    assert slurm.run(*asked) == "FAILED|3:0\n"


def test_without_accounting_sacct_fails_and_jobs_run(slurm_without_sacct: Slurm) -> None:
    job = slurm_without_sacct.submit("true")
    slurm_without_sacct.wait_for_state(job, "COMPLETED")
    asked = subprocess.run(["sacct", "-j", job], env=slurm_without_sacct.environment, capture_output=True, text=True)
    assert asked.returncode == 1
    assert "accounting storage is disabled" in asked.stderr
