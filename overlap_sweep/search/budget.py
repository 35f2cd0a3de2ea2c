"""When to stop for other reasons than that everything is found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Points and minutes; None is no limit."""

    max_points: int | None
    max_minutes: float | None
    points: int = 0
    began_s: float = field(default_factory=time.monotonic)
    _paused_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Without the pauses."""
        return time.monotonic() - self.began_s - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside costs nothing."""
        before_s = time.monotonic()
        try:
            yield
        finally:
            self._paused_s += time.monotonic() - before_s

    @property
    def points_left(self) -> int | None:
        return None if self.max_points is None else max(0, self.max_points - self.points)

    @property
    def spent(self) -> bool:
        return bool(self.why_spent)

    @property
    def why_spent(self) -> str:
        """Empty while it is not."""
        if self.points_left == 0:
            return f"search.max_points={self.max_points} is used up"
        if self.max_minutes is not None and self.elapsed_s >= 60 * self.max_minutes:
            return f"search.max_minutes={self.max_minutes:g} is used up"
        return ""
