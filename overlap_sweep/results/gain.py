"""Gains over a reference with their noise, and the words in which every report states them."""

import math
from collections.abc import Iterable

import msgspec

from overlap_sweep.results.estimate import Estimate, gap_noise_us

COARSE = 0.1
"""Share from which tenths of a percent are not shown, unless the noise is below FINE."""
FINE = 0.01
MOST_DIGITS = 6


class Gain(msgspec.Struct, frozen=True):
    """How much less time something takes than a reference, as a share of the reference's time, with its noise; negative
    if it takes more.

    Its interval is symmetric as a factor of the ratio of the times, since no time is below zero: a gain of 84 % with a
    noise of 17 % may be 67 to 92 %, not 101."""

    share: float
    noise: float
    """How far the lower end of its 95 % confidence interval is below it."""

    @property
    def ratio(self) -> float:
        """Returns the time over the reference's; below 1 is faster."""
        return 1 - self.share

    @property
    def low(self) -> float:
        """Returns the lower end of the ratio's confidence interval, which is never below 0."""
        return self.ratio**2 / self.high if self.noise else self.ratio

    @property
    def high(self) -> float:
        return self.ratio + self.noise

    @property
    def interval(self) -> tuple[float, float]:
        """Returns the ends of the gain's confidence interval, which is always below 1."""
        return 1 - self.high, 1 - self.low

    @property
    def sure(self) -> bool:
        """Returns whether the times differ beyond the noise."""
        return abs(self.share) > self.noise

    @property
    def faster(self) -> bool:
        """Returns whether the time is shorter beyond the noise: whether the interval is narrower than the gain."""
        return self.share > self.noise

    @property
    def in_brief(self) -> str:
        """Returns `+5.1% (2.0 to 8.3)`; empty for no gain at all."""
        if self == NO_GAIN:
            return ""
        low, high = self.interval
        return f"{self.share:+.1%}" + ("" if math.isnan(self.noise) else f" ({100 * low:.1f} to {100 * high:.1f})")

    def in_words(self, than: str, per: str = "") -> str:
        """Returns `9.5% faster than no overlap (9.4 to 9.7%)`, or `not measurably different from no overlap (noise
        1.2%)` if the interval includes nothing. `per`: what the time is of, such as `per sample`."""
        if not self.sure:
            noise = f" (noise {self.noise:.{_digits(self.noise)}%})" if self.noise > 0 else ""
            return f"not measurably different from {than}{noise}"
        by, (low, high) = abs(self.share), self.interval if self.faster else (self.low - 1, self.high - 1)
        digits = 1 if self.noise < FINE else _digits(by)
        while round(100 * low, digits) == 0 and digits < MOST_DIGITS:
            # An interval that excludes nothing must not look as if it began with it.
            digits += 1
        word = " ".join(filter(None, ["faster" if self.faster else "slower", per]))
        return f"{by:.{digits}%} {word} than {than} ({100 * low:.{digits}f} to {high:.{digits}%})"


def _digits(share: float) -> int:
    return 0 if share >= COARSE else 1


NO_GAIN = Gain(0.0, 0.0)
"""The gain of something over itself."""


def nothing_beat(reference: str, advice: str = "") -> str:
    """Returns the sentence, without a full stop, for a decision in which nothing is faster than the reference."""
    return f"Nothing beat {reference} beyond the noise{f'; {advice}' if advice else ''}"


def gain_over(reference: Estimate, time: Estimate, pairs: int = 1) -> Gain:
    """Returns the gain of a time over that of the reference; `pairs` as in `Estimate.differs_from`."""
    share = 1 - time.time_us / reference.time_us
    return Gain(share, gap_noise_us(time, reference, pairs) / reference.time_us)


def gain_of_sum(parts: Iterable[tuple[Gain, float]]) -> Gain:
    """Returns the gain of a sum of times. `parts`: each part's gain and the time of its reference."""
    known = list(parts)
    whole = sum(reference_us for _, reference_us in known)
    noise = math.hypot(*(gain.noise * reference_us for gain, reference_us in known))
    return Gain(sum(gain.share * reference_us for gain, reference_us in known) / whole, noise / whole)
