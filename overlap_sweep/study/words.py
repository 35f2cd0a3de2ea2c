"""The answer in words: headline, sentences and caveats of the settings of one case."""

from collections.abc import Collection, Iterator
from math import isnan

from overlap_sweep.declared import TRAINS_DIFFERENTLY
from overlap_sweep.report.numbers import as_sentence, some_of
from overlap_sweep.report.section import Card
from overlap_sweep.results.estimate import LEAST_RUNS
from overlap_sweep.results.gain import gain_over, nothing_beat
from overlap_sweep.results.provenance import recorded_warnings, slowed_gpus
from overlap_sweep.study import C, CaseAnalysis, R, Study, effects, equality, predictions
from overlap_sweep.study.analysis import wanted_runs

ADVISED_RUNS = 3
"""Runs of each setting that are advised where there are too few."""
LAUNCH_BOUND = "Launch-bound, so the times are the host's, not the GPU's"


def headline(analysis: CaseAnalysis[C, R]) -> str:
    """Returns the setting to use, in a few words."""
    best = analysis.best
    if not best.may_win:
        return "No answer"
    if len(analysis.rows) == 1:
        return f"{best.setting}: nothing to compare with"
    if analysis.too_few_runs:
        repetitions = ",".join(map(str, range(max(wanted_runs(analysis.rows), ADVISED_RUNS))))
        return f"Too few runs to tell which is fastest; add repetition={repetitions} resume=last"
    if analysis.undecided:
        return f"Undecided: {analysis.undecided}; search on with resume="
    if best is analysis.reference or analysis.gain is None:
        return nothing_beat(best.setting, "keep it")
    word = " only if results may differ" if best.computes_differently else ""
    return f"Use {best.setting}{word}: {analysis.gain.in_words(analysis.against, analysis.per)}"


def sentences(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> list[str]:
    """Returns sentences on the best setting, how to get it, and what the workload adds."""
    use, code = _use(study, analysis), _to_write(study, analysis)
    return [
        f"{headline(analysis)}.",
        _times_and_reason(analysis),
        *([f"{study.use}: {use}"] if use else []),
        *([f"Write: {code[0]}"] if len(code) == 1 else ["Write:", *(f"  {line}" for line in code)] if code else []),
        *_shared(analysis),
        *study.sentences(analysis),
        *predictions.scored(analysis),
    ]


def others(analysis: CaseAnalysis[C, R]) -> list[str]:
    """Returns how much each other setting differs from the best, a sentence each."""
    best, rivals = analysis.best, [row for row in analysis.rows if row.may_win and row is not analysis.best]
    if analysis.searched or not best.may_win:
        return []
    gains = ((row, gain_over(best.per(analysis.work), row.per(analysis.work), len(rivals))) for row in rivals)
    return [f"{row.setting} is {gain.in_words(best.setting)}." for row, gain in gains if not isnan(gain.noise)]


def card(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> Card:
    """Returns the answer at a glance."""
    more = [*study.sentences(analysis), *predictions.scored(analysis), *_shared(analysis)]
    use = _use(study, analysis)
    return Card(
        analysis.title,
        headline(analysis),
        [_times_and_reason(analysis), *more],
        use=[use] if use else [],
        to_write=_to_write(study, analysis),
        limits=study.limits(analysis),
    )


def _use(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> str:
    return study.to_use(analysis) if analysis.best.may_win else ""


def _to_write(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> list[str]:
    return study.to_write(analysis).splitlines() if analysis.best.may_win else []


def _times_and_reason(analysis: CaseAnalysis[C, R]) -> str:
    if not analysis.best.may_win:
        return f"{as_sentence(analysis.reason)}."
    reason = f" {as_sentence(analysis.reason)}." if len(analysis.rows) > 1 else ""
    return f"{as_sentence(analysis.best.in_words)}.{reason}"


def _shared(analysis: CaseAnalysis[C, R]) -> list[str]:
    return [f"All settings have {analysis.shared}."] if analysis.shared else []


def cautions(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> list[str]:
    """Returns the caveats, a sentence each; empty if there are none."""
    return [
        *equality.cautions(analysis),
        *effects.cautions(analysis.best.setting, analysis.best.effect, [row.effect for row in analysis.rows]),
        *_too_few_runs(analysis),
        *_trains_differently(study, analysis),
        *study.cautions(analysis),
        *launch_bound_caution([(row.setting, row.launch_bound) for row in analysis.rows], study.if_launch_bound),
        *slowed_gpus(analysis.points),
        *recorded_warnings(analysis.points),
        *study.environments(analysis),
    ]


def _too_few_runs(analysis: CaseAnalysis[C, R]) -> Iterator[str]:
    """Yields which settings cannot be judged where others can."""
    if analysis.unjudged and not analysis.too_few_runs:
        settings = some_of((row.setting for row in analysis.unjudged), separator="; ")
        yield f"Too few runs to judge {settings}: each setting needs at least {LEAST_RUNS}."


def _trains_differently(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> Iterator[str]:
    best, reference = analysis.best, analysis.reference
    changed = [name for name in analysis.differing if repr(best.options.get(name)) != repr(reference.options.get(name))]
    if any(TRAINS_DIFFERENTLY in study.roles(name) for name in changed):
        yield f"The best setting, {best.setting}, trains differently from {reference.setting}: compare their losses."


def launch_bound_caution(settings: Collection[tuple[str, bool]], instead: str = "") -> Iterator[str]:
    """Yields which of the settings, given by name, are launch-bound. `instead`: what to do about it."""
    if which := those_with(settings):
        yield f"{LAUNCH_BOUND}{f' ({instead})' if instead else ''}: {which}."


def those_with(settings: Collection[tuple[str, bool]]) -> str:
    """Returns the settings that have a property, in words; empty if none has. `settings`: names, and whether they have
    it."""
    found = [name for name, has_it in settings if has_it]
    return "all settings" if len(found) == len(settings) > 1 else some_of(found, separator="; ")
