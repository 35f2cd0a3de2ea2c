"""The launcher's side of a running command: it starts the supervisor on a node, hears from it, and has it end the
command."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from overlap_sweep.errors import NodeLost, PointFailed
from overlap_sweep.processes import Process, Running, Start
from overlap_sweep.workloads.job import supervisor

GRACE_S = 5.0
"""Time that processes have to end in order after SIGTERM, as torchrun does with its workers."""
START_S = 60.0
"""Time in which a supervisor says whether the command has started; it needs hundredths of a second."""
POLL_S = 0.05
"""Time between looks at a supervisor on another node."""
_LAST_S = 5.0
"""Time that a supervisor has to end after all that it started has ended or was given up."""


class RunningCommand:
    """A command on one node: `begin`, `confirm` and in any case `end`, after which no process of it is left."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        log: Path,
        grace_s: float = GRACE_S,
        start: Start = Process,
    ) -> None:
        """`log`: file to which the command's output is appended. `grace_s`: time it has to end in order. `start`: what
        starts a process on the node where it runs."""
        self._words, self._folder, self._environment, self.log = words, folder, environment, log
        self._grace_s, self._start = grace_s, start
        self._process: Running | None = None
        self._said: list[str] = []
        self._is_stopped = self._is_over = False
        self.log_start = 0
        """Bytes of the log that were there before."""
        self.status: int | None = None
        """Exit status of the command, negative if a signal ended it; None while it runs."""
        self.left: list[int] = []
        """Processes that were killed and do not end."""

    def begin(self) -> None:
        """Has the command started, without waiting for it."""
        self.log.touch()
        self.log_start = self.log.stat().st_size
        words = [sys.executable, "-I", "-S", supervisor.__file__, str(self._grace_s), *self._words]
        self._process = self._start(words, self._environment, self.log, self._folder)

    def confirm(self) -> None:
        """Waits for the start. PointFailed if the program cannot be started, OSError if nothing can be on that node."""
        line = self._next_line(START_S)
        if line is None:
            raise PointFailed(f"the command was not started within {START_S:g} s")
        started, number = line.split()
        if started == supervisor.NOT_STARTED:
            program = self._words[0]
            raise PointFailed(_why_not(program, self._is_found(program), int(number)), final=True)

    def _is_found(self, program: str) -> bool:
        """Returns whether a program that cannot be run exists; of another node the system's word is taken."""
        if not isinstance(self._process, Process):
            return False
        inside = shutil.which(program, path=self._environment.get("PATH"))
        return (self._folder / program).exists() if "/" in program else inside is not None

    def wait(self, timeout_s: float) -> int | None:
        """Waits for the command to end by itself, at most so long. Returns its exit status, None if it runs on."""
        if self.status is None and (line := self._next_line(timeout_s)):
            self.status = int(line.split()[1])
        return self.status

    def stop(self) -> None:
        """Has all processes of the command ended, without waiting for it."""
        if self._process is None or self._is_stopped:
            return
        self._is_stopped = True
        # Without the connection a node's processes end by themselves.
        with contextlib.suppress(NodeLost):
            self._process.hang_up()

    def end(self) -> None:
        """Ends all processes of the command, and waits until they have ended."""
        if self._process is None or self._is_over:
            return
        self._is_over = True
        self.stop()
        # The same of a node that is lost, and of one that could not start it.
        with contextlib.suppress(OSError):
            self._process.wait(self._grace_s + supervisor.KILLED_S + _LAST_S)
            self._said += self._process.told()
        self._process.kill()
        for name, *numbers in map(str.split, self._said):
            if name == supervisor.LEFT:
                self.left = [int(number) for number in numbers]

    def _next_line(self, timeout_s: float) -> str | None:
        """Returns what the supervisor says next; None if that is nothing in time. PointFailed if it was killed."""
        assert self._process is not None
        until = time.monotonic() + timeout_s
        while not self._said:
            # First, since it may still say something before it ends.
            status = self._process.poll()
            self._said += self._process.told()
            if not self._said:
                if status is not None:
                    raise PointFailed("the process that watches over the command was killed")
                if (left_s := until - time.monotonic()) <= 0:
                    return None
                if isinstance(self._process, Process) and self._process.fileno() >= 0:
                    select.select([self._process], [], [], left_s)
                else:
                    self._process.wait(min(left_s, POLL_S))
        return self._said.pop(0)


def _why_not(program: str, found: bool, number: int) -> str:
    if number == errno.ENOENT and not found:
        where = "does not exist" if "/" in program else "is not in PATH"
        return f"job.command starts {program}, which {where}; install it, or give its whole path"
    if number == errno.EACCES:
        return f"job.command starts {program}, which is not executable; use chmod +x, or put its interpreter before it"
    # Of a script whose first line names an interpreter that does not exist, the system says that the script does not.
    return f"job.command starts {program}, which cannot be run ({os.strerror(number)}); put its interpreter before it"
