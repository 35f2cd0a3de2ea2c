"""Candidates as knobs of a search, and what it may expect of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.optimizer.candidates import Candidate
from overlap_sweep.search.knob_trail import Knob
from overlap_sweep.search.prior import Prior

NULL = "null"
"""Value of a lever that leaves the training as it is."""


def knobs_of(tried: Sequence[Candidate], key_of: Callable[[str], str], *, restarts: bool = False) -> tuple[Knob, ...]:
    """Returns a knob for each lever, of process groups for each purpose of them. `key_of`: returns the option of a
    lever; `restarts`: whether its values need new worker processes."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in tried:
        found.setdefault((one.lever, one.groups), []).append(_text(one))
    return tuple(Knob(key_of(lever), (NULL, *values), restarts) for (lever, _), values in found.items())


def prior_of(knobs: Sequence[Knob], tried: Sequence[Candidate], key_of: Callable[[str], str]) -> Prior:
    index = {(knob.key, value): number for number, knob in enumerate(knobs) for value in knob.values[1:]}
    changes = {one.name: (index[key_of(one.lever), _text(one)], _text(one)) for one in tried}
    expected = {changes[one.name]: one.expected for one in tried if one.expected}
    # A bound may be what another candidate is predicted to gain, which is measured then.
    others = ((one.name, one.expected.why) for one in tried if one.expected and not one.expected.is_predicted)
    return Prior(expected, {changes[name]: changes[why] for name, why in others if why in changes and why != name})


def _text(one: Candidate) -> str:
    """Returns the value as an override has it; of process groups without quotes, since those of several are joined."""
    return str(one.value) if one.groups else override_value(one.value)
