"""Gives settings their effects: what each changed in what ran, against the reference, by the first trace of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from overlap_sweep.report.numbers import some_of
from overlap_sweep.study import C, CaseAnalysis, R, Study


def with_effects(study: Study[C, R], analyses: Sequence[CaseAnalysis[C, R]]) -> list[CaseAnalysis[C, R]]:
    """Returns the analyses with the effects of the settings that have traces, where the reference has some, too."""
    traces = [
        {row.setting: side.traces[0] for row in one.rows if (side := study.side(row)) and side.traces}
        for one in analyses
    ]
    paths = list(dict.fromkeys(path for by_setting in traces for path in by_setting.values()))
    if not paths:
        return list(analyses)
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.effects.comparison import effect
    from overlap_sweep.effects.runs import read_prints

    prints = {path: one.print for path, one in read_prints(paths).items()}

    def compared(analysis: CaseAnalysis[C, R], own: Mapping[str, Path], row: R) -> R:
        before, after = (prints[own[one.setting]] if one.setting in own else None for one in (analysis.reference, row))
        if before is None or after is None or row is analysis.reference:
            return row
        options = {
            name: (study.naming.value(analysis.reference.options.get(name)), study.naming.value(row.options.get(name)))
            for name in analysis.differing
            if analysis.reference.options.get(name) != row.options.get(name)
        }
        return replace(row, effect=effect(row.setting, [after], analysis.reference.setting, [before], options))

    return [
        _with_rows(analysis, [compared(analysis, own, row) for row in analysis.rows])
        for analysis, own in zip(analyses, traces, strict=True)
    ]


def _with_rows(analysis: CaseAnalysis[C, R], rows: list[R]) -> CaseAnalysis[C, R]:
    """Returns the analysis with other rows in the places of its own."""
    by_setting = {row.setting: row for row in rows}
    return replace(
        analysis,
        rows=rows,
        reference=by_setting[analysis.reference.setting],
        best=by_setting[analysis.best.setting],
        unjudged=[by_setting[row.setting] for row in analysis.unjudged],
    )


def cautions(analysis: CaseAnalysis[C, R]) -> Iterator[str]:
    """Yields whether the best setting changed nothing, and which settings were not in force."""
    best = analysis.best
    if best is not analysis.reference and best.effect and not best.effect.changed:
        unseen = [one.evidence for one in best.effect.settings if one.verdict == "cannot be seen"]
        unless = f", unless a trace does not show it ({'; '.join(unseen)})" if unseen else ""
        yield f"{best.setting} changed nothing in what ran, so its gain is noise{unless}."
    missed = [
        f"{one.name}={one.after} {one.verdict}: {one.evidence}"
        for row in analysis.rows
        if row.effect
        for one in row.effect.settings
        if one.verdict in ("not in force", "fell back")
    ]
    if missed:
        yield f"As the traces show: {some_of(dict.fromkeys(missed), separator='; ')}."
