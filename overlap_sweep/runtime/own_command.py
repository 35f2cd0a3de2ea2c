"""Runs the product's own commands in processes of their own, for the functions that Python is given."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

from overlap_sweep.errors import UserError, in_words
from overlap_sweep.program import environment_with_package
from overlap_sweep.runtime.start import make_new, remove_empty

PROGRAM = (sys.executable, "-m", "overlap_sweep")
"""`overlap-sweep`, also where it is not installed."""
ENDING_S = 10.0
"""Time for a command to end after an interrupt before it is terminated."""


@contextmanager
def results_in(output_dir: Path | str | None) -> Iterator[Path]:
    """Yields the directory for results: the given one, or a new one by the time, which is removed if it stays empty.
    UserError if it cannot be made."""
    try:
        made = [] if output_dir else make_new(Path(f"multirun/{datetime.now():%Y-%m-%d/%H-%M-%S}"))
    except OSError as error:
        raise UserError(f"{in_words(error)}; give output_dir.") from None
    try:
        yield Path(output_dir) if output_dir else made[-1]
    finally:
        remove_empty(made)


def run(command: Sequence[str], *, quiet: bool, stdout: TextIO | None = None) -> None:
    """Runs the command and shows its output unless `quiet`. UserError with the command's error if it fails. `stdout`:
    a file for its standard output, in place of ours."""
    process = subprocess.Popen(
        command,
        env=environment_with_package(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert process.stderr
    reason = f"The command failed without a message; it was run as: {shlex.join(command)}"
    with process:
        try:
            for line in process.stderr:
                if not quiet:
                    sys.stderr.write(line)
                if line.startswith("error: ") or not reason.startswith("error: "):
                    reason = line.strip() or reason
        except KeyboardInterrupt:
            output = _ended(process)
            if not quiet:
                sys.stderr.write(output)
            raise
    if process.returncode:
        raise UserError(reason.removeprefix("error: "))


def _ended(process: subprocess.Popen[str]) -> str:
    """Waits for the interrupted process and returns the rest of its stderr. Terminals and notebook servers interrupt
    whole process groups; if the process does not end in time, it is terminated."""
    try:
        return process.communicate(timeout=ENDING_S)[1]
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()
    return process.communicate()[1]
