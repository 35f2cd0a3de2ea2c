"""The machine's network interfaces, as the kernel names them."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest

from overlap_sweep.runtime.interfaces import interface_of, own_addresses

NAMES = {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1"])
def test_loopback_is_found_by_any_of_its_addresses(address: str) -> None:
    assert interface_of(address) == "lo"


def test_each_own_address_is_of_an_interface_and_none_is_loopback() -> None:
    for address in own_addresses():
        assert not ipaddress.ip_address(address).is_loopback
        assert interface_of(address) in NAMES - {"lo"}


def test_an_address_of_nobody_here_has_no_interface() -> None:
    # Reserved for documentation.
    assert interface_of("192.0.2.1") is None
    assert interface_of("2001:db8::1") is None


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="the machine has no IPv6")
def test_ipv6_addresses_are_found() -> None:
    rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    for digits, *_, name in rows:
        address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
        assert interface_of(address) in {row[-1] for row in rows if row[0] == digits}
        assert interface_of(f"{address}%{name}") == interface_of(address)
