"""Compares the fingerprints of two recordings, and tells what differs in every step in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low, mode
from typing import TypeVar

import msgspec

from overlap_sweep.diagnosis import as_size, counted
from overlap_sweep.effects import Difference
from overlap_sweep.effects.fingerprint import COMPUTATION, Counts, Family, Fingerprint, Moved, brief_kernel

H = TypeVar("H", bound=Hashable)

IN_ORDER, OUT_OF_ORDER = 0.02, 0.1
"""Shares of the kernels that were ready that overtake others: at most in one hardware queue, at least in several."""

ENOUGH_READY, ENOUGH_OVERTOOK = 50, 5
"""Fewest such kernels that show one queue, and several."""

LEAST_STEPS = 2
"""Fewest steps of which a part of all must be to count."""

NAMED = 3
"""Kernels that a sentence names."""

ON_ALL_RANKS = ("position", "sequence")
"""Aspects that a slow host changes on one rank: what differs there on some ranks only is not said."""


@dataclass(frozen=True)
class _Sides:
    """A family's collectives by step, before and after."""

    family: Family
    before: list[list[Moved]]
    after: list[list[Moved]]

    def values(self, read: Callable[[list[Moved]], H]) -> tuple[H, H] | None:
        """Returns what is read of most steps on both sides, if no step of one side has a value of the other."""
        return _apart([read(step) for step in self.before], [read(step) for step in self.after])


def _apart(before: Sequence[H], after: Sequence[H]) -> tuple[H, H] | None:
    """Returns the usual values of both sides, by step, if they differ; else None. All values must, but for steps of
    another kind that both have, such as one that is cut, or that has no optimizer: the others must then be alike. Where
    no two steps of a side are alike it has no usual value."""
    common = {*before} & {*after}
    first, second = ([value for value in side if value not in common] for side in (before, after))
    if not first or not second:
        return None
    if any(len(own) > 1 and len(set(own)) == len(own) for own in (first, second)):
        return None
    if common:
        enough = all(
            len(own) >= LEAST_STEPS or 2 * len(own) >= len(side) for own, side in ((first, before), (second, after))
        )
        if not enough or len({*first}) > 1 or len({*second}) > 1:
            return None
    return mode(first), mode(second)


def differences(before: Sequence[Fingerprint], after: Sequence[Fingerprint]) -> list[Difference]:
    """Returns what differs between the ranks that both recordings have, in the order of ASPECTS.

    What varies from step to step anyway is no difference, see `_apart`.
    """
    pairs = paired(before, after)
    found: dict[tuple[str, str, str, str], list[tuple[int | None, Difference]]] = {}
    for one, other in pairs:
        for each in _differences(one, other):
            found.setdefault((each.aspect, each.group, each.collective, each.pass_), []).append((one.rank, each))
    merged = []
    for key, own in found.items():
        if len(own) < len(pairs) and key[0] in ON_ALL_RANKS:
            continue
        first = own[0][1]
        if len(own) == len(pairs):
            merged.append(first)
            continue
        ranks = [rank for rank, _ in own]
        where = f" (only on rank {', '.join(map(str, ranks))})"
        merged.append(msgspec.structs.replace(first, sentence=first.sentence + where, ranks=ranks))
    return [*merged, *_overtaking([one for one, _ in pairs], [other for _, other in pairs])]


def paired(before: Sequence[Fingerprint], after: Sequence[Fingerprint]) -> list[tuple[Fingerprint, Fingerprint]]:
    """Returns the fingerprints of each rank that both have; of single traces whose ranks differ those."""
    by_rank = {one.rank: one for one in after}
    common = [(one, by_rank[one.rank]) for one in before if one.rank in by_rank]
    return common or [(before[0], after[0])]


def _differences(before: Fingerprint, after: Fingerprint) -> Iterator[Difference]:
    sides = _sides(before, after)
    by_aspect: list[Difference] = []
    recounted = False
    for one in sides:
        own = list(_of_family(one))
        recounted |= any(each.aspect == "calls" for each in own)
        by_aspect += own
    yield from by_aspect
    if before.on_device and after.on_device:
        yield from _streams(before, after, {one.family for one in sides})
    if not recounted:
        yield from _sequence(before, after, moved=any(each.aspect == "position" for each in by_aspect))
    yield from _computed(before, after)


def _sides(before: Fingerprint, after: Fingerprint) -> list[_Sides]:
    families = sorted({*before.families, *after.families})
    return [_Sides(family, _moved(before, family), _moved(after, family)) for family in families]


def _moved(one: Fingerprint, family: Family) -> list[list[Moved]]:
    place = one.families.index(family) if family in one.families else None
    return [[moved for moved in step.moved if moved.family == place] for step in one.steps]


