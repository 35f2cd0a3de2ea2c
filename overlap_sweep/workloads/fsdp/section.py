"""Training steps for people: the best setting, what each knob contributed, and the table that this comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console

from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_count, as_loss, as_ms
from overlap_sweep.report.plain_table import PlainRow, print_table
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import environments
from overlap_sweep.workloads.fsdp.answer import TrainingAnalysis, TrainingRow, analyse_training
from overlap_sweep.workloads.fsdp.knob_effects import KnobContribution, KnobEffect, KnobEffects, contributed
from overlap_sweep.workloads.fsdp.knobs import TRAINS_DIFFERENTLY
from overlap_sweep.workloads.fsdp.warnings import warnings

MOST_ROWS = 40
"""On a terminal; training.csv has all."""
LEFT = ("setting", "note", "knob", "change")
OPTIONAL = ("loss", "tokens/s", "host ms", "memory GB", "noise ms", "exposed ms")
"""What a narrow terminal does without, the first of them first."""
OPTIONAL_OF_KNOBS = ("range", "note", "beside the best")
FILE = "training.csv"


def print_training(points: Iterable[Point], console: Console) -> None:
    """Those among them that are training runs."""
    print_analyses(analyse_training(points), console)


def print_analyses(analyses: Sequence[TrainingAnalysis], console: Console, most_rows: int | None = MOST_ROWS) -> None:
    """The answer of each case first, then its settings, its knobs, and what to know before believing it."""
    for analysis in analyses:
        console.print(f"\n{title(analysis)}", style="bold")
        print_lines(answers(analysis), console)
        _print_settings(analysis, console, most_rows)
        _print_knobs(analysis, console, most_rows)
        if notes := cautions(analysis):
            console.print()
            print_lines(notes, console, indent=0)


def title(analysis: TrainingAnalysis) -> str:
    """What was measured, and on what."""
    return f"Training {analysis.case}, {as_count(analysis.parameters)} parameters"


def answers(analysis: TrainingAnalysis) -> list[str]:
    """The best setting, what it gains, and what to type for it."""
    best, reference = analysis.best, analysis.reference
    gains = f"{best.samples_per_s:,.0f} samples/s"
    if best is not reference:
        instead = f"{best.samples_per_s:,.0f} instead of {reference.samples_per_s:,.0f} with {reference.setting}"
        gains = f"{analysis.gain:+.1%} samples/s ({instead})"
    only = len(analysis.rows) == 1
    lines = [
        f"{'measured' if only else 'best'}: {best.setting}, {gains}; {as_ms(best.time_us)} ms a step, "
        f"{best.speedup:.2f}x none, hidden {best.hidden_in_words}{'' if only else f'; {analysis.reason}'}"
    ]
    if analysis.overrides:
        lines.append(f"to set: {analysis.overrides}")
    if analysis.shared:
        lines.append(f"all with: {analysis.shared}")
    return lines


def cautions(analysis: TrainingAnalysis) -> list[str]:
    """A sentence each."""
    lines = warnings(analysis)
    if len(environments(analysis.points)) > 1:
        lines.append("The points were measured in different environments; see tuning_report.json.")
    return lines


def note(row: TrainingRow, analysis: TrainingAnalysis) -> str:
    """What tells a row from those that are simply slower."""
    notes = [
        *([_best(analysis)] if row is analysis.best and len(analysis.rows) > 1 else []),
        *(["diverges"] if row.loss is None else []),
        *(["launch-bound"] if row.host_limits else []),
        *(["baseline launch-bound"] if row.host_limits_beside and not row.host_limits else []),
        *([f"compiled by {row.compiled}"] if not row.compiled.startswith("no") else []),
        *(["not compiled"] if row.compiled.startswith("no:") else []),
        *([f"{len(row.points)} points"] if len(row.points) > 1 else []),
    ]
    return ", ".join(notes)


def _best(analysis: TrainingAnalysis) -> str:
    return "best, proven" if analysis.settled and analysis.best is not analysis.reference else "best"


def cells(row: TrainingRow, analysis: TrainingAnalysis) -> dict[str, str]:
    """By header; an empty cell is unknown."""
    return {
        "setting": row.setting,
        "step ms": as_ms(row.time_us),
        "noise ms": as_ms(row.step.noise_us),
        "none ms": as_ms(row.none_us),
        "floor ms": as_ms(row.floor_us),
        "exposed ms": as_ms(row.exposed_us),
        "hidden": row.hidden_in_words,
        "speedup": f"{row.speedup:.2f}x",
        "samples/s": f"{row.samples_per_s:,.0f}",
        "tokens/s": f"{row.tokens_per_s:,.0f}",
        "host ms": "" if row.host_us is None else as_ms(row.host_us),
        "memory GB": "" if row.peak_memory_gb is None else f"{row.peak_memory_gb:.1f}",
        "loss": "-" if row.loss is None else as_loss(row.loss),
        "note": note(row, analysis),
    }


def knob_cells(contribution: KnobContribution) -> dict[str, str]:
    """One change of one knob, by header: of the time that a sample takes."""
    low, high = contribution.range
    several = len(contribution.effects) > 1
    return {
        "knob": contribution.name,
        "change": contribution.what,
        "pairs": str(len(contribution.effects)),
        "time": _as_change(contribution.change, contribution.sure),
        "noise": f"{contribution.noise:.1%}",
        "range": f"{low:+.1%} to {high:+.1%}" if several else "",
        "beside the best": _as_effect(contribution.beside_best),
        "note": ", ".join(_knob_notes(contribution)),
    }


def _knob_notes(contribution: KnobContribution) -> Iterator[str]:
    if contribution.beside_best:
        yield "taken" if contribution.taken else "left"
    if contribution.knob in TRAINS_DIFFERENTLY:
        yield "changes the training"


def _as_effect(effect: KnobEffect | None) -> str:
    if effect is None:
        return ""
    return _as_change(effect.change, effect.differs)


def _as_change(change: float, sure: bool) -> str:
    return f"{change:+.1%}" if sure else f"{change:+.1%} (noise)"


def knob_notes(effects: KnobEffects) -> list[str]:
    """What the knobs' table does not have, a sentence each."""
    lines = []
    if effects.left_out:
        also = f"; {', '.join(effects.only_left_out)} changed in no other" if effects.only_left_out else ""
        lines.append(
            f"{effects.left_out} pair{'s' if effects.left_out > 1 else ''} left out, one side of which is launch-bound "
            f"or diverges{also}."
        )
    if effects.never_alone:
        lines.append(f"Never changed alone, so what they contributed is not known: {', '.join(effects.never_alone)}.")
    return lines


