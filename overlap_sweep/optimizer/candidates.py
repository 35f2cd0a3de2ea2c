"""What is worth trying in a training: levers that apply to it, by what each is expected to gain."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from overlap_sweep.levers import Lever, Value, change_of, programs
from overlap_sweep.levers.training import Training
from overlap_sweep.nccl.settings import is_older
from overlap_sweep.optimizer.groups import Purpose, is_of_groups, values_for
from overlap_sweep.report.numbers import counted
from overlap_sweep.results.records import Expected
from overlap_sweep.workloads.job.result import JobRun

if TYPE_CHECKING:
    from overlap_sweep.diagnosis import Finding
    from overlap_sweep.predict.predictions import Prediction

Allowed = Literal["exact", "rounding", "training"]
_ALLOWED: Mapping[str, Allowed] = {"exact": "exact", "rounding": "rounding", "trains differently": "training"}
"""What has to be allowed for a lever to be tried, by its `results`."""
_ORDER: Sequence[Allowed] = ("exact", "rounding", "training")

OF_BOUND = 0.38
"""Part of a bound that is gained in the median: 0.30, 0.47, 0.20, 0.38 and 1.11 in five pairs of recordings
(docs/results/2026-11-23-diagnosis.md)."""

OF_HOST = "host_bound"
"""Cause of levers that spare the host work. Where the host computes, that is computation, which no cause has."""

BY_COLLECTIVE_SINCE = (2, 24)
"""NCCL whose variables take values for one collective, such as allreduce:Tree."""

WORTH = 0.01
"""Least share of a step that a lever must be able to gain to be tried where no cause calls for it."""


class Candidate(msgspec.Struct, frozen=True):
    """A value of a lever, and what it is expected to gain."""

    lever: str
    value: Value
    needs: Allowed
    """What has to be allowed for it to be tried."""
    expected: Expected | None
    """None if nothing in the recording says what it does."""
    groups: str = ""
    """For which process groups the value is, where others may have another; empty if it is for all."""

    @property
    def name(self) -> str:
        return f"{self.lever}={programs.text(self.value)}"

    @property
    def gain(self) -> float:
        return self.expected.gain if self.expected else 0.0

    @property
    def in_words(self) -> str:
        return self.expected.in_words if self.expected else "unknown"


class Collecting(NamedTuple):
    """How long Python collects garbage."""

    share: float
    """Share of a step."""
    left_out: int
    """Steps of all first runs that don't count because it did so for long."""
    steps: int


