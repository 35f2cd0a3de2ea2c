"""Searches any knobs: single changes of the best setting so far, and joint changes that may help.

Every knob has a few unordered values, most with little effect. The search must tell the few that help from noise with
few measurements, and not miss those that help only together.

1. The baseline has the first value of every knob; if it does not fit into memory, the first single change that does is
   the baseline instead. All its single changes are measured in one batch.
2. Three joint settings are measured: of changes that are faster beyond the noise, that are faster, and that are not
   slower beyond the noise. Together, small effects add up and knobs that need each other show. A value that is refused
   alone is tried with each single change that makes it valid.
3. The best is the simplest setting that ties with the fastest. From it, single changes that had an effect are measured
   again, since the effect may differ now; those without an effect only jointly. This ends when the best stays the same.
4. Knobs that need new worker processes join after the others have settled.
5. Proof: the best, the baseline, and the best without each of its changes are measured again in alternation. Only a
   setting that is faster there is reported, and changes that contribute nothing beyond the noise are reverted.

Where something is expected of changes, fewer measurements are made (`climb`).

Times are compared relative to each point's own baseline, or, where repeated measurements show that the baselines
change by chance (`disturbed_baselines`), as they are.
"""

import re
from collections.abc import Iterator, Sequence

from overlap_sweep.config import Search
from overlap_sweep.search import Setting
from overlap_sweep.search.climb import climb
from overlap_sweep.search.knob_trail import KnobTrail, Steps, with_values
from overlap_sweep.search.proof import prove

OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)
"""Matches the reason of a point that ran out of memory, in the words of PyTorch, CUDA and other libraries."""

CONTENDERS = 3
"""Most settings that are measured again while noise hides which is fastest."""


def search(trail: KnobTrail, effort: Search) -> Steps:
    """Searches the trail's space. Once the baseline is measured, `trail.best` is the answer so far."""
    yield from trail.measure([trail.baseline])
    if OUT_OF_MEMORY.search(trail.failed.get(trail.baseline, "")):
        yield from _find_baseline(trail)
    if trail.baseline not in trail.found.of:
        return
    if trail.prior:
        yield from climb(trail, trail.prior, effort)
        return
    settled = [index for index, knob in enumerate(trail.knobs) if not knob.restarts]
    everything = range(len(trail.knobs))
    yield from _descend(trail, effort, settled)
    if len(settled) < len(everything) and not trail.cut:
        yield from _descend(trail, effort, everything)
    yield from prove(trail, effort, trail.best)


def _find_baseline(trail: KnobTrail) -> Steps:
    """Makes the first single change that runs the baseline."""
    for change in _changes(trail, trail.baseline, range(len(trail.knobs))):
        yield from trail.measure([change])
        if change in trail.found.of:
            trail.notes.append(f"Compared with {trail.name(change)} instead of the baseline")
            trail.origin = change
            return


def _descend(trail: KnobTrail, effort: Search, knobs: Sequence[int]) -> Steps:
    """Changes these knobs until nothing is faster than the best."""
    while not trail.cut:
        origin = trail.best
        yield from _around(trail, effort, origin, knobs)
        best = trail.best
        # The next round starts from the new best, so its lead is confirmed first.
        if best != origin and len(trail.found.of[best]) < min(2, effort.repeats):
            simpler = (s for s in trail.found.of if trail.simplicity(s)[0] < trail.simplicity(best)[0])
            yield from trail.measure_again([best, min(simpler, key=trail.found.time_us)])
        if trail.best == origin:
            return


def _around(trail: KnobTrail, effort: Search, origin: Setting, knobs: Sequence[int]) -> Steps:
    """Measures the single changes of one setting, and the joint settings that they suggest."""
    changes = [change for change in _changes(trail, origin, knobs) if _is_worthwhile(trail, origin, change)]
    possible = [change for change in changes if trail.possible(change)]
    if len(trail.found.of) == 1 and effort.repeats > 1 and possible:
        # Repeats the baseline: everything is compared with it, and the repetitions show the noise.
        half = (len(possible) + 1) // 2
        yield from trail.measure_again([*possible[:half], origin, *possible[half:], origin])
    else:
        yield from trail.measure(possible)
    yield from trail.measure(_unlocked(trail, origin, changes))
    _learn(trail, effort, origin, changes)
    failed = len(trail.failed)
    yield from trail.measure(_joint(trail, origin, knobs))
    if len(trail.failed) > failed:
        # Some changes turned out to be incompatible.
        yield from trail.measure(_joint(trail, origin, knobs))
    by_ratios = trail.found.paired
    yield from _tell_apart(trail, effort)
    if by_ratios and not trail.found.paired:
        # Ratios to disturbed baselines said little about the effects: plain times judge them again.
        trail.dropped.clear()
        _learn(trail, effort, origin, changes)
        yield from trail.measure(_joint(trail, origin, knobs))
        yield from _tell_apart(trail, effort)


