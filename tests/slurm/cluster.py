"""A real Slurm on this machine, as the tests get hold of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("cluster.sh")
NODES = ("n1", "n2")
GPUS_PER_NODE = 8
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged", "slurmdbd", "mariadbd")
FIRST_PORT, PORTS = 26817, 5


@dataclass(frozen=True)
class Row:
    """A job, or one element of an array, as squeue has it; it shows ended jobs for `min_job_age_s`."""

    state: str
    reason: str
    node: str


@dataclass(frozen=True)
class Slurm:
    """A cluster of two nodes. What waits fails with what the cluster says of itself."""

    base: Path
    settings: dict[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """For every process that shall talk to this cluster. Nothing of a job that the tests may run in."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**kept, "SLURM_CONF": str(self.base / "slurm.conf")}

    # --- jobs

    def submit(
        self,
        command: str | Path,
        *options: str,
        partition: str = "debug",
        gpus: int = 0,
        environment: dict[str, str] | None = None,
    ) -> str:
        """The id of a new job of a shell command, or of a script if it is a Path. `gpus` are per node."""
        what = [str(command)] if isinstance(command, Path) else [f"--wrap={command}"]
        output = self.base / "output" / "%A_%a.txt"
        asked = [f"--partition={partition}", f"--output={output}", "--open-mode=append", "--chdir=/tmp"]
        if gpus:
            asked.append(f"--gpus-per-node={gpus}")
        return self.run("sbatch", "--parsable", *asked, *options, *what, extra=environment).strip()

    def output(self, job_id: str, element: int | None = None) -> str:
        """What a job wrote so far, in all its runs, or one element of a job array."""
        number = 4294967294 if element is None else element
        path = self.base / "output" / f"{job_id}_{number}.txt"
        return path.read_text() if path.exists() else ""

    def squeue(self, *job_ids: str) -> dict[str, Row]:
        """By id: `7`, or `7_0` for an element of an array. `7` asks for all elements of it too. None asks for all."""
        text = self.run("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%N")
        rows = {line[0]: Row(*line[1:]) for line in (line.split("|") for line in text.splitlines())}
        if not job_ids:
            return rows
        return {name: row for name, row in rows.items() if name in job_ids or name.partition("_")[0] in job_ids}

    def job_state(self, job_id: str) -> str:
        """`GONE` where squeue doesn't know it, or not any longer."""
        row = self.squeue(job_id).get(job_id)
        return row.state if row else "GONE"

    def wait_for_state(self, job_id: str, *states: str, timeout_s: float = 30) -> None:
        """Until the job, or every element of the array, is in one of the states."""
        self.wait_for(
            lambda: (rows := self.squeue(job_id)) and all(row.state in states for row in rows.values()),
            f"job {job_id} in state {' or '.join(states)}",
            timeout_s,
        )

    def wait_for_output(self, job_id: str, text: str, timeout_s: float = 30) -> None:
        self.wait_for(lambda: text in self.output(job_id), f"{text!r} in the output of job {job_id}", timeout_s)

    def cancel(self, *job_ids: str) -> None:
        self.run("scancel", *job_ids)

    def clean_up(self) -> None:
        """The cluster as it was at the beginning: no job runs or waits, every part of it is there."""
        self.start_controller()
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
        if left := {name.partition("_")[0] for name, row in self.squeue().items() if row.state not in ended}:
            self.cancel(*left)
            self.wait_for(lambda: all(row.state in ended for row in self.squeue().values()), "an empty queue", 90)
        for node in NODES:
            if self.node_state(node) != "idle":
                self.restore_node(node)

    # --- the cluster

    def restart_controller(self) -> None:
        self._script("restart-controller")

    def stop_controller(self) -> None:
        self._script("stop-controller")

    def kill_controller(self) -> None:
        """Without the chance to save what it knows."""
        self._script("kill-controller")

    def start_controller(self) -> None:
        self._script("start-controller")

    def fail_node(self, node: str) -> None:
        """As if its power went: all its processes are killed, and the controller takes it for down."""
        self._script("fail-node", node)

    def restore_node(self, node: str) -> None:
        self._script("restore-node", node)

    def node_state(self, node: str) -> str:
        return self.run("sinfo", "-h", "-N", "-n", node, "-p", "debug", "-o", "%T").strip()

    def node_processes(self, node: str = "") -> list[int]:
        """Of jobs, whatever session or parent they have by now, on one node or on all."""
        return [int(pid) for pid in self._script("processes", node).split()]

    # --- for failures

    def report(self) -> str:
        """What the cluster says of itself. Never raises: a controller that is down is what may have to be told."""
        says = []
        for command in (["squeue", "-t", "all"], ["sinfo", "-N", "-l"]):
            try:
                shown = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)
                says.append(f"$ {' '.join(command)}\n{shown.stdout}{shown.stderr}")
            except subprocess.TimeoutExpired:
                says.append(f"$ {' '.join(command)}\nno answer in 30 s\n")
        return "\n".join([*says, "slurmctld.log:", self.log_tail()])

    def log_tail(self, name: str = "slurmctld", lines: int = 30) -> str:
        """Of `slurmctld`, `slurmd.n1`, `slurmd.n2` or `slurmdbd`."""
        log = self.base / "log" / f"{name}.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else f"no {log}"

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {timeout_s:g} s\n{self.report()}")
            time.sleep(0.2)

    # --- processes

    def run(self, *command: str, extra: dict[str, str] | None = None, timeout_s: float = 60) -> str:
        """What a command of Slurm's says; one that fails fails the test."""
        return self._run(list(command), {**self.environment, **(extra or {})}, timeout_s)

    def start(self) -> None:
        (self.base / "output").mkdir(exist_ok=True)
        self._script("start")

    def _script(self, *arguments: str) -> str:
        return self._run([str(SCRIPT), *arguments], {**os.environ, **self.settings}, timeout_s=180)

    def _run(self, command: list[str], environment: dict[str, str], timeout_s: float) -> str:
        # To files: a daemon that keeps a pipe open would make the reader wait for it.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            try:
                status = subprocess.run(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout_s
                ).returncode
                ended = f"exit status {status}"
            except subprocess.TimeoutExpired:
                status, ended = -1, f"no end in {timeout_s:g} s"
            out.seek(0)
            err.seek(0)
            said, errors = out.read(), err.read()
        if status:
            raise AssertionError(f"{' '.join(command)}: {ended}\n{said}{errors}\n{self.log_tail()}")
        return said


