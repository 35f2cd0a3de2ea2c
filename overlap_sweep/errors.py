"""The exceptions that carry a sentence for the user."""

import difflib
import errno
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn


class UserError(Exception):
    """What was wrong and how to fix it, in one line. Entry points print it without a traceback."""

    status = 1
    """Exit status of a command that it ends."""


class UsageError(UserError):
    """The command line is wrong whatever the files and the machine: it names something that does not exist, or a value
    that its option does not take."""

    status = 2


def end(error: UserError) -> NoReturn:
    """Prints the error and exits with its status."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.status)


_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space there, or give another directory"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files: ulimit -n 1024"),
    errno.EFBIG: "raise the limit of files' sizes: ulimit -f unlimited",
    errno.ENAMETOOLONG: "give a shorter name",
}


def is_of_users_system(error: OSError) -> bool:
    """Returns whether the error is a limit of the user's system that the user can change."""
    return error.errno in _FIXES


def in_words(error: OSError) -> str:
    """Returns the error in a sentence: the path, the reason, and the fix where one is known."""
    if error.errno not in _FIXES:
        return str(error)
    return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}; {_FIXES[error.errno]}."


def first_line(error: Exception) -> str:
    """Returns the first line of the error's text, of NCCL's errors that which says why; its type if it has none."""
    said = str(error).rpartition("Last error:\n")[2]
    return next(iter(said.splitlines()), type(error).__name__)


def was_interrupted(error: BaseException | None) -> bool:
    """Returns whether an error came of an interruption: a library that is interrupted while it tidies up may raise
    another one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


class Refused(Exception):
    """The point makes no sense here, and why: it is recorded as `skipped`, and the sweep goes on."""


class WrongNumbers(Exception):
    """The point computes something else than without overlap, on every rank's account: it fails, and the process group
    is as good as before."""

    def __init__(self, message: str, relative_error: Mapping[str, float]) -> None:
        """`relative_error` is that of `Result`."""
        super().__init__(message)
        self.relative_error = dict(relative_error)


class PointFailed(Exception):
    """The processes of a point failed, died or did not answer in time, and have ended."""

    def __init__(self, message: str, *, timed_out: bool = False, final: bool = False, node: int = 0) -> None:
        """`final`: another attempt would fail alike. `node`: the point's machine whose log says more."""
        super().__init__(message)
        self.timed_out, self.final, self.node = timed_out, final, node


class NodeLost(OSError):
    """A machine of the launch does not answer any more, or never joined: points that need it are given up without a
    result, so that `resume=` measures them."""


NEAR = 0.7
"""Share of letters that a wrong name must have in common with the one that is offered for it."""


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Returns the known name that a wrong one was probably meant to be; None if none is near. `known` may have parts,
    with dots or slashes: whoever leaves out all but the last is understood, too."""
    if found := difflib.get_close_matches(name, known, n=1, cutoff=NEAR):
        return found[0]
    by_last = {re.split(r"[./+]", each)[-1]: each for each in reversed(known)}
    if found := difflib.get_close_matches(re.split(r"[./]", name)[-1], by_last, n=1, cutoff=NEAR):
        return by_last[found[0]]
    within = (each for each in known if each.startswith(name) or (len(name) > 3 and name in each))
    return next(within, None) if name else None