@dataclass(frozen=True)
class Recorded:
    """What is known of a training from its first run."""

    training: Training
    shares: Mapping[str, float] = field(default_factory=dict)
    """What fixing each cause could gain at most, as a share of the step; of causes that were found."""
    findings: Sequence[Finding] = ()
    """Of the diagnosis of each recording; none if only the shares are known."""
    advice: str = ""
    """What the diagnosis advises, which names arguments."""
    predict: Callable[[Sequence[str]], Sequence[Prediction]] = lambda changes: ()
    """Returns the predictions for changes of `predict` from each recording."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the command is started with."""
    tp_size: int = 1
    """Ranks of Megatron-Core's tensor-parallel group, as far as the recording shows it."""
    purposes: Sequence[Purpose] = ()
    """Of the process groups of NCCL that the recording shows."""
    collectives: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The same as `shares`, of each collective of NCCL alone."""
    nccl_version: str = ""
    nodes: int = 1
    cores: int | None = None
    """Cores that each rank has; None if unknown."""
    collecting: Collecting | None = None
    """None if unknown."""
    inspected: Mapping[tuple[str, object], str] = field(default_factory=dict)
    """By lever and value why a value changes nothing in its processes; empty if it does (`levers.status.inspected`)."""

    def shares_for(self, lever: Lever) -> dict[str, float]:
        """Returns the shares of the causes that a lever can mend, of each at most what the findings cost whose evidence
        and collectives it is for."""
        own = {cause: share for cause, share in self.shares.items() if cause in lever.causes}
        if not self.findings:
            return own
        mended = [one for one in self.findings if lever.can_mend(one)]
        most = {cause: max((one.share for one in mended if one.cause == cause), default=0.0) for cause in own}
        return {cause: min(share, most[cause]) for cause, share in own.items() if most[cause]}


class LeftOut(NamedTuple):
    """Why levers are left out, by their names, and values, by NAME=VALUE."""

    not_here: dict[str, str]
    """Those that have no meaning for this training, or mend what it does not suffer from."""
    useless: dict[str, str]
    """Those that would change nothing in its processes, or could gain nothing."""


def candidates(recorded: Recorded, chosen: Mapping[str, Lever]) -> tuple[list[Candidate], LeftOut]:
    """Returns the values of levers that may change the training, what is expected to gain most first, and why others
    are left out."""
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.predict.named import singles

    not_here = {name: reason for name, lever in chosen.items() if (reason := _not_here(name, lever, recorded, chosen))}
    possible = [
        (name, value)
        for name, lever in chosen.items()
        if name not in not_here
        for value in _values(name, lever, recorded)
    ]
    useless = {
        (name, value): reason
        for name, value in possible
        if (reason := recorded.inspected.get((name, value), "") or _above_cores(chosen[name], value, recorded.cores))
    }
    values = {one: predicted_as(one[0], chosen[one[0]], one[1]) for one in possible if one not in useless}
    changes = [change for change in dict.fromkeys(change for change, _ in values.values()) if change]
    predictions = recorded.predict(changes) if changes else ()
    told = _pooled(predictions)
    untold = {one.change: one.reason for one in predictions if one.change not in told}
    parts_of_host = {
        change
        for (name, _), (change, is_bound) in values.items()
        if is_bound and _is_of_host(chosen[name]) and len(singles(change)) == 1
    }
    # What the host does for one lever, such as to load data, the others cannot spare it.
    known_parts = sum(told[change].gain for change in parts_of_host if change in told)
    found = []
    for (name, value), (change, is_bound) in values.items():
        lever, known = chosen[name], told.get(change)
        is_seen = lever.constructor is not None and (name, value) in recorded.inspected
        if not (is_seen or _may_change(lever, value, known)):
            continue
        # What a training does not do, such as to wait for data or to compute again, it cannot be spared.
        not_done = untold.get(change, "") if change in parts_of_host or not lever.causes else ""
        if reason := _why_useless(name, lever, known, not_done, recorded):
            useless[name, value] = reason
            continue
        purpose = next((one for one in recorded.purposes if is_of_groups(lever) and one.is_meant(value)), None)
        of_collective = (own for one, own in recorded.collectives.items() if lever.is_for(one, value))
        shares = recorded.shares_for(lever)
        if OF_HOST in shares:
            shares[OF_HOST] = max(0.0, shares[OF_HOST] - known_parts)
        own = purpose.shares if purpose else next(of_collective, shares)
        expected = _expected(lever, value, known, own, is_bound)
        if lever.collects and recorded.collecting:
            share = recorded.collecting.share
            expected = Expected(OF_BOUND * share, 0.0, share, why="collecting garbage")
        found.append(Candidate(name, value, _ALLOWED[lever.results], expected, purpose.title if purpose else ""))

    def order(one: Candidate) -> tuple[bool, float, bool, bool]:
        # Of levers that mend the same cause, the one that the evidence speaks for, and of its values that.
        argument = one.lever.rpartition(".")[2]
        given = rf"\b{argument}={re.escape(programs.text(one.value))}\b"
        return one.expected is None, -one.gain, argument not in recorded.advice, not re.search(given, recorded.advice)

    return sorted(found, key=order), LeftOut(not_here, dict(_named(useless, possible)))


def _named(
    useless: Mapping[tuple[str, Value], str], possible: Sequence[tuple[str, Value]]
) -> Iterator[tuple[str, str]]:
    """Yields the name of each lever of which no value is left, for one reason, or NAME=VALUE, with the reason."""
    for (name, value), reason in useless.items():
        is_same = all(useless.get(one) == reason for one in possible if one[0] == name)
        yield name if is_same else f"{name}={programs.text(value)}", reason


def _not_here(name: str, lever: Lever, recorded: Recorded, chosen: Mapping[str, Lever]) -> str:
    """Returns why a lever is not worth a trial in this training; empty if it may be."""
    applies = recorded.training.applies(name, lever)
    if applies.startswith("no: "):
        return applies.removeprefix("no: ")
    for_all = f"nccl.{name.partition('.')[2]}"
    if is_of_groups(lever) and len(recorded.purposes) == 1 and for_all in chosen:
        return f"all process groups that communicate serve one purpose, for which {for_all} sets it"
    if lever.between_nodes and recorded.nodes == 1:
        return "it has a meaning between nodes alone"
    if lever.collectives and is_older(recorded.nccl_version, BY_COLLECTIVE_SINCE):
        return f"it is tried for one collective at a time, which needs NCCL {'.'.join(map(str, BY_COLLECTIVE_SINCE))}"
    if lever.collects and recorded.collecting:
        share, left_out, steps = recorded.collecting
        if left_out:
            return (
                f"Python collects garbage for long in {left_out} of {steps} steps, which don't count; it could gain "
                f"{share:.1%} at most"
            )
        if share < WORTH:
            return f"collecting garbage takes {share:.1%} of a step"
    # Of what has a bound that is looked at first.
    return "" if lever.at_most else _uncalled(name, lever, recorded)


def _why_useless(name: str, lever: Lever, known: Expected | None, not_done: str, recorded: Recorded) -> str:
    """Returns why a value can gain nothing worth a trial, by what is predicted of it; empty if it may. `not_done`: that
    the training does nothing of what it would spare."""
    if known is None:
        return not_done.removesuffix(".") or _uncalled(name, lever, recorded)
    if known.gain == 0:
        return "it is predicted to change nothing"
    if known.gain < WORTH and not _is_called_for(lever, recorded):
        return f"no cause calls for it, and it could gain {max(known.gain, 0.0):.1%} of a step at most"
    return ""


def _uncalled(name: str, lever: Lever, recorded: Recorded) -> str:
    """Returns that nothing calls for a lever; empty if a cause does, or if it spares the host work and is known to
    apply."""
    is_known = any(inspected == name for inspected, _ in recorded.inspected)
    if _is_called_for(lever, recorded) or (is_known and _is_of_host(lever)):
        return ""
    return f"it mends {', '.join(lever.causes)}, which the recording does not show"


def _above_cores(lever: Lever, value: Value, cores: int | None) -> str:
    """Returns why a lever's value is more processes than a rank has cores for; empty if it is not."""
    if cores is None or not lever.cores or int(value) <= cores:
        return ""
    return f"each rank has {counted(cores, 'core')}; where loading waits for a disk or a network, sweep it with launch"


