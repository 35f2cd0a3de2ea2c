"""What a search expected, measured and left out, on the page: from the baseline to the answer, and all its trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from overlap_sweep.report.charts import Axis, Dot, Key, Row, Rows
from overlap_sweep.report.numbers import UNDEFINED, as_us
from overlap_sweep.report.searches import by_reason
from overlap_sweep.report.section import Exhibit
from overlap_sweep.report.table import Column, Listing, RowText, Table, attribute
from overlap_sweep.results.gain import NO_GAIN, Gain, gain_over
from overlap_sweep.results.records import Expected, FailedKnobs, KnobSearch, TriedKnobs
from overlap_sweep.study import C, CaseAnalysis, R, SettingRow, Study, Times
from overlap_sweep.study.analysis import Searches

PREDICTED, BOUND = Key("predicted", "comm", "diamond"), Key("bound, and the usual part of it", "wait", "diamond")
MOST_CHANGES = 12
"""Single changes in the chart if none is part of an answer."""


@dataclass(frozen=True)
class Trial:
    """A setting that a search measured, or tried to."""

    setting: str
    changed: Mapping[str, str]
    """Values that differ from the baseline, by key."""
    baseline_us: float
    gain: Gain | None
    """Of the baseline, or None if it was not measured."""
    expected: Expected | None
    """Of the change that was tried with it."""
    added: Gain | None
    """What that change gained, where it was tried on top of others."""
    row: SettingRow[Times] | None
    """The same setting as it is compared with others; None if no point is ok."""
    note: str
    """Why it was not measured or must not be used, or that it is the best."""
    is_refused: bool

    @property
    def trial_us(self) -> float | None:
        return self.baseline_us * self.gain.ratio if self.gain else None

    @property
    def effect(self) -> str:
        return self.row.effect.in_brief if self.row and self.row.effect else ""

    @property
    def results(self) -> str:
        verdict = self.row.equality.verdict if self.row and self.row.equality else ""
        return UNDEFINED if verdict == "unknown" else verdict


TRIALS: Table[Trial] = Table(
    "trials",
    "one row per setting that a search tried",
    (
        attribute("setting", "Changes of the baseline.", "text", header="setting", style="setting"),
        attribute("trial_us", "The baseline's time, less what was gained.", header="time us", dropped=4),
        Column(
            "gain",
            lambda trial: trial.gain.share if trial.gain else None,
            "Time that it saves, as a fraction of the baseline's, with its interval.",
            header="gain",
            words=lambda trial: trial.gain.in_brief if trial.gain else "",
            high_first=True,
        ),
        Column(
            "added_gain",
            lambda trial: trial.added.share if trial.added else None,
            "What the last change saved, of the time of the best setting until then, which it was tried on.",
            header="last change",
            words=lambda trial: trial.added.in_brief if trial.added else "",
            high_first=True,
            dropped=5,
        ),
        Column(
            "expected_gain",
            lambda trial: trial.expected.gain if trial.expected else None,
            "The gain that was expected of the last change before it was measured: predicted, with its interval, or at "
            "most what a cause costs.",
            header="expected",
            words=lambda trial: trial.expected.in_words if trial.expected else "",
            high_first=True,
            dropped=3,
        ),
        attribute("effect", "What it changed in what ran, against the reference.", "text", header="effect", dropped=1),
        attribute("results", "Whether it computes the same as the reference.", "text", header="results", dropped=2),
    ),
)


def exhibits(study: Study[C, R], analysis: CaseAnalysis[C, R], searches: Searches) -> list[Exhibit]:
    """Returns an exhibit of each search of this case, if its record has gains or failures, as earlier ones have not, or
    there was nothing to try."""
    return [
        _exhibit(study, analysis, search, rows)
        for directory, record in searches.items()
        if (rows := rows_by_point(analysis, directory))
        for search in record.searches
        if search.failed or not search.knobs or any(one.gain for one in search.tried)
        if rows.keys() & {*search.baseline_points}
    ]


def rows_by_point(analysis: CaseAnalysis[C, R], directory: Path) -> dict[str, R]:
    """Returns the rows by the names of their points in a directory."""
    points = ((point, row) for row in analysis.rows for point in row.points)
    return {point.directory.name: row for point, row in points if point.directory.parent == directory}


def _exhibit(study: Study[C, R], analysis: CaseAnalysis[C, R], search: KnobSearch, rows: Mapping[str, R]) -> Exhibit:
    scale = search.expected_scale
    expected = (
        " Expected is what was predicted of a change before it was measured, with its interval, or its bound."
        if search.expected
        else ""
    )
    learnt = f" By what it measured, the search came to expect {scale:.0%} of what is predicted." if scale != 1 else ""
    return Exhibit(
        name="search",
        heading="From the baseline to the answer",
        brief="Trials",
        explained="Gains are shares of the baseline's time, as the search compared them, with their intervals."
        f"{expected}{learnt}",
        parts=lambda: list(_parts(study, analysis, search, rows)),
    )


def _parts(
    study: Study[C, R], analysis: CaseAnalysis[C, R], search: KnobSearch, rows: Mapping[str, R]
) -> Iterator[Exhibit]:
    if _gains(search):
        yield Exhibit(chart=partial(waterfall, study, search))
    tried = trials(study, analysis, search, rows)
    yield Exhibit(listing=Listing(TRIALS, tried, text=_text))
    if reasons := left_out(study, search):
        yield Exhibit(notes=by_reason(reasons), folded=f"What was left out, and why ({len(reasons)})", closed=True)


def _text(trial: Trial) -> RowText:
    heading = "Failed, or must not be used" if trial.is_refused else "Measured, the best first"
    return RowText(heading, [], [trial.note] if trial.note else [])


def waterfall(study: Study[C, R], search: KnobSearch) -> Rows:
    """Returns the baseline, what each change of the best setting gains, alone or on top of those before, and what the
    best setting gains; if that is the baseline, what single changes gain."""
    gains = _gains(search)
    proof = "as proven" if search.proven else "NOT PROVEN"
    on_top = any(one.added for one in search.contributions)
    each = "each change on top of those before, then all" if on_top else "each change alone, then together"
    together = f"{each if len(gains) > 1 else 'the best setting'}, {proof}"
    known = [one for step in gains if (one := search.expected_of(step.changed, step.change))]
    return Rows(
        title=search.label,
        subtitle=together if search.best else "each change alone, and none is proven to be faster",
        axis=Axis("gain, share of the baseline's time", ".3~%"),
        rows=[_row(study, search, step) for step in [Step({}, NO_GAIN), *gains]],
        parts=[Key("measured", "gemm")],
        columns=["time us", "gain", "expected"],
        legend=[key for key in (PREDICTED, BOUND) if any(_key(one) is key for one in known)],
    )


@dataclass(frozen=True)
class Step:
    """A bar of the chart."""

    changed: Mapping[str, str]
    gain: Gain | None
    change: str = ""
    """The change that it has on top of the bar before."""
    before: float = 0.0
    """What that one gains."""


def _gains(search: KnobSearch) -> list[Step]:
    """Returns the gains of each change of the best setting, if it has several, and of the best setting; if none is
    better, of the fastest changes of which something was expected."""
    if not search.best:
        known = [one for one in search.tried if search.expected_of(one.changed)]
        return [Step(one.changed, one.gain) for one in known[:MOST_CHANGES]]
    best = Step(search.best, search.gain)
    if len(search.contributions) < 2:
        return [best]
    if any(one.added for one in search.contributions):
        return [*_on_top(search), best]
    alone = sorted(search.contributions, key=lambda one: -one.alone.share if one.alone else 0.0)
    return [*(Step({one.key: one.value}, one.alone) for one in alone), best]


def _on_top(search: KnobSearch) -> Iterator[Step]:
    """Yields the settings with the first of the best setting's changes, with the first two and so on, as far as they
    were measured."""
    changed: dict[str, str] = {}
    before = 0.0
    for one in search.contributions:
        changed = {**changed, one.key: one.value}
        gain = next((tried.gain for tried in search.tried if tried.changed == changed), None)
        if gain:
            yield Step(changed, gain, f"{one.key}={one.value}", before)
            before = gain.share


def _row(study: Study[C, R], search: KnobSearch, step: Step) -> Row:
    gain, expected = step.gain, search.expected_of(step.changed, step.change)
    is_best = not step.change and step.changed == search.best != {}
    name = _brief(study, step.change) if step.change else _name(study, step.changed)
    name = f"+ {name}" if len(step.changed) > 1 and step.change else name
    time = as_us((search.baseline_us or 0.0) * gain.ratio) if gain else "not measured"
    cells = [time, gain.in_brief if gain else "", expected.in_words if expected else ""]
    low, high = gain.interval if gain else (None, None)
    return Row(
        name=name,
        bold=is_best,
        colour="good" if is_best else "",
        ends=[gain.share] if gain else [],
        low=low,
        high=high,
        cells=cells,
        dots=[_dot(expected, step.before)] if expected else [],
        details=dict(zip(("setting", "time us", "gain", "expected"), (name, *cells), strict=True)),
    )


def _dot(expected: Expected, before: float) -> Dot:
    key = _key(expected)
    return Dot(before + expected.gain, before + expected.low, before + expected.high, key.colour, key.shape)


def _key(expected: Expected) -> Key:
    return PREDICTED if expected.is_predicted else BOUND


def trials(study: Study[C, R], analysis: CaseAnalysis[C, R], search: KnobSearch, rows: Mapping[str, R]) -> list[Trial]:
    """Returns what was tried, best first, then what failed. `rows`: by the names of their points."""

    def row_of(points: Sequence[str]) -> R | None:
        return next((rows[name] for name in points if name in rows), None)

    base = row_of(search.baseline_points)

    def trial(one: TriedKnobs | FailedKnobs, gain: Gain | None, row: R | None, note: str) -> Trial:
        name, expected = _name(study, one.changed), search.expected_of(one.changed, one.change)
        added, is_refused = (one.added, False) if isinstance(one, TriedKnobs) else (None, True)
        return Trial(name, one.changed, search.baseline_us or 0.0, gain, expected, added, row, note, is_refused)

    measured = []
    for one in search.tried:
        best = f"best, {'proven' if search.proven else 'NOT PROVEN'}" if one.changed == search.best != {} else ""
        measured.append(trial(one, one.gain or NO_GAIN, row_of(one.points), best))
    measured.sort(key=lambda one: (not one.note, -one.gain.share if one.gain else 0.0))
    for other in search.failed:
        row = row_of(other.points)
        gain = gain_over(base.per(analysis.work), row.per(analysis.work)) if base and row else None
        measured.append(trial(other, gain, row, other.reason))
    return measured


def left_out(study: Study[C, R], search: KnobSearch) -> dict[str, str]:
    """Returns why each key or value was never tried, by its name as the study's settings are named."""
    said = {
        name: f"at most {most:.1%} faster, by what was expected" if most > 0 else f"at best {-most:.1%} slower"
        for name, most in search.hopeless.items()
    }
    failed = {
        one.change or _only(one.changed): one.reason for one in search.failed if one.change or len(one.changed) == 1
    }
    for key, values in search.never_tried.items():
        like = [f"as {_brief(study, name)}: {why}" for name, why in failed.items() if name.startswith(f"{key}=")]
        why = search.stopped or (like[0] if like else "no valid setting has it")
        names = [f"{key}={value}" for value in values]
        said |= {name: why for name in names if name not in failed and name not in said}
    return {_brief(study, name): reason for name, reason in (said | search.left_out).items()}


def _only(changed: Mapping[str, str]) -> str:
    ((key, value),) = changed.items()
    return f"{key}={value}"


def _brief(study: Study[C, R], name: str) -> str:
    """Returns a key, or `KEY=VALUE`, as the study's settings are named."""
    key, equals, value = name.partition("=")
    return f"{study.naming.brief(key.lstrip('+~'))}{equals}{value}"


def _name(study: Study[C, R], changed: Mapping[str, str]) -> str:
    return ", ".join(_brief(study, f"{key}={value}") for key, value in changed.items()) or "the baseline"
