"""When to stop for other reasons than that everything is found."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Points and minutes; None is no limit."""

    max_points: int | None
    max_minutes: float | None
    points: int = 0
    _began_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

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
