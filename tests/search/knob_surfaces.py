"""Made-up workloads with knobs, noise and drift, and a search over them."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from overlap_sweep.search.knob_trail import Answer, Failure, Knob, KnobTrail, Sample, Setting
from overlap_sweep.search.knobs import KnobEffort, search

KNOBS = (
    Knob("prefetch", ("false", "1", "2")),
    Knob("backward", ("pre", "post", "null")),
    Knob("reshard", ("true", "false")),
    Knob("limit", ("false", "true")),
    Knob("own_streams", ("false", "true")),
    Knob("priority", ("high", "normal")),
    Knob("ctas", ("null", "8", "32"), restarts=True),
)
FLOOR_US, NONE_US = 800.0, 1100.0

Values = dict[str, str]


@dataclass
class Machine:
    """Measures settings: `step_us` of their values, times noise within a point, between points, and a drift that slows
    down everything alike."""

    step_us: Callable[[Values], float]
    knobs: tuple[Knob, ...] = KNOBS
    within: float = 0.004
    between: float = 0.003
    drift: float = 0.02
    seed: int = 0
    fails: Callable[[Values], str | None] = lambda values: None
    refuses: Callable[[Values], str | None] = lambda values: None
    max_points: float = math.inf
    floor_us: Callable[[Values], float] = lambda values: FLOOR_US
    work: Callable[[Values], str] = lambda values: "same"
    asked: list[Setting] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def values(self, setting: Setting) -> Values:
        return dict(zip((knob.key for knob in self.knobs), setting, strict=True))

    def searched(self, effort: KnobEffort | None = None) -> KnobTrail:
        """After the whole search."""
        self._random = random.Random(self.seed)
        trail = KnobTrail(self.knobs, lambda setting: self.refuses(self.values(setting)), self._room)
        steps = search(trail, effort or KnobEffort())
        try:
            wanted = next(steps)
            while True:
                self.batches.append(len(wanted))
                wanted = steps.send([self._measure(setting) for setting in wanted])
        except StopIteration:
            return trail

    def times(self, setting: Setting) -> int:
        return Counter(self.asked)[setting]

    @property
    def optimum_us(self) -> float:
        grid = map(self.values, itertools.product(*(knob.values for knob in self.knobs)))
        return min(self.step_us(values) for values in grid if not self.refuses(values) and not self.fails(values))

    def _room(self) -> float:
        return self.max_points - len(self.asked)

    def _measure(self, setting: Setting) -> Answer:
        values = self.values(setting)
        assert not self.refuses(values)
        assert len(self.asked) < self.max_points
        self.asked.append(setting)
        if reason := self.fails(values):
            return Failure(reason)
        clock = 1 + self.drift * math.sin(len(self.asked) / 5) + self._random.gauss(0, self.drift / 4)
        own = clock * (1 + self._random.gauss(0, self.between))
        point_us, floor_us, none_us = (
            tuple(time_us * (1 + self._random.gauss(0, self.within)) for _ in range(7))
            for time_us in (own * self.step_us(values), clock * self.floor_us(values), clock * NONE_US)
        )
        return Sample(point_us, floor_us, none_us, floor_us, self.work(values))
