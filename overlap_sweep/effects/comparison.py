"""Compares two recordings: whether anything changed in what ran, what, and which settings were in force."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from overlap_sweep.effects import NO_SLOTS, Difference, Setting, Slots
from overlap_sweep.effects.differences import differences, paired
from overlap_sweep.effects.fingerprint import Fingerprint
from overlap_sweep.effects.settings import verdicts
from overlap_sweep.effects.slots import slot_verdicts

_OF_NO_SIZE = re.compile("userbuffers|Memcpy|barrier")
"""Kernels of which no trace has the size of what they move."""

NOTHING = "nothing changed: the setting was not in force, or changes nothing here"


class Effect(msgspec.Struct, kw_only=True):
    """The differences of one recording from another, and the verdicts on settings."""

    schema: Literal[1] = 1
    """Version of these fields."""
    run: str
    against: str
    changed: bool
    differences: list[Difference]
    settings: list[Setting]
    notes: list[str]
    """A sentence for everything that could not be seen."""

    @property
    def sentences(self) -> list[str]:
        return [*(one.sentence for one in self.differences), "nothing else changed"] if self.changed else [NOTHING]

    @property
    def is_unseen(self) -> bool:
        """Returns whether nothing changed that a trace shows, and something may have that it does not."""
        return not self.changed and any(one.verdict == "cannot be seen" for one in self.settings)

    @property
    def in_brief(self) -> str:
        """Returns the aspects that changed; `nothing` if none did, or `not seen`."""
        nothing = "not seen" if self.is_unseen else "nothing"
        return ", ".join(dict.fromkeys(one.aspect for one in self.differences)) or nothing


def effect(
    run: str,
    after: Sequence[Fingerprint],
    against: str,
    before: Sequence[Fingerprint],
    options: Mapping[str, tuple[str, str]],
    slots: Slots = NO_SLOTS,
    entries: Mapping[str, str] | None = None,
) -> Effect:
    """Returns what changed from `before` to `after`, of the ranks that both have. `options`: settings that differ, with
    their values before and after; `slots`: those that `after` overlaps, and `before` does not; `entries`: as in
    `verdicts`."""
    found = differences(before, after)
    return Effect(
        run=run,
        against=against,
        changed=bool(found),
        differences=found,
        settings=[*verdicts(options, after, found, entries or {}), *slot_verdicts(slots, before, after)],
        notes=_notes(before, after),
    )


def _notes(before: Sequence[Fingerprint], after: Sequence[Fingerprint]) -> list[str]:
    notes, pairs = [], paired(before, after)
    ranks = max((one.world_size or 0 for one in (*before, *after)), default=0)
    if len(pairs) < ranks:
        compared = ", ".join(str(one.rank) for one, _ in pairs)
        notes.append(f"Compared rank {compared} of {ranks}: what changes on others is unknown.")
    if any(len(one.steps) < 2 for pair in pairs for one in pair):
        notes.append("A recording has one step: what varies from step to step anyway may count as a change.")
    moved = [moved for pair in pairs for one in pair for step in one.steps for moved in step.moved]
    if moved and all(one.position is None for one in moved):
        notes.append(
            "The traces have no launches of their own for collectives, as in CUDA graphs: their order is unknown."
        )
    sized = [one for one in moved if one.position is not None and not _OF_NO_SIZE.search(one.kernel)]
    if sized and all(one.bytes is None for one in sized):
        notes.append("The traces have no sizes of collectives; record with record_shapes=True.")
    if not any(one.on_device for pair in pairs for one in pair):
        notes.append("No GPU: kernels' grids, streams and queues cannot be seen.")
    return notes
