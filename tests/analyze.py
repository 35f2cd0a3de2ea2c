"""Run the commands of analyze.py in this process, as typer's own test runner does."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from tests import json_schemas

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str
    stdout_bytes: bytes

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What `--format json` printed. The command must have succeeded."""
        assert self.returncode == 0, self.stderr
        found: list[dict[str, Any]] = json.loads(self.stdout)
        return found

    def assert_error(self, *parts: str, status: int = 1) -> None:
        """One line on stderr that begins with `error: ` and has all the parts, and the exit status."""
        assert self.returncode == status, (self.returncode, self.stderr)
        assert self.stderr.count("error: ") == 1, self.stderr
        assert all(part in self.stderr for part in parts), self.stderr

    def assert_usage_error(self, *parts: str) -> None:
        """Exit status 2, and all the parts in the message, whatever frame typer draws around it."""
        message = " ".join(self.stderr.replace("│", " ").split())
        assert self.returncode == 2, (self.returncode, self.stderr)
        assert all(part in message for part in parts), message


def analyze(*arguments: str | Path) -> Ran:
    """Runs `analyze.py ARGUMENTS`. Whatever is no error of the user's is raised here, and what is wrong with JSON."""
    from overlap_sweep.commands.command_line import app

    given: Sequence[str] = [str(argument) for argument in arguments]
    with mock.patch.object(sys, "argv", ["analyze.py", *given]):
        result = CliRunner().invoke(app, given, prog_name="analyze.py", catch_exceptions=False)
    json_schemas.check(given, result.stdout)
    return Ran(result.exit_code, result.stdout, result.stderr, result.stdout_bytes)


def rows(*arguments: str | Path) -> list[dict[str, Any]]:
    """The rows that the command prints with `--format json`."""
    return analyze(*arguments, "--format", "json").rows


def files_below(directory: Path) -> dict[Path, bytes]:
    """Contents by path of all files at or below the directory."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def analyze_process(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs analyze.py as a process, for what only a process shows."""
    command = [sys.executable, "analyze.py", *map(str, arguments)]
    return subprocess.run(command, **{"cwd": ROOT, "text": True, "capture_output": True, "timeout": 60, **options})


def analyzing(*arguments: str | Path) -> subprocess.Popen[str]:
    """Starts analyze.py as a process whose output is read through pipes."""
    command = [sys.executable, "analyze.py", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def shown(columns: int, *arguments: str | Path, status: int = 0) -> str:
    """What a terminal of that width shows of `analyze.py ARGUMENTS`, run in this process, with that exit status."""
    from rich.console import Console

    def console(**options: Any) -> Console:
        return Console(**{**options, "width": columns, "soft_wrap": False})

    with mock.patch("overlap_sweep.report.console.Console", console):
        process = analyze(*arguments)
    assert process.returncode == status, process.stderr
    return process.stdout


def on_terminal(columns: int, *arguments: str | Path) -> str:
    """What a terminal of that width shows of analyze.py, run as a process."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    command = [sys.executable, "analyze.py", *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:
            # The terminal's other end has closed.
            pass
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n")