def _changes(trail: KnobTrail, origin: Setting, knobs: Sequence[int]) -> Iterator[Setting]:
    """Yields the setting's single changes, without dropped values."""
    for index in (index for index in knobs if index not in trail.fixed):
        for value in trail.knobs[index].values:
            if value != origin[index] and (index, value) not in trail.dropped:
                yield with_values(origin, {index: value})


def _is_worthwhile(trail: KnobTrail, origin: Setting, change: Setting) -> bool:
    """Returns whether the single change is worth a measurement."""
    ((index, value),) = trail.changed(change, origin).items()
    if value == trail.baseline[index]:
        # A change that helped is reverted in the proof only.
        made = trail.effects.get((index, origin[index]))
        return not made or not made.faster
    effect = trail.effects.get((index, value))
    return not effect or effect.sure


def _learn(trail: KnobTrail, effort: Search, origin: Setting, changes: Sequence[Setting]) -> None:
    """Records the effects of the single changes; drops values that are too slow."""
    for setting in (change for change in changes if change in trail.found.of):
        ((index, value),) = trail.changed(setting, origin).items()
        # The baseline's values are never dropped, since any change may be reverted.
        if value == trail.baseline[index]:
            continue
        effect = trail.effects[index, value] = trail.found.share(origin, setting)
        if -effect.share - effect.noise > effort.reach:
            trail.dropped[index, value] = -effect.share


def _unlocked(trail: KnobTrail, origin: Setting, changes: Sequence[Setting]) -> Iterator[Setting]:
    """Yields each refused single change together with every other measured change, which may make it valid."""
    for refused in (change for change in changes if trail.refusal(change)):
        for key in (change for change in changes if change in trail.found.of):
            if trail.changed(refused, origin).keys() != trail.changed(key, origin).keys():
                yield with_values(refused, trail.changed(key, origin))


def _joint(trail: KnobTrail, origin: Setting, knobs: Sequence[int]) -> Iterator[Setting]:
    """Yields joint settings of each knob's best change: of changes that help beyond the noise, that help, and that do
    not harm beyond the noise."""
    effects = {
        (index, value): effect
        for (index, value), effect in trail.effects.items()
        if index in knobs and value != origin[index] and (index, value) not in trail.dropped
    }
    best_first = sorted(effects, key=lambda change: -effects[change].share)
    sure = [change for change in best_first if effects[change].faster]
    hopeful = [change for change in best_first if effects[change].share > 0]
    # By the interval that is shown: what takes twice as long is slower also with much noise, since a ratio has it.
    harmless = [change for change in best_first if effects[change].interval[1] >= 0]
    for chosen in (sure, hopeful, harmless):
        together, misfits = _joined(trail, origin, chosen)
        yield together
        for misfit in misfits:
            yield _joined(trail, origin, [misfit, *chosen])[0]


def _joined(
    trail: KnobTrail, origin: Setting, changes: Sequence[tuple[int, str]]
) -> tuple[Setting, list[tuple[int, str]]]:
    """Returns `origin` with each knob's first change applied in turn, and the changes that were impossible."""
    together, misfits = origin, []
    for index, value in changes:
        more = with_values(together, {index: value})
        if together[index] != origin[index]:
            continue
        if trail.possible(more):
            together = more
        else:
            misfits.append((index, value))
    return together, misfits


def _tell_apart(trail: KnobTrail, effort: Search) -> Steps:
    """Measures the fastest setting and simpler ones again while noise hides which is faster."""
    while not trail.cut and trail.fastest != trail.best:
        fastest, found = trail.fastest, trail.found
        ties = [s for s in sorted(found.of, key=found.time_us) if s != fastest and not found.beats(fastest, s)]
        simpler = sorted((s for s in ties if trail.simplicity(s) < trail.simplicity(fastest)), key=trail.simplicity)
        contenders = list(dict.fromkeys([fastest, trail.best, *simpler]))[:CONTENDERS]
        wanting = [setting for setting in contenders if len(found.of[setting]) < effort.repeats]
        lead = found.gain(trail.best, fastest).time_us / found.time_us(fastest)
        if lead < effort.worth or fastest not in wanting:
            return
        yield from trail.measure_again(wanting)
