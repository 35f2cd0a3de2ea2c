"""One setting of a case: its points, its times, and what is said of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from overlap_sweep.report.numbers import as_us
from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.study.settings import Options

if TYPE_CHECKING:
    from overlap_sweep.effects.comparison import Effect
    from overlap_sweep.predict.predictions import Prediction
    from overlap_sweep.study.equality import Equality


def in_brief(notes: Mapping[str, bool]) -> str:
    """Returns the notes that hold, for a row of a table."""
    return ", ".join(note for note, holds in notes.items() if holds)


@dataclass(frozen=True)
class Times:
    """The times of one setting over its points. Workloads add what else they measured."""

    step: Estimate
    """Time that settings are compared by, of a step or of what else a point repeats, with its noise."""


def time_of_point(timing: Timing) -> Times:
    """Returns the median of a point's samples, with the noise within it."""
    return Times(estimate(timing.samples_us))


def step_times(settings: Sequence[Sequence[Point]], timing: Callable[[Point], Timing]) -> list[Times]:
    """Returns the time of each setting whose points have one timing each: the mean of its points, with the noise
    between points of all settings, and what such points typically differ by."""
    samples_us = [[timing(point).samples_us for point in points] for points in settings]
    limited = [any(point.launch_bound for point in points) for points in settings]
    device = settings[0][0].config.runtime.device
    return [Times(step) for step in verdict.times_of_steps(samples_us, limited, device)]


T = TypeVar("T", bound=Times, covariant=True)


@dataclass(frozen=True)
class SettingRow(Generic[T]):
    """One setting over all its points, or one point by itself. Workloads add properties for their columns."""

    setting: str
    """What distinguishes it from the other settings of its case, in words."""
    whole_setting: str
    """Every option that is not at its default, in words."""
    options: Options
    points: list[Point]
    """In the order of their starts."""
    times: T
    standing: str = ""
    """`best`, `best, proven`, `reference`, or `only` if there is no other setting; empty for the others."""
    over_reference: float = 1.0
    """The reference's time over this one's, for the same work."""
    effect: "Effect | None" = None
    """Its differences from the reference in what ran; None without traces of both."""
    equality: "Equality | None" = None
    """Whether it computes the same as the reference; None where that does not matter."""
    prediction: "Prediction | None" = None
    """What a step was to take, as the reference's traces show; None for settings of which nothing is predicted."""

    @property
    def step(self) -> Estimate:
        return self.times.step

    @property
    def time_us(self) -> float:
        return self.step.time_us

    @property
    def amounts(self) -> Mapping[str, float | None]:
        """Returns the work of a step by what it is counted in, such as `sample`; None if it is not known. Settings are
        compared per the first that all of them know."""
        return {}

    @property
    def amount(self) -> float:
        """Returns the work of a step, in what of it is known first; 1 if nothing is."""
        return next(filter(None, self.amounts.values()), 1.0)

    def per(self, work: str) -> Estimate:
        """Returns the time of a unit of the work; of a step if the amount is not known."""
        return self.step.relative_to(self.amounts.get(work) or 1.0)

    @property
    def none_us(self) -> float | None:
        """Returns the time with no overlap; None if it was not measured."""
        return None

    @property
    def floor_us(self) -> float | None:
        """Returns the time without communication; None if it was not measured."""
        return None

    @property
    def unit(self) -> str | None:
        """Returns what the time is of if it is not that of a step."""
        return None

    @property
    def in_words(self) -> str:
        """Returns the time and what follows from it, for a sentence."""
        return f"{as_us(self.time_us)} us"

    @property
    def may_win(self) -> bool:
        """Returns whether the setting may be the answer if others may, too."""
        return True

    @property
    def must_compute_the_same(self) -> bool:
        """Returns whether it changes how a training runs that its user has not written so."""
        return False

    @property
    def trains_differently(self) -> list[str]:
        """Returns the options by which it is declared to compute something else, in words."""
        return []

    @property
    def computes_differently(self) -> bool:
        """Returns whether it is declared or seen to compute something else than the reference."""
        return bool(self.trains_differently) or (self.equality is not None and self.equality.verdict == "differs")

    @property
    def launch_bound(self) -> bool:
        return any(point.launch_bound for point in self.points)

    @property
    def chosen(self) -> bool:
        return self.standing.startswith(("best", "only"))

    @property
    def notes(self) -> Mapping[str, bool]:
        """Returns what distinguishes it from rows that are simply slower, and whether that holds."""
        return {"launch-bound": self.launch_bound}

    @property
    def note(self) -> str:
        standing = "" if self.standing == "only" else self.standing
        idle = self.effect is not None and not self.effect.changed and not self.effect.is_unseen
        return in_brief({standing: bool(standing), **self.notes, "changed nothing": idle})


R = TypeVar("R", bound=SettingRow[Times])
