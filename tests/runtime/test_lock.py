"""One sweep at a time in a directory, and one process at a time at a point."""

import errno
import fcntl
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import LOCK_FILE
from overlap_sweep.runtime import lock

LEFT_BEHIND = b"process 1 of somebody on node9 since 2026-11-21 12:30:05: python launch.py -m"


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    """What a test holds would be held until pytest's end."""
    yield
    for descriptor in lock._held.values():
        os.close(descriptor)
    lock._held.clear()


def started(what: str, directory: Path) -> subprocess.Popen[str]:
    """A process that has done something to the lock of the directory, and waits."""
    script = "import sys, time, pathlib; from overlap_sweep.runtime import lock; path = pathlib.Path(sys.argv[1])\n"
    script += f"{what}; print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, str(directory), "-m", "x=1,2"]
    process = subprocess.Popen(command, stdout=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def test_a_directory_on_a_read_only_file_system_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock.os, "open", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(UserError, match=rf"{LOCK_FILE} cannot be written to \(Read-only.*hydra\.sweep\.dir=DIR"):
        lock.hold(tmp_path)


def test_what_cannot_be_made_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.refuse_if_read_only(tmp_path / "a" / "b", "run")
    asked = Mock(return_value=False)
    monkeypatch.setattr(lock.os, "access", asked)
    with pytest.raises(UserError, match=rf"{tmp_path} cannot be written to; make it writable"):
        lock.refuse_if_read_only(tmp_path / "a" / "b", "run")
    assert asked.call_args.args[0] == tmp_path
    assert not list(tmp_path.iterdir())


def test_a_held_directory_is_refused_until_its_owner_is_dead(tmp_path: Path) -> None:
    """Also where it is held by another name."""
    (tmp_path / "link").symlink_to(tmp_path)
    with started("lock.hold(path)", tmp_path / "link") as process:
        with pytest.raises(UserError) as refused:
            lock.hold(tmp_path)
        # An owner that has not said yet who it is.
        for content, said in ((b"", "just started"), (b"\0\x1b[31m", r"by \\x00\\x1b\[31m;")):
            (tmp_path / LOCK_FILE).write_bytes(content)
            with pytest.raises(UserError, match=said):
                lock.hold(tmp_path)
        process.kill()
        process.wait()
    assert not lock.hold(tmp_path), "somebody held it before"
    owner = rf"process {process.pid} of .+ on {re.escape(platform.node())}"
    since = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: python launch.py .+ x=1,2"
    assert re.match(rf"{tmp_path} is in use by {owner} {since}", str(refused.value))
    assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} of ")


@pytest.mark.parametrize("content", [b"", LEFT_BEHIND, b"\0\xff garbage", b"x" * 100_000])
def test_what_a_dead_owner_left_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    lock.hold(tmp_path)
    assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} of ")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    lock.hold(tmp_path)
    (said,) = "".join(capsys.readouterr()).splitlines()
    assert said.startswith(f"warning: {tmp_path}")
    assert f"cannot be locked ({os.strerror(number)})" in said


def test_another_error_is_not_taken_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "broken disk")))
    with pytest.raises(OSError, match="broken disk"):
        lock.hold(tmp_path)


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two processes would hold a lock, one of them that of a file which nobody else can see."""
    opened, path = os.open, tmp_path / LOCK_FILE

    def removed_once(*arguments: Any) -> int:
        monkeypatch.setattr(lock.os, "open", opened)
        descriptor = opened(*arguments)
        path.unlink()
        return descriptor

    monkeypatch.setattr(lock.os, "open", removed_once)
    assert lock.hold(tmp_path)
    assert os.path.samestat(path.stat(), os.fstat(lock._held[path]))


def test_a_point_is_claimed_by_one_process_until_it_ends(tmp_path: Path) -> None:
    with lock.claimed(tmp_path, patience_s=0) as ours:
        assert ours
    with started("claim = lock.claimed(path, 0); claim.__enter__()", tmp_path) as process:
        with lock.claimed(tmp_path, patience_s=0) as ours:
            assert not ours
        process.kill()
        with lock.claimed(tmp_path, patience_s=20) as ours:
            assert ours


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="is a link"):
        lock.hold(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"
