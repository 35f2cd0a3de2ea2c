"""A real Slurm on this machine, as the tests get hold of it."""

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
GPUS_PER_NODE = 16
HEALTHY = ("idle", "mixed", "allocated")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged", "slurmdbd", "mariadbd")
FIRST_PORT, PORTS = 26817, 5


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

    def submit(self, command: str, *options: str, partition: str = "debug", gpus: int = 0) -> str:
        """The id of a new job of a shell command. `gpus` are per node."""
        asked = [f"--partition={partition}", "--output=/dev/null", "--chdir=/tmp", f"--gpus-per-node={gpus}"]
        return self.run("sbatch", "--parsable", *asked, *options, f"--wrap={command}").strip()

    def wait_for_state(self, job_id: str, *states: str) -> None:
        """Until the job is in one of the states."""
        asked = ("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T")
        self.wait_for(lambda: self.run(*asked).strip() in states, f"job {job_id} in state {' or '.join(states)}", 60)

    # --- the cluster

    def control(self, *arguments: str) -> str:
        """What cluster.sh prints, such as for `stop-controller`."""
        return self._run([str(SCRIPT), *arguments], {**os.environ, **self.settings}, timeout_s=180)

    def mend(self) -> None:
        """Starts again whatever part of the cluster is down."""
        self.control("start-controller")
        for node in NODES:
            if self.run("sinfo", "-h", "-N", "-n", node, "-p", "debug", "-o", "%T").strip() not in HEALTHY:
                self.control("restore-node", node)

    # --- for failures

    def report(self) -> str:
        """What the cluster says of itself. Never raises: a controller that is down is what may have to be told."""
        asked = f"set -x; squeue -t all; sinfo -N -l; tail -n 30 {self.base}/log/slurmctld.log"
        shell = ["timeout", "60", "bash", "-c", asked]
        return subprocess.run(shell, env=self.environment, stdout=-1, stderr=-2, text=True).stdout

    def wait_for(
        self, condition: Callable[[], object], what: str, timeout_s: float = 30, told: Callable[[], str] = str
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{self.report()}\n{told()}"
            time.sleep(0.1)

    # --- processes

    def run(self, *command: str) -> str:
        """What a command of Slurm's says; one that fails fails the test."""
        return self._run(list(command), self.environment, timeout_s=60)

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
            raise AssertionError(f"{' '.join(command)}: {ended}\n{said}{errors}\n{self.report()}")
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
def started_cluster(gpus: int) -> Iterator[Slurm]:
    # Not pytest's own temporary directory: that is closed to other users, munge's among them, and its path is long.
    base = Path(tempfile.mkdtemp(prefix="slurm.", dir="/tmp"))
    settings = {"BASE": str(base), "PORT_OFFSET": str(_free_port_offset()), "GPUS": str(gpus)}
    cluster = Slurm(base, settings)
    with _stopped_at_the_end(base, settings):
        cluster.control("start")
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
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(FIRST_PORT + offset, FIRST_PORT + offset + PORTS):
                probe = probes.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
            return offset
    raise AssertionError(f"no {PORTS} free ports in a row from {FIRST_PORT} on")
