"""Prints lines, tables and answers to a terminal of any width, or unwrapped and uncut to a pipe or file."""

import io
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment
from rich.text import Text

from overlap_sweep.program import end_unread
from overlap_sweep.report.numbers import counted, shortened, some_of, visible
from overlap_sweep.report.searches import Titled, knob_searches, pass_searches
from overlap_sweep.report.section import Analysis, Answer, Card, Exhibit, Section
from overlap_sweep.report.table import Column, Listing
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import launch_commands

R = TypeVar("R")

SUMMARY_FILE = "summary.txt"
UNBOUNDED = 10_000
"""Width of a pipe or file, in columns."""
GAP = 2
"""Columns between two cells."""
NARROWEST_NAME = 20
"""Shortest length to which a name in the last column is cut, in columns."""


class _Visible:
    """A renderable with control characters in its text escaped; rich's own control codes are separate from the text."""

    def __init__(self, shown: ConsoleRenderable) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self._shown, options):
            yield Segment(text if control else visible(text), style, control)


class _Escaping(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Visible(shown) for shown in renderables]


def console_for(stream: IO[str]) -> Console:
    """Returns a console that does not cut lines in a pipe or file and does not interpret markup."""
    width = None if stream.isatty() else UNBOUNDED
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=width is not None)
    console.push_render_hook(_Escaping())
    # rich's own would end with status 1.
    console.on_broken_pipe = end_unread  # type: ignore[method-assign]
    return console


def print_lines(lines: Iterable[str], console: Console, indent: int = 2, hanging: int = 2) -> None:
    """Prints each line indented by `indent` columns; wrapped lines are indented further by `hanging`."""
    for line in lines:
        if console.soft_wrap:
            console.print(" " * indent + line)
            continue
        wrapped = textwrap.wrap(
            visible(line),
            console.width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hanging),
            break_on_hyphens=False,
        )
        console.print("\n".join(wrapped))


def print_table(
    title: str,
    columns: Sequence[Column[R]],
    rows: Sequence[R],
    console: Console,
    *,
    style: Callable[[R], str] = lambda row: "",
    group: Callable[[R], object] = lambda row: None,
    cut_last: bool = False,
) -> None:
    """Prints the columns that have a header. A blank line separates groups of rows, as by `group`.

    On a narrow terminal columns that may be dropped are dropped first, and the last one is shortened if it may be cut;
    if that does not help, each row becomes lines of text.
    """
    if title:
        console.print(f"\n{title}", style="bold")
    shown = [(column, [column.header, *map(column.text, rows)]) for column in columns if column.header]
    for turn in sorted({0, *(column.dropped for column, _ in shown)}):
        kept = [(column, texts) for column, texts in shown if not 0 < column.dropped <= turn]
        widths = [max(map(cell_len, texts)) for _, texts in kept]
        room = console.width - sum(width + GAP for width in widths[:-1])
        if room >= widths[-1] or (cut_last and room >= NARROWEST_NAME):
            break
    else:
        _print_stacked([column for column, _ in shown], rows, console)
        return
    # Laid out here, because rich would measure each cell of thousands of rows.
    widths[-1] = min(widths[-1], room)
    cells = []
    for (column, texts), width in zip(kept, widths, strict=True):
        cut = [shortened(text, width) if len(text) > width else text for text in texts]
        gaps = [" " * (width - cell_len(text)) for text in cut]
        cells.append([gap + text if column.is_number else text + gap for text, gap in zip(cut, gaps, strict=True)])
    header, *body = ((" " * GAP).join(line).rstrip() for line in zip(*cells, strict=True))
    rule = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * (sum(widths) + GAP * (len(widths) - 1))
    styled = [(header, "bold"), (rule, "")]
    for i, (line, row) in enumerate(zip(body, rows, strict=True)):
        ends_group = i + 1 < len(rows) and group(rows[i + 1]) != group(row)
        styled.append((line + "\n" * ends_group, style(row)))
    console.print()
    for look, lines in groupby(styled, key=lambda one: one[1]):
        console.print(Text("\n".join(text for text, _ in lines), look), soft_wrap=True)
    if dropped := sorted((column for column, _ in shown if 0 < column.dropped <= turn), key=lambda one: -one.dropped):
        names = ", ".join(column.header.strip() for column in dropped)
        print_lines([f"Hidden columns: {names}. A wider terminal shows them."], console, indent=0)


