"""The settings of each case, and the best of them."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil, isnan
from pathlib import Path
from typing import NamedTuple

from overlap_sweep.report.numbers import counted, shortened, some_of
from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import LEAST_FREEDOM, LEAST_RUNS, gap_noise_us
from overlap_sweep.results.gain import Gain, gain_over
from overlap_sweep.results.points import Point, group_points
from overlap_sweep.results.records import KnobRecord, KnobSearch
from overlap_sweep.study import STEP, C, CaseAnalysis, R, Study
from overlap_sweep.study.settings import differing, numbered

LONGEST_FIELD = 100
"""Longest field of a case in a title, in characters."""

Searches = Mapping[Path, KnobRecord]
"""Records of searches by directory."""


class Decision(NamedTuple):
    """A choice between rows. The best row is given by its position."""

    best: int
    gain: Gain | None
    reason: str
    against: str
    proven: bool = False
    searched: bool = False
    """Whether a search decided."""
    undecided: str = ""
    """What is known if it could not."""


def analyse(study: Study[C, R], points: Iterable[Point], searches: Searches | None = None) -> list[CaseAnalysis[C, R]]:
    """Returns an analysis of the `ok` points for each case."""
    cases = group_points(points, study.workload, study.case)
    ordered = sorted(cases, key=study.order)
    return [
        _analysis(study, case, title, cases[case], searches or {})
        for case, title in zip(ordered, titles(ordered), strict=True)
    ]


def titles(cases: Sequence[C]) -> list[str]:
    """Returns the cases in words; those that would be called the same with what distinguishes them."""
    found = []
    for case in cases:
        alike = [other._asdict() for other in cases if str(other) == str(case)]
        own = case._asdict().items()
        differ = [f"{name}={value}" for name, value in own if any(other[name] != value for other in alike)]
        found.append(", ".join([str(case), *(shortened(text, LONGEST_FIELD) for text in differ)]))
    return found


def point_row(study: Study[C, R], point: Point, placed: R) -> R:
    """Returns the row of a single `ok` point. `placed`: that of its setting."""
    options = study.options(point)
    name = study.naming.in_words(options)
    return study.row(
        name,
        name,
        options,
        [point],
        study.times_of_point(point),
        placed.standing,
        effect=placed.effect,
        equality=placed.equality,
        prediction=placed.prediction,
    )


def rows_of(study: Study[C, R], points: Iterable[Point]) -> list[R]:
    """Returns a row for each setting, in the order of their first starts. `points`: the `ok` points of one case."""
    alike: dict[Hashable, list[Point]] = defaultdict(list)
    for point in sorted(points, key=_start):
        alike[study.identity(point)].append(point)
    groups, naming = list(alike.values()), study.naming
    settings = [study.options(group[0]) for group in groups]
    shown = differing(settings) if len(groups) > 1 else None
    return [
        study.row(name, whole, options, group, times)
        for name, whole, options, group, times in zip(
            numbered(naming.in_words(options, shown) for options in settings),
            numbered(map(naming.in_words, settings)),
            settings,
            groups,
            study.times(groups),
            strict=True,
        )
    ]


def _start(point: Point) -> tuple[str, str]:
    return (point.result and point.result.started) or "", point.name


def _analysis(study: Study[C, R], case: C, title: str, points: list[Point], searches: Searches) -> CaseAnalysis[C, R]:
    rows = _in_order(study, _with_times_of_proof(study, rows_of(study, points), searches))
    work, reference = compared_by(rows), rows[0]
    if any(row.may_win for row in rows):
        decision = _of_finals(rows, searches) or _of_searches(study, rows, work, searches) or choose(rows, work)
    else:
        decision = Decision(0, None, "no setting trains as it should", reference.setting)
    unjudged = {
        number
        for number, row in enumerate(rows)
        if number and not decision.searched and isnan(gap_noise_us(row.per(work), reference.per(work)))
    }
    decided = rows[decision.best].may_win and (len(rows) == 1 or len(unjudged) < len(rows) - 1)

    def standing(number: int) -> str:
        best = "best, proven" if decision.proven else "best"
        names = {best: decided and number == decision.best and not decision.undecided, "reference": number == 0}
        only = len(rows) == 1 and decided
        return "only" if only else ", ".join(name for name, holds in names.items() if holds)

    placed = [
        replace(
            row,
            standing=standing(number),
            over_reference=reference.per(work).time_us / row.per(work).time_us,
        )
        for number, row in enumerate(rows)
    ]
    settings = [row.options for row in rows]
    return CaseAnalysis(
        case=case,
        title=title,
        points=points,
        rows=sorted(placed, key=lambda row: row.per(work).time_us),
        reference=placed[0],
        best=placed[decision.best],
        work=work,
        gain=decision.gain,
        against=decision.against,
        proven=decision.proven,
        reason=decision.reason,
        unjudged=[placed[number] for number in sorted(unjudged)],
        differing=differing(settings),
        shared=study.naming.shared(settings),
        searched=decision.searched,
        undecided=decision.undecided,
    )


def _in_order(study: Study[C, R], rows: Sequence[R]) -> list[R]:
    """Returns the reference, then the others from simple to complex."""
    usable = [row for row in rows if row.may_win] or rows
    naming = study.naming
    if study.reference == "first":
        first = usable[0]
        others = [row for row in rows if row is not first]
        return [first, *sorted(others, key=lambda row: len(differing([first.options, row.options])))]
    return sorted(rows, key=lambda row: (not any(row is one for one in usable), naming.simplicity(row.options)))


def compared_by(rows: Sequence[R]) -> str:
    """Returns the work that the rows' times are compared per: the first that is known of all, else the step."""
    return next((work for work in rows[0].amounts if all(row.amounts.get(work) for row in rows)), STEP)