def _of_family(sides: _Sides) -> Iterator[Difference]:
    family = sides.family

    def difference(aspect: str, before: str, after: str, sentence: str) -> Difference:
        return Difference(
            aspect=aspect,
            group=family.group,
            collective=family.collective,
            pass_=family.pass_,
            before=before,
            after=after,
            sentence=f"{sentence}{_in_words(family)}",
        )

    name = family.collective
    if found := sides.values(lambda step: tuple(sorted(moved.bytes or 0 for moved in step))):
        before, after = (_sizes(sizes, name) for sizes in found)
        yield difference("calls", before, after, _became(before, after))
    for aspect, noun in (("dtype", "type"), ("kernel", "kernel"), ("blocks", "thread blocks"), ("threads", "threads")):
        known = sides.values(partial(_known, aspect=aspect))
        if known and all(known):
            before, after = (", ".join(values) for values in known)
            aspect = "type" if aspect == "dtype" else aspect
            yield difference(aspect, before, after, f"{noun} of {name}: {before} became {after}")
    shifts = _shifts(sides)
    if any(shifts):
        yield _shifted(shifts, difference, name)


def _became(before: str, after: str) -> str:
    if "none" in (before, after):
        return f"{before} gone" if after == "none" else f"{after} new"
    return f"{before} became {after}"


def _known(step: Iterable[Moved], aspect: str) -> tuple[str, ...]:
    return tuple(map(str, sorted({value for moved in step if (value := getattr(moved, aspect)) not in (None, "")})))


def _sizes(sizes: Sequence[int], name: str) -> str:
    """Returns such as `12 all_reduce of 25 MB`, or `3 all_reduce of 1 to 25 MB, 40 MB in all`."""
    if not sizes:
        return "none"
    low, high = min(sizes), max(sizes)
    if not high:
        return f"{len(sizes)} {name}"
    if high < 1.1 * low:
        return f"{len(sizes)} {name} of {as_size(high)}"
    return f"{len(sizes)} {name} of {as_size(low)} to {as_size(high)}, {as_size(sum(sizes))} in all"


def _shifts(sides: _Sides) -> list[int]:
    """Returns by how many GEMMs each call of a step is launched later; empty if calls cannot be told apart."""
    # A step that is cut, or of another kind, has another number of calls.
    usual = {mode(map(len, side)) for side in (sides.before, sides.after) if side}
    if len(usual) != 1:
        return []
    count, shifts = usual.pop(), []
    for call in range(count):
        before, after = (
            [step[call].position for step in side if len(step) == count] for side in (sides.before, sides.after)
        )
        if None in before or None in after or not before or not after:
            return []
        first, second = ([place for place in side if place is not None] for side in (before, after))
        apart = max(first) < min(second) or max(second) < min(first)
        shifts.append(median_low(second) - median_low(first) if apart else 0)
    return shifts


def _shifted(shifts: Sequence[int], difference: Callable[[str, str, str, str], Difference], name: str) -> Difference:
    earlier, later = ([shift for shift in shifts if (shift < 0) is sign and shift] for sign in (True, False))
    parts = [
        f"{len(own)} of {len(shifts)} {name} launched {_gemms_in_words(own)} {word}"
        for own, word in ((earlier, "earlier"), (later, "later"))
        if own
    ]
    return difference("position", "", "; ".join(parts), "; ".join(parts))


def _gemms_in_words(shifts: Sequence[int]) -> str:
    sizes = sorted(map(abs, shifts))
    return counted(sizes[0], "GEMM") if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]} GEMMs"


def _in_words(family: Family) -> str:
    known = ", ".join(filter(None, (family.pass_, family.group)))
    return f" ({known})" if known else ""


def _streams(before: Fingerprint, after: Fingerprint, both: set[Family]) -> Iterator[Difference]:
    shared = [family for family in sorted(both) if family in before.families and family in after.families]
    for family in shared:
        first, second = (_stream(one, family, shared) for one in (before, after))
        if first != second:
            name = family.collective
            yield Difference(
                aspect="stream",
                group=family.group,
                collective=name,
                pass_=family.pass_,
                before=first,
                after=second,
                sentence=f"{name} runs on {second}, before on {first}{_in_words(family)}",
            )


def _stream(one: Fingerprint, family: Family, shared: Sequence[Family]) -> str:
    """Returns what a family's stream is, in words; families that only one recording has don't count."""
    stream = one.streams[one.families.index(family)]
    if stream == COMPUTATION:
        return "the stream of computation"
    others = sorted(
        {
            f"{other.collective}{f' of {other.group}' if other.group != family.group else ''}"
            for other in shared
            if other.collective != family.collective and one.streams[one.families.index(other)] == stream
        }
    )
    return f"the stream of {', '.join(others)}" if others else "a stream of its own"


def _sequence(before: Fingerprint, after: Fingerprint, *, moved: bool) -> Iterator[Difference]:
    def sequences(one: Fingerprint) -> list[tuple[tuple[Family, int | None], ...]]:
        return [tuple((one.families[each.family], each.bytes) for each in step.moved) for step in one.steps]

    found = _apart(sequences(before), sequences(after))
    if found and not moved:
        first, second = (" ".join(family.collective for family, _ in sequence) for sequence in found)
        same = first == second
        yield Difference(
            aspect="sequence",
            before=first,
            after=second,
            sentence="collectives of other sizes come first" if same else "collectives are launched in another order",
        )


