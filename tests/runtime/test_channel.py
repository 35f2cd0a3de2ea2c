"""Connections between the processes of a launch: only who knows the secret gets one, over either kind of socket."""

import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from overlap_sweep.runtime import channel

Doors = tuple[channel.Door, str]


@pytest.fixture(params=["unix", "tcp"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Doors]:
    """A door and its address."""
    path = tmp_path / "s" if request.param == "unix" else None
    with channel.Door(channel.listen(path), "secret") as door:
        yield door, str(path) if path else f"127.0.0.1:{channel.port_of(door.listener)}"


@pytest.fixture
def others() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def stranger(address: str) -> socket.socket:
    """A connection of somebody who proves nothing."""
    if address.startswith("/"):
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(address)
        return connected
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def is_let_in(listening: Doors, others: ThreadPoolExecutor, timeout_s: float = 5.0) -> bool:
    """Whether who knows the secret gets a connection that works."""
    door, address = listening
    theirs = others.submit(channel.connect, address, "secret", timeout_s)
    ours = door.accept(timeout_s)
    if ours is None:
        return False
    with ours, theirs.result() as other:
        other.send({"rank": 1})
        return bool(ours.recv() == {"rank": 1})


def test_both_ends_with_the_secret_exchange_objects(listening: Doors, others: ThreadPoolExecutor) -> None:
    door, address = listening
    theirs = others.submit(channel.connect, address, "secret", 5.0)
    ours = door.accept(5.0)
    assert ours
    with ours, theirs.result() as other:
        other.send({"rank": 1})
        assert ours.recv() == {"rank": 1}
        ours.send([2] * 10**3)
        assert len(other.recv()) == 10**3
        assert address.startswith("/") or channel.own_host(other) == "127.0.0.1"


def test_another_secret_is_refused_on_both_ends(listening: Doors, others: ThreadPoolExecutor) -> None:
    door, address = listening
    theirs = others.submit(channel.connect, address, "wrong", 5.0)
    assert door.accept(0.5) is None
    with pytest.raises(ConnectionError, match=r"belongs to another launch"):
        theirs.result()


def test_a_listener_that_does_not_know_the_secret_is_refused(listening: Doors, others: ThreadPoolExecutor) -> None:
    """Somebody may listen at a port that a launch before had. One that passes on or repeats what it is sent proves
    nothing."""
    door, address = listening
    door.secret = "wrong"
    theirs = others.submit(channel.connect, address, "secret", 5.0)
    assert door.accept(0.5) is None
    with pytest.raises(ConnectionError, match=r"belongs to another launch"):
        theirs.result()


def test_what_is_sent_to_a_listener_is_not_its_proof(others: ThreadPoolExecutor) -> None:
    with channel.listen(None) as false:
        theirs = others.submit(channel.connect, f"127.0.0.1:{channel.port_of(false)}", "secret", 5.0)
        connected, _ = false.accept()
        with connected:
            connected.sendall(b"c" * 32)
            connected.sendall(connected.recv(64, socket.MSG_WAITALL)[32:])
            with pytest.raises(ConnectionError, match=r"belongs to another launch"):
                theirs.result()


def test_a_recorded_proof_opens_no_door(listening: Doors, others: ThreadPoolExecutor) -> None:
    door, address = listening
    with stranger(address) as first, stranger(address) as second:
        assert door.accept(0.2) is None
        ours = b"o" * 32
        proof = channel._proof("secret", "connects", first.recv(32), ours)
        second.sendall(ours + proof)
        assert door.accept(0.2) is None
        first.sendall(ours + proof)
        entered = door.accept(5.0)
        assert entered
        entered.close()


def test_strangers_keep_nobody_waiting(
    listening: Doors, others: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent ones, such as say something else, and some that say a byte at a time: each is shown out in time."""
    monkeypatch.setattr(channel, "PROOF_S", 1.0)
    door, address = listening
    said = [b"", b"", b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0\0\0\4abcd", b"\xff" * 10**5]
    strangers = [stranger(address) for _ in said]
    for one, words in zip(strangers, said, strict=True):
        one.setblocking(False)
        with suppress(BlockingIOError):
            one.send(words)
    slow = stranger(address)
    began = time.monotonic()
    assert is_let_in(listening, others)
    assert time.monotonic() - began < channel.PROOF_S
    while door._guests:
        assert time.monotonic() - began < 30 * channel.PROOF_S
        with suppress(ConnectionError):
            slow.send(b"x")
        assert door.accept(0.1) is None
    for one in (*strangers, slow):
        one.close()
    assert is_let_in(listening, others)


def test_more_strangers_than_there_is_room_for_keep_nobody_out(
    listening: Doors, others: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MOST_GUESTS", 8)
    with ExitStack() as open_ones:
        for _ in range(20):
            open_ones.enter_context(stranger(listening[1]))
        assert is_let_in(listening, others)
        assert len(listening[0]._guests) <= 8


def test_a_stranger_that_hangs_up_at_once_is_ignored(listening: Doors, others: ThreadPoolExecutor) -> None:
    stranger(listening[1]).close()
    assert is_let_in(listening, others)


def test_nobody_is_waited_for_longer_than_asked(listening: Doors) -> None:
    """Not even where strangers come all the time."""
    for busy in (False, True):
        with ExitStack() as open_ones:
            for _ in range(100 if busy else 0):
                open_ones.enter_context(stranger(listening[1]))
            began = time.monotonic()
            assert listening[0].accept(0.1) is None
            assert 0.1 <= time.monotonic() - began < channel.PROOF_S


def test_a_listener_that_says_nothing_is_given_up(listening: Doors) -> None:
    with pytest.raises(TimeoutError, match=r"does not answer within 0.2 s"):
        channel.connect(listening[1], "secret", 0.2)


def test_a_listener_that_says_a_byte_at_a_time_is_given_up(others: ThreadPoolExecutor) -> None:
    with channel.listen(None) as false:
        theirs = others.submit(channel.connect, f"127.0.0.1:{channel.port_of(false)}", "secret", 0.5)
        connected, _ = false.accept()
        with connected:
            for _ in range(10):
                with suppress(ConnectionError):
                    connected.send(b"x")
                time.sleep(0.1)
            with pytest.raises(TimeoutError, match=r"does not answer within 0.5 s"):
                theirs.result()


def test_after_the_proof_there_is_no_time_limit(
    listening: Doors, others: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PROOF_S", 0.5)
    door, address = listening
    theirs = others.submit(channel.connect, address, "secret", 0.5)
    ours = door.accept(5.0)
    assert ours
    with ours, theirs.result() as other:
        received: list[Callable[[], object]] = [others.submit(end.recv).result for end in (ours, other)]
        time.sleep(0.6)
        ours.send("late")
        other.send("late")
        assert [result() for result in received] == ["late", "late"]


def test_where_nobody_listens_connecting_fails_at_once(tmp_path: Path) -> None:
    for address in (str(tmp_path / "s"), f"127.0.0.1:{channel.free_port()}"):
        with pytest.raises(OSError, match=r"refused|No such file"):
            channel.connect(address, "secret", 5.0)


def test_secrets_differ_and_sockets_in_files_are_the_user_s(tmp_path: Path) -> None:
    assert len({channel.new_secret() for _ in range(100)}) == 100
    assert len(channel.new_secret()) == 64
    with channel.listen(tmp_path / "s"):
        assert stat.S_ISSOCK((tmp_path / "s").stat().st_mode)
