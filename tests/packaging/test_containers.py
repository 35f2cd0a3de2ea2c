"""What the images' files say; .ci/containers builds one where it can."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from overlap_sweep.results.identity import NO_MULTICAST
from tests.sweeps import ROOT

FILES = [ROOT / "containers" / name for name in ("Dockerfile", "cpu.Dockerfile")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_program_in_an_image_uses_multicast(file: Path) -> None:
    text = file.read_text().replace("\\\n", " ")
    (variables,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    assert dict(each.split("=") for each in variables.split()) == NO_MULTICAST


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_image_is_made_of_files_that_are_there(file: Path) -> None:
    left_out = (ROOT / ".dockerignore").read_text().split()
    copied = [
        name for line in re.findall(r"^COPY (?!--)(.*) \S+$", file.read_text(), re.MULTILINE) for name in line.split()
    ]
    assert len(copied) > 1
    assert all((ROOT / name).exists() and name not in left_out for name in copied)


def test_nothing_is_installed_where_there_is_no_pytorch(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho numpy==2.1.0\n")
    (tmp_path / "python").chmod(0o755)
    environment = {**os.environ, "PYTHON": str(tmp_path / "python")}
    command = [ROOT / "containers/install_beside", ROOT / "constraints-gpu.txt", "overlap-sweep"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "install_beside: there is no PyTorch here; give another image\n")


def test_a_skipped_image_is_a_failure_where_one_is_required(tmp_path: Path) -> None:
    (tmp_path / "timeout").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "timeout").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for required, status in (("", 0), ("required", 1)):
        done = subprocess.run(
            [ROOT / ".ci/containers"],
            env={**environment, "CONTAINERS": required},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status
        assert "containers: SKIPPED, no image was built: neither docker nor podman runs here" in done.stderr
