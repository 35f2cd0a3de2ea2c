"""What is worth trying in a training: levers that apply to it, by what each is expected to gain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import msgspec

from overlap_sweep.errors import UsageError, nearest
from overlap_sweep.levers import Lever, Value, levers, programs
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
    basis: Literal["predicted", "bound", "unknown"]
    """`bound`: no more can be gained; `unknown`: nothing in the recording says what it does."""
    gain: float
    """Shares of the step's time; losses are negative."""
    low: float
    high: float
    why: str
    """The change that was predicted, or the cause that it can mend."""

    @property
    def name(self) -> str:
        return f"{self.lever}={programs.text(self.value)}"

    @property
    def expected(self) -> Expected | None:
        """Returns what a search is given; None if nothing is known."""
        if self.basis == "unknown":
            return None
        return Expected(self.gain, self.low, self.high, is_predicted=self.basis == "predicted", why=self.why)

    @property
    def in_words(self) -> str:
        """Returns such as `5.1% faster (2.0 to 8.3)`, or `at most 7.0% (issued_late)`."""
        if self.basis == "unknown":
            return "unknown"
        if self.basis == "bound":
            return f"at most {self.high:.1%} ({self.why})"
        word = "faster" if self.gain >= 0 else "slower"
        low, high = sorted((self.low, self.high) if self.gain >= 0 else (-self.high, -self.low))
        return f"{abs(self.gain):.1%} {word} ({100 * low:.1f} to {100 * high:.1f})"


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
        _candidate(name, chosen[name], value, change, told.get(change), recorded.shares, is_bound=is_bound)
        for (name, value), (change, is_bound) in values.items()
        if value != chosen[name].default or _may_set_back(chosen[name], told.get(change))
    ]

    def order(one: Candidate) -> tuple[bool, float, bool]:
        # Of levers that mend the same cause, the one that the evidence speaks for.
        is_advised = one.lever.rpartition(".")[2] in recorded.advice
        return one.basis == "unknown", -one.gain, not is_advised

    return sorted(found, key=order), reasons


def chosen_levers(wanted: Collection[str] | None) -> Iterator[tuple[str, Lever]]:
    """Yields the levers of these names or families; None: all. UsageError for an unknown one."""
    known = levers()
    for name in wanted if wanted is not None else known:
        own = {each: one for each, one in known.items() if each == name or each.startswith(f"{name}.")}
        if not own:
            near = nearest(name, [*known, *(each.partition(".")[0] for each in known)])
            raise UsageError(
                f"Unknown lever {name}. {f'Did you mean {near}?' if near else '`analyze.py levers` lists them.'}"
            )
        yield from own.items()


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


def _may_set_back(lever: Lever, told: _Pooled | None) -> bool:
    """Returns whether the default is worth a trial, since the training may have something else: a variable, what is
    there to replace what a script gives, or what is predicted."""
    return bool(lever.environment) or lever.overrides or (lever.constructor is not None and told is not None)


def _change(name: str, lever: Lever, value: Value) -> tuple[str, bool]:
    """Returns the change of `predict` that a value is, empty if it is none, and whether that is a bound."""
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.predict.named import CHANGES

    text = programs.text(value)
    if lever.change or lever.at_most:
        return (lever.change or lever.at_most).replace("{value}", text), bool(lever.at_most)
    return (f"{name}={text}", False) if name in CHANGES else ("", False)


@dataclass(frozen=True)
class _Pooled:
    """What several recordings predict of a change, in shares of the step's time."""

    gain: float
    low: float
    high: float
    is_bound: bool


def _pooled(several: Iterable[Prediction]) -> dict[str, _Pooled]:
    """Returns the mean gain of each change that can be predicted, between the lowest and the highest of all
    recordings: on a busy machine two of the same command may disagree by more than each says of itself."""
    found: dict[str, list[_Pooled]] = {}
    for one in several:
        if one.gain_us is not None and one.low_us is not None and one.high_us is not None:
            low, high = (1 - time_us / one.step_us for time_us in (one.high_us, one.low_us))
            shares = _Pooled(one.gain_us / one.step_us, low, high, one.status == "bound")
            found.setdefault(one.change, []).append(shares)
    return {
        change: _Pooled(
            fmean(one.gain for one in ones),
            min(one.low for one in ones),
            max(one.high for one in ones),
            ones[0].is_bound,
        )
        for change, ones in found.items()
    }


def _candidate(
    name: str,
    lever: Lever,
    value: Value,
    change: str,
    told: _Pooled | None,
    shares: Mapping[str, float],
    *,
    is_bound: bool,
) -> Candidate:
    needs = _ALLOWED[lever.results]
    if told:
        if is_bound or told.is_bound:
            return Candidate(name, value, needs, "bound", OF_BOUND * told.gain, told.low, max(told.high, 0.0), change)
        return Candidate(name, value, needs, "predicted", told.gain, told.low, told.high, change)
    found = {cause: shares[cause] for cause in lever.causes if cause in shares}
    if not found:
        return Candidate(name, value, needs, "unknown", 0.0, 0.0, 0.0, "")
    cause = max(found, key=found.__getitem__)
    return Candidate(name, value, needs, "bound", OF_BOUND * found[cause], 0.0, found[cause], cause)


def allowed(needs: Allowed, allow: Allowed) -> bool:
    """Returns whether what is needed is among what is allowed."""
    return _ORDER.index(needs) <= _ORDER.index(allow)
