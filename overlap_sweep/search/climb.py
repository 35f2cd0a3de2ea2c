"""Searches knobs of whose changes something is expected, as of a user's training, whose runs take long: few are made.

1. Changes are tried one by one, what is expected to gain most first, each together with all that has helped so far:
   what is faster beyond the noise stays. So several that help need no run of them together, and of two that mend the
   same, the second shows at once that it adds nothing.
2. What helped, but not beyond the noise, and what did not harm beyond it, is tried together, if the budget has room for
   a proof of each of these changes.
3. The best is proven, together with what comes close to it. The first two rounds of that are kept free throughout, or
   more if the noise needs them: what helps is worth nothing unproven.
4. What may still be faster goes on taking turns with the baseline as long as the budget lasts (`undecided`).
"""

from collections.abc import Generator, Iterable, Sequence

from overlap_sweep.config import Search
from overlap_sweep.search import Setting
from overlap_sweep.search.knob_trail import Answer, KnobTrail, Steps, with_values
from overlap_sweep.search.prior import Change, Prior
from overlap_sweep.search.proof import alternate, prove, rounds_of, rounds_wanted
from overlap_sweep.search.undecided import rivals

CONTENDERS = 3
"""Most settings that take turns while noise hides which is fastest."""
LOOK_AGAIN = 6
"""Changes that are tried before the setting that they are compared with is measured once more."""
MOST_TURNS = 50
"""Rounds in turns after which more would say little."""

Choice = Generator[Sequence[Setting], Sequence[Answer], Setting]
"""`Steps` that return a setting."""


def climb(trail: KnobTrail, prior: Prior, effort: Search) -> Steps:
    """Searches from the measured baseline on; `trail.best` is the answer so far."""
    # Everything is compared with the baseline, and the repetitions show the noise.
    yield from trail.measure_again([trail.baseline] * (effort.repeats - len(trail.found.of[trail.baseline])))
    top = yield from _one_by_one(trail, prior, effort)
    yield from _together(trail, top)
    yield from prove(trail, effort, (yield from _most_likely(trail, effort)))
    yield from _go_on(trail, effort)


def _one_by_one(
    trail: KnobTrail, prior: Prior, effort: Search
) -> Generator[Sequence[Setting], Sequence[Answer], Setting]:
    """Tries single changes on the best so far; returns the best."""
    top, tries = trail.baseline, 0
    left = [(i, value) for i, knob in enumerate(trail.knobs) for value in knob.values if value != top[i]]
    # What fails together with what helped is not tried again, but perhaps alone.
    failed: list[Change] = []
    while not trail.cut and (top == trail.baseline or trail.room() > trail.kept_for_proof):
        on_top = trail.changed(top)
        possible = [change for change in left if trail.possible(with_values(top, dict([change])))]
        if not possible:
            break
        change = max(possible, key=lambda one: prior.gain(one, on_top))
        left.remove(change)
        if (most := prior.most(change, on_top)) < effort.worth:
            trail.left_out[change] = most
            continue
        setting = with_values(top, dict([change]))
        yield from trail.try_on(top, setting)
        if setting in trail.refused:
            left = [other for other in left if other[0] != change[0]]
        if setting in trail.failed and top != trail.baseline:
            failed.append(change)
        if setting in trail.found.of:
            gain = trail.effects[change] = trail.found.share(top, setting)
            prior.learn(change, gain, on_top)
            if -gain.share - gain.noise > effort.reach:
                trail.dropped[change] = -gain.share
            top = setting if gain.faster and gain.share >= effort.worth else top
        tries += 1
        is_last = not left and top == trail.baseline
        if (tries % LOOK_AGAIN == 0 or is_last) and trail.room() > trail.kept_for_proof:
            # If the machine has slowed down since, changes seem slower than they are.
            yield from trail.measure_again([top])
            top = trail.best if trail.found.beats(trail.best, top) else top
    for change in (one for one in failed if one in prior.expected):
        if prior.most(change, {}) > trail.found.share(trail.baseline, top).share + effort.worth:
            alone = with_values(trail.baseline, dict([change]))
            yield from trail.try_on(trail.baseline, alone)
            top = alone if alone in trail.found.of and trail.found.beats(alone, top) else top
    return top


def _together(trail: KnobTrail, top: Setting) -> Steps:
    """Measures the best together with what helped, and with what did not harm beyond the noise, where the budget has
    room for a proof of that."""
    free = {
        change: effect
        for change, effect in sorted(trail.effects.items(), key=lambda one: -one[1].share)
        if change[0] not in trail.changed(top) and change not in trail.dropped
    }
    hopeful = [change for change, effect in free.items() if effect.share > 0]
    # By the interval that is shown: what takes twice as long is slower also with much noise, since a ratio has it.
    harmless = [change for change, effect in free.items() if effect.interval[1] >= 0]
    for chosen in (hopeful, harmless):
        setting = _joined(trail, top, chosen)
        if trail.room() > trail.kept_for_proof + len(trail.changed(setting)):
            yield from trail.try_on(top, setting)


def _joined(trail: KnobTrail, top: Setting, changes: Iterable[Change]) -> Setting:
    """Returns `top` with each other knob's first change that is possible with those before."""
    setting = top
    for index, value in changes:
        more = with_values(setting, {index: value})
        if setting[index] == top[index] and trail.possible(more):
            setting = more
    return setting


def _most_likely(trail: KnobTrail, effort: Search) -> Choice:
    """Returns the setting to prove. Where several that are expected to gain come close, it is the one that gains most,
    even if the noise is against it, in the same rounds, or one of fewer changes that it does not beat there."""
    best = trail.best
    if best == trail.baseline:
        return best
    close = [one for one in rivals(trail) if one != best and not trail.found.beats(best, one)][: CONTENDERS - 1]
    yield from alternate(trail, effort, best, close)
    proof = trail.proof
    gains = {one: proof.share(trail.baseline, one) for one in (best, *close) if rounds_of(trail, one) >= 2}
    if not gains:
        return best
    fastest = max(gains, key=lambda one: gains[one].interval[0])
    tied = [one for one in gains if one == fastest or not proof.beats(fastest, one)]
    return min(tied, key=lambda one: (len(trail.changed(one)), -gains[one].interval[0]))


def _go_on(trail: KnobTrail, effort: Search) -> Steps:
    """Measures the baseline and what may be faster in turns while the budget lasts and nothing is decided; proves what
    is faster then."""
    lost: set[Setting] = set()
    for turn in range(MOST_TURNS):
        left = [] if trail.chosen not in (None, trail.baseline) else [s for s in rivals(trail) if s not in lost]
        if not left or trail.baseline in lost or trail.proof_cut:
            return
        if trail.room() < 2:
            trail.cut = True
            return
        members = [trail.baseline, *left[:CONTENDERS]][: int(min(trail.room(), CONTENDERS + 1))]
        yield from trail.prove(members if turn % 2 == 0 else members[::-1])
        lost |= {*members} - trail.proof.rounds[-1].keys()
        for best in members[1:]:
            if rounds_of(trail, best) >= rounds_wanted(effort) and trail.proof.beats(best, trail.baseline):
                trail.chosen = None
                yield from prove(trail, effort, best)
                break
