"""Being told to stop: at once (SIGTERM), or after the point that is running (SIGUSR2, which cluster managers send ahead
of a time limit or a preemption)."""

from __future__ import annotations

import signal
from typing import Any

STOP_AFTER_POINT = signal.SIGUSR2
STOP_NOW = signal.SIGTERM


class Stopped(KeyboardInterrupt):
    """By a signal, as by Ctrl-C: what is running is given up and leaves no result."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number
        self.exit_status = 128 + number


_told: signal.Signals | None = None


def listen() -> None:
    """From now on in this process, which must be in its main thread."""
    signal.signal(STOP_AFTER_POINT, _after_the_point)
    signal.signal(STOP_NOW, _now)


def stop_if_told() -> None:
    """Between points: `Stopped` if no further one should be begun."""
    if _told is not None:
        raise Stopped(_told)


def _after_the_point(number: int, frame: Any) -> None:
    global _told
    _told = signal.Signals(number)


def _now(number: int, frame: Any) -> None:
    # Slurm sends it twice, and the second must not disturb the tidying up after the first.
    signal.signal(STOP_NOW, signal.SIG_IGN)
    raise Stopped(signal.Signals(number))
