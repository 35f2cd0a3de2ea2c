"""Search any knobs: one change at a time from the best so far, and what seems to help together.

Every knob has a few values without order, most of which change little: what matters is to tell the few that help from
the noise with few measurements, and not to miss those that help only together.

1. The baseline has the first value of every knob. All single changes of it are measured in one batch.
2. What is surely faster is measured together, and so is what seems to be, and what does no sure harm: in a joint
   setting effects add up that are too small alone, and knobs that need each other show. A value that is refused alone
   is tried with whatever single change makes it possible.
3. The simplest setting that the noise cannot tell from the fastest is the best. From it the single changes are measured
   again that have shown an effect, since that may be another now; those that changed nothing only together. This ends
   when the best stays the best.
4. Knobs that need other worker processes join after the others have settled.
5. The best, the baseline, and the best without each of its changes are measured again in alternation: only what is
   faster there is named, and a change that contributes nothing beyond the noise is taken back.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

from overlap_sweep.config import Search
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.records import Contribution, Gain, KnobSearch, TriedKnobs
from overlap_sweep.search.knob_trail import KnobTrail, Samples, Setting, Steps

CONTENDERS = 3
"""How many are measured again at most while the noise cannot tell them apart."""


def search(trail: KnobTrail, effort: Search) -> Steps:
    """Search the trail's space; `trail.best` is the answer at any time, once the baseline was measured."""
    yield from trail.measure([trail.baseline])
    if trail.baseline not in trail.found.of:
        return
    settled = [index for index, knob in enumerate(trail.knobs) if not knob.restarts]
    everything = range(len(trail.knobs))
    yield from _descend(trail, effort, settled)
    if len(settled) < len(everything) and not trail.cut:
        yield from _descend(trail, effort, everything)
    yield from _prove(trail, effort)


def _descend(trail: KnobTrail, effort: Search, knobs: Sequence[int]) -> Steps:
    """Change these knobs until nothing is faster than the best."""
    while not trail.cut:
        origin = trail.best
        yield from _around(trail, effort, origin, knobs)
        best = trail.best
        # A whole round of measurements goes out from the next one: it should be no stroke of luck.
        if best != origin and len(trail.found.of[best]) < min(2, effort.repeats):
            simpler = (s for s in trail.found.of if trail.simplicity(s)[0] < trail.simplicity(best)[0])
            yield from trail.measure_again([best, min(simpler, key=trail.found.time_us)], _reserve(trail))
        if trail.best == origin:
            return


def _around(trail: KnobTrail, effort: Search, origin: Setting, knobs: Sequence[int]) -> Steps:
    """Measure single changes of one setting, and what they say should be tried together."""
    changes = [change for change in _changes(trail, origin, knobs) if _telling(trail, origin, change)]
    possible = [change for change in changes if trail.possible(change)]
    if len(trail.found.of) == 1 and effort.repeats > 1 and possible:
        # Everything is compared with it, and it tells how far two measurements of one setting may lie apart.
        half = (len(possible) + 1) // 2
        yield from trail.measure_again([*possible[:half], origin, *possible[half:], origin], _reserve(trail))
    else:
        yield from trail.measure(possible, _reserve(trail))
    yield from trail.measure(_unlocked(trail, origin, changes), _reserve(trail))
    _learn(trail, effort, origin, changes)
    failed = len(trail.failed)
    yield from trail.measure(_joint(trail, origin, knobs), _reserve(trail))
    if len(trail.failed) > failed:
        # What does not go together is known now.
        yield from trail.measure(_joint(trail, origin, knobs), _reserve(trail))
    yield from _tell_apart(trail, effort)


def _changes(trail: KnobTrail, origin: Setting, knobs: Sequence[int]) -> Iterator[Setting]:
    """Its single changes, but for values that were dropped."""
    for index in knobs:
        for value in trail.knobs[index].values:
            if value != origin[index] and (index, value) not in trail.dropped:
                yield _with(origin, {index: value})


def _telling(trail: KnobTrail, origin: Setting, change: Setting) -> bool:
    """Whether the change is worth a measurement of its own here."""
    ((index, value),) = trail.changed(change, origin).items()
    if value == trail.baseline[index]:
        # What helped when it was made is put back in the proof only.
        made = trail.effects.get((index, origin[index]))
        return not made or made.time_us <= made.noise_us
    effect = trail.effects.get((index, value))
    return not effect or abs(effect.time_us) > effect.noise_us


def _learn(trail: KnobTrail, effort: Search, origin: Setting, changes: Sequence[Setting]) -> None:
    """What the single changes do here; what is out of reach is dropped."""
    origin_us = trail.found.time_us(origin)
    for setting in (change for change in changes if change in trail.found.of):
        ((index, value),) = trail.changed(setting, origin).items()
        # The baseline's values stay: whatever leads away from them may be taken back.
        if value == trail.baseline[index]:
            continue
        effect = trail.effects[index, value] = trail.found.gain(origin, setting)
        slower = -effect.time_us / origin_us
        if slower - effect.noise_us / origin_us > effort.reach:
            trail.dropped[index, value] = slower
            trail.notes.append(f"{trail.knobs[index].key}={value} is {slower:.0%} slower: not tried again")


