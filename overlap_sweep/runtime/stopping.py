"""Stop signals: SIGTERM stops at once; SIGUSR2, which cluster managers send ahead of a time limit or a preemption,
stops after the running point."""

import os
import signal
import sys
from typing import Any

STOP_AFTER_POINT = signal.SIGUSR2
STOP_NOW = signal.SIGTERM


class Stopped(KeyboardInterrupt):
    """Stopped by a signal, like Ctrl-C: a running point leaves no result."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number
        self.exit_status = 128 + number


_stop_signal: signal.Signals | None = None


def listen() -> None:
    """Installs the signal handlers; call in the main thread."""
    signal.signal(STOP_AFTER_POINT, _after_the_point)
    signal.signal(STOP_NOW, _now)


def stop_if_requested() -> None:
    """Raises `Stopped` after a stop signal; called before each point."""
    if _stop_signal is not None:
        raise Stopped(_stop_signal)


def _after_the_point(number: int, frame: Any) -> None:
    global _stop_signal
    _stop_signal = signal.Signals(number)
    # A handler may run in the middle of a print.
    os.write(sys.stderr.fileno(), f"{_stop_signal.name}: stops after the running point\n".encode())


def _now(number: int, frame: Any) -> None:
    # Cluster managers may send it twice, as Slurm does; the second must not interrupt the cleanup after the first.
    signal.signal(STOP_NOW, signal.SIG_IGN)
    raise Stopped(signal.Signals(number))
