"""Which of Megatron-Core's switches to set, so that what was chosen is what runs.

A slot that is left out of the YAML is not `none`: it gets Transformer Engine's default overlap. `initialize_ub` knows
no method that turns a slot off; only the switches do, and most of them hold for several slots at once, so the choices
of all operators are settled together: every combination of switches is tried, and the one that loses least against the
choices is taken. Slots that nothing was measured of cost nothing here; whether they are to be off decides among those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS as DEFAULTS
from overlap_sweep.overlap.overlap_cfg import OverlapConfig, methods_allowed, switches_refusal
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice

FLAGS = {
    "tp_comm_overlap": "--tp-comm-overlap",
    "tp_comm_overlap_ag": "--disable-tp-comm-overlap-ag",
    "tp_comm_overlap_rs": "--disable-tp-comm-overlap-rs",
    "tp_comm_overlap_rs_dgrad": "--tp-comm-overlap-rs-dgrad",
    "tp_comm_bulk_dgrad": "--disable-tp-comm-bulk-dgrad",
    "tp_comm_bulk_wgrad": "--disable-tp-comm-bulk-wgrad",
}
"""The command line options of Megatron-LM that change a switch from its default; the others have none."""

Switches = Mapping[str, bool]


@dataclass(frozen=True)
class UnmeasuredSlot:
    """A slot that no point of an operator overlapped."""

    slot: str
    runs: str
    """What the configuration makes of it: `off`, or `default`, as the library overlaps it by itself, or `as set`."""
    why: str


@dataclass(frozen=True)
class SwitchAdvice:
    """A switch that must not keep its default, and why."""

    name: str
    value: bool
    reason: str

    @property
    def flag(self) -> str | None:
        """Megatron-LM's command line option for it; for tp_comm_overlap, the one to leave out."""
        return FLAGS.get(self.name)


@dataclass(frozen=True)
class Plan:
    """What to give Megatron-Core at one TP size."""

    choices: list[PassChoice]
    """As chosen one by one, whatever the switches allow."""
    finals: list[Candidate]
    """For each choice what will run: what was chosen, or where no switch allows that, the next best that they allow."""
    overruled: list[str]
    """One sentence for each choice that the switches don't allow."""
    switches: list[SwitchAdvice]
    unmeasured: str
    """What was wanted of slots that nothing was measured of: `AnalysisConfig.unmeasured`."""

    @property
    def config(self) -> OverlapConfig:
        """The finals' slots, and all switches with the advice applied."""
        return OverlapConfig(
            _slots_of(self.finals), {**DEFAULTS, **{advice.name: advice.value for advice in self.switches}}
        )


def _slots_of(finals: Sequence[Candidate]) -> dict[str, space.Setting]:
    final = {slot: setting for candidate in finals for slot, setting in candidate.settings.items()}
    return {slot: dict(final[slot]) for slot in space.SLOTS if slot in final}


def plan(choices: Sequence[PassChoice], unmeasured: str = "off") -> Plan:
    """Settle the choices of one case and TP size under the switches that lose least.

    Ties go to the combination that overrules fewest choices, then by `unmeasured`, `AnalysisConfig`'s: `off` leaves
    fewest slots on of which nothing is known, and changes fewest switches; `default` touches fewest operators of
    which nothing is known, and changes fewest switches.
    """
    best = min(_settled(choices), key=lambda settled: settled.ranks[unmeasured])
    overruled = [
        _why_overruled(choice, final, best, choices)
        for choice, final in zip(choices, best.finals, strict=True)
        if final is not choice.chosen
    ]
    return Plan(list(choices), best.finals, overruled, _advice(best, choices, unmeasured), unmeasured)


@dataclass(frozen=True)
class _Settled:
    switches: Switches
    finals: list[Candidate]
    loss_us: float
    ranks: Mapping[str, tuple[float, ...]]
    """By `AnalysisConfig.unmeasured`; the least is the best."""


def _combinations() -> Iterator[Switches]:
    names = [name for name in DEFAULTS if name != "tp_comm_overlap"]
    for values in product((False, True), repeat=len(names)):
        changed = {name: DEFAULTS[name] ^ value for name, value in zip(names, values, strict=True)}
        yield {**DEFAULTS, **changed}
    yield {**DEFAULTS, "tp_comm_overlap": False}


