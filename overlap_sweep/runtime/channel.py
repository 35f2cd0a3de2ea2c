"""JSON messages between the launcher and its workers, over a Unix socket in a private directory."""

from __future__ import annotations

import json
import socket
from typing import Any


class Channel:
    """One connection. A closed or reset peer reads as None."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unread = b""

    @classmethod
    def connect(cls, address: str) -> Channel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address)
        return cls(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None when the peer is gone. TimeoutError after `timeout_s` in which nothing
        came; what came before of a message is kept for the next call."""
        self._socket.settimeout(timeout_s)
        try:
            while b"\n" not in self._unread:
                received = self._socket.recv(65536)
                if not received:
                    return None
                self._unread += received
        except ConnectionResetError:
            return None
        finally:
            self._socket.settimeout(None)
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        self._socket.close()