def why_unavailable() -> str:
    """Empty where a cluster can be started, after installing Slurm if need be."""
    if os.geteuid() != 0:
        return "only root can start a Slurm cluster for the tests"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if all(shutil.which(program, path=path) for program in PROGRAMS):
        return ""
    installed = subprocess.run([SCRIPT, "install"], capture_output=True, text=True, timeout=280)
    return installed.stderr.strip() if installed.returncode else ""


@contextlib.contextmanager
def started_cluster(*, accounting: bool = True, min_job_age_s: int = 300) -> Iterator[Slurm]:
    # Not pytest's own temporary directory: that is closed to other users, munge's among them, and its path is long.
    base = Path(tempfile.mkdtemp(prefix="slurm.", dir="/tmp"))
    settings = {
        "BASE": str(base),
        "PORT_OFFSET": str(_free_port_offset()),
        "ACCT": "dbd" if accounting else "none",
        "GPUS": str(GPUS_PER_NODE),
        "MIN_JOB_AGE": str(min_job_age_s),
    }
    cluster = Slurm(base, settings)
    with _stopped_at_the_end(base, settings):
        cluster.start()
        yield cluster


@contextlib.contextmanager
def _stopped_at_the_end(base: Path, settings: dict[str, str]) -> Iterator[None]:
    """However this process ends: the daemons have nothing else that would stop them."""
    keeper = subprocess.Popen(
        ["bash", "-c", 'cat; "$0" stop; rm -rf "$BASE"', SCRIPT],
        env={**os.environ, **settings},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert keeper.stdin
    try:
        yield
    finally:
        keeper.stdin.close()
        keeper.wait(timeout=120)
    assert not base.exists(), f"the cluster in {base} was not stopped"


def _free_port_offset() -> int:
    # By process, so that two test sessions that begin together don't choose the same.
    first = os.getpid() % 100 * 10
    for offset in (*range(first, 1000, 10), *range(0, first, 10)):
        if all(_is_free(FIRST_PORT + offset + number) for number in range(PORTS)):
            return offset
    raise AssertionError(f"no {PORTS} free ports in a row from {FIRST_PORT} on")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
