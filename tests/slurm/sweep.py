"""A sweep on a cluster whose points tell when they are measured, and wait where a test wants to disturb them.

Its workers are those of tests/faults/light_agent.py, unless real ones are asked for.
"""

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from overlap_sweep.runtime.cluster import Cluster
from overlap_sweep.runtime.cluster.records import JobRecord, folder_of
from overlap_sweep.runtime.cluster.slurm import CLUSTER
from tests.faults.injection import TINY, faults_in, injected
from tests.faults.sitecustomize import HOLD, read_journal
from tests.slurm.cluster import ENDED, Slurm
from tests.sweeps import Launch, wait_for

# A point that a test holds is not to be given up.
POINTS = (*TINY, "runtime.timeout_factor=0")
SUBMITTED = re.compile(r"\S*python\S* (.*submitit\.core\._submit|-c import cloudpickle)")
"""The command of a job's Python."""


class ClusterSweep:
    """One sweep directory, and all that was launched for it on a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        environment: Mapping[str, str],
        folder: Path,
        *,
        plan: Sequence[dict[str, Any]] = (),
        light: bool = True,
        points: Sequence[str] = POINTS,
    ) -> None:
        """`environment`: of processes that use the cluster. `plan`: see tests/faults/sitecustomize.py. `points`:
        arguments of all launches."""
        self.cluster, self.points = cluster, points
        self.through = [f"hydra/launcher={cluster.name}", "hydra.launcher.poll_s=0.5"]
        self.faults = faults_in(folder, plan)
        faulty = injected(self.faults, light)
        path = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), faulty["PYTHONPATH"])))
        self.launch = Launch(folder / "sweep", {**environment, **faulty, "PYTHONPATH": path})
        self.results = self.launch.results
        self._started: list[subprocess.Popen[str]] = []

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{self.logs()}"
            time.sleep(0.1)

    @property
    def launcher(self) -> subprocess.Popen[str]:
        """Returns the one that was started last."""
        return self._started[-1]

    # --- launching

    def start(self, *arguments: str, torchrun: bool = False) -> subprocess.Popen[str]:
        process = self.launch.start("-m", *(() if torchrun else self.through), *self.points, *arguments)
        self._started.append(process)
        return process

    def finish(self, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Waits for the launcher that was started last, which ends with this status."""
        process = self.launcher
        timer = threading.Timer(240, process.kill)
        timer.start()
        stdout, stderr = process.communicate()
        timer.cancel()
        assert process.returncode == status, f"{process.returncode}:\n{stdout}{stderr}\n{self.logs()}"
        return subprocess.CompletedProcess(process.args, status, stdout, stderr)

    def run(self, *arguments: str, torchrun: bool = False, status: int = 0) -> subprocess.CompletedProcess[str]:
        self.start(*arguments, torchrun=torchrun)
        return self.finish(status)

    def end_launcher(self, number: signal.Signals, status: int) -> subprocess.CompletedProcess[str]:
        """The one that was started last."""
        self.launcher.send_signal(number)
        return self.finish(status)

    def kill_launcher(self) -> None:
        self.end_launcher(signal.SIGKILL, -signal.SIGKILL)

    def close(self) -> None:
        """No launcher outlives its test, nor do its jobs."""
        for process in self._started:
            process.kill()
            process.communicate()
        self.cluster.cancel([*self.records()])

    # --- jobs

    def records(self) -> dict[str, list[str]]:
        """By the id of each job that the launcher looks after, its points."""
        return {record.job_id: list(record.points) for record in self.job_records()}

    def job_records(self) -> list[JobRecord]:
        files = sorted(folder_of(self.cluster, self.launch.directory).glob("*.json"))
        return [msgspec.json.decode(file.read_bytes(), type=JobRecord) for file in files]

    def job_of(self, point: str) -> str:
        (job_id,) = (job_id for job_id, points in self.records().items() if point in points)
        return job_id

    def logs(self) -> str:
        """What the jobs printed."""
        files = {Path(record.log) for record in self.job_records()}
        files |= {*self.launch.directory.glob(".submitit/*/*_log.*")}
        return "\n".join(f"{file.name}:\n{text}" for file in sorted(files) if (text := read(file)))

    # --- points

    def hold(self, *points: str) -> None:
        for point in points:
            (self.faults / HOLD / point).touch()

    def release(self, *points: str) -> None:
        """All, where none is named."""
        for path in list((self.faults / HOLD).iterdir()):
            if not points or path.name in points:
                path.unlink()

    def wait_until_begun(self, *points: str) -> None:
        self.wait_for(lambda: set(points) <= set(self.measured()), f"the begin of {points}", 200)

    def measured(self, event: str = "begun", rank: int = 0) -> Counter[str]:
        """How often a rank began each point, or came to its end (`run`)."""
        noted = read_journal(self.faults)
        return Counter(line["point"] for line in noted if line["event"] == event and line.get("rank") == rank)

    def restarts(self) -> int:
        """The most often that one of the jobs which began a point had been queued again."""
        return max(line["restarts"] for line in read_journal(self.faults))

    def statuses(self) -> dict[str, str]:
        return {name: result.status for name, result in self.results().items()}


