"""The process on another machine than the launcher's: starts and ends commands there as the launcher asks."""

import os
import platform
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait

from overlap_sweep.errors import UserError
from overlap_sweep.keeper import OwnKeeper, Program
from overlap_sweep.runtime import channel
from overlap_sweep.runtime.meeting import Meeting, Place, interface_of, read_meeting

PATIENCE_S = 600.0
"""How long to wait for the launcher: by hand it may be started last."""
RETRY_S = 0.5
GONE_S = 5.0
"""How long the first machine's torchrun must not listen to count as ended."""


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
class StartCommand:
    """Request to start a command, as `keeper.Start` does."""

    number: int
    program: Program
    """With no environment."""
    variables: Mapping[str, str | None]
    """Changes to the machine's own environment; None removes a variable."""


@dataclass(frozen=True)
class EndCommand:
    """Request to end a command, in order or at once."""

    number: int
    at_once: bool


@dataclass(frozen=True)
class Goodbye:
    """The launcher ends in order."""


@dataclass(frozen=True)
class Said:
    """What the keepers of a command say."""

    number: int
    line: str | None
    """None if they have ended, or could not be started."""
    problem: str = ""
    """Why they could not be started."""


def serve(place: Place) -> int:
    """Serves the launcher as its machine of that number until it ends. Returns the exit status: 0 if the launcher ended
    in order. UserError if it never comes."""
    connection = _joined(place)
    if connection is None:
        return 0
    keepers: dict[int, OwnKeeper] = {}
    try:
        while True:
            wait([connection, *(keeper.fileno() for keeper in keepers.values())])
            while connection.poll():
                message = connection.recv()
                if isinstance(message, Goodbye):
                    return 0
                _obey(message, keepers, connection)
            _report(keepers, connection)
    except (EOFError, OSError):
        print(f"node {place.number}: the launch has ended or no longer answers", file=sys.stderr, flush=True)
        return 1
    finally:
        _end(keepers.values())


def _end(keepers: Collection[OwnKeeper]) -> None:
    """Ends all commands, at the same time and in order."""
    for keeper in keepers:
        keeper.hang_up()
    for keeper in keepers:
        keeper.kill()


def _joined(place: Place) -> Connection | None:
    """Returns the connection to the launcher; None if it has ended before this machine came."""
    until = time.monotonic() + PATIENCE_S
    gone_since: float | None = None
    print(f"node {place.number}: waits for the launcher's {place.file}", file=sys.stderr, flush=True)
    while time.monotonic() < until:
        meeting = read_meeting(place.file)
        if meeting and meeting.ended:
            return None
        if meeting and (connection := _connected(place.number, meeting)):
            return connection
        gone_since = (gone_since or time.monotonic()) if _is_gone(place) else None
        if gone_since and time.monotonic() - gone_since > GONE_S:
            raise UserError(f"node {place.number}: the launch has ended; node 0 on {place.hosts[0]} says why.")
        time.sleep(RETRY_S)
    raise UserError(
        f"node {place.number}: no launcher came to {place.file} within {PATIENCE_S:g} s; start all nodes in the same "
        "shared folder."
    )


def _is_gone(place: Place) -> bool:
    """Returns whether the first machine's torchrun, which listens as long as it runs, has ended."""
    if place.torchrun is None:
        return False
    try:
        socket.create_connection(place.torchrun, RETRY_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        # The network may only be slow.
        return False
    return False


def _connected(number: int, meeting: Meeting) -> Connection | None:
    """Returns the connection to the launcher; None if it does not answer, as after its end."""
    for host in meeting.hosts:
        try:
            connection = channel.connect(f"{host}:{meeting.port}", meeting.secret, channel.PROOF_S)
            address = channel.own_host(connection)
            connection.send(Hello(number, platform.node(), address, host, interface_of(address)))
        except OSError:
            continue
        return connection
    return None


def _obey(message: object, keepers: dict[int, OwnKeeper], connection: Connection) -> None:
    if isinstance(message, StartCommand):
        changed = {**os.environ, **message.variables}
        environment = {name: value for name, value in changed.items() if value is not None}
        try:
            keeper = OwnKeeper(replace(message.program, environment=environment))
        except OSError as error:
            connection.send(Said(message.number, None, str(error)))
            return
        keepers[message.number] = keeper
    elif isinstance(message, EndCommand) and (found := keepers.get(message.number)):
        found.kill() if message.at_once else found.hang_up()


def _report(keepers: dict[int, OwnKeeper], connection: Connection) -> None:
    """Tells the launcher what the keepers say, and which of them have ended."""
    for number, keeper in list(keepers.items()):
        for line in keeper.hear(0.0):
            connection.send(Said(number, line))
        if keeper.is_gone:
            # If they were killed themselves, what they kept goes, too.
            keeper.kill()
            del keepers[number]
            connection.send(Said(number, None))
