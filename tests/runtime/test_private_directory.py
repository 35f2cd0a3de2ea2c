"""Temporary directories that a killed process leaves are removed by the next, and no others."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from overlap_sweep.runtime.lock import PREFIX, PrivateDirectory
from tests.sweeps import ROOT


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def made_elsewhere(temporary: Path, then: str) -> tuple[subprocess.Popen[str], Path]:
    """A process with a directory of its own that has a file, and does `then`."""
    code = "from overlap_sweep.runtime.lock import PrivateDirectory; made = PrivateDirectory()\n"
    code += f"(made.path / 'file').touch(); print(made.path, flush=True); {then}"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.PIPE,
    )
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def test_a_directory_is_its_owner_s_alone_and_can_be_removed() -> None:
    directory = PrivateDirectory()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    (directory.path / "folder").mkdir()
    (directory.path / "folder" / "file").touch()
    directory.remove()
    assert not directory.path.exists()


def test_what_a_killed_process_has_left_is_removed_at_the_next_start(temporary: Path) -> None:
    killed, left = made_elsewhere(temporary, "import os; os.kill(os.getpid(), 9)")
    with killed:
        assert killed.wait(20) == -9
    (temporary / f"{PREFIX}empty").mkdir()
    assert (left / "file").exists()
    directory = PrivateDirectory()
    assert [*temporary.iterdir()] == [directory.path]
    directory.remove()


def test_what_a_living_process_has_is_kept(temporary: Path) -> None:
    living, its = made_elsewhere(temporary, "input()")
    with living:
        PrivateDirectory().remove()
        assert (its / "file").exists()
        living.communicate("\n")


def test_what_somebody_else_has_is_kept(temporary: Path) -> None:
    """Also a link to a folder, and directories without a lock, of which it is unknown who made them."""
    kept = {temporary / name for name in ("other", f"{PREFIX}link", f"{PREFIX}unknown", "overlap_sweeps")}
    (temporary / "other").mkdir()
    (temporary / "other" / ".lock").touch()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "other")
    for name in (f"{PREFIX}unknown", "overlap_sweeps"):
        (temporary / name).mkdir()
        (temporary / name / "file").touch()
    PrivateDirectory().remove()
    assert {*temporary.iterdir()} == kept
    assert (temporary / "other" / ".lock").exists()
