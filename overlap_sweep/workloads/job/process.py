"""The launcher's side of a running command: it starts the supervisor, hears from it, and has it end the command."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from overlap_sweep.errors import PointFailed
from overlap_sweep.workloads.job import supervisor

GRACE_S = 5.0
"""Time that processes have to end in order after SIGTERM, as torchrun does with its workers."""

_LAUNCHERS_OWN = (signal.SIGUSR2,)
"""Cluster managers send it to every process of a job, but only the launcher handles it."""


class RunningCommand:
    """`with RunningCommand(...) as running: running.wait(1.0)`: no process of the command outlives the block."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        log: Path,
        grace_s: float = GRACE_S,
    ) -> None:
        """`log`: file to which the command's output is appended. `grace_s`: time it has to end in order."""
        self._words, self._folder, self._environment, self._log = words, folder, environment, log
        self._grace_s, self._heard = grace_s, b""
        self.status: int | None = None
        """Exit status of the command, negative if a signal ended it; None while it runs."""
        self.left: list[int] = []
        """Processes that were killed and do not end."""

    def __enter__(self) -> RunningCommand:
        """PointFailed if the program cannot be started."""
        self._channel, theirs = socket.socketpair()
        # Child processes inherit the blocked signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, _LAUNCHERS_OWN)
        try:
            with theirs, self._log.open("ab") as log:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-I", "-S", supervisor.__file__, str(self._grace_s), *self._words],
                    stdin=theirs.fileno(),
                    stdout=log,
                    stderr=log,
                    cwd=self._folder,
                    env=self._environment,
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _LAUNCHERS_OWN)
        try:
            started, number = self._next_line()
            if started == supervisor.NOT_STARTED:
                program = self._words[0]
                inside = shutil.which(program, path=self._environment.get("PATH"))
                found = (self._folder / program).exists() if "/" in program else inside is not None
                raise PointFailed(_why_not(program, found, number), final=True)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait(self, timeout_s: float) -> int | None:
        """Waits for the command to end by itself, at most so long. Returns its exit status, None if it runs on."""
        if self.status is None and select.select([self._channel], [], [], timeout_s)[0]:
            _, self.status = self._next_line()
        return self.status

    def end(self) -> None:
        """Ends all processes of the command, and waits until they have ended."""
        if self._channel.fileno() < 0:
            return
        runs = self.status is None and not select.select([self._channel], [], [], 0.0)[0]
        written = self._log.stat().st_size
        self._channel.shutdown(socket.SHUT_WR)
        said = self._heard + b"".join(iter(lambda: self._channel.recv(4096), b""))
        self._channel.close()
        self._supervisor.wait()
        for name, *numbers in map(str.split, said.decode().splitlines()):
            if name == supervisor.LEFT:
                self.left = [int(number) for number in numbers]
        if runs:
            self._cut_log(written)

    def _cut_log(self, written: int) -> None:
        """Leaves out what the command printed while it was ended: torchrun prints a page, below which its last words
        would be lost."""
        left_out = self._log.stat().st_size - written
        os.truncate(self._log, written)
        with self._log.open("a") as log:
            log.write(
                f"overlap_sweep: The command was ended here. {left_out} bytes that it then printed are left out.\n"
            )

    def _next_line(self) -> tuple[str, int]:
        while b"\n" not in self._heard:
            said = self._channel.recv(4096)
            if not said:
                raise PointFailed("the process that watches over the command was killed")
            self._heard += said
        line, _, self._heard = self._heard.partition(b"\n")
        name, number = line.decode().split()
        return name, int(number)


def _why_not(program: str, found: bool, number: int) -> str:
    if number == errno.ENOENT and not found:
        where = "does not exist" if "/" in program else "is not in PATH"
        return f"job.command starts {program}, which {where}; install it, or give its whole path"
    if number == errno.EACCES:
        return f"job.command starts {program}, which is not executable; use chmod +x, or put its interpreter before it"
    # Of a script whose first line names an interpreter that does not exist, the system says that the script does not.
    return f"job.command starts {program}, which cannot be run ({os.strerror(number)}); put its interpreter before it"
