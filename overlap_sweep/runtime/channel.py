"""Connections between the processes of a launch: over a Unix socket within a machine, over TCP between machines. Both
ends of each prove that they know a secret of the launch."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

SECRET = "OVERLAP_SWEEP_SECRET"
"""Variable with which processes inherit the secret: a command line could be read by other users."""

PROOF_S = 5.0
"""Time that whoever connects has to prove that it knows the secret. Others must have the patience to wait for so
long."""

SILENT_S = 30
"""Time after which a machine that no longer answers counts as lost, in seconds."""
_PROBE_S = 5

_UNIX = "/"
"""First character of the address of a Unix socket; others are host:port."""


def new_secret() -> str:
    """Returns a secret that nobody can guess."""
    return secrets.token_hex(32)


def listen(path: Path | None, backlog: int) -> socket.socket:
    """Returns a socket that listens at the path, or on a free port of every network interface."""
    if path:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(backlog)
        return listener
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=both)


def port_of(listener: socket.socket) -> int:
    """Returns the TCP port of a listening socket."""
    return int(listener.getsockname()[1])


def accept(listener: socket.socket, secret: str, timeout_s: float) -> Connection | None:
    """Returns the next connection; None if there was none in time, or its other end did not know the secret."""
    if not select.select([listener], [], [], timeout_s)[0]:
        return None
    with contextlib.suppress(AuthenticationError, EOFError, OSError):
        accepted, _ = listener.accept()
        return _proven(accepted, secret, PROOF_S, ours_first=True)
    return None


def connect(address: str, secret: str, timeout_s: float) -> Connection:
    """Returns a connection to an address: the path of a Unix socket, or host:port. OSError if nobody listens there, or
    who does has another secret."""
    if address.startswith(_UNIX):
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.connect(address)
    else:
        host, _, port = address.rpartition(":")
        connected = socket.create_connection((host, int(port)), timeout_s)
    try:
        return _proven(connected, secret, timeout_s, ours_first=False)
    except BlockingIOError:
        raise TimeoutError(f"{address} does not answer within {timeout_s:g} s") from None
    except (AuthenticationError, EOFError) as error:
        raise ConnectionError(f"{address} belongs to another launch ({error})") from None


def _proven(connected: socket.socket, secret: str, limit_s: float, *, ours_first: bool) -> Connection:
    """Returns the connection once both ends have proven that they know the secret. BlockingIOError if the other says
    nothing within the limit."""
    with connected:
        # As a limit of the system it holds for the connection's reads, too.
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time_value(limit_s))
        if connected.family != socket.AF_UNIX:
            _notice_silence(connected)
        connection: Connection = Connection(os.dup(connected.fileno()))
        try:
            steps = [deliver_challenge, answer_challenge]
            for step in steps if ours_first else reversed(steps):
                step(connection, secret.encode())
        except BaseException:
            connection.close()
            raise
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time_value(0))
        return connection


def _time_value(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _notice_silence(connected: socket.socket) -> None:
    """Has the connection fail if the other machine does not answer: one without power closes nothing."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // _PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)
    # Messages are short and waited for.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def own_host(connection: Connection) -> str:
    """Returns this machine's IP address in a TCP connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as connected:
        return str(connected.getsockname()[0]).removeprefix("::ffff:")


def free_port() -> int:
    """Returns a TCP port that nobody listens at. Another process may take it before it is used."""
    with contextlib.closing(listen(None, 1)) as listener:
        return port_of(listener)