class SlurmSweep(ClusterSweep):
    """A sweep on a real Slurm."""

    def __init__(self, slurm: Slurm, folder: Path, *, environment: Mapping[str, str] = {}, **given: Any) -> None:
        super().__init__(CLUSTER, {**slurm.environment, **environment}, folder, **given)
        self.slurm = slurm
        # By its name the jobs of this sweep are told from those of other tests, which squeue shows for a while.
        # The points run on the CPU and ask for GPUs nevertheless.
        self.through += ["hydra.launcher.gpus_per_node=${tp_size}", f"hydra.launcher.name={self.launch.tag}"]

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
        self.slurm.wait_for(condition, what, timeout_s, self.logs)

    def close(self) -> None:
        super().close()
        self.slurm.run("scancel", f"--name={self.launch.tag}")

    def jobs(self, form: str = "%T") -> dict[str, str]:
        """All of this sweep that squeue knows, in the order of their submission, by id as its format says."""
        text = self.slurm.run("squeue", "-h", "-r", "-t", "all", f"--name={self.launch.tag}", "-o", f"%i|{form}")
        found = dict(line.split("|", 1) for line in text.splitlines())
        return {job_id: found[job_id] for job_id in sorted(found, key=lambda one: [*map(int, one.split("_"))])}

    def kill(self, job_id: str) -> None:
        """Kills the Python that works off the job's points; returns when its workers, who have to notice, are gone."""
        array, _, element = job_id.partition("_")
        asked = [f"SLURM_ARRAY_JOB_ID={array}", f"SLURM_ARRAY_TASK_ID={element}"]
        of_job = self.launch.processes(*(asked if element else [f"SLURM_JOB_ID={array}"]))
        (working_off,) = (pid for pid, command in of_job.items() if SUBMITTED.match(command))
        os.kill(working_off, signal.SIGKILL)
        wait_for(lambda: not of_job.keys() & self.launch.processes().keys())

    def processes(self) -> list[str]:
        """Command lines of what the jobs have running, on whatever node."""
        return list(self.launch.processes("SUBMITIT_EXECUTOR=slurm").values())

    def end_in(self, seconds: float) -> None:
        """Moves the end of the only job's time limit."""
        (job,) = self.jobs()
        ends = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
        self.slurm.run("scontrol", "update", f"jobid={job}", f"endtime={ends}")

    def wait_for_empty_queue(self) -> None:
        """The launcher goes when it has all results, a moment before the last job ends."""
        self.wait_for(lambda: set(self.jobs().values()) <= ENDED, "the end of the sweep's jobs")


def read(log: Path) -> str:
    """Returns what is in a log, which a job that has not begun lacks."""
    return log.read_text(errors="replace") if log.exists() else ""


def points(*num_sms: int, tp_size: int = 2) -> list[str]:
    return [f"tp{tp_size}_sm{num_sm}" for num_sm in num_sms]


def ok(names: list[str]) -> dict[str, str]:
    return dict.fromkeys(names, "ok")


def forgetful_squeue(folder: Path, accounts: bool = True) -> str:
    """A PATH whose squeue knows no job that has ended, as every squeue some minutes later, and whose sacct perhaps has
    no accounts."""
    known = "PENDING,RUNNING,COMPLETING,SUSPENDED,PREEMPTED"
    programs = {"squeue": f'exec {shutil.which("squeue")} "${{@/#--states=all/--states={known}}}"'}
    if not accounts:
        programs["sacct"] = "echo Slurm accounting storage is disabled >&2; exit 1"
    return with_programs(folder, programs)


def late_sbatch(folder: Path) -> str:
    """A PATH whose sbatch answers when the job has begun, as a loaded controller's may."""
    return with_programs(folder, {"sbatch": f'said=$({shutil.which("sbatch")} "$@") && sleep 2 && echo "$said"'})


def with_programs(folder: Path, programs: Mapping[str, str]) -> str:
    """A PATH that begins with these scripts."""
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])