def choose(rows: Sequence[R], work: str) -> Decision:
    """Returns the best row, its gain over the reference, which comes first, and why. The reference is the best unless
    another is faster beyond the noise; then it is the simplest within the noise of the fastest. `rows`: from simple to
    complex."""
    reference = rows[0]
    if len(rows) == 1:
        return Decision(0, None, "the only setting measured", reference.setting)
    usable = [number for number, row in enumerate(rows) if row.may_win]
    choice = verdict.choose(usable, lambda number: rows[number].per(work))
    fastest = rows[choice.fastest]
    if choice.unknown and len(choice.unknown) == len(usable) - 1:
        return Decision(0, None, _why_unknown(rows), reference.setting)
    if len(usable) > 1 and not choice.won:
        reason = f"the fastest other, {fastest.setting}, is {choice.gain_of_fastest.in_words(reference.setting)}"
    elif choice.chosen == choice.fastest:
        reason = f"fastest of {len(usable)}"
    else:
        reason = f"simplest within the noise of the fastest, {fastest.setting} (noise {choice.tie_noise:.1%})"
    if len(rows[choice.chosen].points) == 1:
        reason = f"{reason}; not repeated"
    gain = choice.gain if choice.won else None
    return Decision(choice.chosen, gain, reason, reference.setting)


def wanted_runs(rows: Sequence[R]) -> int:
    """Returns how many runs of each setting are enough, and more than there are."""
    enough = max(LEAST_RUNS, 1 + ceil(LEAST_FREEDOM / len(rows)))
    return max(enough, 1 + min(len(row.points) for row in rows))


def _why_unknown(rows: Sequence[R]) -> str:
    """Returns how many runs of each setting are needed, and how many there are."""
    fewest, most = (pick(len(row.points) for row in rows) for pick in (min, max))
    runs = counted(most, "run") if fewest == most else f"{fewest} to {most} runs"
    return f"{wanted_runs(rows)} runs of each setting are needed to see what equal runs differ by; so far {runs} each"


def _number_of(rows: Sequence[R], directory: Path, names: Sequence[str]) -> int | None:
    """Returns the position of the row that has one of these points; None if none has."""
    wanted = {directory / name for name in names}
    return next((i for i, row in enumerate(rows) if any(point.directory in wanted for point in row.points)), None)


def _settling(study: Study[C, R], searches: Searches) -> Iterable[tuple[Path, KnobSearch]]:
    """Yields the searches whose answers override the ranking of single points."""
    for directory, record in searches.items():
        for search in record.searches:
            whole = search.best or search.verdict or not search.stopped or study.stopped_searches_settle
            if search.settles and whole:
                yield directory, search


