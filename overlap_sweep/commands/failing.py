"""Errors and warnings on stderr, and exit statuses."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from overlap_sweep.report.numbers import visible


def fail_for(problems: Sequence[str]) -> None:
    """Prints what could not be read, and exits with status 1 if there is any."""
    for problem in problems:
        print_error(problem)
    if problems:
        raise typer.Exit(1)


def print_error(message: str) -> None:
    print_aside(f"error: {message}")


def print_warning(message: str) -> None:
    print_aside(f"warning: {message}")


def print_aside(sentence: str) -> None:
    """Prints it to stderr, in one line."""
    print(visible(sentence).replace("\n", r"\n"), file=sys.stderr)
