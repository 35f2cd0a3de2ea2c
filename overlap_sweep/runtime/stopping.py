"""When no further point is begun: a process is asked to stop at once (SIGTERM), or after the point that is running
(SIGUSR2, which cluster managers send ahead of a time limit or a preemption)."""

from __future__ import annotations

import signal
from typing import Any

STOP_AFTER_POINT = signal.SIGUSR2
STOP_NOW = signal.SIGTERM


class Stopped(KeyboardInterrupt):
    """Stopped by a signal, as by Ctrl-C: what is running is given up and leaves no result."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number
        self.exit_status = 128 + number


_stop_signal: signal.Signals | None = None


def listen() -> None:
    """Listens for signals from now on; called in the main thread."""
    signal.signal(STOP_AFTER_POINT, _after_the_point)
    signal.signal(STOP_NOW, _now)


def stop_if_told() -> None:
    """Raises `Stopped` if no further point should be begun."""
    if _stop_signal is not None:
        raise Stopped(_stop_signal)


def _after_the_point(number: int, frame: Any) -> None:
    global _stop_signal
    _stop_signal = signal.Signals(number)


def _now(number: int, frame: Any) -> None:
    # Slurm sends it twice, and the second must not disturb the tidying up after the first.
    signal.signal(STOP_NOW, signal.SIG_IGN)
    raise Stopped(signal.Signals(number))
