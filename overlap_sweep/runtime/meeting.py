"""Has the machines of a launch find each other: by a file in the shared folder with the launcher's address and a secret
that only its owner can read. What addresses a machine has, and at which network interface."""

import errno
import fcntl
import os
import re
import socket
import struct
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from overlap_sweep.errors import UserError

BY_HAND = Path("multirun/.nodes")
"""Folder of the meeting files of launches by torchrun."""

_OF_TORCHRUN = re.compile(r"((GROUP|ROLE|LOCAL)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+")
"""Variables that torchrun sets for the processes that it starts."""

_SIOCGIFADDR = 0x8915
"""The request of Linux's netdevice(7) for an interface's IPv4 address."""

LOOPBACK = "lo"
"""The interface that only this machine's processes reach."""


class Meeting(msgspec.Struct, frozen=True):
    """How the launcher is reached."""

    hosts: tuple[str, ...]
    """Names or addresses of its machine, the most likely first."""
    port: int
    secret: str
    ended: bool = False
    """Whether the launch has ended before all machines have joined."""


@dataclass(frozen=True)
class Place:
    """This process's place in a launch on several machines."""

    number: int
    """0 is the launcher's."""
    count: int
    file: Path
    """The file of the `Meeting`."""
    hosts: tuple[str, ...]
    """Names of the launcher's machine."""
    torchrun: tuple[str, int] | None = None
    """Host and port of the first machine's torchrun; None in a cluster's job, whose file is of no other launch."""


def place_by_hand(environ: MutableMapping[str, str]) -> Place | None:
    """Returns the place in a launch by one torchrun a machine; None otherwise. Removes torchrun's variables, which are
    of no process that this one starts. UserError if torchrun started several processes a machine."""
    if "TORCHELASTIC_RUN_ID" not in environ or int(environ.get("GROUP_WORLD_SIZE", 1)) == 1:
        return None
    if environ["LOCAL_WORLD_SIZE"] != "1":
        raise UserError(
            f"torchrun started {environ['LOCAL_WORLD_SIZE']} processes on each node; use --nproc-per-node=1: the one "
            "process starts the ranks itself."
        )
    common = (environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))
    name = re.sub(r"\W+", "_", "_".join(common))
    number, count, host = int(environ["GROUP_RANK"]), int(environ["GROUP_WORLD_SIZE"]), environ["MASTER_ADDR"]
    torchrun = host, int(environ["MASTER_PORT"])
    for variable in [name for name in environ if _OF_TORCHRUN.fullmatch(name)]:
        del environ[variable]
    return Place(number, count, (BY_HAND / f"{name}.json").absolute(), (host,), torchrun)


def write_meeting(file: Path, meeting: Meeting) -> None:
    """Writes the file, which only this user can read, at once whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Always the same name: a job that was killed while it wrote, and is queued again, leaves nothing.
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as written:
        written.write(msgspec.json.encode(meeting))
    temporary.replace(file)


def read_meeting(file: Path) -> Meeting | None:
    """Returns what the file says; None while there is none."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Meeting)
    except msgspec.MsgspecError:
        # On network file systems a new file may be seen before its content,
        return None
    except OSError as error:
        # and one that was replaced while it was opened is stale.
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return None


def own_addresses() -> list[str]:
    """Returns the IPv4 addresses of this machine that others may reach."""
    found = [_ipv4(name) for _, name in socket.if_nameindex()]
    return [address for address in found if address and not address.startswith("127.")]


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with this IP address; None if there is none."""
    if ":" in address:
        return _by_ipv6(address)
    if address.startswith("127."):
        # All of 127.0.0.0/8 is reached, though the interface has but one address.
        return LOOPBACK
    return next((name for _, name in socket.if_nameindex() if _ipv4(name) == address), None)


def _ipv4(interface: str) -> str | None:
    """Returns the interface's IPv4 address; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _by_ipv6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    listed = Path("/proc/net/if_inet6")
    rows = [line.split() for line in listed.read_text().splitlines()] if listed.exists() else []
    return next((row[-1] for row in rows if row[0] == wanted), None)
