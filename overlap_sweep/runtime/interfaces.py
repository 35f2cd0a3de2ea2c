"""Network interfaces of this machine."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
"""The request of Linux's netdevice(7) for an interface's IPv4 address."""


LOOPBACK = "lo"
"""The interface that only this machine's processes reach."""


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
