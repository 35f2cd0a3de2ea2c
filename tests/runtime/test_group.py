"""What the launcher makes of workers that say nothing, or half of something, which points share them, and what of their
log is told. No process is started."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlap_sweep.config import Runtime
from overlap_sweep.errors import PointFailed, UserError
from overlap_sweep.runtime import group
from overlap_sweep.runtime.channel import Door, Reply, connect, listen
from overlap_sweep.runtime.group import WorkerGroup, WorkerPool
from overlap_sweep.runtime.group_config import GroupConfig, check_multicast, check_temporary_directory
from overlap_sweep.runtime.outcome import MOST_BYTES, tail
from tests.make_point import resolved

OK, FAILED = Reply("ok"), Reply("failed", "rank 1: no")
Ranks = tuple[Any, list[Any]]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """A group whose agent seems to live, and its workers' ends of the connections."""
    monkeypatch.setattr(group, "SETTLE_S", 0.3)
    (tmp_path / "log").touch()
    found: Any = WorkerGroup(GroupConfig(2, "cpu", 1, False, 1, 0.5, 60), tmp_path / "log")
    found._agents = [
        SimpleNamespace(wait=lambda timeout_s=0.0: 3 if timeout_s else None, log=tmp_path / "log", log_start=0)
    ]
    pairs = [Pipe() for _ in range(2)]
    found._channels = [ours for ours, _ in pairs]
    yield found, [theirs for _, theirs in pairs]
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_a_temporary_directory_too_long_for_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "/tmp/" + "x" * 70
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        for directory, error in ((longest, "No such file"), (f"{longest}x", "path too long")):
            with pytest.raises(OSError, match=error):
                listener.bind(f"{directory}/pymp-12345678/listener-12345678")
    monkeypatch.setattr(tempfile, "tempdir", longest)
    check_temporary_directory()
    monkeypatch.setattr(tempfile, "tempdir", f"{longest}x")
    with pytest.raises(UserError, match=rf"TMPDIR={longest}x has 76 bytes.*set TMPDIR to a shorter path"):
        check_temporary_directory()


def test_who_does_not_answer_in_time_is_given_up(ranks: Ranks) -> None:
    found, workers = ranks
    workers[0].send(OK)
    with pytest.raises(PointFailed, match=r"no answer from ranks \[1\] within 0.5 s") as given_up:
        found._collect(0.5)
    assert given_up.value.timed_out


def test_who_waits_for_one_that_failed_is_not_waited_for_long(ranks: Ranks) -> None:
    found, workers = ranks
    workers[1].send(FAILED)
    started = time.monotonic()
    assert found._collect(60) == {1: FAILED}
    assert time.monotonic() - started < 5


def test_a_closed_connection_is_a_death(ranks: Ranks) -> None:
    found, workers = ranks
    workers[1].close()
    with pytest.raises(PointFailed, match=r"rank 1 died \(its agent exited with 3\)"):
        found._collect(5)


def test_a_machine_that_is_unreachable_is_a_death_of_its_ranks(ranks: Ranks) -> None:
    """Over TCP that is no ConnectionError."""
    found, workers = ranks

    class Unreachable(Connection):
        def recv(self) -> Any:
            raise OSError(errno.EHOSTUNREACH, "No route to host")

        def send(self, obj: Any) -> None:
            self.recv()

    workers[1].send(OK)
    with Unreachable(os.dup(found._channels[1].fileno())) as broken:
        found._channels[1] = broken
        with pytest.raises(PointFailed, match=r"rank 1 died \(its agent exited with 3\)"):
            found._collect(5)
        with pytest.raises(PointFailed, match=r"the worker group died \(its agent exited with 3\)"):
            found._send({})


def test_of_deaths_the_group_s_own_counts(ranks: Ranks, tmp_path: Path) -> None:
    """The log also has those of the groups before it."""
    found, workers = ranks
    log = tmp_path / "log"
    log.write_text("  exitcode  : -9 (pid: 1)  (SIGKILL)\n")
    found._agents[0].log_start = log.stat().st_size
    workers[0].close()
    with pytest.raises(PointFailed, match="its agent exited with 3"):
        found._collect(5)
    log.write_text(log.read_text() + "noise\n  exitcode  : -11 (pid: 22)  (SIGSEGV)\nmore\n")
    with pytest.raises(PointFailed, match=r"exitcode : -11 \(pid: 22\) \(SIGSEGV\)"):
        found._collect(5)


def test_a_rank_that_connects_and_says_nothing_has_not_joined(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "s"

    def join(*said: int) -> None:
        with connect(str(path), "secret", 1.0) as joined:
            for word in said:
                joined.send(word)
            time.sleep(1.0)

    with Door(listen(path), "secret") as door, ThreadPoolExecutor() as others:
        others.map(lambda said: join(*said), [(), (0,)])
        with pytest.raises(PointFailed, match=r"only [01] of 2 ranks joined within runtime.start_timeout_s=0.5"):
            ranks[0]._accept(door)


def test_a_group_is_shared_by_points_alike_unless_they_are_isolated_or_it_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living: list[Any] = []

    class Group:
        alive, has_joined = True, False

        def __init__(self, config: GroupConfig, log: Path) -> None:
            self.config = config

        def __enter__(self) -> Group:
            assert not living, "idle workers would disturb the next point's"
            living.append(self)
            self.has_joined = True
            return self

        def close(self) -> None:
            living.remove(self)

        def run(self, *_: object) -> dict[str, Any]:
            return {"group": self}

    def group_of(**changes: Any) -> Any:
        return groups.run(resolved("operator", **changes), tmp_path, 1.0)["group"]

    monkeypatch.setattr(group, "WorkerGroup", Group)
    groups = WorkerPool(tmp_path / "log")
    first = group_of()
    assert group_of(num_sm=2) is first
    isolated = group_of(runtime={"isolate": True})
    assert isolated is not first
    assert group_of(runtime={"isolate": True}) is not isolated
    other = group_of(tp_size=4)
    assert other.config.world_size == 4
    other.alive = False
    assert group_of(tp_size=4) is not other
    groups.close()
    assert living == []


def test_of_a_log_the_last_lines_are_told_and_a_huge_one_is_not_read_as_a_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log, 3) == ""
    log.write_text("a\nb\nc\nd\n")
    assert tail(log, 3) == "b\nc\nd"
    assert tail(log, 30) == "a\nb\nc\nd"
    # From where somebody else's end.
    assert tail(log, 10, start=len("a\nb\n")) == "c\nd"
    assert tail(log, 10, start=log.stat().st_size) == ""
    with log.open("wb") as file:
        file.seek(2**40)
        file.write(b"\xff the end")
    assert tail(log, 2).endswith("\ufffd the end")
    assert len(tail(log, 2)) <= MOST_BYTES


def test_an_environment_that_turns_multicast_off_is_refused_where_it_is_asked_for() -> None:
    off, on = (Runtime(device="cuda", multicast=multicast) for multicast in (False, True))
    check_multicast(replace(on, device="cpu"), {"UB_SKIPMC": "1"})
    check_multicast(off, {"UB_SKIPMC": "1"})
    check_multicast(on, {"UB_SKIPMC": "0"})
    with pytest.raises(UserError, match=r"UB_SKIPMC=1 .*runtime\.multicast=true"):
        check_multicast(on, {"UB_SKIPMC": "1"})
