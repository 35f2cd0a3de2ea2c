"""Run launch.py as a user does, and watch its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from overlap_sweep.run_directory import RESULT_FILE, Result, find_points, read_result

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
        """Of the points that have one, by name."""
        found = find_points(self.directory)
        return {path.name: read_result(path / RESULT_FILE) for path in found if (path / RESULT_FILE).exists()}

    def processes(self) -> dict[int, str]:
        """Living processes of this launch: pid -> command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if f"OVERLAP_SWEEP_TEST={self.tag}".encode() in environment and state != "Z":
                found[int(entry.name)] = command
        return found

    def workers(self) -> list[int]:
        """The ranks' processes: the children of the fork server, which look like it."""
        servers = {pid for pid, command in self.processes().items() if "multiprocessing.forkserver" in command}
        return sorted(pid for pid in servers if _parent(pid) in servers)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