def _is_called_for(lever: Lever, recorded: Recorded) -> bool:
    return not lever.causes or bool(recorded.shares_for(lever))


def _is_of_host(lever: Lever) -> bool:
    return OF_HOST in lever.causes


def _values(name: str, lever: Lever, recorded: Recorded) -> Iterator[Value]:
    """Yields the values that change something, of process groups for each purpose that suffers from what they mend."""
    if is_of_groups(lever):
        for purpose in recorded.purposes:
            if purpose.shares.keys() & {*lever.causes}:
                yield from values_for(lever, purpose)
        return
    now = recorded.environment.get(lever.environment) if lever.environment else None
    if lever.collectives:
        for collective in lever.collectives:
            suffered = recorded.collectives.get(collective, {}).keys()
            suited = (value for value in lever.values if suffered & {*lever.mended_by(value)})
            yield from (lever.for_collective(collective, value) for value in suited)
        return
    for value in lever.values:
        is_set = lever.assigned(value) == now if now else lever.environment and value == lever.default
        # The command's processes may have other variables than it was started with.
        if not is_set or (name, value) in recorded.inspected:
            yield value


def _may_change(lever: Lever, value: Value, told: Expected | None) -> bool:
    """Returns whether a value may be another than the training has. The default may, where a variable or a script may
    have set something else: what is there to replace that, or what is predicted."""
    may_be_set = lever.environment or lever.overrides or (lever.constructor is not None and told is not None)
    return value != lever.default or bool(may_be_set)


def predicted_as(name: str, lever: Lever, value: Value) -> tuple[str, bool]:
    """Returns the change of `predict` that a value is, empty if it is none, and whether that is a bound."""
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.predict.named import CHANGES

    if lever.at_most:
        return lever.at_most.replace("{value}", programs.text(value)), True
    change = change_of(name, value)
    return change if change.partition("=")[0] in CHANGES else "", False


def as_timed(one: Prediction, run: JobRun) -> Prediction:
    """Returns a prediction of a recording as it is for its run's timed steps: what a host spares that the profiler has
    made late is less by what the profiled steps take longer."""
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.predict.named import mends, singles

    if one.gain_us is None or run.timed_by != "gpu" or not any(mends(each, OF_HOST) for each in singles(one.change)):
        return one
    slower_us = max((run.profiled_us or 0.0) - run.mean_us, 0.0)
    low_us, gain_us, high_us = (
        None if us is None else max(us - slower_us, min(us, 0.0))
        for us in (one.gain_low_us, one.gain_us, one.gain_high_us)
    )
    return msgspec.structs.replace(one, gain_us=gain_us, gain_low_us=low_us, gain_high_us=high_us)


def _pooled(several: Iterable[Prediction]) -> dict[str, Expected]:
    """Returns the mean gain of each change that can be predicted, between the lowest and the highest of all
    recordings: on a busy machine two of the same command may disagree by more than each says of itself."""
    found: dict[str, list[Expected]] = {}
    for one in several:
        if one.gain_us is not None and one.gain_low_us is not None and one.gain_high_us is not None:
            gain, low, high = (us / one.step_us for us in (one.gain_us, one.gain_low_us, one.gain_high_us))
            is_predicted = one.status == "predicted"
            shares = Expected(gain, low, high, is_predicted=is_predicted, why=one.change)
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


def _expected(
    lever: Lever, value: Value, told: Expected | None, shares: Mapping[str, float], is_bound: bool
) -> Expected | None:
    """Returns what is predicted, else at most what a cause costs that the lever mends; None if it mends none."""
    if told and told.is_predicted and not is_bound:
        return told
    if told:
        return Expected(OF_BOUND * told.gain, min(told.low, 0.0), max(told.high, 0.0), why=told.why)
    cause = max((one for one in lever.mended_by(value) if one in shares), key=shares.__getitem__, default=None)
    return Expected(OF_BOUND * shares[cause], 0.0, shares[cause], why=cause) if cause else None


def allowed(needs: Allowed, allow: Allowed) -> bool:
    """Returns whether what is needed is among what is allowed."""
    return _ORDER.index(needs) <= _ORDER.index(allow)
