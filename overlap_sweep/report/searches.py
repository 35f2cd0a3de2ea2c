"""Results of searches as lines of text: for settings of passes (search.json) and for knobs (knobs.json)."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from overlap_sweep.overlap.overlap_cfg import NONE_IN_WORDS
from overlap_sweep.program import launch_program
from overlap_sweep.report.numbers import as_duration, as_us, counted
from overlap_sweep.results.gain import NO_GAIN, Gain, gain_over, nothing_beat
from overlap_sweep.results.records import (
    EQUIVALENT,
    Finalist,
    KnobFinal,
    KnobRecord,
    KnobSearch,
    PassSearch,
    Records,
    SearchRecord,
    without_operator,
)
from overlap_sweep.results.verdict import pairs_among

LEVERS = "job.levers."
"""What the names of levers begin with as options of `launch`, and nowhere else."""

Titled = Iterable[tuple[str, list[str]]]
"""Headings with lines of text."""


def pass_searches(records: Records, root: Path) -> Titled:
    """Yields a heading per search.json, with one line per search and its notes."""
    for directory, record in records.searches.items():
        known = records.tuners[directory].dropped if directory in records.tuners else {}
        lines = [f"{record.points} points in {as_duration(record.elapsed_s)}", *_pass_lines(record, known)]
        yield f"Search{_where(directory, root)}", lines


def knob_searches(records: Mapping[Path, KnobRecord], root: Path) -> Titled:
    """Yields a heading per knobs.json, with its answers and their basis."""
    for directory, record in records.items():
        yield f"Search for knobs{_where(directory, root)}", knob_lines(record)


def _where(directory: Path, root: Path) -> str:
    return f" in {directory.relative_to(root).as_posix()}" if directory != root else ""


def _pass_lines(record: SearchRecord, known: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines on the passes. `known`: dropped values that are reported elsewhere."""
    reported = set()
    for search in record.searches:
        yield pass_line(search)
        yield from (f"  {note}" for note in search.notes)
        # The same for both passes of an operator.
        operator = search.model, search.tp_size, search.operator
        refused = {why: n for why, n in search.refused.items() if (operator, why) not in reported}
        yield from (f"  Refused {_times(n)}: {why}" for why, n in refused.items())
        reported |= {(operator, why) for why in search.refused}
    dropped = {name: without_operator(name, why) for name, why in record.dropped.items() if known.get(name) != why}
    yield from (f"Dropped: {name}: {why}" for name, why in dropped.items())


def pass_line(search: PassSearch) -> str:
    """Returns how the search of one pass went, as a line. What won is decided by the analysis, which knows the noise
    between points."""
    return (
        f"{search.model} TP={search.tp_size} {search.operator} {search.pass_name}: {len(search.tried)} of "
        f"{search.exhaustive} settings measured; {search.stopped or 'not stopped'}"
    )


def knob_lines(record: KnobRecord) -> list[str]:
    reused = f", {record.reused} of them reused" if record.reused else ""
    lines = [line for search in record.searches for line in _in_brief_names(search)]
    lines += [line for final in record.finals for line in _final_lines(final)]
    return [*lines, f"{record.points} points{reused} in {as_duration(record.elapsed_s)}"]


def _headline(search: KnobSearch) -> str:
    if search.time_us is None or search.baseline_us is None:
        return f"no answer: {search.dropped or search.stopped}"
    if not search.best:
        early = f" (stopped early: {search.stopped})" if search.stopped else ""
        if search.settings <= 1:
            said = "only the baseline was measured"
        elif search.verdict == "undecided":
            said = "undecided"
        else:
            said = nothing_beat("the baseline", "keep it")
        return f"{said} ({as_us(search.time_us)} us){early}"
    assert search.gain
    over_none = f", {search.over_none.in_words(NONE_IN_WORDS)}" if search.over_none else ""
    times = f"{as_us(search.time_us)} us instead of {as_us(search.baseline_us)}"
    gain = f"{times}, {search.gain.in_words('the baseline')}{over_none}"
    why = f" ({search.stopped})" if search.stopped else ""
    return gain if search.proven and search.gain.faster else f"{gain}; NOT PROVEN: its proof is not complete{why}"


def pasted(search: KnobSearch) -> str:
    return _command(search.overrides, search.best)


def _command(overrides: Iterable[str], changed: Mapping[str, str]) -> str:
    given = {**dict(override.partition("=")[::2] for override in overrides), **changed}
    return shlex.join([*launch_program().split(), *(f"{key}={value}" for key, value in given.items())])


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _final_lines(final: KnobFinal) -> Iterator[str]:
    if final.finalists:
        best: dict[str, Finalist] = {}
        for one in final.finalists:
            if one.place:
                best.setdefault(one.label, one)
        yield f"Side by side, {final.rounds} rounds: {_final_headline(final.finalists, best)}"
        rows = [("search", "changed", "time us", "noise us", ""), *_final_rows(final.finalists)]
        yield from (f"  {line}" for line in _aligned(rows, texts=2))
        if final.work_of:
            yield f"  Times are for the work of one step of {final.work_of}."
        yield from (f"  {_command(one.overrides, one.changed)}" for one in best.values())
        yield from (f"  {one.label} deviates: {one.deviation}" for one in final.finalists if one.deviation)
    else:
        yield f"Side by side: {'not compared' if final.stopped else 'nothing to compare'}"
    yield from (f"  Not compared: {label}: {reason}" for label, reason in final.left_out.items())
    if final.stopped:
        yield f"  Stopped early: {final.stopped}."


