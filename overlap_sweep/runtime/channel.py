"""Connections between the processes of a launch: over a Unix socket within a machine, over TCP between machines. Both
ends of each prove that they know a secret of the launch."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from overlap_sweep.config import ResolvedPoint
from overlap_sweep.results.run_directory import Attempt, Status

SECRET = "OVERLAP_SWEEP_SECRET"
"""Variable with which processes inherit the secret: a command line could be read by other users."""

PROOF_S = 5.0
"""Time that whoever connects has to prove that it knows the secret."""

MOST_GUESTS = 256
"""Most that may be at their proof at a time; the one who has been longest at it makes room for another."""

BACKLOG = 256
"""Most that may wait to be accepted: strangers while nobody is expected, or all ranks of a launch at once."""

_NONCE = _PROOF = 32
"""Bytes of a random number, and of a proof: SHA-256's."""

_POLL_S = 0.1
"""Time between looks at who has taken too long."""

SILENT_S = 30
"""Time after which a machine that no longer answers counts as lost, in seconds."""
_PROBE_S = 5

_UNIX = "/"
"""First character of the address of a Unix socket; others are host:port."""


@dataclass(frozen=True)
class PointRequest:
    """A point that every rank is to run."""

    point: ResolvedPoint
    directory: Path
    machine: Mapping[str, object]
    """Description of the launcher's machine, as `identity.machine` returns it."""
    earlier_attempts: Sequence[Attempt]
    limit_s: float


@dataclass(frozen=True)
class Reply:
    """How a point ended, on a rank or as a whole."""

    status: Status
    error: str = ""
    """Empty only if the status is `ok`."""
    final: bool = False
    """Whether another attempt would fail alike, and the group is as good as before."""
    relative_error: Mapping[str, float] = field(default_factory=dict)
    """As in `Result`."""
    node: int = 0
    """The point's machine whose log says more."""


def new_secret() -> str:
    """Returns a secret that nobody can guess."""
    return secrets.token_hex(32)


def listen(path: Path | None) -> socket.socket:
    """Returns a socket that listens at the path, or on a free port of every network interface."""
    if path:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(BACKLOG)
        return listener
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=BACKLOG, dualstack_ipv6=both)


def port_of(listener: socket.socket) -> int:
    """Returns the TCP port of a listening socket."""
    return int(listener.getsockname()[1])


@dataclass
class _Guest:
    """Who has connected and has not proven yet that it knows the secret."""

    connected: socket.socket
    challenge: bytes
    until: float
    """When it must have proven it, by time.monotonic()."""
    said: bytes = b""


class Door:
    """`with Door(listener, secret) as door: door.accept(1.0)`: lets in who proves that it knows the secret.

    Whoever connects has to prove it within `PROOF_S`, however slowly it speaks, and nobody waits for anybody else.
    """

    def __init__(self, listener: socket.socket, secret: str) -> None:
        """Closes the listening socket, too."""
        self.listener, self.secret = listener, secret
        self._guests: list[_Guest] = []
        listener.setblocking(False)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for guest in self._guests:
            guest.connected.close()
        self.listener.close()

    def accept(self, timeout_s: float) -> Connection | None:
        """Returns the next connection of who knows the secret; None if there was none in time."""
        until = time.monotonic() + timeout_s
        while True:
            waiting = [guest.connected for guest in self._guests]
            wait_s = max(0.0, min(_POLL_S, until - time.monotonic()))
            ready, _, _ = select.select([self.listener, *waiting], [], [], wait_s)
            if self.listener in ready:
                self._welcome()
            for guest in list(self._guests):
                if guest.connected in ready and self._has_proven(guest):
                    self._guests.remove(guest)
                    return _connection(guest.connected)
                if guest.until < time.monotonic():
                    self._show_out(guest)
            if time.monotonic() >= until:
                return None

    def _welcome(self) -> None:
        """Has the next one that connects begin its proof."""
        with contextlib.suppress(OSError):
            connected, _ = self.listener.accept()
            if len(self._guests) == MOST_GUESTS:
                self._show_out(self._guests[0])
            connected.setblocking(False)
            guest = _Guest(connected, secrets.token_bytes(_NONCE), time.monotonic() + PROOF_S)
            self._guests.append(guest)
            connected.send(guest.challenge)

    def _show_out(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        guest.connected.close()

    def _has_proven(self, guest: _Guest) -> bool:
        """Takes in what the guest says, and returns whether it has proven now that it knows the secret. Then it has our
        proof, too. One that is wrong or has hung up has no time left."""
        with contextlib.suppress(OSError):
            said = guest.connected.recv(_NONCE + _PROOF - len(guest.said))
            guest.said += said
            if said and len(guest.said) < _NONCE + _PROOF:
                return False
            theirs, proof = guest.said[:_NONCE], guest.said[_NONCE:]
            if hmac.compare_digest(proof, _proof(self.secret, "connects", guest.challenge, theirs)):
                guest.connected.sendall(_proof(self.secret, "listens", guest.challenge, theirs))
                return True
        guest.until = 0.0
        return False


def connect(address: str, secret: str, timeout_s: float) -> Connection:
    """Returns a connection to an address: the path of a Unix socket, or host:port. OSError if nobody listens there, or
    who does has another secret."""
    until = time.monotonic() + timeout_s
    with _connected(address, timeout_s) as connected:
        try:
            challenge, ours = _read(connected, _NONCE, until), secrets.token_bytes(_NONCE)
            connected.sendall(ours + _proof(secret, "connects", challenge, ours))
            proof = _read(connected, _PROOF, until)
        except TimeoutError:
            raise TimeoutError(f"{address} does not answer within {timeout_s:g} s") from None
        if not hmac.compare_digest(proof, _proof(secret, "listens", challenge, ours)):
            raise ConnectionError(f"{address} belongs to another launch")
        return _connection(connected.dup())


def _connected(address: str, timeout_s: float) -> socket.socket:
    if not address.startswith(_UNIX):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout_s)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(address)
    return connected


def _read(connected: socket.socket, count: int, until: float) -> bytes:
    """Returns so many bytes. TimeoutError if they are not there by then, fewer if the other end hangs up."""
    found = b""
    while len(found) < count:
        connected.settimeout(max(0.001, until - time.monotonic()))
        if not (said := connected.recv(count - len(found))):
            break
        found += said
    return found


def _proof(secret: str, role: str, challenge: bytes, answer: bytes) -> bytes:
    """Returns what only who knows the secret can say about both ends' random numbers. Nobody can pass on one end's
    proof as the other's: each names its role."""
    return hmac.digest(secret.encode(), role.encode() + challenge + answer, "sha256")


def _connection(connected: socket.socket) -> Connection:
    """Returns a connection in the place of the socket."""
    connected.setblocking(True)
    if connected.family != socket.AF_UNIX:
        _notice_silence(connected)
    return Connection(connected.detach())


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
    with socket.socket() as bound:
        bound.bind(("", 0))
        return port_of(bound)
