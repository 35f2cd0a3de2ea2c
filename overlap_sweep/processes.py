"""Processes that end with the process that started them, on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

LAUNCHERS_OWN = (signal.SIGUSR2,)
"""Cluster managers send it to every process of a job, but only the launcher handles it."""


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Has the kernel kill this process once the parent, which is of the same session, has ended: at once, even inside a
    library that never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getsid(os.getppid()) != os.getsid(0):
        # It has already ended.
        os.kill(os.getpid(), signal.SIGKILL)


class Running(Protocol):
    """A started process, on this or on another machine."""

    def poll(self) -> int | None:
        """Returns the exit status, negative if a signal ended it; None while it runs."""

    def wait(self, timeout_s: float) -> int | None:
        """Waits for the end, at most so long; returns as `poll`."""

    def told(self) -> list[str]:
        """Returns the lines that the process has written to its standard input since the last call."""

    def hang_up(self) -> None:
        """Closes its standard input, upon which it is to end."""

    def kill(self) -> None:
        """Kills its session, and waits for the end."""


class Start(Protocol):
    """Starts processes on a certain machine."""

    def __call__(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> Running:
        """Starts the program with the environment; its output is appended to the log."""


class Process:
    """A process in a session of its own. Its standard input is a socket to us: when that closes, however we ended, it
    must end what it has started. It may write lines to it, too."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> None:
        """OSError if the program cannot be started."""
        self._channel, theirs = socket.socketpair()
        self._heard, self._all_heard, self._killed = b"", False, False
        # Child processes inherit the blocked signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHERS_OWN)
        try:
            with theirs, log.open("ab") as output:
                self._process = subprocess.Popen(
                    words,
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    cwd=folder,
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHERS_OWN)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Returns the descriptor that is readable when `told` has news; -1 once it will have none."""
        return -1 if self._all_heard else self._channel.fileno()

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def told(self) -> list[str]:
        while self.fileno() >= 0 and select.select([self._channel], [], [], 0)[0]:
            self._hear()
        *lines, self._heard = self._heard.split(b"\n")
        return [line.decode() for line in lines]

    def _hear(self) -> None:
        """Reads what the process has written, or that it has closed its standard input."""
        try:
            said = self._channel.recv(4096)
        except ConnectionResetError:
            # It has not read what we wrote.
            said = b""
        self._heard += said
        self._all_heard = not said

    def hang_up(self) -> None:
        # It may have closed it, too.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        # Only once: the id of an ended process group may be reused.
        if self._killed:
            return
        self._killed = True
        # All of it may have ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()
