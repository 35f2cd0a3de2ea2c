"""Connections between the processes of a launch: only who knows the secret gets one, over either kind of socket."""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from overlap_sweep.runtime import channel

Listener = tuple[socket.socket, str]


@pytest.fixture(params=["unix", "tcp"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    """A listening socket and its address."""
    path = tmp_path / "s" if request.param == "unix" else None
    with channel.listen(path, 4) as listening:
        yield listening, str(path) if path else f"127.0.0.1:{channel.port_of(listening)}"


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


def test_both_ends_with_the_secret_exchange_objects(listener: Listener, others: ThreadPoolExecutor) -> None:
    listening, address = listener
    theirs = others.submit(channel.connect, address, "secret", 5.0)
    ours = channel.accept(listening, "secret", 5.0)
    assert ours
    with ours, theirs.result() as other:
        other.send({"rank": 1})
        assert ours.recv() == {"rank": 1}
        ours.send([2] * 10**3)
        assert len(other.recv()) == 10**3
        assert address.startswith("/") or channel.own_host(other) == "127.0.0.1"


def test_another_secret_is_refused_on_both_ends(listener: Listener, others: ThreadPoolExecutor) -> None:
    listening, address = listener
    theirs = others.submit(channel.connect, address, "wrong", 5.0)
    assert channel.accept(listening, "secret", 5.0) is None
    with pytest.raises(ConnectionError, match=r"belongs to another launch"):
        theirs.result()


def test_a_listener_that_does_not_know_the_secret_is_refused(listener: Listener, others: ThreadPoolExecutor) -> None:
    """Somebody may listen at a port that a launch before had: it must not be believed."""
    listening, address = listener
    theirs = others.submit(channel.connect, address, "secret", 5.0)
    assert channel.accept(listening, "wrong", 5.0) is None
    with pytest.raises(ConnectionError, match=r"belongs to another launch"):
        theirs.result()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0\0\0\4abcd"])
def test_who_proves_nothing_is_not_waited_for_long(
    listener: Listener, said: bytes, others: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PROOF_S", 0.2)
    listening, address = listener
    with stranger(address) as unknown:
        unknown.sendall(said)
        started = time.monotonic()
        assert channel.accept(listening, "secret", 5.0) is None
        assert time.monotonic() - started < 2.0
        # It has disturbed nobody.
        theirs = others.submit(channel.connect, address, "secret", 5.0)
        ours = channel.accept(listening, "secret", 5.0)
        assert ours
        with ours, theirs.result():
            pass


def test_a_stranger_that_hangs_up_at_once_is_ignored(listener: Listener) -> None:
    listening, address = listener
    stranger(address).close()
    assert channel.accept(listening, "secret", 5.0) is None


def test_nobody_is_waited_for_longer_than_asked(listener: Listener) -> None:
    started = time.monotonic()
    assert channel.accept(listener[0], "secret", 0.1) is None
    assert 0.1 <= time.monotonic() - started < 2.0


def test_a_listener_that_says_nothing_is_given_up(listener: Listener) -> None:
    with pytest.raises(TimeoutError, match=r"does not answer within 0.2 s"):
        channel.connect(listener[1], "secret", 0.2)


def test_after_the_proof_there_is_no_time_limit(
    listener: Listener, others: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PROOF_S", 0.2)
    listening, address = listener
    theirs = others.submit(channel.connect, address, "secret", 0.2)
    ours = channel.accept(listening, "secret", 5.0)
    assert ours
    with ours, theirs.result() as other:
        received: list[Callable[[], object]] = [others.submit(end.recv).result for end in (ours, other)]
        time.sleep(0.5)
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
    with channel.listen(tmp_path / "s", 1):
        assert stat.S_ISSOCK((tmp_path / "s").stat().st_mode)