def _unlocked(trail: KnobTrail, origin: Setting, changes: Sequence[Setting]) -> Iterator[Setting]:
    """What is refused as a single change, with each other change that makes it possible."""
    for refused in (change for change in changes if trail.refusal(change)):
        for key in (change for change in changes if change in trail.found.of):
            if trail.changed(refused, origin).keys() != trail.changed(key, origin).keys():
                yield _with(refused, trail.changed(key, origin))


def _joint(trail: KnobTrail, origin: Setting, knobs: Sequence[int]) -> Iterator[Setting]:
    """The best change of each knob together: of those that surely help, that seem to, and that do no sure harm."""
    effects = {
        (index, value): effect
        for (index, value), effect in trail.effects.items()
        if index in knobs and value != origin[index] and (index, value) not in trail.dropped
    }
    best_first = sorted(effects, key=lambda change: -effects[change].time_us)
    sure = [change for change in best_first if effects[change].time_us > effects[change].noise_us]
    hopeful = [change for change in best_first if effects[change].time_us > 0]
    harmless = [change for change in best_first if effects[change].time_us >= -effects[change].noise_us]
    for chosen in (sure, hopeful, harmless):
        together, misfits = _joined(trail, origin, chosen)
        yield together
        for misfit in misfits:
            yield _joined(trail, origin, [misfit, *chosen])[0]


def _joined(
    trail: KnobTrail, origin: Setting, changes: Sequence[tuple[int, str]]
) -> tuple[Setting, list[tuple[int, str]]]:
    """The first change of each knob, one after the other; and those that are not possible with the ones before."""
    together, misfits = origin, []
    for index, value in changes:
        more = _with(together, {index: value})
        if together[index] != origin[index]:
            continue
        if trail.possible(more):
            together = more
        else:
            misfits.append((index, value))
    return together, misfits


def _with(setting: Setting, values: dict[int, str]) -> Setting:
    return tuple(values.get(index, value) for index, value in enumerate(setting))


def _tell_apart(trail: KnobTrail, effort: Search) -> Steps:
    """Measure the fastest and the simpler ones again while the noise hides which of them is faster."""
    while not trail.cut and trail.fastest != trail.best:
        fastest, found = trail.fastest, trail.found
        ties = [s for s in sorted(found.of, key=found.time_us) if s != fastest and not found.beats(fastest, s)]
        simpler = sorted((s for s in ties if trail.simplicity(s) < trail.simplicity(fastest)), key=trail.simplicity)
        contenders = list(dict.fromkeys([fastest, trail.best, *simpler]))[:CONTENDERS]
        wanting = [setting for setting in contenders if len(found.of[setting]) < effort.repeats]
        lead = found.gain(trail.best, fastest).time_us / found.time_us(fastest)
        if lead < effort.worth or fastest not in wanting:
            return
        yield from trail.measure_again(wanting, _reserve(trail))


def team(trail: KnobTrail, best: Setting) -> list[Setting]:
    """What is measured again to prove it: the baseline, itself, and itself without each of its changes."""
    if best == trail.baseline:
        return []
    return list(
        dict.fromkeys([trail.baseline, best, *(s for s in one_by_one(trail, best, trail.baseline).values() if s)])
    )


def one_by_one(trail: KnobTrail, setting: Setting, other: Setting) -> dict[int, Setting | None]:
    """By the index of each knob that they have otherwise, the setting with the other's value there; None where that is
    refused or fails."""
    taken_over = {index: _with(setting, {index: value}) for index, value in trail.changed(other, setting).items()}
    return {index: changed if trail.possible(changed) else None for index, changed in taken_over.items()}


def _reserve(trail: KnobTrail) -> int:
    """Points that the shortest proof will need."""
    return 2 * len(team(trail, trail.best))


def _prove(trail: KnobTrail, effort: Search) -> Steps:
    """Measure the best against the baseline and against itself without each of its changes, and take back what does not
    help. Without room for that the best stays what the search says, unproven."""
    best = fastest = trail.best
    instead: Setting | None = None
    while best != trail.baseline:
        yield from _alternate(trail, effort, best)
        proof = trail.proof
        if not {trail.baseline, best} <= proof.of.keys():
            return
        if not agree(proof, trail.baseline, best):
            proof = trail.proof = proof.by_time()
        if instead and proof.beats(fastest, best):
            # Each was idle beside the others, and one of them is needed.
            best, instead = instead, None
            continue
        if trail.chosen:
            trail.notes.append(f"{trail.name(trail.chosen, best)} does not help beside the rest: taken back")
        trail.chosen = best
        if not proof.beats(best, trail.baseline):
            trail.notes.append(f"{trail.name(best)} seemed faster than the baseline, and was not when measured again")
            trail.chosen = trail.baseline
            break
        # Many small losses make a large one: what is taken back is measured against what the search found, too.
        idle = [
            setting
            for setting in one_by_one(trail, best, trail.baseline).values()
            if setting in proof.of and not proof.beats(best, setting) and not proof.beats(fastest, setting)
        ]
        if not idle:
            break
        one = min(idle, key=proof.time_us)
        every = _with(best, {index: trail.baseline[index] for s in idle for index in trail.changed(s, best)})
        known_worse = every in proof.of and proof.beats(fastest, every)
        best, instead = (one, None) if known_worse or not trail.possible(every) else (every, one)
    yield from trail.measure([setting for setting in one_by_one(trail, trail.baseline, trail.best).values() if setting])