LEGEND = (
    "none: the same step with every collective alone on the device; floor: without communication; exposed: what "
    "communication adds to the step; hidden is (none - step) / (none - floor) by rounds, - where it is all noise."
)
KNOB_LEGEND = (
    "Of the time that a sample takes, the median of all pairs of settings that differ in this knob alone; beside the "
    "best: that pair with all other knobs as there, which flatters what is taken, as the best was chosen for its time."
)


def _print_settings(analysis: TrainingAnalysis, console: Console, most_rows: int | None) -> None:
    shown = _shown(analysis, most_rows)
    rows = [(row, cells(row, analysis)) for row in shown]
    headers = [header for header in rows[0][1] if any(of_row[header] for _, of_row in rows)]
    table = [
        PlainRow([of_row[header] for header in headers], "green" if row is analysis.best else "")
        for row, of_row in rows
    ]
    if not print_table(headers, table, LEFT, console, OPTIONAL):
        for row, of_row in rows:
            _print_stacked(row, of_row, console)
    if len(shown) < len(analysis.rows):
        print_lines([f"... and {len(analysis.rows) - len(shown)} more, all in {FILE}"], console, indent=0)
    print_lines([f"{LEGEND} {analysis.how_timed}"], console, indent=0)


def _shown(analysis: TrainingAnalysis, most_rows: int | None) -> list[TrainingRow]:
    """The fastest, and what they are told against."""
    if most_rows is None or len(analysis.rows) <= most_rows:
        return analysis.rows
    told = (analysis.best, analysis.reference)
    return [row for i, row in enumerate(analysis.rows) if i < most_rows or row in told]


def _print_stacked(row: TrainingRow, of_row: dict[str, str], console: Console) -> None:
    told = f" ({of_row['note']})" if of_row["note"] else ""
    print_lines([f"{row.setting}{told}: {of_row['step ms']} ms, noise {of_row['noise ms']}"], console)
    others = [f"none {of_row['none ms']} ms", f"floor {of_row['floor ms']} ms", f"hidden {of_row['hidden']}"]
    others += [f"{of_row['speedup']} none", f"{of_row['samples/s']} samples/s"]
    print_lines([", ".join(others)], console, indent=4)


def _print_knobs(analysis: TrainingAnalysis, console: Console, most_rows: int | None) -> None:
    effects = contributed(analysis)
    contributions = effects.contributions
    if not contributions:
        print_lines(knob_notes(effects), console, indent=0)
        return
    shown = contributions if most_rows is None else contributions[:most_rows]
    rows = [(contribution, knob_cells(contribution)) for contribution in shown]
    headers = [header for header in rows[0][1] if any(of_row[header] for _, of_row in rows)]
    table = [
        PlainRow([of_row[header] for header in headers], "green" if one.taken and one.beside_best else "")
        for one, of_row in rows
    ]
    console.print("\nWhat each knob contributed", style="bold")
    if not print_table(headers, table, LEFT, console, OPTIONAL_OF_KNOBS):
        for _, of_row in rows:
            beside = f", beside the best {of_row['beside the best']}" if of_row["beside the best"] else ""
            pairs = f"noise {of_row['noise']}, pairs {of_row['pairs']}"
            print_lines([f"{of_row['knob']} {of_row['change']}: {of_row['time']}, {pairs}{beside}"], console)
    if len(shown) < len(contributions):
        print_lines([f"... and {len(contributions) - len(shown)} more"], console, indent=0)
    print_lines([KNOB_LEGEND, *knob_notes(effects)], console, indent=0)
