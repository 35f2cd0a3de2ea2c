"""What is shown of the settings of one case: their times, the streams of a step, and the effect of each option, from
all pairs of settings that differ in that option alone."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import isnan
from typing import TypeVar

from overlap_sweep.report import causes
from overlap_sweep.report.charts import Axis, Form, Row, Rows
from overlap_sweep.report.iterations import timeline
from overlap_sweep.report.section import Exhibit
from overlap_sweep.report.table import Listing, Table, attribute
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.study import C, CaseAnalysis, R, Study, predicted_steps, searched
from overlap_sweep.study.analysis import Searches

T = TypeVar("T")

MOST_BARS = 30
"""Bars in a chart; the table has all settings."""


def exhibits(study: Study[C, R], analysis: CaseAnalysis[C, R], searches: Searches) -> list[Exhibit]:
    """Returns the charts of an answer, what searches tried, and why communication is exposed in the traces."""
    return [
        Exhibit(chart=partial(settings_bars, study, analysis)),
        *searched.exhibits(study, analysis, searches),
        *study.charts(analysis),
        *_streams(study, analysis),
        causes.exhibit({"": sides(study, analysis)}),
        *([predicted_steps.exhibit(study, analysis)] if study.shows_predictions else []),
    ]


def first_bars(rows: Sequence[T]) -> tuple[Sequence[T], str]:
    """Returns the rows that a chart shows, and words for its title if it leaves some out."""
    shown = rows[:MOST_BARS]
    return shown, f"; the first {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""


def settings_bars(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> Rows:
    """Returns the settings from fast to slow, by the time per unit of work."""
    rows = [row for i, row in enumerate(analysis.rows) if i < MOST_BARS or row in analysis.shown_first]
    more = f"; {len(rows)} of {len(analysis.rows)} settings" if len(rows) < len(analysis.rows) else ""
    bars = [study.bar(analysis, row) for row in rows]
    drawn = [i for i in range(len(study.bar_columns)) if any(bar.cells[i] for bar in bars)]
    return Rows(
        title=analysis.title,
        subtitle=study.bars_subtitle,
        axis=Axis(f"time {analysis.per}, us{more}"),
        parts=study.parts(analysis),
        columns=[study.bar_columns[i] for i in drawn],
        rows=[
            Row(
                name=row.setting,
                ends=bar.ends,
                low=low,
                high=high,
                cells=[bar.cells[i] for i in drawn],
                bold=row is analysis.answer,
                details=study.compared.details(row),
            )
            for row, bar in zip(rows, bars, strict=True)
            for low, high in [_interval(row.per(analysis.work))]
        ],
    )


def _interval(time: Estimate) -> tuple[float | None, float | None]:
    """Returns the ends of a time's interval; None if its noise is unknown."""
    if isnan(time.noise_us):
        return None, None
    return max(0.0, time.time_us - time.noise_us), time.time_us + time.noise_us


