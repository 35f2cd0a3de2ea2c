"""The knobs as columns, and the effect of each, from all pairs of settings that differ in that knob alone."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from overlap_sweep.report.section import Exhibit
from overlap_sweep.report.table import Column, Kind, Listing, Table, attribute
from overlap_sweep.results.estimate import estimate
from overlap_sweep.workloads.fsdp.answer import TrainingAnalysis, TrainingRow
from overlap_sweep.workloads.fsdp.knobs import Knobs, brief, changed, in_words, order

MANY_PAIRS = 5
"""Number of pairs from which the noise is estimated from their spread."""
MOST_ROWS = 40
"""Rows on a terminal."""

K = Column[Knobs]


def _knob(name: str, kind: Kind, path: str, read: Callable[[Any], Any] = lambda value: value, **more: Any) -> K:
    return K(name, lambda knobs: read(knobs[path]), f"Value of the option {path}.", kind, **more)


STRATEGY = _knob("strategy", "text", "distributed.strategy")
TURNED = K("turned", lambda knobs: len(changed(knobs)), "Number of options that are not at their defaults.", "count")
KNOBS = (
    _knob("batch_size", "count", "training.batch_size", header="batch", show=str, dropped=1),
    _knob("gradient_accumulation", "count", "training.gradient_accumulation"),
    _knob("forward_prefetch", "count", "fsdp.forward_prefetch", lambda value: None if value is None else int(value)),
    _knob("backward_prefetch", "text", "fsdp.backward_prefetch", in_words),
    _knob("limit_all_gathers", "flag", "fsdp.limit_all_gathers"),
    _knob("reshard_after_forward", "text", "fsdp.reshard_after_forward", in_words),
    _knob("replicas", "count", "fsdp.replicas"),
    _knob("reduce_dtype", "text", "fsdp.reduce_dtype"),
    _knob("layers_per_unit", "count", "fsdp.layers_per_unit"),
    _knob("separate_reduce_scatter_group", "flag", "fsdp.separate_reduce_scatter_group"),
    _knob("symmetric_memory", "text", "fsdp.symmetric_memory"),
    _knob("enable_overlap", "flag", "distributed.enable_overlap"),
    _knob("bucket_cap_mb", "number", "distributed.bucket_cap_mb"),
    _knob("compile", "flag", "compile.enabled"),
)
"""Knobs with their own columns; the others are in `setting`."""


@dataclass(frozen=True)
class KnobChange:
    """One change of one knob, over all pairs of settings that differ in it alone. Changes are relative changes of the
    time per sample: -0.1 is 10 % less."""

    knob: str
    before: str
    """The default value, or the smaller one if neither is the default."""
    after: str
    pairs: int
    """Number of pairs."""
    change: float
    """Median change of the pairs."""
    noise: float
    """Noise of that median."""
    change_beside_best: float | None
    """Change of the pair with all other knobs as in the best setting; biased, as that was chosen for its time."""
    taken: bool
    """Whether the best setting has the value after the change."""

    @property
    def change_text(self) -> str:
        return f"{self.change:+.1%}" if abs(self.change) > self.noise else f"{self.change:+.1%} (noise)"


C = Column[KnobChange]
EFFECTS = Table(
    *("knobs", "one row per change of one knob; changes of the time per sample"),
    (
        C("knob", lambda one: one.knob, kind="text", header="knob", words=lambda one: brief(one.knob)),
        C("before", lambda one: one.before, kind="text", header="from"),
        C("after", lambda one: one.after, kind="text", header="to"),
        C("pairs", lambda one: one.pairs, kind="count", header="pairs"),
        C("change", lambda one: one.change, "Median of the pairs.", header="time", words=lambda one: one.change_text),
        attribute("noise", header="noise", show="{:.1%}".format),
        attribute("change_beside_best", header="in best", show="{:+.1%}".format),
        C("taken", lambda one: one.taken, "The best setting has the value after the change.", "flag"),
    ),
)


def knob_changes(analysis: TrainingAnalysis) -> list[KnobChange]:
    """Returns every change of each knob from one value to another, largest effect first."""
    found = [change for knob in analysis.differing for change in _changes(knob, analysis)]
    return sorted(found, key=lambda change: -abs(change.change))


def knobs_exhibit(analysis: TrainingAnalysis) -> list[Exhibit]:
    """Returns the table of the knobs' effects, with a note on the knobs whose effect is unknown."""
    changes = knob_changes(analysis)
    known = {change.knob for change in changes}
    unknown = [brief(knob) for knob in analysis.differing if knob not in known]
    notes = [f"Never changed alone in comparable runs: {', '.join(unknown)}."] if unknown else []
    if not changes:
        return [Exhibit(notes=notes)] if notes else []
    listing = Listing(
        *(EFFECTS, changes, "Every change of one knob."),
        chosen=lambda one: one.taken and one.change_beside_best is not None,
        most_rows=MOST_ROWS,
    )
    explained = (
        "time: change of the time per sample, median of all pairs of settings that differ in this knob alone and are "
        "neither launch-bound nor diverging. in best: the pair with all other knobs as in the best setting; biased "
        "towards that setting, which was chosen for its time."
    )
    return [Exhibit(listing=listing, heading="Effect of each knob", explained=explained, notes=notes)]


def _changes(knob: str, analysis: TrainingAnalysis) -> Iterator[KnobChange]:
    """Yields the changes of one knob, without pairs in which a setting is launch-bound or diverges."""
    alike: dict[tuple[str, ...], list[TrainingRow]] = defaultdict(list)
    for row in analysis.rows:
        if not row.launch_bound and row.loss is not None:
            alike[tuple(repr(row.knobs.get(other)) for other in analysis.differing if other != knob)].append(row)
    pairs: dict[tuple[str, str], list[tuple[TrainingRow, TrainingRow]]] = defaultdict(list)
    for group in alike.values():
        for before, after in combinations(sorted(group, key=lambda row: order(row.knobs, knob)), 2):
            pairs[in_words(before.knobs.get(knob)), in_words(after.knobs.get(knob))].append((before, after))
    for (usual, turned), of_change in pairs.items():
        changes = [after.of_sample.time_us / before.of_sample.time_us - 1 for before, after in of_change]
        beside = [change for change, pair in zip(changes, of_change, strict=True) if analysis.best in pair]
        yield KnobChange(
            knob=knob,
            before=usual,
            after=turned,
            pairs=len(of_change),
            change=statistics.median(changes),
            noise=_noise(changes, of_change),
            change_beside_best=beside[0] if beside else None,
            taken=in_words(analysis.best.knobs.get(knob)) == turned,
        )


def _noise(changes: list[float], pairs: list[tuple[TrainingRow, TrainingRow]]) -> float:
    """Returns the noise of the median: from MANY_PAIRS on from their spread, else that of a typical pair."""
    if len(changes) >= MANY_PAIRS:
        return estimate(changes).noise_us
    relative = [
        math.hypot(*(one.of_sample.noise_us / one.of_sample.time_us for one in (before, after)))
        for before, after in pairs
    ]
    return statistics.median(noise * (1 + change) for noise, change in zip(relative, changes, strict=True))
