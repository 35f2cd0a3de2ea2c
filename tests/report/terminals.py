"""What analyze.py and its parts show on a terminal of any width, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from tests.analyze import analyze


def shown(columns: int, *arguments: str | Path, status: int = 0) -> str:
    """What a terminal of that width shows of `analyze.py ARGUMENTS`, which must end with that status."""

    def console(**given: Any) -> Console:
        return Console(**{**given, "width": columns, "soft_wrap": False})

    with mock.patch("overlap_sweep.report.console.Console", console):
        process = analyze(*arguments)
    assert process.returncode == status, process.stderr
    return process.stdout
