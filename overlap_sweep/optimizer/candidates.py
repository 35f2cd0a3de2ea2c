"""What is worth trying in a training: levers that apply to it, by what each is expected to gain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import msgspec

from overlap_sweep.levers import Lever, Value, change_of, programs
from overlap_sweep.levers.training import Training
from overlap_sweep.results.records import Expected

if TYPE_CHECKING:
    from overlap_sweep.predict.predictions import Prediction

Allowed = Literal["exact", "rounding", "training"]
_ALLOWED: Mapping[str, Allowed] = {"exact": "exact", "rounding": "rounding", "trains differently": "training"}
"""What has to be allowed for a lever to be tried, by its `results`."""
_ORDER: Sequence[Allowed] = ("exact", "rounding", "training")

OF_BOUND = 0.38
"""Part of a bound that is gained in the median: 0.30, 0.47, 0.20, 0.38 and 1.11 in five pairs of recordings
(docs/results/2026-11-23-diagnosis.md)."""


class Candidate(msgspec.Struct, frozen=True):
    """A value of a lever, and what it is expected to gain."""

    lever: str
    value: Value
    needs: Allowed
    """What has to be allowed for it to be tried."""
    expected: Expected | None
    """None if nothing in the recording says what it does."""

    @property
    def name(self) -> str:
        return f"{self.lever}={programs.text(self.value)}"

    @property
    def gain(self) -> float:
        return self.expected.gain if self.expected else 0.0

    @property
    def in_words(self) -> str:
        return self.expected.in_words if self.expected else "unknown"


@dataclass(frozen=True)
class Recorded:
    """What is known of a training from its first run."""

    training: Training
    shares: Mapping[str, float] = field(default_factory=dict)
    """What fixing each cause could gain at most, as a share of the step; of causes that were found."""
    advice: str = ""
    """What the diagnosis advises, which names arguments."""
    predict: Callable[[Sequence[str]], Sequence[Prediction]] = lambda changes: ()
    """Returns the predictions for changes of `predict` from each recording."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the command is started with."""
    tp_size: int = 1
    """Ranks of Megatron-Core's tensor-parallel group, as far as the recording shows it."""


def candidates(recorded: Recorded, chosen: Mapping[str, Lever]) -> tuple[list[Candidate], dict[str, str]]:
    """Returns the values of levers that may change the training, what is expected to gain most first, and why each
    other lever is left out, by its name."""
    reasons = {name: reason for name, lever in chosen.items() if (reason := _not_here(name, lever, recorded))}
    values = {
        (name, value): _change(name, lever, value)
        for name, lever in chosen.items()
        if name not in reasons
        for value in _values(lever, recorded.environment)
    }
    changes = [change for change in dict.fromkeys(change for change, _ in values.values()) if change]
    told = _pooled(recorded.predict(changes) if changes else ())
    found = [
        Candidate(name, value, _ALLOWED[lever.results], _expected(lever, told.get(change), recorded.shares, is_bound))
        for (name, value), (change, is_bound) in values.items()
        if _may_change(lever := chosen[name], value, told.get(change))
    ]

    def order(one: Candidate) -> tuple[bool, float, bool]:
        # Of levers that mend the same cause, the one that the evidence speaks for.
        is_advised = one.lever.rpartition(".")[2] in recorded.advice
        return one.expected is None, -one.gain, not is_advised

    return sorted(found, key=order), reasons


def _not_here(name: str, lever: Lever, recorded: Recorded) -> str:
    """Returns why a lever is not worth a trial in this training; empty if it may be."""
    applies = recorded.training.applies(name, lever)
    if applies.startswith("no: "):
        return applies.removeprefix("no: ")
    if lever.causes and not recorded.shares.keys() & {*lever.causes}:
        return f"it mends {', '.join(lever.causes)}, which the recording does not show"
    return ""


def _values(lever: Lever, environment: Mapping[str, str]) -> Iterator[Value]:
    """Yields the values that change something: those of single process groups are for who knows their names."""
    now = environment.get(lever.environment) if lever.environment else None
    for value in lever.values:
        of_one_group = lever.pattern and isinstance(value, str) and ":" in value
        is_set = lever.assigned(value) == now if now else lever.environment and value == lever.default
        if not is_set and not of_one_group:
            yield value


def _may_change(lever: Lever, value: Value, told: Expected | None) -> bool:
    """Returns whether a value may be another than the training has. The default may, where a variable or a script may
    have set something else: what is there to replace that, or what is predicted."""
    if told and told.gain == 0:
        return False
    may_be_set = lever.environment or lever.overrides or (lever.constructor is not None and told is not None)
    return value != lever.default or bool(may_be_set)


def _change(name: str, lever: Lever, value: Value) -> tuple[str, bool]:
    """Returns the change of `predict` that a value is, empty if it is none, and whether that is a bound."""
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.predict.named import CHANGES

    if lever.at_most:
        return lever.at_most.replace("{value}", programs.text(value)), True
    change = change_of(name, value)
    return change if change.partition("=")[0] in CHANGES else "", False


def _pooled(several: Iterable[Prediction]) -> dict[str, Expected]:
    """Returns the mean gain of each change that can be predicted, between the lowest and the highest of all
    recordings: on a busy machine two of the same command may disagree by more than each says of itself."""
    found: dict[str, list[Expected]] = {}
    for one in several:
        if one.gain_us is not None and one.low_us is not None and one.high_us is not None:
            low, high = (1 - time_us / one.step_us for time_us in (one.high_us, one.low_us))
            is_predicted = one.status == "predicted"
            shares = Expected(one.gain_us / one.step_us, low, high, is_predicted=is_predicted, why=one.change)
            found.setdefault(one.change, []).append(shares)
    return {
        change: msgspec.structs.replace(
            ones[0],
            gain=fmean(one.gain for one in ones),
            low=min(one.low for one in ones),
            high=max(one.high for one in ones),
        )
        for change, ones in found.items()
    }


def _expected(lever: Lever, told: Expected | None, shares: Mapping[str, float], is_bound: bool) -> Expected | None:
    """Returns what is predicted, else at most what a cause costs that the lever mends; None if it mends none."""
    if told and told.is_predicted and not is_bound:
        return told
    if told:
        return Expected(OF_BOUND * told.gain, told.low, max(told.high, 0.0), why=told.why)
    cause = max((one for one in lever.causes if one in shares), key=shares.__getitem__, default=None)
    return Expected(OF_BOUND * shares[cause], 0.0, shares[cause], why=cause) if cause else None


def allowed(needs: Allowed, allow: Allowed) -> bool:
    """Returns whether what is needed is among what is allowed."""
    return _ORDER.index(needs) <= _ORDER.index(allow)
