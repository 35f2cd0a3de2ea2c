"""Commands whose processes all end with them, and with us, whoever is killed and in whatever order.

Each runs under two keepers (`process.py`), a process and its parent, which end all that the command has started once
it has ended or we have; either does if the other is killed. If both are, we end whatever is in the command's session or
has its mark in the environment. If we are killed, too, the kernel ends what has asked for it (`end_with_parent`).
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from overlap_sweep.errors import PointFailed
from overlap_sweep.keeper import process

GRACE_S = 5.0
"""Time that processes have to end in order after SIGTERM, as torchrun does with its workers."""
LAST_S = 5.0
"""Time that keepers have to end after all that they keep has ended or was given up."""

LAUNCHERS_OWN = (signal.SIGUSR2,)
"""Cluster managers send it to every process of a job, but only the launcher handles it."""

_MARK = "OVERLAP_SWEEP_KEPT"
"""Variable of all processes of a command, whose value no other command has."""


class NotStarted(OSError):
    """The program of a command cannot be run."""


class Keeper(Protocol):
    """The keepers of a command, on this or another machine."""

    @property
    def is_gone(self) -> bool:
        """Returns whether they say nothing any more, since they have ended."""

    def hear(self, timeout_s: float) -> list[str]:
        """Returns the lines that they have said since the last call, after waiting for one at most so long."""

    def hang_up(self) -> None:
        """Has them end the command in order."""

    def kill(self) -> None:
        """Has them end the command at once, unless it ends in order. Afterwards nothing of it is left."""


@dataclass(frozen=True)
class Program:
    """A command that is to be started."""

    words: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    """File to which its output is appended."""
    folder: Path | None = None
    """Its working directory, if not ours."""
    grace_s: float = GRACE_S
    """Time that its processes have to end in order."""


Start = Callable[[Program], Keeper]
"""Starts keepers with a command on a certain machine. OSError if not even they can be started."""


class OwnKeeper:
    """Keepers on this machine."""

    def __init__(self, program: Program) -> None:
        """Starts them with the command. OSError if not even they can be started."""
        self._mark = uuid.uuid4().hex
        self._channel, theirs = socket.socketpair()
        self._heard, self._is_closed = b"", False
        self._longest_s = program.grace_s + process.KILLED_S + LAST_S
        # Child processes inherit the blocked signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHERS_OWN)
        try:
            with theirs, program.log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", process.__file__, str(program.grace_s), *program.words],
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    cwd=program.folder,
                    env={**program.environment, _MARK: self._mark},
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHERS_OWN)
        self.pid, self.is_gone = self._process.pid, False
        self._session: int | None = None

    def fileno(self) -> int:
        """Returns the descriptor that is readable when `hear` has news; it is open until `is_gone`."""
        return self._channel.fileno()

    def hear(self, timeout_s: float) -> list[str]:
        until = time.monotonic() + timeout_s
        while not self.is_gone and b"\n" not in self._heard:
            if not select.select([self._channel], [], [], max(0.0, until - time.monotonic()))[0]:
                return []
            try:
                said = self._channel.recv(4096)
            except ConnectionResetError:
                # They have not read what we wrote.
                said = b""
            self._heard += said
            self.is_gone = not said
        *heard, self._heard = self._heard.split(b"\n")
        lines = [line.decode() for line in heard]
        for line in lines:
            if line.startswith(process.STARTED):
                # The command leads a session.
                self._session = int(line.split()[1])
        return lines

    def hang_up(self) -> None:
        # They may have ended.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # They have been asked to end it in order where this fails.
        with contextlib.suppress(OSError):
            self._channel.send(b"k")
        until, lines = time.monotonic() + self._longest_s, []
        while not self.is_gone and time.monotonic() < until:
            lines += self.hear(until - time.monotonic())
        self._heard, self.is_gone = "".join(f"{line}\n" for line in lines).encode() + self._heard, True
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.wait(LAST_S) == 0:
                return
        until = time.monotonic() + process.KILLED_S
        while (left := self._left()) and time.monotonic() < until:
            for pid in left:
                process.send(pid, signal.SIGKILL)
            time.sleep(process.POLL_S)
        self._process.wait()

    def _left(self) -> list[int]:
        left, mark = [], f"{_MARK}={self._mark}".encode()
        for pid, _, session, has_ended in process.all_processes():
            # It may end just now, or be another user's.
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") or (
                    session == self._session and not has_ended
                ):
                    left.append(pid)
        return left


class Command:
    """A command with its keepers. In any case call `end`, after which no process of it is left."""

    def __init__(self, program: Program, start: Start = OwnKeeper) -> None:
        """Starts it, without waiting for it to be started. `start`: what starts keepers on the machine where it runs.
        OSError if not even they can be started."""
        self.log = program.log
        self.log.touch()
        self.log_start = self.log.stat().st_size
        """Bytes of the log that were there before."""
        self.status: int | None = None
        """Exit status of the command, negative if a signal ended it; None while it runs."""
        self.left: list[int] = []
        """Processes that were killed and do not end."""
        self._is_started = self._is_stopped = self._is_over = False
        self.keeper = start(program)

    def confirm(self, timeout_s: float) -> None:
        """Waits for the start. NotStarted if the program cannot be run, another OSError if nothing can on that machine,
        PointFailed if it is not started in time."""
        if not self._await(lambda: self._is_started, timeout_s):
            raise PointFailed(f"the command was not started within {timeout_s:g} s")

    def wait(self, timeout_s: float = 0.0) -> int | None:
        """Waits for the command to end by itself, at most so long. Returns its exit status, None if it runs on.
        Raises as `confirm`, and PointFailed if its keepers were killed."""
        self._await(lambda: self.status is not None, timeout_s)
        return self.status

    def stop(self) -> None:
        """Has all its processes ended in order, without waiting for it."""
        if not self._is_stopped:
            self._is_stopped = True
            # Without the connection the processes of another machine end by themselves.
            with contextlib.suppress(OSError):
                self.keeper.hang_up()

    def end(self, *, at_once: bool = False) -> None:
        """Ends all its processes, and waits until they have ended."""
        if self._is_over:
            return
        self._is_over = True
        if not at_once:
            self.stop()
        self.keeper.kill()
        # What they have said last. Perhaps that they could not start it.
        with contextlib.suppress(OSError, PointFailed):
            self._await(lambda: False, 0.0)

    def _await(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Listens to the keepers until something is so, at most so long; returns whether it is."""
        until = time.monotonic() + timeout_s
        while not is_so():
            for line in self.keeper.hear(max(0.0, until - time.monotonic())):
                self._take_in(line)
            if not is_so() and self.keeper.is_gone:
                raise PointFailed("the process that watches over the command was killed")
            if time.monotonic() >= until:
                return is_so()
        return True

    def _take_in(self, line: str) -> None:
        name, *numbers = line.split()
        if name == process.STARTED:
            self._is_started = True
        elif name == process.NOT_STARTED:
            raise NotStarted(int(numbers[0]), os.strerror(int(numbers[0])))
        elif name == process.ENDED:
            self.status = int(numbers[0])
        else:
            self.left = [int(number) for number in numbers]
