"""What a search did, for people: how much of the space it measured, why it stopped, and what it dropped."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.overlap import space
from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_duration, as_us
from overlap_sweep.results.records import PassSearch, SearchRecord


def print_searches(analysis: Analysis, console: Console) -> None:
    """For every search.json its searches, one line each, and their notes."""
    root, records = analysis.reading.root, analysis.records
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