def _settled(choices: Sequence[PassChoice]) -> Iterator[_Settled]:
    """Every combination of switches that leaves each choice a measured candidate."""
    tried = frozenset[str]().union(*(choice.tried_slots for choice in choices))
    default = methods_allowed(DEFAULTS)
    for switches in _combinations():
        allowed = methods_allowed(switches)
        finals = [_best_allowed(choice, allowed) for choice in choices]
        if any(final is None for final in finals):
            continue
        found = [final for final in finals if final]
        if switches_refusal(OverlapConfig(_slots_of(found), dict(switches))):
            continue
        losses = [max(0.0, f.time_us - c.chosen.time_us) for f, c in zip(found, choices, strict=True)]
        overruled = sum(final is not choice.chosen for final, choice in zip(found, choices, strict=True))
        touched = [slot for slot in allowed if slot not in tried and allowed[slot] != default[slot]]
        operators = {slot.partition("_")[0] for slot in touched}
        left_on = [slot for slot in allowed if slot not in tried and allowed[slot]]
        changed = sum(switches[name] != DEFAULTS[name] for name in DEFAULTS)
        ranks = {
            "off": (sum(losses), overruled, len(left_on), changed),
            "default": (sum(losses), overruled, len(operators), changed, len(touched)),
        }
        yield _Settled(switches, found, sum(losses), ranks)


def _best_allowed(choice: PassChoice, allowed: Mapping[str, frozenset[str]]) -> Candidate | None:
    def fits(candidate: Candidate) -> bool:
        for slot in choice.tried_slots:
            setting = candidate.settings.get(slot)
            if setting["method"] not in allowed[slot] if setting else allowed[slot]:
                return False
        return True

    if fits(choice.chosen):
        return choice.chosen
    return min(filter(fits, choice.candidates), key=lambda candidate: candidate.time_us, default=None)


def _why_overruled(choice: PassChoice, final: Candidate, best: _Settled, choices: Sequence[PassChoice]) -> str:
    at = choices.index(choice)
    granted = [settled for settled in _settled(choices) if settled.finals[at] is choice.chosen]
    more_us = min((settled.loss_us for settled in granted), default=None)
    sentence = (
        f"TP={choice.tp_size} {choice.label}: {final.name} instead of {choice.chosen.name} "
        f"({final.time_us - choice.chosen.time_us:+.1f} us): the switches hold for several slots at once, "
    )
    if more_us is None:
        return sentence + "and none of their combinations allows it."
    return sentence + f"and a combination that allows it costs {more_us - best.loss_us:.1f} us more in sum."


def _advice(best: _Settled, choices: Sequence[PassChoice], unmeasured: str) -> list[SwitchAdvice]:
    final = {slot: f for choice, f in zip(choices, best.finals, strict=True) for slot in choice.tried_slots}
    now = methods_allowed(best.switches)
    advice = []
    for name, value in best.switches.items():
        if value == DEFAULTS[name]:
            continue
        without = methods_allowed({**best.switches, name: DEFAULTS[name]})
        moved = [slot for slot in now if now[slot] != without[slot]]
        off = [slot for slot in moved if slot in final and not final[slot].settings.get(slot)]
        on = [slot for slot in moved if slot in final and final[slot].settings.get(slot)]
        untried = [slot for slot in moved if slot not in final]
        reasons = [f"no overlap for {', '.join(off)}"] if off else []
        reasons += [f"{space.brief_name(final[slot].settings[slot])} for {slot}" for slot in on]
        also = ", but changed by it too" if unmeasured == "default" else ""
        reasons += [f"{', '.join(untried)} not measured{also}"] if untried else []
        advice.append(SwitchAdvice(name, value, "; ".join(reasons)))
    return advice


def unmeasured_slots(config: OverlapConfig, tried: Collection[str], proven: bool) -> list[UnmeasuredSlot]:
    """What becomes of the slots that are not among the tried, and why; `proven` if a whole layer ran so."""
    on = methods_allowed(config.switches)
    found = []
    for slot in (slot for slot, methods in space.SLOTS.items() if methods and slot not in tried):
        runs = "off" if not on[slot] else "as set" if slot in config.slots else "default"
        if proven:
            why = "as the whole layer was measured"
        elif runs == "off":
            why = "its switch is off"
        else:
            needed = _sharing(slot, config)
            why = f"its switch is needed for {', '.join(needed)}" if needed else "its switch is on"
        found.append(UnmeasuredSlot(slot, runs, why))
    return found


def _sharing(slot: str, config: OverlapConfig) -> list[str]:
    """The slots with settings that any switch would turn off together with this one."""
    now, found = methods_allowed(config.switches), set[str]()
    for name, on in config.switches.items():
        if name == "tp_comm_overlap":
            continue
        without = methods_allowed({**config.switches, name: not on})
        if now[slot] and not without[slot]:
            found |= {other for other in config.slots if now[other] and not without[other]}
    return [other for other in space.SLOTS if other in found]