def _final_headline(finalists: Sequence[Finalist], best: Mapping[str, Finalist]) -> str:
    """Returns which search has the fastest setting, and its gain over the next one if that is sure. `best`: the fastest
    setting and those that tie with it, one of each search, by its label."""
    if not best:
        return "no winner, since all deviate"
    if len(best) > 1:
        return f"a tie of {', '.join(best)}"
    ((label, fastest),) = best.items()
    comparable = [one for one in finalists if not one.deviation]
    second = next((one for one in comparable if one.label != label), None)
    gain = gain_over(second.time, fastest.time, pairs_among(comparable)) if second else NO_GAIN
    return f"{label} is the fastest{f', {gain.in_words(second.label)}' if second and gain.faster else ''}"


def _final_rows(finalists: Sequence[Finalist]) -> Iterator[tuple[str, ...]]:
    for one in finalists:
        changed = " ".join(f"{key}={value}" for key, value in one.changed.items()) or "the baseline"
        note = one.place or f"{one.time_us / finalists[0].time_us - 1:+.1%}"
        yield one.label, changed, as_us(one.time_us), as_us(one.noise_us), "deviates" if one.deviation else note


def _in_brief_names(search: KnobSearch) -> Iterator[str]:
    """Yields the lines on a search, in which levers have the names that tables call them by, but for the command."""
    for line in _knob_search_lines(search):
        yield line if line.strip() == pasted(search) else line.replace(LEVERS, "")


def _knob_search_lines(search: KnobSearch) -> Iterator[str]:
    yield f"{search.label}: {_headline(search)}"
    if search.answered and not search.best_points:
        yield "  Which points it answers with is not recorded, so tables decide without it; search again with resume=."
    if search.time_us is not None:
        if search.best:
            yield f"  {pasted(search)}"
        if search.contributions:
            on_top = any(one.added for one in search.contributions)
            first = "gain on top of those before" if on_top else "gain alone"
            rows = [("knob", "baseline", "best", first, "gain in the best setting")]
            for one in search.contributions:
                gains = _in_brief(one.added if on_top else one.alone), _in_brief(one.taken_away)
                rows.append((one.key.removeprefix(LEVERS), one.baseline, one.value, *gains))
            yield from (f"  {line}" for line in _aligned(rows, texts=3))
        combinations = counted(search.grid, "combination")
        points = counted(search.points, "point")
        yield f"  {counted(search.settings, 'setting')} measured, of {combinations} of values, in {points}"
        if search.stopped:
            yield f"  Stopped early: {search.stopped}. Settings that were not measured may be faster."
    if search.disturbed:
        noise_of_ratios, noise_of_times = 100 * search.disturbed.ratios, 100 * search.disturbed.times
        yield (
            f"  The baselines are noisy: times relative to them have a noise of {noise_of_ratios:.1f} %, the times "
            f"themselves of {noise_of_times:.1f} %, so the settings are compared by their times."
        )
    elif search.by_time:
        yield "  The baselines differ between settings, so the settings are compared by their times."
    if search.host_bound:
        yield f"  {search.host_bound} of the points are launch-bound: the host is slower than the device."
    yield from (f"  {note}" for note in search.notes)
    yield from (f"  Refused {_times(count)}: {reason}" for reason, count in search.refused.items())
    idle = [key for key, reason in search.left_out.items() if reason.endswith(EQUIVALENT)]
    if len(idle) > 1:
        names = ", ".join(key.rpartition(".")[2] for key in idle)
        yield f"  Not searched, since their values {EQUIVALENT}: {names}"
    left_out = {key: why for key, why in search.left_out.items() if len(idle) == 1 or key not in idle}
    yield from (f"  Not searched: {line}" for line in by_reason(left_out))
    if search.tried and search.never_tried:
        values = (f"{key}={','.join(missing)}" for key, missing in search.never_tried.items())
        yield f"  Never tried: {' '.join(values)}"


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """Returns a line for each reason, after what was left out for it. `reasons`: by what was left out."""
    names = {reason: ", ".join(name for name, why in reasons.items() if why == reason) for reason in reasons.values()}
    return [f"{those}: {reason}" for reason, those in names.items()]


def _aligned(rows: Sequence[Sequence[str]], texts: int) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        yield "  ".join(cell.ljust(w) if i < texts else cell.rjust(w) for i, (cell, w) in pairs).rstrip()


def _in_brief(gain: Gain | None) -> str:
    return "not measured" if gain is None else gain.in_brief
