"""Says whether each slot of a tp_comm_overlap_cfg ran as the file asks, by what the functions of Transformer Engine's
layers launched."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, permutations
from operator import attrgetter, itemgetter
from typing import NamedTuple

from overlap_sweep.diagnosis import as_size, counted
from overlap_sweep.effects import Setting, Slots, Verdict
from overlap_sweep.effects.fingerprint import Fingerprint, Moved
from overlap_sweep.effects.settings import known

GATHER, SCATTER = "all_gather", "reduce_scatter"
IN_MLP = {"fc1", "fc2"}

SHOWN = ("num_sm", "num_splits", "use_ce")
"""Knobs that a trace shows."""

WORST_FIRST: tuple[Verdict, ...] = ("not in force", "fell back", "in force", "cannot be seen")


class Place(NamedTuple):
    """A collective that an operator needs: what a slot overlaps runs in its place."""

    operator: str
    pass_: str
    collective: str


FUNCTIONS = {
    "_LayerNormLinear": [[Place("qkv", "fwd", GATHER)], [Place("fc1", "fwd", GATHER)]],
    "_Linear": [[Place("proj", "fwd", SCATTER)], [Place("fc2", "fwd", SCATTER)]],
    "_LayerNormMLP": [[Place("fc1", "fwd", GATHER), Place("fc2", "fwd", SCATTER)]],
    "_LayerNormMLPBackward": [
        [Place("fc2", "bwd", GATHER), Place("fc1", "bwd", GATHER), Place("fc1", "bwd", SCATTER)],
    ],
    "_LinearBackward": [[Place("fc2", "bwd", GATHER)], [Place("proj", "bwd", GATHER)]],
    "_LayerNormLinearBackward": [
        [Place("fc1", "bwd", GATHER), Place("fc1", "bwd", SCATTER)],
        [Place("qkv", "bwd", GATHER), Place("qkv", "bwd", SCATTER)],
    ],
}
"""Collectives that Transformer Engine's functions need. Where operators have the same function, a layer calls it for
one after the other, in this order."""

_KERNEL = re.compile(r"userbuffers_\w*_(ag|rs)(_|$)")
"""Kernels that gather, or reduce and scatter, in one."""


@dataclass(frozen=True)
class Transfer:
    """NCCL's collective, or the kernels and copies of an overlap, that ran in a place."""

    method: str
    """Method as in a file; `none` for NCCL."""
    collective: str
    """Empty for a ring exchange, which does not show what it is part of."""
    kernel: str
    pieces: int
    """Kernels; of a ring exchange messages received."""
    blocks: int | None
    """Thread blocks of the kernels that move data; None if those differ, or copy engines move it."""
    bytes: int | None = field(compare=False)

    @property
    def in_words(self) -> str:
        if self.method == "none":
            return f"NCCL's {self.collective}{f' of {as_size(self.bytes)}' if self.bytes else ''}"
        blocks = f" with {counted(self.blocks, 'block')}" if self.blocks else ""
        times = f"{counted(self.pieces, 'exchange')} by" if self.method == "ring_exchange" else f"{self.pieces}"
        return f"{times} {self.kernel}{blocks}"

    def fits(self, place: Place) -> bool:
        """Returns whether it may have run there."""
        if self.collective:
            return self.collective == place.collective
        # What dgrad gathers for wgrad, its GEMM does not need: it is gathered at once, or in bulk.
        return place.pass_ == "fwd" or place.operator in ("proj", "fc2") or place.collective == SCATTER


Found = Mapping[Place, Sequence[Transfer | str | None]]
"""Transfers in each place, by time. None: nothing ran; a text: which of several things ran is unknown."""


def slot_verdicts(slots: Slots, before: Sequence[Fingerprint], after: Sequence[Fingerprint]) -> list[Setting]:
    """Returns the verdict on each slot. `before`: a recording without overlap."""
    if not slots.settings:
        return []
    was, ran = (_found(prints, slots.operators) for prints in (before, after))
    settings = []
    for slot, setting in slots.settings.items():
        verdict, evidence = _verdict(slot, setting, was, ran)
        # Copy engines have no blocks.
        knobs = [one for one in SHOWN if one in setting and not (one == "num_sm" and setting.get("use_ce"))]
        asked = " ".join([str(setting.get("method", "")), *(f"{one}={setting[one]}" for one in knobs)]).strip()
        settings.append(Setting(name=slot, before="", after=asked, verdict=verdict, evidence=evidence))
    return settings


def _verdict(slot: str, setting: Mapping[str, object], was: Found, ran: Found) -> tuple[Verdict, str]:
    entry, method = known(slot), setting.get("method")
    assert entry, f"{slot} is not in settings.yaml"
    if method is None:
        return "cannot be seen", "the file leaves the method to the library"
    operator, _, phase = slot.partition("_")
    collective = entry.moves.get(str(method), next(iter(entry.moves.values())))
    place = Place(operator, "fwd" if phase == "fprop" else "bwd", collective)
    if place not in ran:
        return "cannot be seen", "no function of Transformer Engine is seen to launch it"
    judged = Counter(_judged(one, setting) for one in ran[place])
    worst = min((verdict for verdict, _ in judged), key=WORST_FIRST.index)
    alike = ((words, times) for (verdict, words), times in judged.items() if verdict == worst)
    evidence, times = max(alike, key=itemgetter(1))
    usual = next((one for one in was.get(place, ()) if isinstance(one, Transfer)), None)
    instead = f", in place of {usual.in_words}" if usual and worst in ("in force", "not in force") else ""
    of_all = f" ({times} of {judged.total()} times)" if times < judged.total() else ""
    return worst, f"{evidence}{instead}{of_all}"


