"""The exceptions that carry a sentence for the user."""

from __future__ import annotations

from collections.abc import Mapping


class UserError(Exception):
    """What was wrong and how to mend it, in one line. Entry points print it without a traceback."""


class Refused(Exception):
    """The point makes no sense here, and why: it is recorded as `skipped`, and the sweep goes on."""


class WrongNumbers(Exception):
    """The point computes something else than without overlap, on every rank's account: it fails, and the process group
    is as good as before."""

    def __init__(self, message: str, relative_error: Mapping[str, float]) -> None:
        """`relative_error` is that of `Result`."""
        super().__init__(message)
        self.relative_error = dict(relative_error)
