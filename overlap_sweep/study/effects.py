"""Gives settings their effects: what each changed in what ran, against the reference, by the first trace of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_sweep.effects import NO_SLOTS, UNSEEN, Slots
from overlap_sweep.report.causes import Side
from overlap_sweep.report.numbers import some_of
from overlap_sweep.study import C, CaseAnalysis, R, Study

if TYPE_CHECKING:
    from overlap_sweep.effects.comparison import Effect


@dataclass(frozen=True)
class Compared:
    """A setting and the reference, by name, and their first traces; None without."""

    setting: str
    trace: Path | None
    reference: str
    reference_trace: Path | None
    options: Mapping[str, tuple[str, str]]
    """Options that differ, with the values of the reference and of the setting."""
    slots: Slots = NO_SLOTS
    """Slots of a layer that the setting overlaps, and the reference does not."""
    entries: Mapping[str, str] = field(default_factory=dict)
    """Entries of effects/settings.yaml by which one sees options whose names do not say it."""

    @property
    def traces(self) -> list[Path]:
        """Returns the traces of the reference and the setting; empty unless there are both."""
        both = [one for one in (self.reference_trace, self.trace) if one]
        return both if len({*both}) == 2 else []


def first_trace(side: Side | None) -> Path | None:
    return next(iter(side.traces), None) if side else None


def effects_of(compared: Sequence[Compared]) -> list[Effect | None]:
    """Returns the effect of each setting; None without readable traces of both."""
    paths = list(dict.fromkeys(path for one in compared for path in one.traces))
    if not paths:
        return [None] * len(compared)
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.effects.comparison import effect
    from overlap_sweep.effects.runs import read_prints

    read = read_prints(paths)

    def of(one: Compared) -> Effect | None:
        prints = [found for path in one.traces if (found := read[path].print)]
        if len(prints) < 2:
            return None
        before, after = prints
        return effect(one.setting, [after], one.reference, [before], one.options, one.slots, one.entries)

    return [of(one) for one in compared]


def with_effects(study: Study[C, R], analyses: Sequence[CaseAnalysis[C, R]]) -> list[CaseAnalysis[C, R]]:
    """Returns the analyses with the effects of the settings that have traces, where the reference has some, too."""

    def compared(analysis: CaseAnalysis[C, R], row: R) -> Compared:
        reference = analysis.reference
        traces = (first_trace(study.side(one)) for one in (row, reference))
        options = {
            name: (study.naming.value(reference.options.get(name)), study.naming.value(row.options.get(name)))
            for name in analysis.differing
            if reference.options.get(name) != row.options.get(name)
        }
        entries = {name: entry for name in options if (entry := study.effect_entry(name)) is not None}
        return Compared(row.setting, next(traces), reference.setting, next(traces), options, entries=entries)

    effects = iter(effects_of([compared(analysis, row) for analysis in analyses for row in analysis.rows]))
    return [one.with_rows([replace(row, effect=next(effects)) for row in one.rows]) for one in analyses]


def cautions(best: str, effect: Effect | None, effects: Sequence[Effect | None]) -> Iterator[str]:
    """Yields whether the best setting, of this effect, changed nothing, and which settings were not in force.
    `effects`: those of all settings."""
    if effect and not effect.changed:
        unseen = [one.evidence for one in effect.settings if one.verdict == "cannot be seen"]
        why = "; ".join(one for one in unseen if one != UNSEEN)
        unless = f", unless {UNSEEN}{f' ({why})' if why else ''}" if unseen else ""
        yield f"{best} changed nothing in what ran, so its gain is noise{unless}."
    missed = [
        f"{one.name}={one.after} {one.verdict}: {one.evidence}"
        for found in effects
        if found
        for one in found.settings
        if one.verdict in ("not in force", "fell back")
    ]
    if missed:
        yield f"As the traces show: {some_of(dict.fromkeys(missed), separator='; ')}."