def _print_stacked(columns: Sequence[Column[R]], rows: Sequence[R], console: Console) -> None:
    for row in rows:
        texts = [column.text(row) for column in columns if column.kind == "text" and column.header != "note"]
        notes = [column.text(row) for column in columns if column.header == "note"]
        note = f" ({notes[0]})" if any(notes) else ""
        print_lines([f"{', '.join(filter(None, texts))}{note}"], console)
        named = [(column.header.strip(), column.text(row)) for column in columns if column.kind != "text"]
        print_lines([", ".join(f"{header} {text}" for header, text in named if text)], console, indent=4)


def summary_text(analysis: Analysis) -> str:
    stream, reading = io.StringIO(), analysis.sources.reading
    console = console_for(stream)
    print_answers(analysis, console, whole=True)
    details = ((f"Details of {answer.title}", answer.details) for answer in analysis.answers if answer.details)
    print_titled(details, console)
    print_titled(pass_searches(analysis.sources.records, reading.root), console)
    if commands := launch_commands(reading.points):
        print_titled([("Commands", commands)], console)
    return stream.getvalue()


def print_answers(analysis: Analysis, console: Console, whole: bool = False) -> None:
    """Prints each workload's answers, then the points that are not ok; `whole`: all tables with all rows."""
    reading = analysis.sources.reading
    print_titled(knob_searches(analysis.sources.records.knobs, reading.root), console)
    for section in analysis.sections:
        print_section(section, console, whole)
    counts = {name: count for name, count in analysis.counts.items() if count}
    points = counts.pop("points")
    by_status = ", ".join(f"{count} {name}" for name, count in counts.items())
    console.print(f"\n{counted(points, 'point')}: {by_status}")
    _print_not_ok(reading.points, console)


def print_headlines(analysis: Analysis, console: Console) -> None:
    """Prints the headline of each answer, then the lines to copy."""
    for answer in analysis.answers:
        console.print(f"\n{answer.title}", style="bold")
        print_lines(answer.sentences if answer.cards else [], console)
        for card in answer.shown_cards:
            title = f"{card.title}: " if answer.cards else ""
            print_lines([f"{title}{card.headline}{f', {card.file}' if card.file else ''}"], console)
    print_uses(analysis, console)


def print_uses(analysis: Analysis, console: Console) -> None:
    """Prints what to give to the program that is to run with each answer, to be copied."""
    for card in (card for answer in analysis.answers for card in answer.shown_cards if card.use):
        console.print(f"\n{card.title}, to copy:", style="bold")
        print_lines([card.limits] if card.limits else [], console)
        print_lines(card.use, console)


def print_written(paths: Sequence[Path], console: Console, sections: Sequence[Section] = ()) -> None:
    """Prints the directory, then the names of the files; for files of one kind their number."""
    root = paths[0].parent
    kind_of = {file.name: file.kind for section in sections for file in section.files if file.kind}
    names = [str(path.relative_to(root)) for path in paths if path.parent == root or path.name not in kind_of]
    kinds = Counter(kind_of[path.name] for path in paths if path.parent != root and path.name in kind_of)
    names += [f"{kind} of {number} run directories" for kind, number in kinds.items()]
    console.print(f"\nWritten to {root}: {', '.join(names)}")


def print_titled(found: Titled, console: Console) -> None:
    for heading, lines in found:
        console.print(f"\n{heading}", style="bold")
        print_lines(lines, console)