def sides(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> Mapping[str, causes.Side | None]:
    """Returns the traces of the settings, of the best and the reference first."""
    others = analysis.rows if study.most_diagnosed else []
    rows = {row.setting: row for row in (*analysis.shown_first, *others)}
    found = [(name, side) for name, row in rows.items() if (side := study.side(row))]
    return dict(found[: study.most_diagnosed or None])


def _streams(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> list[Exhibit]:
    """Returns the streams in a step of the best setting, below those of another."""
    traces = study.streams(analysis)
    if not traces:
        return []

    def drawn() -> Form | None:
        shown = timeline(f"Streams of a step, {analysis.case.brief}", dict(traces), by_stream=True)
        return shown.chart if shown else None

    return [
        Exhibit(
            chart=drawn,
            name="timeline",
            heading="Streams of a step",
            brief="Timeline",
            drawn="A typical profiled step: see what runs concurrently, but take times from the table, as profiling "
            "slows the step down. Blue: GEMMs; green: other computation; orange: communication; exposed: communication "
            "with no concurrent computation.",
        )
    ]


MANY_PAIRS = 5
"""Number of pairs from which the noise is estimated from their spread."""
MOST_EFFECTS = 40
"""Rows on a terminal."""


@dataclass(frozen=True)
class Effect:
    """One change of one option, over all pairs of settings that differ in it alone. Changes are relative changes of the
    time that settings are compared by: -0.1 is 10 % less."""

    knob: str
    brief: str
    """The option's short name."""
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
    """Change of the pair with all other options as in the best setting; biased, as that was chosen for its time."""
    taken: bool
    """Whether the best setting has the value after the change."""

    @property
    def change_text(self) -> str:
        return f"{self.change:+.1%}" if abs(self.change) > self.noise else f"{self.change:+.1%} (noise)"


EFFECTS: Table[Effect] = Table(
    "knobs",
    "one row per change of one knob; changes of the time that settings are compared by",
    (
        attribute("knob", kind="text", header="knob", words=lambda one: one.brief),
        attribute("before", kind="text", header="from"),
        attribute("after", kind="text", header="to"),
        attribute("pairs", kind="count", header="pairs"),
        attribute("change", "Median of the pairs.", header="time", words=lambda one: one.change_text),
        attribute("noise", header="noise", show="{:.1%}".format),
        attribute("change_beside_best", header="in best", show="{:+.1%}".format),
        attribute("taken", "The best setting has the value after the change.", "flag"),
    ),
)


def effects(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> list[Effect]:
    """Returns every change of each option from one value to another, the largest effect first. Pairs with settings that
    are launch-bound or cannot win are left out."""
    found = [effect for option in analysis.differing for effect in _effects(study, analysis, option)]
    return sorted(found, key=lambda one: -abs(one.change))


def effects_table(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> list[Exhibit]:
    """Returns the table of the options' effects, with a note on those whose effect is unknown; empty if no options
    differ."""
    changes = effects(study, analysis)
    known = {one.knob for one in changes}
    unknown = [study.naming.brief(name) for name in analysis.differing if name not in known]
    notes = [f"Never changed alone in comparable runs: {', '.join(unknown)}."] if unknown else []
    if not changes:
        return [Exhibit(notes=notes)] if notes else []
    listing = Listing(
        EFFECTS,
        changes,
        "Every change of one knob.",
        chosen=lambda one: one.taken and one.change_beside_best is not None,
        most_rows=MOST_EFFECTS,
    )
    explained = (
        f"time: change of the time {analysis.per}, median of all pairs of settings that differ in this knob alone and "
        "are neither launch-bound nor diverging. in best: the pair with all other knobs as in the best setting; biased "
        "towards that setting, which was chosen for its time."
    )
    return [Exhibit(listing=listing, heading="Effect of each knob", explained=explained, notes=notes)]


def _effects(study: Study[C, R], analysis: CaseAnalysis[C, R], option: str) -> Iterator[Effect]:
    naming = study.naming
    alike: dict[tuple[str, ...], list[R]] = defaultdict(list)
    for row in analysis.rows:
        if row.may_win and not row.launch_bound:
            alike[tuple(repr(row.options.get(other)) for other in analysis.differing if other != option)].append(row)
    pairs: dict[tuple[str, str], list[tuple[R, R]]] = defaultdict(list)
    for group in alike.values():
        for pair in combinations(sorted(group, key=lambda row: naming.order(row.options, option)), 2):
            before, after = (naming.value(row.options.get(option)) for row in pair)
            pairs[before, after].append(pair)
    for (before, after), of_change in pairs.items():
        times = [(one.per(analysis.work), other.per(analysis.work)) for one, other in of_change]
        changes = [other.time_us / one.time_us - 1 for one, other in times]
        beside = [change for change, pair in zip(changes, of_change, strict=True) if analysis.best in pair]
        yield Effect(
            knob=option,
            brief=naming.brief(option),
            before=before,
            after=after,
            pairs=len(of_change),
            change=statistics.median(changes),
            noise=_noise_of_median(changes, times),
            change_beside_best=beside[0] if beside else None,
            taken=naming.value(analysis.best.options.get(option)) == after,
        )


def _noise_of_median(changes: list[float], pairs: list[tuple[Estimate, Estimate]]) -> float:
    """Returns the noise of the median: from MANY_PAIRS on from their spread, else that of a typical pair."""
    if len(changes) >= MANY_PAIRS:
        return estimate(changes).noise_us
    relative = [math.hypot(*(time.noise_us / time.time_us for time in pair)) for pair in pairs]
    return statistics.median(noise * (1 + change) for noise, change in zip(relative, changes, strict=True))
