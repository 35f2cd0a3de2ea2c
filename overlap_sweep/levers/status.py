"""What the processes of a command say about their levers: a line each in a file of the run directory."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LEVERS_FILE = "job_levers"
APPLIED, SKIPPED = "applied", "skipped"


class LeverStatus(NamedTuple):
    """Whether one process has applied a lever."""

    lever: str
    value: object
    status: str
    """APPLIED or SKIPPED."""
    reason: str
    process: str
    """Host and number."""


def add_status(directory: str, status: LeverStatus) -> None:
    # Short lines that are appended at once do not mix.
    with Path(directory, LEVERS_FILE).open("a") as file:
        file.write(json.dumps(status) + "\n")


def skipped(directory: Path) -> str:
    """Returns the first lever that a process could not apply, and why; empty if there is none."""
    one = next((one for one in statuses(directory) if one.status == SKIPPED), None)
    return f"job.levers.{one.lever}={one.value} cannot be applied: {one.reason}" if one else ""


def lacking(directory: Path, asked: Iterable[str], ranks: int) -> str:
    """Returns which lever fewer processes than the ranks have applied; empty if none."""
    found = statuses(directory)
    for lever in asked:
        count = len({one.process for one in found if one.lever == lever and one.status == APPLIED})
        if count < ranks:
            return f"job.levers.{lever} was applied in {count} of {ranks} ranks"
    return ""


def statuses(directory: Path) -> list[LeverStatus]:
    """Returns what processes have said so far, without a last line that is still being written."""
    path = directory / LEVERS_FILE
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [LeverStatus(*json.loads(line)) for line in lines]
