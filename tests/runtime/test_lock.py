"""One sweep at a time in a directory: the lock, and two launches at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import LOCK_FILE
from overlap_sweep.runtime import lock
from tests.faults.injection import TINY, faulty_launch, journal
from tests.faults.sitecustomize import HOLD
from tests.sweeps import launch_here, wait_for

HOLDER = "import sys, time; from pathlib import Path; from overlap_sweep.runtime.lock import hold\n"
HOLDER += "hold(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
LEFT_BEHIND = {"host": "node9", "user": "somebody", "pid": 1, "command": "python launch.py -m", "since": 0.0}


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    """What a test holds would be held until pytest's end."""
    yield
    for descriptor in lock._held.values():
        os.close(descriptor)
    lock._held.clear()


def holder(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory), "-m", "x=1,2"], stdout=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_held_directory_is_refused_until_its_owner_is_dead(tmp_path: Path) -> None:
    """Also where it is held by another name."""
    lock.refuse_if_held(tmp_path)
    assert not list(tmp_path.iterdir()), "who only asks leaves nothing"
    (tmp_path / "link").symlink_to(tmp_path)
    with holder(tmp_path / "link") as process:
        with pytest.raises(UserError) as refused:
            lock.hold(tmp_path)
        with pytest.raises(UserError, match=f"{tmp_path} is in use by process {process.pid}"):
            lock.refuse_if_held(tmp_path)
        process.kill()
        process.wait()
    lock.refuse_if_held(tmp_path)
    lock.hold(tmp_path)
    lock.hold(tmp_path)
    assert len(lock._held) == 1
    said = str(refused.value)
    assert said.startswith(f"{tmp_path} is in use by process {process.pid} of ")
    assert re.search(
        rf" on {re.escape(platform.node())} since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d \(\d+ s\): python -c", said
    )
    assert "x=1,2" in said
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", json.dumps(LEFT_BEHIND).encode(), b"{", b"\0\xff garbage", b"x" * 100_000])
def test_what_a_dead_owner_left_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    lock.hold(tmp_path)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_an_owner_that_has_not_said_who_it_is_is_respected(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        for content in (b"", b"{", b"\0\xff garbage"):
            (tmp_path / LOCK_FILE).write_bytes(content)
            with pytest.raises(UserError, match="only just begun"):
                lock.hold(tmp_path)
        process.kill()


@pytest.mark.parametrize(
    ("seconds", "age"), [(5, "5 s"), (120, "2 min"), (3 * 3600, "3.0 h"), (86400, "24.0 h"), (10 * 86400, "10 days")]
)
def test_how_long_it_is_held_is_told(seconds: float, age: str) -> None:
    owner = lock.Owner("node9", "somebody", 7, "python launch.py", time.time() - seconds)
    assert f"({age})" in str(owner)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock.hold(tmp_path)
    said = "".join(capsys.readouterr())
    assert said.startswith(f"warning: {tmp_path}")
    assert f"cannot be locked ({os.strerror(number)})" in said
    assert said.count("\n") == 1


def test_another_error_is_not_taken_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="broken disk"):
        lock.hold(tmp_path)


CLAIM = "import sys, time; from pathlib import Path; from overlap_sweep.runtime.lock import claimed\n"
CLAIM += "with claimed(Path(sys.argv[1]), 0): print('claimed', flush=True); time.sleep(60)"


def test_a_point_is_claimed_by_one_process_until_it_ends(tmp_path: Path) -> None:
    with lock.claimed(tmp_path, patience_s=0) as ours:
        assert ours
    process = subprocess.Popen([sys.executable, "-c", CLAIM, str(tmp_path)], stdout=-1, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
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


def test_a_second_launch_is_refused_and_the_first_not_disturbed(tmp_path: Path) -> None:
    launch = faulty_launch(tmp_path, light=True)
    (held := tmp_path / "faults" / HOLD / "tp2_sm1").touch()
    first = launch.start("-m", "num_sm=1,2", *TINY)
    wait_for(lambda: journal(tmp_path))
    files = [path for path in launch.directory.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    second = launch_here("-m", "num_sm=3", *TINY, f"hydra.sweep.dir={launch.directory}")
    assert second.returncode == 1
    (error,) = second.stderr.splitlines()
    assert re.match(rf"error: .*sweep is in use by process {first.pid} of \S+ on \S+ since .* \(\d+ s\): ", error)
    assert "launch.py -m num_sm=1,2" in error
    assert before == {path: path.read_bytes() for path in files}
    held.unlink()
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert sorted(launch.results()) == ["tp2_sm1", "tp2_sm2"]


def test_after_a_killed_launch_the_next_goes_in_at_once(tmp_path: Path) -> None:
    launch = faulty_launch(tmp_path, [{"num_sm": 1, "fault": "hangs", "times": 1}], light=True)
    first = launch.start("-m", "num_sm=1", *TINY)
    wait_for(lambda: journal(tmp_path))
    first.kill()
    first.communicate()
    second = launch.run("-m", "num_sm=1", *TINY)
    assert second.returncode == 0, second.stderr
    assert [result.status for result in launch.results().values()] == ["ok"]
    wait_for(lambda: not launch.processes(), 20)