def _judged(one: Transfer | str | None, setting: Mapping[str, object]) -> tuple[Verdict, str]:
    if one is None:
        return "not in force", "nothing ran"
    if isinstance(one, str):
        return "cannot be seen", one
    if one.method != setting["method"]:
        return ("fell back" if one.method == "none" else "not in force"), f"{one.in_words} ran"
    shown = {"num_sm": one.blocks}
    if one.method == "pipeline":
        shown["num_splits"] = one.pieces
    if one.method == "ring_exchange":
        shown["use_ce"] = one.kernel.startswith("Memcpy")
    other = [
        f"{name}={setting[name]}"
        for name, value in shown.items()
        if value is not None and setting.get(name, value) != value
    ]
    return ("not in force", f"{one.in_words} ran, not {' '.join(other)}") if other else ("in force", one.in_words)


def _found(prints: Sequence[Fingerprint], operators: Sequence[str]) -> Found:
    found: dict[Place, list[Transfer | str | None]] = defaultdict(list)
    for one in prints:
        for step in one.steps:
            for places, moved in _calls(one, step.moved, operators):
                for place, transfer in _placed(places, _transfers(one, moved)):
                    found[place].append(transfer)
    return found


def _calls(
    one: Fingerprint, moved: Sequence[Moved], operators: Sequence[str]
) -> Iterator[tuple[Sequence[Place], Sequence[Moved]]]:
    """Yields the calls of functions in a step: where each may need a collective, and what it launched."""
    calls: dict[str, list[list[Moved]]] = defaultdict(list)
    # What is recomputed runs a function of the forward pass in the backward pass.
    passes = {name: "bwd" if name.endswith("Backward") else "fwd" for name in FUNCTIONS}
    own = (each for each in moved if passes.get(each.function) == one.families[each.family].pass_)
    for function, launched in groupby(own, key=attrgetter("function")):
        calls[function].append([*launched])
    has_mlp = any("MLP" in function for function in calls)
    for function, of_function in calls.items():
        turns = turns_of(function, operators, has_mlp=has_mlp)
        # Else it is unknown which call is whose.
        if turns and len(of_function) % len(turns) == 0:
            yield from ((turns[number % len(turns)], launched) for number, launched in enumerate(of_function))


def turns_of(function: str, operators: Sequence[str], *, has_mlp: bool) -> list[list[Place]]:
    """Returns the places of the function's calls in a layer of these operators, in turn. `has_mlp`: whether one
    function has both operators of the MLP."""
    within = set(operators) - (IN_MLP if has_mlp and "MLP" not in function else set())
    return [places for places in FUNCTIONS[function] if {place.operator for place in places} <= within]


def _transfers(one: Fingerprint, moved: Sequence[Moved]) -> list[Transfer]:
    """Returns what a function moved, in the order of launches: kernels of one stream are pieces of a transfer, and of a
    ring exchange what is sent before each message is received on one stream."""
    parts: list[tuple[object, list[Moved]]] = []
    sent: list[Moved] = []

    def add(key: object, own: list[Moved]) -> None:
        if parts and parts[-1][0] == key:
            parts[-1][1].extend(own)
        else:
            parts.append((key, own))

    for each in moved:
        collective = one.families[each.family].collective
        if _KERNEL.search(each.kernel):
            add((each.kernel, each.stream), [each])
        elif collective in (GATHER, SCATTER):
            add((collective, len(parts)), [each])
        elif collective in ("peer_copy", "userbuffers"):
            sent.append(each)
            if "recv" in each.kernel:
                add(each.stream, sent)
                sent = []
    if sent:
        add("never received", sent)
    return [_transfer(own, one.families[own[0].family].collective) for _, own in parts]


def _transfer(own: Sequence[Moved], collective: str) -> Transfer:
    first = own[0]
    if collective in (GATHER, SCATTER):
        return Transfer("none", collective, first.kernel, 1, None, first.bytes)
    if found := _KERNEL.search(first.kernel):
        # FP8 has no other kernel for bulk.
        pipeline = len(own) > 1 or ("_oop" in first.kernel and "fp8" not in first.kernel)
        # A pipeline's last kernel takes all blocks that it can get.
        blocks = _only(own[:-1] if pipeline else own)
        moves = GATHER if found[1] == "ag" else SCATTER
        return Transfer("pipeline" if pipeline else "bulk", moves, first.kernel, len(own), blocks, None)
    copies = [each for each in own if each.kernel.startswith("Memcpy")]
    sends = copies or [each for each in own if "send" in each.kernel] or list(own)
    received = sum("recv" in each.kernel for each in own)
    return Transfer("ring_exchange", "", sends[0].kernel, received, _only(sends), None)


def _only(moved: Sequence[Moved]) -> int | None:
    """Returns the thread blocks of kernels that have the same; else None."""
    blocks = {each.blocks for each in moved}
    return blocks.pop() if len(blocks) == 1 else None


def _placed(places: Sequence[Place], transfers: Sequence[Transfer]) -> Iterator[tuple[Place, Transfer | str | None]]:
    """Yields what ran in each place, if all ways of putting the transfers into places agree on it. What is scattered is
    computed from what was gathered, so it comes last."""
    ways = [
        dict(zip(way, transfers, strict=True))
        for way in permutations(places, len(transfers))
        if all(transfer.fits(place) for place, transfer in zip(way, transfers, strict=True))
        and all(place.collective == GATHER for place in way[:-1])
    ]
    words = ", ".join(f"{n} x {one}" if n > 1 else one for one, n in Counter(one.in_words for one in transfers).items())
    for place in places:
        options = {way.get(place) for way in ways}
        yield place, options.pop() if len(options) == 1 else f"not to be told apart: {words}"
