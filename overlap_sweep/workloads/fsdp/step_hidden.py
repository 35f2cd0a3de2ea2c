"""How much of what communication costs a training step is hidden, with its noise: from the samples of one point."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from overlap_sweep.results.estimate import estimate
from overlap_sweep.results.measured import Timing


class Hidden(NamedTuple):
    """(none - point) / (none - floor)."""

    fraction: float
    noise: float

    @property
    def known(self) -> bool:
        """Whether it says anything: an interval as wide as all the communication there is leaves nothing."""
        return self.noise < 0.5

    @property
    def in_words(self) -> str:
        """`37% \N{PLUS-MINUS SIGN} 8%`; `-` where it says nothing."""
        return f"{self.fraction:.0%} \N{PLUS-MINUS SIGN} {self.noise:.0%}" if self.known else "-"


def hidden(step: Mapping[str, Timing]) -> Hidden | None:
    """None where `none` takes no longer than `floor`: there is nothing to hide.

    The medians of the differences of samples that were taken side by side, and their noises; the quotient's noise is
    that of its parts, in quadrature.
    """
    samples = (step[name].samples_us for name in ("point", "none", "floor"))
    rounds = list(zip(*samples, strict=True))
    saved = [none - point for point, none, _ in rounds]
    comm = [none - floor for _, none, floor in rounds]
    comm_us = statistics.median(comm)
    if comm_us <= 0:
        return None
    fraction = statistics.median(saved) / comm_us
    return Hidden(fraction, math.hypot(estimate(saved).noise_us, fraction * estimate(comm).noise_us) / comm_us)
