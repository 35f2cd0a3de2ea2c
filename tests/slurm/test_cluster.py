"""The cluster that the other tests here use does what a real one does, as far as they don't show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.runtime.slurm.queue import JobState, job_states
from tests.slurm.cluster import NODES, Slurm
from tests.slurm.sweep import forgetful_squeue


def test_jobs_see_the_gpus_they_asked_for_on_both_nodes(slurm: Slurm) -> None:
    command = "srun bash -c 'echo $CUDA_VISIBLE_DEVICES $SLURMD_NODENAME'; sleep 1"
    job = slurm.submit(command, "--array=0-3", gpus=8)
    slurm.wait_for_state(job, "COMPLETED")
    said = [slurm.output(job, element).split() for element in range(4)]
    assert {node for _, node in said} == set(NODES)
    assert {len(gpus.split(",")) for gpus, _ in said} == {8}


def test_accounts_tell_how_a_job_ended_that_squeue_has_forgotten(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", forgetful_squeue(tmp_path))
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    jobs = {slurm.submit("exit 3"): "FAILED", slurm.submit("sleep 100"): "CANCELLED"}
    slurm.wait_for(lambda: slurm.control("processes"), "the jobs' start")
    slurm.cancel(*(job for job, state in jobs.items() if state == "CANCELLED"))
    expected = {job: JobState(state) for job, state in jobs.items()}
    slurm.wait_for(lambda: job_states(dict.fromkeys(jobs, tmp_path)) == expected, "the jobs' ends in sacct")
