"""What searches and searches over knobs say to people, and knobs.json, in which the latter last."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from overlap_sweep.overlap import space
from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_duration, as_us
from overlap_sweep.results.records import Contribution, Gain, KnobRecord, KnobSearch, PassSearch, Records, SearchRecord
from overlap_sweep.results.run_directory import KNOBS_FILE, write_record


def print_searches(records: Records, root: Path, console: Console) -> None:
    """Prints for every search.json its searches, one line each, and their notes."""
    for directory, record in records.searches.items():
        where = f" in {directory.relative_to(root).as_posix()}" if directory != root else ""
        console.print(f"\nSearch{where}", style="bold")
        known = records.tuners[directory].dropped if directory in records.tuners else {}
        print_lines([f"{record.points} points in {as_duration(record.elapsed_s)}", *_lines(record, known)], console)


def _lines(record: SearchRecord, known: dict[str, str]) -> Iterator[str]:
    """`known`: what was said elsewhere to be dropped."""
    said = set()
    for search in record.searches:
        yield _answer(search)
        yield from (f"  {note}" for note in search.notes)
        # The same for both passes of an operator.
        operator = search.model, search.tp_size, search.operator
        yield from (f"  refused {n} times: {why}" for why, n in search.refused.items() if (operator, why) not in said)
        said |= {(operator, why) for why in search.refused}
    yield from (f"Dropped: {what}: {why}" for what, why in record.dropped.items() if known.get(what) != why)


def _answer(search: PassSearch) -> str:
    name = space.settings_name(search.chosen) if search.chosen else "don't overlap"
    gain = ""
    if search.chosen and search.time_us and search.none_us:
        gain = f", {as_us(search.time_us)} us, {search.none_us / search.time_us:.2f}x no overlap"
    return (
        f"{search.model} TP={search.tp_size} {search.operator} {search.pass_name}: {name}{gain}; "
        f"{len(search.tried)} of {search.exhaustive} settings measured; {search.stopped or 'not stopped'}"
    )


def write_knobs(directory: Path, record: KnobRecord) -> Path:
    return write_record(directory / KNOBS_FILE, record)


def print_knob_searches(records: Mapping[Path, KnobRecord], root: Path, console: Console) -> None:
    """Prints what each search over knobs found, by its directory at or below `root`."""
    for heading, lines in told_searches(records, root):
        console.print(f"\n{heading}", style="bold")
        print_lines(lines, console)


def told_searches(records: Mapping[Path, KnobRecord], root: Path) -> list[tuple[str, list[str]]]:
    """Returns a heading and lines for each search over knobs."""
    found = []
    for directory, record in records.items():
        where = f" in {directory.relative_to(root).as_posix()}" if directory != root else ""
        found.append((f"The search over knobs{where}", knob_lines(record)))
    return found


def knob_lines(record: KnobRecord) -> list[str]:
    """Returns the answers, and what they rest on."""
    reused = f", {record.reused} of them measured before" if record.reused else ""
    lines = [line for search in record.searches for line in _search_lines(search)]
    return [*lines, f"{record.points} points{reused} in {as_duration(record.elapsed_s)}"]


def headline(search: KnobSearch) -> str:
    """Returns the answer in a sentence."""
    if search.time_us is None or search.baseline_us is None:
        return f"no answer: {search.dropped or search.stopped}"
    if not search.best:
        early = f" in what was measured until {search.stopped}" if search.stopped else ""
        return f"nothing is faster than the baseline{early}, {as_us(search.time_us)} us: keep it"
    assert search.gain
    over_none = f", {_gain_in_words(search.over_none)} than the same without overlap" if search.over_none else ""
    times = f"{as_us(search.time_us)} us instead of {as_us(search.baseline_us)}"
    what = f"{times}, {_gain_in_words(search.gain)} than the baseline{over_none}"
    return what if search.proven else f"{what}; NOT PROVEN: no points were left to measure it again"


def pasted(search: KnobSearch) -> str:
    """Returns the command that runs the best setting."""
    overrides = dict(override.partition("=")[::2] for override in search.overrides)
    changed = {**overrides, **search.best}
    return shlex.join(["python", "launch.py", *(f"{key}={value}" for key, value in changed.items())])


def _search_lines(search: KnobSearch) -> list[str]:
    lines = [f"{search.label}: {headline(search)}"]
    if search.time_us is not None:
        lines += [f"  {pasted(search)}"] if search.best else []
        lines += [f"  {line}" for line in _contribution_lines(search.contributions)]
        lines.append(f"  {search.settings} of {search.grid} settings measured, in {search.points} points")
    if search.stopped and search.time_us is not None:
        lines.append(f"  Stopped early: {search.stopped}; there may be something faster.")
    if search.by_time:
        lines.append(
            "  What was measured beside the settings differs between them: compared by their times as they are."
        )
    if search.host_bound:
        lines.append(f"  In {search.host_bound} of the points the host, not the device, is what takes so long.")
    lines += [f"  {note}" for note in search.notes]
    lines += [f"  refused {count} times: {reason}" for reason, count in search.refused.items()]
    lines += [f"  {key} was not searched: {reason}" for key, reason in search.left_out.items()]
    if search.tried and search.never_tried:
        values = (f"{key}={','.join(missing)}" for key, missing in search.never_tried.items())
        lines.append(f"  never tried: {' '.join(values)}")
    return lines


def _contribution_lines(contributions: Sequence[Contribution]) -> list[str]:
    if not contributions:
        return []
    rows = [("knob", "baseline", "best", "gains alone", "gains in the best setting")]
    rows += [(c.key, c.baseline, c.value, _gain_share(c.alone), _gain_share(c.taken_away)) for c in contributions]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: tuple[str, ...]) -> str:
        cells = [
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(row) for row in rows]


def _gain_share(gain: Gain | None) -> str:
    if gain is None:
        return "not possible"
    return f"{100 * gain.share:+.1f} % ± {100 * gain.noise:.1f}" + ("" if gain.sure else " (noise)")


def _gain_in_words(gain: Gain) -> str:
    size = f"{100 * abs(gain.share):.1f} % (± {100 * gain.noise:.1f})"
    if not gain.sure:
        return f"no faster beyond the noise, {100 * gain.share:+.1f} % (± {100 * gain.noise:.1f}),"
    return f"{size} {'less' if gain.share > 0 else 'more'} time"
