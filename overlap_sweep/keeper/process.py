"""The process that runs a command and outlives it: when it ends, none of the command's processes is left.

torchrun starts its workers in sessions of their own, and any process may leave its parent. This process adopts all
that are left behind, so it knows them by their parents. Its standard input is a socket to the launcher: when that
closes, however the launcher ended, the command is ended. A guard, which is its parent, kills what it leaves if it is
killed itself. Run by its path and with the standard library alone, it starts at once.
"""

import ctypes
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator

STARTED, NOT_STARTED, ENDED, LEFT = "started", "not_started", "ended", "left"
"""First words of the lines to the launcher. Numbers follow: of NOT_STARTED the errno, of ENDED the exit status,
negative if a signal ended it, of LEFT the processes that do not end."""

KILLED_S = 30.0
"""Time after which processes that were killed count as left: of a hung driver they never end."""
POLL_S = 0.02

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Has the kernel send this process the signal once its parent has ended: at once, even inside a library that never
    returns. Ends it if the parent has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)


class Keeper:
    """Starts a command and ends it."""

    def __init__(self, grace_s: float, words: list[str]) -> None:
        """`grace_s`: time that processes have to end in order after SIGTERM, as torchrun does with its workers."""
        self._grace_s, self._words = grace_s, words
        self._status: int | None = None
        # Signals arrive as bytes in this pipe, so that a single call waits for them and for the launcher.
        self._signals, write_end = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        for number in (*_TO_STOP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def run(self) -> None:
        """Runs the command until it ends by itself or is to be stopped, and ends all of its processes."""
        _adopt_orphans()
        self._pid, problem = _start(self._words)
        _report(NOT_STARTED if problem else STARTED, problem or self._pid)
        none_left = self._none_is_left()
        while self._status is None and not self._is_to_stop():
            none_left = self._none_is_left()
        is_stopped = self._status is None
        if not is_stopped:
            _report(ENDED, self._status)
        written = os.fstat(1)
        left = [] if none_left else self._end()
        if is_stopped and self._grace_s and stat.S_ISREG(written.st_mode):
            _cut_output(written.st_size)
        if left:
            print(f"overlap_sweep: processes {left} were killed and do not end", file=sys.stderr, flush=True)
            _report(LEFT, *left)

    def _is_to_stop(self) -> bool:
        """Waits for something to happen; returns whether the command is to be stopped."""
        ready, _, _ = select.select([0, self._signals], [], [])
        if 0 in ready:
            if _is_hurried():
                self._grace_s = 0.0
            return True
        received = os.read(self._signals, 4096)
        return any(number in received for number in _TO_STOP)

    def _none_is_left(self) -> bool:
        return _none_is_left(self._note_end)

    def _note_end(self, pid: int, status: int) -> None:
        if pid == self._pid:
            self._status = os.waitstatus_to_exitcode(status)

    def _end(self) -> list[int]:
        """Ends all processes, in order if they do so in time. Returns those that do not end."""
        asked: set[int] = set()
        until = time.monotonic() + self._grace_s
        while time.monotonic() < until:
            if self._none_is_left():
                return []
            # The command may have its own way to end its processes, so it is asked first.
            for one in [self._pid] if self._status is None else _descendants():
                if one not in asked:
                    asked.add(one)
                    send(one, signal.SIGTERM)
            time.sleep(POLL_S)
        return _killed(self._none_is_left)


def guarded(run: Callable[[], None]) -> int:
    """Runs that in a child process, and kills all that is left if the child is killed. Returns its exit status."""
    _adopt_orphans()
    guard = os.getpid()
    pid = os.fork()
    if not pid:
        end_with_parent(guard, signal.SIGTERM)
        run()
        os._exit(0)
    for number in _TO_STOP:
        signal.signal(number, lambda number, _: send(pid, signal.Signals(number)))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        _killed(_none_is_left)
    return abs(status)


def _adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _none_is_left(note_end: Callable[[int, int], None] = lambda pid, status: None) -> bool:
    """Collects the status of what has ended. Returns whether nothing is left: orphans become our children, so without
    children there are none."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            note_end(*ended)
    except ChildProcessError:
        return True
    return False


def _killed(none_is_left: Callable[[], bool]) -> list[int]:
    until = time.monotonic() + KILLED_S
    while not none_is_left():
        if time.monotonic() > until:
            return _descendants()
        for one in _descendants():
            send(one, signal.SIGKILL)
        time.sleep(POLL_S)
    return []


def _start(words: list[str]) -> tuple[int, int]:
    """Starts the command. Returns its process and 0, or the number of the error why it cannot be started."""
    parent = os.getpid()
    failed, failing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            # If this process and its guard are killed, torchrun at least can end its workers.
            end_with_parent(parent, signal.SIGTERM)
            # A command that kills its process group must not kill this process.
            os.setsid()
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvp(words[0], words)
        except OSError as error:
            os.write(failing, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(failing)
    said = os.read(failed, 16)
    os.close(failed)
    return pid, int(said or 0)


def _cut_output(written: int) -> None:
    """Leaves out what the command printed while it was ended: torchrun prints a page, below which its last words would
    be lost."""
    left_out = os.fstat(1).st_size - written
    os.ftruncate(1, written)
    print(f"overlap_sweep: The command was stopped here. {left_out} bytes printed afterwards are left out.", flush=True)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent, _, _ in all_processes():
        children.setdefault(parent, []).append(pid)
    found, below = [], [os.getpid()]
    while below:
        own = children.get(below.pop(), [])
        found += own
        below += own
    return found


def all_processes() -> Iterator[tuple[int, int, int, bool]]:
    """Yields every process with its parent, its session, and whether it has ended but was not collected."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"/proc/{entry.name}/stat", "rb") as file:
                    state, parent, _, session, *_ = file.read().rpartition(b")")[2].split()
            except OSError:
                # It has just ended.
                continue
            yield int(entry.name), int(parent), int(session), state == b"Z"


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        # It has just ended, or became another user's; the latter is reported as left.
        return


def _is_hurried() -> bool:
    """Returns whether the launcher has sent a byte, for lack of time, and not only hung up."""
    try:
        return bool(os.read(0, 1))
    except ConnectionResetError:
        # It has ended with lines unread.
        return False


def _report(*words: object) -> None:
    try:
        os.write(0, f"{' '.join(map(str, words))}\n".encode())
    except OSError:
        # The launcher is gone, which select() shows, too.
        return


if __name__ == "__main__":
    sys.exit(guarded(lambda: Keeper(float(sys.argv[1]), sys.argv[2:]).run()))