def _print_not_ok(points: Sequence[Point], console: Console) -> None:
    reasons: dict[tuple[str, str], list[str]] = {}
    for point in points:
        if point.status != "ok":
            reasons.setdefault((point.status, point.why_not_ok), []).append(point.name)
    for (status, reason), names in reasons.items():
        print_lines([f"{status}: {some_of(names, 1)}: {reason}"], console)


def print_section(section: Section, console: Console, whole: bool = False) -> None:
    """Prints the summary of all answers, then each answer with its table; of very many answers only the cautions.
    `whole`: all answers with all rows."""
    if section.summary:
        print_listing(section.summary, console, section.file, whole, section.summary.caption)
    if not whole and section.most_tables is not None and len(section.answers) > section.most_tables:
        print_lines(_cautions_of_all(section.answers), console, indent=0)
        where = "summary.txt and report.html have the reasons and all compared settings."
        print_lines([where], console, indent=0)
        return
    for answer in section.answers:
        print_answer(answer, console, section.file, whole)
    for exhibit in section.more:
        print_exhibit(exhibit, console, whole)


def _cautions_of_all(answers: Sequence[Answer]) -> list[str]:
    found: dict[str, list[str]] = {}
    for answer in answers:
        for caution in answer.cautions:
            found.setdefault(caution, []).append(answer.brief)
    return [f"{some_of(briefs, separator='; ')}: {caution}" for caution, briefs in found.items()]


def print_answer(answer: Answer, console: Console, file: str, whole: bool = False) -> None:
    """Prints the answer, then the compared settings, then the cautions."""
    console.print(f"\n{answer.title}", style="bold")
    print_lines(answer.sentences, console)
    print_lines(filter(None, [answer.later() if answer.later else ""]), console)
    for card in answer.cards:
        _print_card(card, console)
    print_listing(answer.compared, console, file, whole)
    print_lines([answer.legend] if answer.legend else [], console, indent=0)
    for exhibit in answer.more:
        print_exhibit(exhibit, console, whole)
    if answer.more and answer.cautions:
        console.print()
    print_lines(answer.cautions, console, indent=0)


def _print_card(card: Card, console: Console) -> None:
    where = f": {card.file}" if card.file else ""
    print_lines([f"{card.title}: {card.headline}{where}"], console)
    print_lines([*card.sentences, *card.basis], console, indent=4)
    if card.to_set:
        print_lines(["What to set:"], console, indent=4)
        print_lines(card.to_set, console, indent=6)


def print_exhibit(exhibit: Exhibit, console: Console, whole: bool) -> None:
    """Prints the exhibit's table and notes, if it has any; charts are only on the page."""
    if not (exhibit.listing or exhibit.notes):
        return
    if exhibit.heading:
        console.print(f"\n{exhibit.heading}", style="bold")
    if exhibit.listing:
        print_listing(exhibit.listing, console, "report.html", whole)
    print_lines([*([exhibit.explained] if exhibit.explained else []), *exhibit.notes], console, indent=0)


def print_listing(listing: Listing[R], console: Console, file: str, whole: bool = False, title: str = "") -> None:
    """Prints the rows below their headers; one below the other where the terminal is too narrow. Of more than
    `most_rows` only the first, the chosen and the reference, unless `whole`; `file` has all."""
    most = None if whole else listing.most_rows
    rows = [
        row
        for i, row in enumerate(listing.rows)
        if most is None or i < most or listing.chosen(row) or listing.reference(row)
    ]
    if not rows:
        return

    def style(row: R) -> str:
        return "green" if listing.chosen(row) else "dim" if listing.faint(row) else ""

    columns = [column for column in listing.columns if not column.page_only]
    print_table(title, columns, rows, console, style=style, group=listing.group)
    if len(rows) < len(listing.rows):
        print_lines([f"... and {len(listing.rows) - len(rows)} more, all in {file}"], console, indent=0)
