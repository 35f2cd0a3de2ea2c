"""Why a command ended that did not end well: its exit status, and what it printed."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

MOST_BYTES = 2**20
"""Most of a log that is searched."""
LONGEST = 300
"""Longest reason from a log, in characters."""

MOST_LINES = 3
"""Lines of a program's last words."""
_OF_TORCHRUN = re.compile(r"E\d{4} .*torch/distributed/elastic/.*(failed \(exitcode|Received .* death signal)")
_WARNING = re.compile(r"^\[?[WI]\d{4} [\d:.]+ |\b\w*Warning: |^Setting OMP_NUM_THREADS env")
"""Of torchrun and torch, and of Python."""
_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]: ?")
_TRACEBACK = "Traceback (most recent call last)"
_RAISED = re.compile(r"(?!torch\.distributed\.elastic)[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*")
"""The last line of a traceback. torchrun's own only says that a worker has failed."""
_RAISED_ANOTHER = ("The above exception was", "During handling of the above")
_TOLD = re.compile(
    r"\S+: error: .+"
    r"|\S*python\S*: (?:No module named|Error while finding module specification for) .+"
    r"|(?<=: )Signal \d+ \((?!SIGTERM)SIG\w+\) received by PID \d+"
)
"""Lines of argparse and us, of Python about a module that it is to run, and of torchrun about a worker that a signal
ended; SIGTERM is its own."""


def ending(status: int, log: Path, start: int) -> str:
    """Returns how the command ended, and the first error in its log from byte `start` on, or else what it printed
    last."""
    if error := first_error(_lines(log, start)):
        return f"{_ended(status)}: {error[:LONGEST]}"
    said = last_words(log, start)
    return f"{_ended(status)}; it printed last: {said}" if said else _ended(status)


def last_words(log: Path, start: int) -> str:
    """Returns the last lines that the command itself printed, from byte `start` of its log on: without warnings, and
    without what torchrun says about it. Empty if there are none."""
    said: list[str] = []
    warned = False
    for line in (_PREFIX.sub("", line).rstrip() for line in _lines(log, start)):
        if _OF_TORCHRUN.match(line):
            break
        # Below its message a warning has the line of code.
        warned = bool(_WARNING.search(line)) or (warned and line.startswith("  "))
        # Ranks often say the same.
        if re.search(r"\w", line) and not warned and line not in said[-MOST_LINES:]:
            said.append(line)
    return " / ".join(line.strip() for line in said[-MOST_LINES:])[-LONGEST:]


def _lines(log: Path, start: int) -> list[str]:
    with log.open("rb") as written:
        written.seek(max(start, log.stat().st_size - MOST_BYTES))
        return written.read().decode(errors="replace").splitlines()


def first_error(lines: Sequence[str]) -> str:
    """Returns the error that came first, since those of other ranks follow from it; empty if there is none."""
    lines = [line for line in (_PREFIX.sub("", line).rstrip() for line in lines) if line]
    inside = False
    for line, after in zip(lines, [*lines[1:], ""], strict=False):
        if _TRACEBACK in line:
            inside = True
        elif inside and _RAISED.match(line):
            inside = False
            if not after.startswith(_RAISED_ANOTHER):
                return line
    return next((told[0] for line in lines if (told := _TOLD.search(line))), "")


def _ended(status: int) -> str:
    """Returns an exit status in words: of shells, too, who add 128 to the number of a signal."""
    number = -status if status < 0 else status - 128
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if status < 0:
        said = f"was killed by {name}"
    elif number in set(signal.Signals):
        said = f"ended with exit status {status} ({name})"
    else:
        said = f"ended with exit status {status}"
    return f"{said}, perhaps for lack of memory" if name == "SIGKILL" else said
