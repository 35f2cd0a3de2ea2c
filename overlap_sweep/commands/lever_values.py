"""Which levers names mean, and which of a lever's values a recording speaks for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from overlap_sweep.errors import UsageError
from overlap_sweep.levers import OPTION, Lever, Value, levers, named, value_of

if TYPE_CHECKING:
    from overlap_sweep.predict.predictions import Prediction

NO_SETTINGS = {
    "batch.times": "it asks what a larger batch would take, which the script sets.",
    "ddp.accumulate": "it asks what microbatches without reductions would take; see ddp.no_sync.",
    "ddp.hooks": "the script has to launch reductions in hooks, as DistributedDataParallel does.",
    "fsdp2.accumulate": "it asks what microbatches without reductions would take; see fsdp2.no_sync.",
    "host.launch": "the script has to launch its kernels with a CUDA graph.",
    "link.times": "it asks what a faster link between the GPUs would gain.",
    "ranks.equal": "it asks what is gained if each rank takes as long as the mean of them; balance their work.",
    "ranks.surplus": "it asks what is gained without the kernels that one rank alone runs; the script has them.",
    "ranks.times": "it asks what more ranks would take.",
}
"""Changes of `predict` that no lever makes."""


class Meant(NamedTuple):
    """What names mean."""

    values: dict[str, Value | None]
    """By lever the value that is asked for; None if none is."""
    whole: set[str]
    """Levers that are named themselves, and not by their family."""
    notes: list[str]
    """A sentence for each name that is no lever's, but a change's or a variable's."""
    unknown: list[str]
    """A sentence for each that is not known, or has a value that does not exist."""


def meant_by(names: Sequence[str]) -> Meant:
    """Returns the levers that names mean: of levers, families, variables, and changes as `diagnose` and `predict` print
    them, each but families with or without a value. Without names all levers."""
    found = Meant({} if names else dict.fromkeys(levers()), set(), [], [])
    for name in names:
        for each in _singles(name.removeprefix("+").removeprefix(OPTION)):
            try:
                _add(each, found)
            except UsageError as error:
                found.unknown.append(str(error))
    return found


def _singles(change: str) -> list[str]:
    if "+" not in change:
        return [change]
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.predict.named import singles

    return singles(change)


def _add(each: str, found: Meant) -> None:
    """Adds what a name means. UsageError if it is unknown."""
    name, is_given, text = each.partition("=")
    known = levers()
    own: list[str] = []
    if name in NO_SETTINGS:
        found.notes.append(f"{each} is no setting: {NO_SETTINGS[name]}")
    elif name not in known and (own := [one for one in known if known[one].at_most.partition("=")[0] == name]):
        found.notes.append(f"{each} is no setting, but what these gain at most: {', '.join(own)}.")
    elif own := [name] if name in known else [one for one in known if known[one].environment == _variable(name)]:
        if is_given:
            found.values.update({one: value_of(one, text) for one in own})
        found.whole.update(own)
        found.notes.extend(f"{each} is the lever {one}{is_given}{text}." for one in own if one != name)
    else:
        own = [*named([name])]
        if is_given:
            raise UsageError(f"{each}: {name} is several levers, such as {own[0]}; name one of them.")
    for one in own:
        # Another name may have given its value.
        found.values.setdefault(one, None)


def _variable(name: str) -> str:
    return name.removeprefix("env.")


class Worth(NamedTuple):
    """What a recording says of a lever."""

    value: Value | None = None
    """The value to write: what is asked for, or gains most; None if nothing is known of several, or none gains."""
    gains: bool = True
    """False if all that is predicted of it gains nothing."""
    gain: Prediction | None = None
    """Of the value, or of the best if none gains; None if nothing is predicted."""


def worth_of(
    wanted: Mapping[str, Value | None], told: Mapping[str, Prediction], advised: Collection[str]
) -> dict[str, Worth]:
    """Returns what predictions, by their changes, say of each lever. `advised`: changes that the diagnosis names."""
    found = {}
    for name, value in wanted.items():
        changes = changes_of(name, value, advised)
        known = {one: told[change] for one, change in changes.items() if change in told}
        known = {one: own for one, own in known.items() if own.gain_us is not None}
        found[name] = _worth(levers()[name], value, known)
    return found


def _worth(lever: Lever, wanted: Value | None, known: Mapping[Value, Prediction]) -> Worth:
    from overlap_sweep.predict.predictions import LEAST

    if wanted is not None:
        return Worth(wanted, gain=known.get(wanted))
    if not known:
        return Worth(lever.only_value)
    changing = {one: own for one, own in known.items() if abs(own.gain_us or 0.0) >= LEAST * own.step_us} or known
    most = max(one.gain_us or 0.0 for one in changing.values())
    # Of values that gain alike the first, as `predict` lists them.
    best = next(one for one, own in changing.items() if (own.gain_us or 0.0) > most - LEAST * own.step_us)
    if most < LEAST * known[best].step_us:
        return Worth(None, gains=False, gain=known[best])
    # Values that one change bounds are not told apart by it.
    is_of_value = len({own.change for own in known.values()}) == len(known)
    return Worth(best if is_of_value else lever.only_value, gain=known[best])


def unrecorded(name: str, wanted: Value | None) -> Worth:
    """Returns what to write of a lever without a prediction: what is asked for, or its only value."""
    return Worth(levers()[name].only_value if wanted is None else wanted)


def changes_of(name: str, wanted: Value | None, advised: Collection[str]) -> dict[Value, str]:
    """Returns the change of `predict` by value of a lever, for the one that is wanted or all, those that the diagnosis
    names first; without those that are none."""
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.optimizer.candidates import predicted_as

    lever = levers()[name]
    values = [wanted] if wanted is not None else [*_listed(name, lever, advised), *lever.values]
    found = {one: predicted_as(name, lever, one)[0] for one in values if not lever.is_scoped(one)}
    return {one: change for one, change in found.items() if change}


def _listed(name: str, lever: Lever, advised: Collection[str]) -> Iterator[Value]:
    """Yields the values of a lever that the diagnosis names, or that `predict` tries."""
    from overlap_sweep.predict.named import CHANGES

    begin = (lever.change or f"{name}={{value}}").partition("{value}")[0]
    tried = [f"{change}={value}" for change, one in CHANGES.items() for value in one.values]
    for change in () if lever.at_most else (*advised, *tried):
        text = change.removeprefix(begin)
        # A program's option may not take what PyTorch takes, such as half a megabyte.
        with suppress(UsageError):
            if text != change:
                yield value_of(name, text)


def as_lever(change: str) -> str:
    """Returns the change of a variable in the words of its lever."""
    name, _, value = change.partition("=")
    variable = _variable(name)
    lever = next((one for one, own in levers().items() if name != variable and own.environment == variable), name)
    return f"{lever}={value}"