def queues(one: Sequence[Fingerprint]) -> str:
    """Returns `one hardware queue` or `several hardware queues`, as far as the kernels of these ranks show it."""
    ready, overtook = (sum(getattr(rank, name) for rank in one) for name in ("ready", "overtook"))
    if ready >= ENOUGH_READY and overtook <= IN_ORDER * ready:
        return "one hardware queue"
    return "several hardware queues" if overtook >= ENOUGH_OVERTOOK and overtook >= OUT_OF_ORDER * ready else ""


def _overtaking(before: Sequence[Fingerprint], after: Sequence[Fingerprint]) -> Iterator[Difference]:
    first, second = queues(before), queues(after)
    if first and second and first != second:
        how = "kernels no longer overtake" if second.startswith("one") else "kernels now overtake"
        sentence = f"{how} what was launched before them on other streams"
        yield Difference(aspect="overtaking", before=first, after=second, sentence=sentence)


def _computed(before: Fingerprint, after: Fingerprint) -> Iterator[Difference]:
    """Yields what differs in GEMMs, other kernels and copies, by pass as far as they have one."""
    noun = "kernel" if after.on_device else "operator"
    for pass_ in ("fwd", "bwd", "other"):
        sides = ([step.gemms.get(pass_, {}) for step in one.steps] for one in (before, after))
        yield from _recounted("gemms", "GEMM", pass_, *sides)
    for pass_ in ("fwd", "bwd", "other"):
        sides = ([step.computation.get(pass_, {}) for step in one.steps] for one in (before, after))
        yield from _recounted("computation", noun, pass_, *sides)
    for pass_ in ("fwd", "bwd", "other"):
        yield from _resized(pass_, *([step.grids.get(pass_, {}) for step in one.steps] for one in (before, after)))
    yield from _recounted("copies", "copy", "", *([step.copies for step in one.steps] for one in (before, after)))


def _recounted(
    aspect: str, noun: str, pass_: str, before: Sequence[Counts], after: Sequence[Counts]
) -> Iterator[Difference]:
    if changed := _changed(before, after):
        first, second = (_listed(own, other, noun) for own, other in (changed, changed[::-1]))
        yield Difference(
            aspect=aspect,
            pass_=pass_,
            before=first,
            after=second,
            sentence=f"{_became(first, second)}{f' ({pass_})' if pass_ else ''}",
        )


def _resized(
    pass_: str, before: Sequence[dict[str, list[int]]], after: Sequence[dict[str, list[int]]]
) -> Iterator[Difference]:
    """Yields the kernels that run as often with other grids, the same in all steps of a side: others depend on data."""
    changed: dict[str, tuple[str, str]] = {}
    for name in sorted({name for grids in (*before, *after) for name in grids}):
        first, second = ({tuple(grids.get(name, ())) for grids in side} for side in (before, after))
        if len(first) == len(second) == 1 and first != second:
            (one,), (other,) = first, second
            if len(one) == len(other):
                changed.setdefault(brief_kernel(name), (_in_order(one), _in_order(other)))
    if changed:
        own = [f"{name} ({one} became {other})" for name, (one, other) in changed.items()]
        more = f" and {len(own) - NAMED} more kernels" if len(own) > NAMED else ""
        yield Difference(
            aspect="grid",
            pass_=pass_,
            before="; ".join(f"{name}: {one}" for name, (one, _) in changed.items()),
            after="; ".join(f"{name}: {other}" for name, (_, other) in changed.items()),
            sentence=f"thread blocks of {', '.join(own[:NAMED])}{more} ({pass_})",
        )


def _in_order(blocks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(blocks))))


def _changed(before: Sequence[Counts], after: Sequence[Counts]) -> tuple[Counts, Counts] | None:
    """Returns how often kernels run whose number differs, before and after; None if there are none. Kernels of the same
    short name are counted together, unless their number alone is the same."""
    first, second = Counter[str](), Counter[str]()
    for name in sorted({name for counts in (*before, *after) for name in counts}):
        found = _apart([counts.get(name, 0) for counts in before], [counts.get(name, 0) for counts in after])
        if found:
            first[name], second[name] = found
    if not first:
        return None
    sums = [Counter[str](), Counter[str]()]
    for total, counts in zip(sums, (first, second), strict=True):
        for name, count in counts.items():
            total[brief_kernel(name)] += count
    return (sums[0], sums[1]) if sums[0] != sums[1] else (first, second)


def _listed(counts: Counts, other: Counts, noun: str) -> str:
    """Returns such as `12 kernels (10 gelu, 2 layer_norm)`; what differs most from the other side comes first."""
    names = sorted(
        (name for name in counts if counts[name]), key=lambda name: (-abs(counts[name] - other.get(name, 0)), name)
    )
    if not names:
        return "none"
    if len(names) == 1:
        return f"{counts[names[0]]} {names[0]}"
    more = f" and {len(names) - NAMED} more kinds" if len(names) > NAMED else ""
    named = f"{', '.join(f'{counts[name]} {name}' for name in names[:NAMED])}{more}"
    plural = "copies" if noun == "copy" else f"{noun}s"
    return f"{sum(counts.values())} {plural} ({named})"