def _with_times_of_proof(study: Study[C, R], rows: Sequence[R], searches: Searches) -> list[R]:
    """Returns the rows, in which a search's settings have the times that the search states: those of the proof, which
    were measured in turns, where there are some."""
    found = list(rows)
    for directory, search in _settling(study, searches) if study.times_of_proof else ():
        base = _number_of(rows, directory, search.baseline_points)
        if base is None or not search.time_us or not search.baseline_us:
            continue
        stated = [(one.points, search.baseline_us * one.gain.ratio) for one in search.tried if one.gain]
        if stated or search.best:
            stated += [(search.best_points, search.time_us), (search.baseline_points, search.baseline_us)]
        for number, time_us in ((_number_of(rows, directory, names), time_us) for names, time_us in stated):
            if number is not None:
                # The search states times for the baseline's amount of work.
                found[number] = _timed(found[number], time_us * rows[number].amount / rows[base].amount)
    return found


def _timed(row: R, time_us: float) -> R:
    return replace(row, times=replace(row.times, step=replace(row.step, time_us=time_us)))


def _of_finals(rows: Sequence[R], searches: Searches) -> Decision | None:
    """Returns what the end of competing searches decided, in which their best settings took turns: the simplest of
    those that none beat, and its gain over the fastest of the others. None without a winner, and if several ends, of
    other numbers of ranks, had settings of these."""
    ends = []
    for directory, final in ((directory, final) for directory, one in searches.items() for final in one.finals):
        numbers = {_number_of(rows, directory, one.points): one for one in final.finalists}
        if found := {number: one for number, one in numbers.items() if number is not None and rows[number].may_win}:
            ends.append((final, found))
    if len(ends) != 1:
        return None
    ((final, found),) = ends
    first = [number for number in sorted(found) if found[number].place]
    others = [number for number in found if not found[number].place and not found[number].deviation]
    if first:
        best, reason = first[0], f"{final.rounds} rounds side by side with the best settings of other searches"
        if len(first) > 1:
            reason = f"{reason}, of which {some_of(rows[number].setting for number in first[1:])} tie"
        if not others:
            return Decision(best, None, reason, rows[0].setting, searched=True)
        second = min(others, key=lambda number: found[number].time_us)
        gain = gain_over(found[second].time, found[best].time, verdict.pairs_among(list(found)))
        return Decision(best, gain, reason, rows[second].setting, searched=True)
    return None


def _of_searches(study: Study[C, R], rows: Sequence[R], work: str, searches: Searches) -> Decision | None:
    """Returns what searches settled: a search measures its answer again, in alternation with the baseline, so that it
    is not just the luckiest of many. None without one."""
    settled = {
        number: (directory, search)
        for directory, search in reversed(list(_settling(study, searches)))
        if (number := _number_of(rows, directory, search.best_points)) is not None
    }
    if not settled:
        return None
    numbers = sorted(settled)
    best = numbers[choose([rows[number] for number in numbers], work).best]
    directory, search = settled[best]
    base = _number_of(rows, directory, search.baseline_points)
    against = rows[0].setting if base == 0 else "the search's baseline"
    if search.verdict == "undecided":
        known = _likeliest(study, search) or "the runs do not show whether anything is faster"
        return Decision(base or 0, None, "the search could not decide", rows[0].setting, searched=True, undecided=known)
    if search.best and search.gain and search.gain.faster:
        return Decision(best, search.gain, "proven by the search", against, proven=True, searched=True)
    return Decision(best, None, "the search found nothing faster", rows[0].setting, searched=True)


def _likeliest(study: Study[C, R], search: KnobSearch) -> str:
    """Returns the setting that a search would have proven next, in words; empty if nothing was faster."""
    gain = next((one.gain for one in search.tried if search.seemed and one.changed == search.seemed), None)
    if gain is None or gain.interval[1] <= 0:
        return ""
    names = ", ".join(f"{study.naming.brief(key.lstrip('+~'))}={value}" for key, value in search.seemed.items())
    gains = f"saves {gain.in_brief}" if gain.faster else f"may save up to {gain.interval[1]:.1%}"
    return f"{names} {gains}, NOT PROVEN"
