"""What the processes of a command say about their levers, each in a file of its own in the run directory."""

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LEVERS_FILE = "job_levers"
"""How names of the files begin: lines that several hosts append to one file may be lost."""
APPLIED, SKIPPED = "applied", "skipped"
APPLIES, THERE, USELESS = "applies", "is there already", "does not apply"
"""What is found out without applying anything."""


class LeverStatus(NamedTuple):
    """Whether one process has applied a lever, or could."""

    lever: str
    value: object
    status: str
    """One of the above."""
    reason: str


def add_status(directory: str, status: LeverStatus) -> None:
    with Path(directory, f"{LEVERS_FILE}_{platform.node()}_{os.getpid()}").open("a") as file:
        file.write(json.dumps(status) + "\n")


def skipped(directory: Path) -> str:
    """Returns the first lever that a process could not apply, and why; empty if there is none."""
    one = next((one for own in statuses(directory) for one in own if one.status == SKIPPED), None)
    return f"job.levers.{one.lever}={one.value} cannot be applied: {one.reason}" if one else ""


def lacking(directory: Path, asked: Iterable[str], ranks: int) -> str:
    """Returns which lever fewer processes than the ranks have applied; empty if none."""
    found = statuses(directory)
    for lever in asked:
        count = sum(any(one.lever == lever and one.status == APPLIED for one in own) for own in found)
        if count < ranks:
            return f"job.levers.{lever} was applied in {count} of {ranks} ranks"
    return ""


def inspected(directories: Iterable[Path]) -> dict[tuple[str, object], str]:
    """Returns by lever and value why it would change nothing in what was inspected in these run directories, or end as
    skipped; empty if it would change something."""
    found: dict[tuple[str, object], dict[str, str]] = {}
    for one in (one for directory in directories for own in statuses(directory) for one in own):
        found.setdefault((one.lever, one.value), {}).setdefault(one.status, one.reason)
    return {
        key: f"{USELESS}: {said[USELESS]}" if USELESS in said else "" if APPLIES in said else THERE
        for key, said in found.items()
    }


def variables(directories: Iterable[Path]) -> dict[str, str]:
    """Returns the values that variables of levers have in what was inspected in these run directories, by lever;
    without those that are not set."""
    said = (one for directory in directories for own in statuses(directory) for one in own)
    return {one.lever: one.reason for one in said if one.status in (APPLIES, THERE) and one.reason}


def statuses(directory: Path) -> list[list[LeverStatus]]:
    """Returns what each process has said so far, without a last line that is still being written."""
    texts = (path.read_text() for path in sorted(directory.glob(f"{LEVERS_FILE}_*")))
    return [[LeverStatus(*json.loads(line)) for line in text.split("\n")[:-1]] for text in texts]
