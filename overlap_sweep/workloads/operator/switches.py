"""Decides which of Megatron-Core's switches to set, so that training runs the chosen settings.

A slot that is left out of the YAML is not `none`: it gets Transformer Engine's default overlap. `initialize_ub` has no
method that turns a slot off. Only the switches do, and most of them apply to several slots, so the choices of all
operators are settled together: every combination of switches is tried, and the one that loses least time is taken.
Unmeasured slots cost nothing here; they only break ties.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import NONE_IN_WORDS, OverlapConfig, methods_allowed, switches_refusal
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS as DEFAULTS
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice, gain_together

Switches = Mapping[str, bool]

OFF: Switches = MappingProxyType({**DEFAULTS, "tp_comm_overlap": False})
"""The switches without any overlap."""
LAYERS_ALIKE: Mapping[str, int] = MappingProxyType(dict.fromkeys(space.OPERATORS, 1))
"""The operators of a model whose layers are all alike."""


@dataclass(frozen=True)
class UnmeasuredSlot:
    """A slot that no operator point overlapped."""

    slot: str
    runs: str
    """How it runs in the configuration: `off`, `default` (the library's own overlap) or `as set`."""


@dataclass(frozen=True)
class SwitchAdvice:
    """A switch to change from its default, and why."""

    name: str
    value: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """The configuration for Megatron-Core at one TP size."""

    choices: list[PassChoice]
    """The best settings, each chosen alone, whatever the switches allow."""
    finals: list[Candidate]
    """The candidate that runs for each choice: the chosen one, or the fastest that the switches allow."""
    overruled: list[str]
    switches: list[SwitchAdvice]

    @property
    def config(self) -> OverlapConfig:
        """Returns the finals' slots, and all switches with the advice applied."""
        changed = {advice.name: advice.value for advice in self.switches}
        return OverlapConfig(_slots_of(self.finals), {**DEFAULTS, **changed})


def _slots_of(finals: Sequence[Candidate]) -> dict[str, space.Setting]:
    final = {slot: setting for candidate in finals for slot, setting in candidate.settings.items()}
    return {slot: dict(final[slot]) for slot in space.SLOTS if slot in final}


def plan(
    choices: Sequence[PassChoice],
    unmeasured: str = "off",
    layers: Mapping[str, int] = LAYERS_ALIKE,
    *,
    only_if_faster: bool = False,
) -> Plan:
    """Returns the switches, and the settings they allow, that lose least time against the choices of one TP size.

    `layers` has the operators of the model, each with the number of layers that have it: what is lost counts in all of
    them. `only_if_faster`: plan without any overlap if the settings that the switches allow are together no faster than
    that beyond the noise.

    Ties go to the combination that overrules the fewest choices, then by `AnalysisConfig.unmeasured`: `off` leaves the
    fewest unmeasured slots on, `default` touches the fewest unmeasured operators; then to the fewest changed switches.
    """
    switches, finals = min(_settled(choices, unmeasured, layers), key=lambda settled: settled[0])[1:]
    overruled = [
        f"TP={choice.tp_size} {choice.label}: {final.spoken} instead of {choice.chosen.spoken} "
        f"({final.time_us - choice.chosen.time_us:+.1f} us), because a Megatron-Core switch applies to several slots."
        for choice, final in zip(choices, finals, strict=True)
        if final is not choice.chosen
    ]
    gain = gain_together(zip(choices, finals, strict=True))
    if only_if_faster and not gain.faster and any(final.settings for final in finals):
        switches, finals = OFF, [choice.none for choice in choices]
        overruled = [
            f"TP={choices[0].tp_size}: {NONE_IN_WORDS}, because the settings that Megatron-Core's switches allow are "
            f"together {gain.in_words(NONE_IN_WORDS)}."
        ]
    return Plan(list(choices), finals, overruled, _advice(switches, finals, choices, layers))


def _combinations() -> Iterator[Switches]:
    others = [(on, not on) for name, on in DEFAULTS.items() if name != "tp_comm_overlap"]
    yield from (dict(zip(DEFAULTS, values, strict=True)) for values in product((True,), *others))
    yield OFF


def _settled(
    choices: Sequence[PassChoice], unmeasured: str, layers: Mapping[str, int]
) -> Iterator[tuple[tuple[float, ...], Switches, list[Candidate]]]:
    """Yields every combination of switches that leaves each choice a measured candidate: its rank (smallest is best),
    the switches, and the candidates."""
    tried = frozenset[str]().union(*(choice.tried_slots for choice in choices))
    default = _allowed(DEFAULTS, layers)
    for switches in _combinations():
        allowed = _allowed(switches, layers)
        found = [final for choice in choices if (final := _best_allowed(choice, allowed))]
        if len(found) < len(choices) or switches_refusal(OverlapConfig(_slots_of(found), dict(switches)), layers):
            continue
        loss_us = sum(
            max(0.0, final.time_us - choice.chosen.time_us) * layers[choice.operator]
            for final, choice in zip(found, choices, strict=True)
        )
        overruled = sum(final is not choice.chosen for final, choice in zip(found, choices, strict=True))
        touched = [slot for slot in allowed if slot not in tried and allowed[slot] != default[slot]]
        operators = {slot.partition("_")[0] for slot in touched}
        left_on = [slot for slot in allowed if slot not in tried and allowed[slot]]
        changed = sum(switches[name] != DEFAULTS[name] for name in DEFAULTS)
        unknown = (len(left_on), changed) if unmeasured == "off" else (len(operators), changed, len(touched))
        yield (loss_us, overruled, *unknown), switches, found


def _allowed(switches: Switches, operators: Collection[str]) -> dict[str, frozenset[str]]:
    """Returns the methods that each slot of these operators can have under the switches."""
    methods = methods_allowed(switches)
    return {slot: own for slot, own in methods.items() if slot.partition("_")[0] in operators}


def _best_allowed(choice: PassChoice, allowed: Mapping[str, frozenset[str]]) -> Candidate | None:
    def fits(candidate: Candidate) -> bool:
        own = {slot: candidate.settings.get(slot) for slot in choice.tried_slots}
        return all(one["method"] in allowed[slot] if one else not allowed[slot] for slot, one in own.items())

    if fits(choice.chosen):
        return choice.chosen
    return min(filter(fits, choice.candidates), key=lambda candidate: candidate.time_us, default=None)


def _advice(
    switches: Switches, finals: Sequence[Candidate], choices: Sequence[PassChoice], operators: Collection[str]
) -> list[SwitchAdvice]:
    final = {slot: f for choice, f in zip(choices, finals, strict=True) for slot in choice.tried_slots}
    now = _allowed(switches, operators)
    advice = []
    for name, value in switches.items():
        if value == DEFAULTS[name]:
            continue
        without = _allowed({**switches, name: DEFAULTS[name]}, operators)
        moved = [slot for slot in now if now[slot] != without[slot]]
        by_setting: dict[str, list[str]] = {}
        for slot in (slot for slot in moved if slot in final):
            setting = final[slot].settings.get(slot)
            by_setting.setdefault(space.brief_name(setting) if setting else "no overlap", []).append(slot)
        reasons = [f"{setting} for {', '.join(slots)}" for setting, slots in by_setting.items()]
        untried = [slot for slot in moved if slot not in final]
        reasons += [f"{', '.join(untried)} not measured"] if untried else []
        advice.append(SwitchAdvice(name, value, "; ".join(reasons)))
    return advice


def unmeasured_slots(
    config: OverlapConfig, tried: Collection[str], operators: Collection[str] = LAYERS_ALIKE
) -> list[UnmeasuredSlot]:
    """Returns how the slots of these operators run that are not in `tried`."""
    on = _allowed(config.switches, operators)
    return [
        UnmeasuredSlot(slot, "off" if not on[slot] else "as set" if slot in config.slots else "default")
        for slot in space.SLOTS
        if slot in on and slot not in tried
    ]
