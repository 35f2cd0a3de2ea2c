"""The end of a search over knobs: its best is measured in turns with the baseline and without each of its changes."""

import math
import sys
from collections.abc import Sequence

from overlap_sweep.config import Search
from overlap_sweep.search import Setting, disturbed_baselines
from overlap_sweep.search.knob_trail import (
    LEAST_IN_PROOF,
    KnobTrail,
    Steps,
    least_rounds,
    one_by_one,
    proof_team,
    with_values,
)

LEAST_FREEDOM = 2
"""Degrees of freedom of a proof (measurements of settings beyond each one's first) that show its noise: two rounds of
two settings."""


def prove(trail: KnobTrail, effort: Search, best: Setting) -> Steps:
    """Measures the best against the baseline and against itself without each of its changes, and reverts changes that
    do not help. If the budget does not allow that, the search's best stays, unproven."""
    fastest = best
    instead: Setting | None = None
    while best != trail.baseline:
        yield from alternate(trail, effort, best)
        proof = trail.proof
        if not {trail.baseline, best} <= proof.of.keys():
            return
        if disturbed := trail.found.disturbed or disturbed_baselines([*trail.found.of.values(), *proof.of.values()]):
            proof = trail.proof = proof.by_time(disturbed)
        elif not proof.agrees(trail.baseline, best):
            proof = trail.proof = proof.by_time()
        if instead and proof.beats(fastest, best):
            # Each change was useless while the others were there, but one of them is needed.
            best, instead = instead, None
            continue
        if _is_open(trail, effort, best):
            trail.cut = True
            trail.notes.append(f"The budget ended before the proof was complete: {_seen(trail, effort, best)}")
            return
        if trail.chosen:
            trail.notes.append(f"{trail.name(trail.chosen, best)} does not help with the other changes; reverted")
        trail.chosen = best
        if not proof.beats(best, trail.baseline):
            trail.notes.append(f"Seemed faster, but not beyond the noise of the proof: {_seen(trail, effort, best)}")
            trail.chosen = trail.baseline
            break
        # Small losses add up, so each reverted setting is also compared with the search's best.
        idle = [
            setting
            for setting in one_by_one(trail, best, trail.baseline).values()
            if setting in proof.of and not proof.beats(best, setting) and not proof.beats(fastest, setting)
        ]
        if not idle:
            break
        one = min(idle, key=proof.time_us)
        every = with_values(best, {index: trail.baseline[index] for s in idle for index in trail.changed(s, best)})
        known_worse = every in proof.of and proof.beats(fastest, every)
        best, instead = (one, None) if known_worse or not trail.possible(every) else (every, one)
    if not trail.prior:
        alone = one_by_one(trail, trail.baseline, trail.best)
        yield from trail.measure([setting for setting in alone.values() if setting])


def _is_open(trail: KnobTrail, effort: Search, best: Setting) -> bool:
    """Returns whether the budget cut the proof short while the best was faster, but not yet beyond the noise, which one
    round alone does not show."""
    gain = trail.proof.gain(trail.baseline, best)
    proven = gain.time_us > gain.noise_us and trail.proof.freedom >= LEAST_FREEDOM
    return trail.proof_cut and rounds_of(trail, best) < rounds_wanted(effort) and gain.time_us > 0 and not proven


def _seen(trail: KnobTrail, effort: Search, best: Setting) -> str:
    """Returns what the proof measured."""
    proof, base = trail.proof, trail.baseline
    times = f"took {proof.time_us(best):,.1f} us instead of {proof.time_us(base):,.1f}"
    held = rounds_of(trail, best)
    rounds = f"after {held} of {max(held, rounds_wanted(effort))} rounds"
    return f"{trail.name(best)} {times} {rounds}, noise {proof.gain(base, best).noise_us:,.1f}"


def rounds_of(trail: KnobTrail, best: Setting) -> int:
    return min(len(trail.proof.of.get(setting, [])) for setting in (trail.baseline, best))


def rounds_wanted(effort: Search) -> int:
    return max(2, effort.repeats)


def alternate(trail: KnobTrail, effort: Search, best: Setting, others: Sequence[Setting] = ()) -> Steps:
    """Measures rounds of the best's proof team, with others if the budget has room for them; if it allows too few of
    them, of the best and the baseline, and of those of the best's changes that are least sure."""
    team = [setting for setting in proof_team(trail, best) if setting not in trail.proof.of]
    all_of_them = list(dict.fromkeys([*team, *others]))
    new = all_of_them if trail.room() >= rounds_wanted(effort) * len(all_of_them) else team
    if not new:
        return
    # The best takes part again, since its earlier samples did not alternate with the new settings.
    members = list(dict.fromkeys([*new, best]))
    room = int(min(trail.room(), sys.maxsize))
    least = least_rounds(trail, best) if trail.prior else LEAST_IN_PROOF
    if room < least * len(members):
        trail.cut = True
        both = [setting for setting in (trail.baseline, best) if setting in members]
        others = sorted((one for one in members if one not in both), key=lambda one: _sure(trail, best, one))
        members = [*both, *others[: max(0, room // least - len(both))]]
    rounds = min(rounds_wanted(effort), room // len(members))
    trail.proof_cut = trail.proof_cut or rounds < rounds_wanted(effort)
    for turn in range(rounds):
        # In alternating order, so that steady drift affects all alike.
        yield from trail.prove(members if turn % 2 == 0 else members[::-1])


def _sure(trail: KnobTrail, best: Setting, without: Setting) -> float:
    """Returns how many times its noise what `without` lacks has gained in the search; 0 where that is not known."""
    effects = [trail.effects.get(change) for change in trail.changed(best, without).items()]
    known = [effect.share / effect.noise if effect.noise else math.inf for effect in effects if effect]
    return min(known, default=0.0)
