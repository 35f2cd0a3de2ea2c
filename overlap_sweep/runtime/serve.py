"""The process on another machine than the launcher's: starts and ends processes there as the launcher asks."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Collection
from multiprocessing.connection import Connection, wait

from overlap_sweep.errors import UserError
from overlap_sweep.processes import Process
from overlap_sweep.runtime import channel
from overlap_sweep.runtime.meeting import Meeting, Place, read_meeting
from overlap_sweep.runtime.node import POLL_S, Ended, Goodbye, HangUp, Kill, StartProcess, Told, hello

PATIENCE_S = 600.0
"""How long to wait for the launcher: by hand it may be started last."""
RETRY_S = 0.5
GONE_S = 5.0
"""How long the first machine's torchrun must not listen to count as ended."""
END_S = 15.0
"""Time that processes have to end what they have started."""


def serve(place: Place) -> int:
    """Serves the launcher as its machine of that number until it ends. Returns the exit status: 0 if the launcher ended
    in order. UserError if it never comes."""
    connection = _joined(place)
    if connection is None:
        return 0
    processes: dict[int, Process] = {}
    try:
        while True:
            wait([connection, *(one.fileno() for one in processes.values() if one.fileno() >= 0)], POLL_S)
            while connection.poll():
                message = connection.recv()
                if isinstance(message, Goodbye):
                    return 0
                _obey(message, processes, connection)
            _report(processes, connection)
    except (EOFError, OSError):
        print(f"node {place.number}: the launch has ended or no longer answers", file=sys.stderr, flush=True)
        return 1
    finally:
        _end(processes.values())


def _end(processes: Collection[Process]) -> None:
    """Ends the processes: in order if they do so in time, since what they started in other sessions only they can
    end."""
    for process in processes:
        process.hang_up()
    until = time.monotonic() + END_S
    for process in processes:
        process.wait(max(0.0, until - time.monotonic()))
        process.kill()


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
            connection.send(hello(number, host, connection))
        except OSError:
            continue
        return connection
    return None


def _obey(message: object, processes: dict[int, Process], connection: Connection) -> None:
    if isinstance(message, StartProcess):
        changed = {**os.environ, **message.variables}
        environment = {name: value for name, value in changed.items() if value is not None}
        try:
            process = Process(message.words, environment, message.log, message.folder)
        except OSError as error:
            connection.send(Ended(message.number, 127, str(error)))
            return
        processes[message.number] = process
    elif isinstance(message, HangUp) and message.number in processes:
        processes[message.number].hang_up()
    elif isinstance(message, Kill) and message.number in processes:
        processes[message.number].kill()


def _report(processes: dict[int, Process], connection: Connection) -> None:
    """Tells the launcher what the processes told, and which have ended."""
    for number, process in list(processes.items()):
        status = process.poll()
        for line in process.told():
            connection.send(Told(number, line))
        if status is not None:
            # What it has left behind in its session goes, too.
            process.kill()
            del processes[number]
            connection.send(Ended(number, status))