def _alternate(trail: KnobTrail, effort: Search, best: Setting) -> Steps:
    """Rounds of all that proves this one; where there is no room for two of them, of itself and the baseline alone."""
    new = [setting for setting in team(trail, best) if setting not in trail.proof.of]
    if not new:
        return
    # The best takes part again: what was measured before it was not in turns with this.
    members = list(dict.fromkeys([*new, best]))
    # One round alone says nothing of what two measurements differ by.
    most = max(2, effort.repeats)
    rounds = min(most, int(min(trail.room(), sys.maxsize)) // len(members))
    if rounds < 2:
        trail.cut, members = True, [setting for setting in (trail.baseline, best) if setting in members]
        rounds = min(most, int(trail.room()) // len(members))
    for turn in range(rounds):
        # There and back: what drifts steadily hits all alike.
        yield from trail.prove(members if turn % 2 == 0 else members[::-1])


def agree(proof: Samples, one: Setting, other: Setting) -> bool:
    """Whether the gain is the same with the machine's drift taken out as by times alone. Those are noisier, but don't
    rest on what is measured beside a setting being the same for both."""
    gain, by_time = proof.gain(one, other), proof.by_time().gain(one, other)
    return abs(gain.time_us - by_time.time_us) <= math.hypot(gain.noise_us, by_time.noise_us)


def answer(trail: KnobTrail) -> KnobSearch:
    """Returns what a search, under way or ended, came to."""
    knobs = {knob.key: list(knob.values) for knob in trail.knobs}
    search = KnobSearch(label="", overrides=[], knobs=knobs, notes=trail.notes, grid=trail.grid)
    base = trail.baseline
    if base not in trail.found.of:
        search.dropped = trail.failed.get(base, "")
        return search
    best = trail.best
    search.proven = best == base or {base, best} <= trail.proof.of.keys()
    judged = trail.proof if search.proven and best != base else trail.found
    search.best = _changed(trail, best)
    search.time_us, search.baseline_us = judged.time_us(best), judged.time_us(base)
    search.gain = _share(judged, base, best)
    search.over_none = _over_none(judged, best)
    search.by_time = best != base and not judged.beside
    search.contributions = [_contribution(trail, judged, best, index) for index in trail.changed(best)]
    search.settings = len(trail.found.of) + len(trail.failed)
    for setting in sorted(trail.found.of, key=trail.found.time_us):
        found, measurements = trail.found.estimate(setting), len(trail.found.of[setting])
        changed = _changed(trail, setting)
        search.tried.append(
            TriedKnobs(changed=changed, time_us=found.time_us, noise_us=found.noise_us, measurements=measurements)
        )
    return search


def _changed(trail: KnobTrail, setting: Setting) -> dict[str, str]:
    return {trail.knobs[index].key: value for index, value in trail.changed(setting).items()}


def _contribution(trail: KnobTrail, judged: Samples, best: Setting, index: int) -> Contribution:
    with_it, without = one_by_one(trail, trail.baseline, best)[index], one_by_one(trail, best, trail.baseline)[index]
    return Contribution(
        key=trail.knobs[index].key,
        baseline=trail.baseline[index],
        value=best[index],
        alone=_known_share([judged, trail.found], trail.baseline, with_it),
        taken_away=_known_share([judged, trail.found], without, best),
    )


def _known_share(sources: list[Samples], slower: Setting | None, faster: Setting | None) -> Gain | None:
    """From the first that has measured both."""
    for samples in sources:
        if slower in samples.of and faster in samples.of:
            assert slower is not None
            assert faster is not None
            return _share(samples, slower, faster)
    return None


def _share(samples: Samples, slower: Setting, faster: Setting) -> Gain:
    gain, slower_us = samples.gain(slower, faster), samples.time_us(slower)
    return Gain(gain.time_us / slower_us, gain.noise_us / slower_us)


def _over_none(samples: Samples, setting: Setting) -> Gain | None:
    """Pair by pair, of all samples of the setting."""
    pairs = [pair for sample in samples.of[setting] for pair in zip(sample.times_us, sample.none_us, strict=False)]
    if not pairs:
        return None
    ratio: Estimate = estimate([time_us / none_us for time_us, none_us in pairs])
    return Gain(1 - ratio.time_us, ratio.noise_us)
