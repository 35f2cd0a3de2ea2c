"""One machine on which processes of a point run, as the launcher sees it: its own, or another that serves it."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from overlap_sweep.errors import NodeLost
from overlap_sweep.processes import Process, Running
from overlap_sweep.runtime import channel
from overlap_sweep.runtime.interfaces import interface_of

POLL_S = 0.1

KILLED_S = 60.0
"""Time that another machine has to end a process that was killed."""


@dataclass(frozen=True)
class Hello:
    """Description of another machine, which it sends when it joins."""

    number: int
    """Its place among the launch's machines; the launcher's is 0."""
    host: str
    address: str
    """Its IP address in the connection to the launcher, which other machines can reach, too."""
    launcher: str
    """The launcher's host as this machine reaches it."""
    interface: str | None
    """The network interface with that address."""


@dataclass(frozen=True)
class StartProcess:
    """Request to start a process."""

    number: int
    words: Sequence[str]
    variables: Mapping[str, str | None]
    """Changes to the machine's own environment; None removes a variable."""
    log: Path
    folder: Path | None


@dataclass(frozen=True)
class HangUp:
    """Request to close the standard input of a process."""

    number: int


@dataclass(frozen=True)
class Kill:
    """Request to kill a process."""

    number: int


@dataclass(frozen=True)
class Goodbye:
    """The launcher ends in order."""


@dataclass(frozen=True)
class Told:
    """A line that a process wrote to its standard input."""

    number: int
    line: str


@dataclass(frozen=True)
class Ended:
    """A process has ended, or could not be started."""

    number: int
    status: int
    problem: str = ""


class Node(Protocol):
    """A machine on which processes of a point can be started."""

    host: str
    address: str
    """IP address at which the other nodes reach it."""
    launcher: str
    """Host at which it reaches the launcher."""
    interface: str | None
    """Network interface with that address."""

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> Running:
        """Starts a process whose environment differs from the node's as `environment` differs from the launcher's."""


class OwnNode:
    """The launcher's machine."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.host, self.address, self.launcher = platform.node(), address, "127.0.0.1"
        self.interface = interface_of(address)

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> Process:
        return Process(words, environment, log, folder)


class OtherNode:
    """Another machine, over the connection to the process that serves there. Its methods and those of its processes
    raise NodeLost once the connection is lost."""

    def __init__(self, hello: Hello, connection: Connection) -> None:
        self.number, self.host, self.address = hello.number, hello.host, hello.address
        self.launcher, self.interface = hello.launcher, hello.interface
        self.connection = connection
        self._numbers = count()
        self._told: dict[int, list[str]] = {}
        self._ended: dict[int, Ended] = {}
        self.lost = False

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None = None
    ) -> Running:
        number = next(self._numbers)
        self.send(StartProcess(number, tuple(words), _changes(environment), log.absolute(), folder))
        return _ProcessThere(self, number)

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._loss() from None

    def hear(self, timeout_s: float = 0.0) -> None:
        """Takes in what the machine has said, after waiting for it at most so long."""
        try:
            while self.connection.poll(timeout_s):
                timeout_s = 0.0
                message = self.connection.recv()
                if isinstance(message, Told):
                    self._told.setdefault(message.number, []).append(message.line)
                elif isinstance(message, Ended):
                    self._ended[message.number] = message
        except (EOFError, OSError):
            raise self._loss() from None

    def give_up(self) -> None:
        """Ends the connection, upon which the machine's processes end by themselves."""
        self.lost = True
        self.connection.close()

    def _loss(self) -> NodeLost:
        self.give_up()
        return NodeLost(f"node {self.number} ({self.host}) is lost: its process no longer answers")

    def told(self, number: int) -> list[str]:
        """Returns the lines of a process that were not yet returned."""
        return self._told.pop(number, [])

    def end_of(self, number: int) -> Ended | None:
        """Returns how a process has ended; None while it runs."""
        return self._ended.get(number)


class _ProcessThere:
    """A process on another machine."""

    def __init__(self, node: OtherNode, number: int) -> None:
        self._node, self._number = node, number
        self._killed = False

    def poll(self) -> int | None:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> int | None:
        until = time.monotonic() + timeout_s
        while True:
            if ended := self._node.end_of(self._number):
                if ended.problem:
                    raise OSError(f"node {self._node.number} ({self._node.host}): {ended.problem}")
                return ended.status
            if self._node.lost:
                raise NodeLost(f"node {self._node.number} ({self._node.host}) is lost")
            left_s = until - time.monotonic()
            self._node.hear(min(POLL_S, max(0.0, left_s)))
            if left_s <= 0 and not self._node.end_of(self._number):
                return None

    def told(self) -> list[str]:
        self._node.hear()
        return self._node.told(self._number)

    def hang_up(self) -> None:
        self._node.send(HangUp(self._number))

    def kill(self) -> None:
        if self._killed or self._node.lost:
            # Without the connection the machine's processes end by themselves.
            return
        self._killed = True
        with contextlib.suppress(NodeLost):
            self._node.send(Kill(self._number))
            until = time.monotonic() + KILLED_S
            while self._node.end_of(self._number) is None:
                if time.monotonic() > until:
                    self._node.give_up()
                    return
                self._node.hear(POLL_S)


def _changes(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Returns how the environment differs from this process's."""
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    return {**changed, **dict.fromkeys(os.environ.keys() - environment.keys())}


def hello(number: int, host_of_launcher: str, connection: Connection) -> Hello:
    """Returns what this machine says of itself in a connection to the launcher."""
    address = channel.own_host(connection)
    return Hello(number, platform.node(), address, host_of_launcher, interface_of(address))
