"""Machines of a launch find each other, their places as torchrun gives them, and their network interfaces."""

import ipaddress
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.meeting import (
    Meeting,
    interface_of,
    own_addresses,
    place_by_hand,
    read_meeting,
    write_meeting,
)
from tests.by_hand import variables_of_torchrun

MEETING = Meeting(("node0", "10.0.0.1"), 1234, "secret")
OWN = {"LOCAL_SCRATCH": "/scratch", "RANK_FILE": "r", "SLURM_LOCALID": "0", "MASTER": "m", "OMP_NUM_THREADS": "4"}


def test_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    file = tmp_path / ".nodes" / "one.json"
    write_meeting(file, MEETING)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_meeting(file) == MEETING
    assert list(file.parent.iterdir()) == [file]


def test_what_a_killed_writer_left_is_gone_with_the_next_meeting(tmp_path: Path) -> None:
    file = tmp_path / "47_0.nodes"
    (tmp_path / ".47_0.nodes.tmp").write_text("{")
    write_meeting(file, MEETING)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_meeting(file) == MEETING


def test_the_file_of_a_launch_before_is_replaced_at_once_whole(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    written = [Meeting((str(number),) * 1000, number, "s") for number in range(100)]
    write_meeting(file, written[0])
    with ThreadPoolExecutor() as others:
        done = others.submit(lambda: [write_meeting(file, one) for one in written])
        seen = []
        while not done.done():
            seen.append(read_meeting(file))
    assert seen
    assert all(one in written for one in seen)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("content", [None, b"", b'{"hosts": ["node', b"[]"])
def test_a_file_that_is_not_there_or_not_whole_says_nothing(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "one.json"
    if content is not None:
        file.write_bytes(content)
    assert read_meeting(file) is None


def test_both_processes_of_torchrun_meet_in_one_file_and_its_variables_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = []
    for node in range(2):
        environ = {**OWN, **variables_of_torchrun(node, port=4321)}
        places.append(place_by_hand(environ))
        assert environ == OWN
    first, second = places
    assert first
    assert second
    assert (first.number, second.number) == (0, 1)
    assert (first.count, first.file, first.hosts) == (second.count, second.file, second.hosts)
    assert (first.count, first.hosts) == (2, ("127.0.0.1",))
    assert first.torchrun == second.torchrun == ("127.0.0.1", 4321)
    assert first.file == tmp_path / "multirun/.nodes/127_0_0_1_4321_none.json"


@pytest.mark.parametrize("environ", [OWN, {**OWN, **variables_of_torchrun(0, nodes=1)}, {"RANK": "0"}])
def test_without_several_machines_there_is_no_place_and_nothing_is_removed(environ: dict[str, str]) -> None:
    given = dict(environ)
    assert place_by_hand(given) is None
    assert given == environ


def test_several_processes_on_a_machine_are_refused() -> None:
    with pytest.raises(UserError, match=r"torchrun started 2 processes on each node; use --nproc-per-node=1"):
        place_by_hand(variables_of_torchrun(0, per_node=2))


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
