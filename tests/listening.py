"""Which TCP sockets of processes listen, and where, as the kernel lists them."""

import contextlib
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

_LISTENS = "0A"


def listening(pids: Collection[int]) -> list[str]:
    """The addresses at which one of the processes listens."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    return [_address(row[1].partition(":")[0]) for row in rows if row[3] == _LISTENS and row[9] in inodes]


def _sockets(pid: int) -> Iterator[str]:
    """The inodes of the process's sockets."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if (target := str(descriptor.readlink())).startswith("socket:["):
                yield target[len("socket:[") : -1]


def _address(words: str) -> str:
    """Of 32-bit words in the machine's order of bytes."""
    packed = b"".join(bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
