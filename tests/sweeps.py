"""Run launch.py as a user does, and watch its processes; or, to see what it refuses, without starting any."""

import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

from overlap_sweep.results.run_directory import RESULT_FILE, Result, find_points, read_result

ROOT = Path(__file__).parent.parent
SMALL = (
    "runtime.device=cpu",
    "workload.tokens=32",
    "workload.repeats=3",
    "workload.profiled=1",
    "model.hidden_size=256",
    "model.ffn_hidden_size=256",
)
"""A point that takes a moment."""


@dataclass
class Launch:
    """launch.py with its sweep directory, tagged through the environment so that all its processes can be found."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    tag: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        # A report takes longer than a small sweep; tests of it ask for it.
        if "-m" in arguments and not any(argument.startswith("report=") for argument in arguments):
            arguments += ("report=false",)
        where = (f"hydra.sweep.dir={self.directory}", f"hydra.run.dir={self.directory}/single")
        environment = {**os.environ, "OVERLAP_SWEEP_TEST": self.tag, **self.environment}
        return subprocess.Popen(
            [sys.executable, "launch.py", *arguments, *where],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def results(self) -> dict[str, Result]:
        """By name those of the points that have one."""
        found = find_points(self.directory)
        return {path.name: read_result(path / RESULT_FILE) for path in found if (path / RESULT_FILE).exists()}

    def processes(self, *variables: str) -> dict[int, str]:
        """Living processes of this launch whose environment has `NAME=VALUE` of each: pid -> command line."""
        asked = {variable.encode() for variable in (f"OVERLAP_SWEEP_TEST={self.tag}", *variables)}
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if asked <= {*environment} and state != "Z":
                found[int(entry.name)] = command
        return found

    def agents(self, *variables: str) -> dict[int, list[int]]:
        """The groups' agents, with their ranks' processes, which are forks of them and look like them."""
        of_agents = ((pid, line.split()) for pid, line in self.processes(*variables).items())
        # The second argument: keepers have the agent's command line as their own arguments.
        alike = {pid for pid, words in of_agents if words[1:3] == ["-m", "overlap_sweep.runtime.agent"]}
        parents = {pid: parent_of(pid) for pid in alike}
        agents = sorted(pid for pid, parent in parents.items() if parent not in alike)
        return {agent: sorted(pid for pid, parent in parents.items() if parent == agent) for agent in agents}

    def workers(self) -> list[int]:
        """The ranks' processes."""
        return [rank for ranks in self.agents().values() for rank in ranks]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@dataclass
class Fork:
    """A `launch.py ARGUMENTS`, or another program, that runs in a fork of this process."""

    arguments: tuple[str, ...]
    pid: int
    stdout: IO[str]
    stderr: IO[str]

    @property
    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> subprocess.CompletedProcess[str]:
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with self.stdout, self.stderr:
            self.stdout.seek(0)
            self.stderr.seek(0)
            return subprocess.CompletedProcess(self.arguments, status, self.stdout.read(), self.stderr.read())


def start_here(*arguments: str, cwd: Path = ROOT, program: str = "launch.py", **environment: str) -> Fork:
    """Starts the program, with its arguments, in a fork of this process, which has done already what takes most of a
    second: importing, composing once, and reading which options there are."""
    from overlap_sweep.commands import launch  # noqa: F401
    from overlap_sweep.hydra_adapter.mistakes import unknown_option
    from tests.composed import configuration

    configuration()
    unknown_option("")
    stdout, stderr = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
    child = os.fork()
    if not child:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        os.chdir(cwd)
        os.environ.update(environment)
        _be(program, arguments)
    return Fork(arguments, child, stdout, stderr)


def launch_here(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `launch.py ARGUMENTS` as `start_here` does."""
    return start_here(*arguments, cwd=cwd, **environment).wait()


def _be(program: str, arguments: tuple[str, ...]) -> NoReturn:
    """Ends this process as Python would, with nothing left of what the tests before have done in it."""
    from hydra.core.global_hydra import GlobalHydra

    from overlap_sweep.gpus import visible_gpus
    from overlap_sweep.runtime.outcome import Outcomes, outcomes

    status: object = 1
    try:
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        sys.argv = [program, *arguments]
        GlobalHydra.instance().clear()
        visible_gpus.cache_clear()
        vars(outcomes).update(vars(Outcomes()))
        runpy.run_path(str(ROOT / program), run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(status, str):
            print(status, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))
