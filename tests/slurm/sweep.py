"""A sweep through Slurm whose points tell when they are measured, and wait where a test wants to disturb them.

Its workers are those of tests/faults/light_agent.py, unless real ones are asked for.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from overlap_sweep.run_directory import LOCK_FILE
from overlap_sweep.runtime.slurm.records import RECORDS, JobRecord
from tests.faults.injection import TINY, faults_in, injected
from tests.faults.sitecustomize import HOLD, read_journal
from tests.slurm.cluster import ENDED, Slurm
from tests.sweeps import Launch

# A point that a test holds is not to be given up.
POINTS = (*TINY, "runtime.timeout_factor=0")
THROUGH_SLURM = (
    "hydra/launcher=slurm",
    "hydra.launcher.poll_s=0.5",
    # The points run on the CPU and ask for GPUs nevertheless.
    "hydra.launcher.gpus_per_node=${tp_size}",
)


@dataclass
class SlurmSweep:
    """One sweep directory, and all that was launched for it."""

    slurm: Slurm
    folder: Path
    plan: Sequence[dict[str, Any]] = ()
    """See tests/faults/sitecustomize.py."""
    light: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.faults = faults_in(self.folder, self.plan)
        environment = {**self.slurm.environment, **injected(self.faults, self.light), **self.environment}
        self.launch = Launch(self.folder / "sweep", environment)
        self.results = self.launch.results
        self._started: list[subprocess.Popen[str]] = []

    # --- launching

    def start(self, *arguments: str, torchrun: bool = False) -> subprocess.Popen[str]:
        # By its name the jobs of this sweep are told from those of other tests, which squeue shows for a while.
        through_slurm = (*THROUGH_SLURM, f"hydra.launcher.name={self.launch.tag}")
        process = self.launch.start("-m", *POINTS, *(() if torchrun else through_slurm), *arguments)
        self._started.append(process)
        return process

    def finish(self, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Waits for the launcher that was started last."""
        process = self._started[-1]
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            raise AssertionError(f"no end in {timeout_s:g} s:\n{stdout}{stderr}\n{self.logs()}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def run(self, *arguments: str, torchrun: bool = False, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        self.start(*arguments, torchrun=torchrun)
        return self.finish(timeout_s)

    def kill_launcher(self) -> None:
        """The one that was started last."""
        self._started[-1].kill()
        self._started[-1].communicate()

    def signal_launcher(self, number: signal.Signals) -> None:
        self._started[-1].send_signal(number)

    def close(self) -> None:
        """No launcher outlives its test, nor do its jobs."""
        for process in self._started:
            process.kill()
            process.communicate()
        self.slurm.run("scancel", f"--name={self.launch.tag}")

    def is_locked(self) -> bool:
        """Whether a launcher is at work."""
        with (self.launch.directory / LOCK_FILE).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    # --- jobs

    def jobs(self, form: str = "%T") -> dict[str, str]:
        """All of this sweep that squeue knows, in the order of their submission, by id as its format says."""
        text = self.slurm.run("squeue", "-h", "-r", "-t", "all", f"--name={self.launch.tag}", "-o", f"%i|{form}")
        found = dict(line.split("|", 1) for line in text.splitlines())
        return {job_id: found[job_id] for job_id in sorted(found, key=_in_order)}

    def records(self) -> dict[str, list[str]]:
        """By the id of each job that the launcher looks after, its points."""
        files = sorted((self.launch.directory / RECORDS).glob("*.json"))
        records = [msgspec.json.decode(file.read_bytes(), type=JobRecord) for file in files]
        return {record.job_id: list(record.points) for record in records}

    def job_of(self, point: str) -> str:
        (job_id,) = (job_id for job_id, points in self.records().items() if point in points)
        return job_id

    def process_of(self, job_id: str) -> int:
        """The Python that works off the job's points."""
        array, _, element = job_id.partition("_")
        ours = (
            {f"SLURM_ARRAY_JOB_ID={array}", f"SLURM_ARRAY_TASK_ID={element}"} if element else {f"SLURM_JOB_ID={array}"}
        )
        (pid,) = (
            pid
            for pid, command in self.launch.processes().items()
            if "submitit.core._submit" in command
            and "python" in command.split()[0]
            and ours <= set(Path(f"/proc/{pid}/environ").read_text().split("\0"))
        )
        return pid

    def kill(self, job_id: str) -> None:
        os.kill(self.process_of(job_id), signal.SIGKILL)

    def end_in(self, seconds: float) -> None:
        """Moves the end of the only job's time limit."""
        (job,) = self.jobs()
        ends = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
        self.slurm.run("scontrol", "update", f"jobid={job}", f"endtime={ends}")

    def preempted(self, job_id: str) -> bool:
        """Whether it was told to make room."""
        shown = self.slurm.run("scontrol", "--oneliner", "show", "job", job_id).split()
        return any(field.startswith("PreemptTime=") and field != "PreemptTime=None" for field in shown)

    def wait_for_empty_queue(self) -> None:
        """The launcher goes when it has all results, a moment before the last job ends."""
        self.slurm.wait_for(lambda: set(self.jobs().values()) <= ENDED, "the end of the sweep's jobs")

    def logs(self) -> str:
        """What the jobs printed."""
        files = sorted(self.launch.directory.glob(".submitit/*/*/*_log.*"))
        return "\n".join(f"{file.name}:\n{text}" for file in files if (text := file.read_text(errors="replace")))

    # --- points

    def hold(self, *points: str) -> None:
        for point in points:
            (self.faults / HOLD / point).touch()

    def release(self, *points: str) -> None:
        """All, where none is named."""
        for path in list((self.faults / HOLD).iterdir()):
            if not points or path.name in points:
                path.unlink()

    def wait_until_begun(self, *points: str, timeout_s: float = 200) -> None:
        try:
            self.slurm.wait_for(lambda: set(points) <= set(self.measured()), f"the begin of {points}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def measured(self, event: str = "begun") -> Counter[str]:
        """How often the workers began each point, or came to its end (`run`)."""
        return Counter(line["point"] for line in self._lines() if line["event"] == event)

    def _lines(self) -> list[dict[str, Any]]:
        return [line for line in read_journal(self.faults) if line["rank"] == 0]

    def restarts(self) -> int:
        """The most often that one of the jobs which began a point had been queued again."""
        return max(line["restarts"] for line in self._lines())

    def statuses(self) -> dict[str, str]:
        return {name: result.status for name, result in self.results().items()}


def _in_order(job_id: str) -> list[int]:
    return [int(number) for number in job_id.split("_")]


def points(*num_sms: int, tp_size: int = 2) -> list[str]:
    return [f"tp{tp_size}_sm{num_sm}" for num_sm in num_sms]


def ok(names: list[str]) -> dict[str, str]:
    return dict.fromkeys(names, "ok")


def forgetful_squeue(folder: Path) -> str:
    """A PATH whose squeue knows no job that has ended, as every squeue some minutes later."""
    program = folder / "squeue"
    known = "PENDING,RUNNING,COMPLETING,SUSPENDED,PREEMPTED"
    program.write_text(f'#!/bin/bash\nexec {shutil.which("squeue")} "${{@/#--states=all/--states={known}}}"\n')
    program.chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


def without_accounts(folder: Path) -> None:
    """Adds to such a PATH's folder a sacct as it is where no accounts are kept."""
    program = folder / "sacct"
    program.write_text("#!/bin/sh\necho Slurm accounting storage is disabled >&2\nexit 1\n")
    program.chmod(0o755)
