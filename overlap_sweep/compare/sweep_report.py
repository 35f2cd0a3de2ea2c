"""Shows and writes comparisons of sweeps: matching points, what is faster or slower, and what else changed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from overlap_sweep.compare.sweeps import Aggregate, Match, SlotChange, SweepComparison, compare_sweeps, read_dataset
from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE
from overlap_sweep.report.charts import TICK, Axis, Dot, Reference, Row, Rows
from overlap_sweep.report.charts import Key as LegendKey
from overlap_sweep.report.comparison import (
    Change,
    Chart,
    Comparison,
    Times,
    by_label,
    mean_change,
    ratio_column,
    ratios_file,
    verdict_style,
)
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.numbers import as_percent, counted, some_of
from overlap_sweep.report.table import Column, Listing, Table, attribute, through
from overlap_sweep.results.comparable import Key
from overlap_sweep.results.provenance import describe_machine, launch_commands, machines, measured_when
from overlap_sweep.results.verdict import MARGIN, mean_ratio

R = TypeVar("R", Aggregate, Match, SlotChange)

MACHINE_CHANGE = 0.01
"""Change of the baselines from which the machine is said to have changed."""
FEW_POINTS = 15
COLOURS = {"faster": "good", "slower": "bad", "same": "wait", "unknown": "wait"}

_KEY: tuple[Column[Key], ...] = (
    attribute("model", kind="text", header="model", differing=True),
    attribute("tokens", kind="count", header="tokens", differing=True),
    attribute("precision", kind="text", header="precision", differing=True),
    attribute("backend", kind="text", header="backend", differing=True),
    attribute("device", kind="text", header="device", differing=True),
    Column("process_wide", lambda key: key.process_wide or None, kind="text", header="process", differing=True),
    attribute("tp_size", kind="count", header="TP"),
    attribute("operator", kind="text", header="operator"),
    attribute("pass", read="pass_name", kind="text", header="pass"),
)
_MATCH_KEY: tuple[Column, ...] = tuple(through(column, lambda match: match.ours.key) for column in _KEY)
RATIO: Column = ratio_column("ratio", lambda match: match.ratio, "ratio")
_TIMES: tuple[Column, ...] = (
    attribute("dataset", kind="text"),
    attribute("reference", kind="text"),
    attribute("reference_time_us", read="theirs.time.time_us", header="reference us"),
    attribute("reference_noise_us", read="theirs.time.noise_us"),
    attribute("time_us", read="ours.time.time_us", header="time us"),
    attribute("noise_us", read="ours.time.noise_us"),
    RATIO,
    attribute("verdict", kind="text", header="verdict"),
    attribute("reference_hidden_fraction", read="theirs.hidden_fraction"),
    attribute("hidden_fraction", read="ours.hidden_fraction", header="hidden", show=as_percent, dropped=3),
    attribute("reference_none_us", read="theirs.none_us"),
    attribute("none_us", read="ours.none_us"),
    ratio_column("none_ratio", lambda match: match.none_ratio, "none", dropped=2),
    attribute("reference_floor_us", read="theirs.floor_us"),
    attribute("floor_us", read="ours.floor_us"),
    ratio_column("floor_ratio", lambda match: match.floor_ratio, "floor", dropped=1),
)
"""The times of a slot are those of its whole pass."""

POINTS: Table[Match] = Table(
    "points",
    "one row per matching point and dataset",
    (
        *_MATCH_KEY,
        attribute("setting", read="ours.key.setting", kind="text", header="setting"),
        attribute(
            "reference_setting",
            kind="text",
            read="theirs.key.setting",
            header="reference setting",
            words=lambda match: "" if match.ours.key.setting == match.theirs.key.setting else match.theirs.key.setting,
        ),
        *_TIMES,
        Column("measurements", lambda match: len(match.ours.points), kind="count"),
        Column("reference_measurements", lambda match: len(match.theirs.points), kind="count"),
    ),
)
SLOTS: Table[SlotChange] = Table(
    "slots",
    "one row per slot and dataset: the best setting of each",
    (
        *_MATCH_KEY,
        attribute("slot", kind="text", header="slot"),
        attribute("reference_setting", kind="text", header="best in reference"),
        attribute("setting", kind="text", header="best"),
        *_TIMES,
    ),
)
AGGREGATES: Table[Aggregate] = Table(
    "aggregates",
    "one row per dataset and pass, and one over all passes: geometric means",
    (
        attribute("dataset", kind="text"),
        *(through(column, lambda one: one.key) for column in _KEY),
        Column("faster", lambda one: one.counts["faster"], kind="count", header="faster"),
        Column("slower", lambda one: one.counts["slower"], kind="count", header="slower"),
        Column("same", lambda one: one.counts["same"], kind="count", header="same"),
        RATIO,
        ratio_column("best_ratio", lambda one: one.best_ratio, "best"),
        ratio_column("none_ratio", lambda one: mean_ratio(match.none_ratio for match in one.matches), "none"),
        ratio_column("floor_ratio", lambda one: mean_ratio(match.floor_ratio for match in one.matches), "floor"),
    ),
)


def compare(operands: Sequence[tuple[str, Path]], reference: str, by: str | None) -> Comparison:
    """Compares directories with results, given with their labels. UserError where nothing matches. Rows are points, or
    slots with by="slot"; tables have the points that changed most, with by="point" all of them."""
    compared = compare_sweeps([read_dataset(*operand) for operand in operands], reference)
    by_slot = by == "slot"
    return Comparison(
        table=SLOTS if by_slot else POINTS,
        rows=compared.slots if by_slot else compared.matches,
        show=lambda console: _print(compared, console, by),
        summary=lambda: _summary(compared),
        charts=lambda: [
            Chart(ratios_file(label, compared.candidates), [_ratio_dots(compared, label)])
            for label in compared.candidates
            if _of(compared.matches, label)
        ],
        problems=[problem for dataset in compared.datasets for problem in dataset.problems],
        headlines=[_headline(compared, label) for label in compared.candidates],
    )


def _summary(compared: SweepComparison) -> dict[str, object]:
    return {
        "kind": "sweeps",
        "reference": compared.reference,
        "datasets": {
            dataset.label: {
                "path": str(dataset.path),
                "points": len(dataset.points),
                **dataset.counts(),
                "proofs": dataset.found.proofs,
                "commands": launch_commands(dataset.points),
            }
            for dataset in compared.datasets
        },
        "compared": compared.compared,
        "aggregates": AGGREGATES.records(compared.aggregates),
        "environment": compared.environment,
        "configuration": compared.configuration,
        "unmatched": [found._asdict() for found in compared.unmatched],
    }


def _print(compared: SweepComparison, console: Console, by: str | None) -> None:
    """Prints the datasets, then all tables of each dataset, then unmatched points; with by="slot" only the slots."""
    if by != "slot":
        console.print()
        _print_datasets(compared, console)
    for label in compared.candidates:
        console.print(f"\n{label} against {compared.reference}", style="bold")
        slots, matches = _of(compared.slots, label), _of(compared.matches, label)
        if by != "slot":
            _print_rows(
                "Geometric mean per pass, and over all passes in the last row",
                AGGREGATES,
                _of(compared.aggregates, label),
                console,
            )
        _print_rows("Best setting per slot", SLOTS, slots, console)
        if by == "slot":
            continue
        most = len(matches) if by == "point" else FEW_POINTS
        if len(matches) > most:
            matches.sort(key=lambda match: (match.verdict == "same", -abs(math.log(match.ratio))))
        _print_rows("Matching points", POINTS, matches[:most], console)
        if len(matches) > most:
            print_lines([f"... and {len(matches) - most} more that changed less; --by point prints all"], console)
    for one in compared.unmatched if by != "slot" else ():
        points = f"{len(one.points)} in {one.only_in} but not in {one.missing_in}"
        print_lines([f"{points}: {some_of(one.points)}"], console)
    legend = (
        f"\nratio: time / {compared.reference}'s time, below 1 is faster. same: within the noise of both, or within"
    )
    rest = "unknown: too few runs to tell. none, floor: ratios of the none times and of the floor times."
    console.print(f"{legend} {MARGIN:.1%}; {rest}")


def _print_datasets(compared: SweepComparison, console: Console) -> None:
    for dataset in compared.datasets:
        counts = ", ".join(f"{count} {name}" for name, count in dataset.counts().items())
        machine = describe_machine(machines(dataset.points)[0])
        points = f"{counted(len(dataset.points), 'point')} ({counts}), measured {measured_when(dataset.points)}"
        proofs = (f"{dataset.label} {proof}" for proof in dataset.found.proofs)
        print_lines([f"{dataset.label}: {dataset.path}, {points} on {machine}", *proofs], console, indent=0)
    differences = {"Compared": compared.compared, "Environment": compared.environment}
    for title, found in (differences | {"Configuration": compared.configuration}).items():
        if found:
            console.print(f"{title}:")
            print_lines((f"{name}: {by_label(values)}" for name, values in found.items()), console)


def _print_rows(title: str, table: Table[R], rows: Sequence[R], console: Console) -> None:
    if rows:
        # The row over all passes has no value in the columns that distinguish passes.
        columns = Listing(table, [row for row in rows if not isinstance(row, Aggregate) or row.key]).columns
        print_table(title, columns, rows, console, style=lambda row: verdict_style(getattr(row, "verdict", None)))


def _of(found: Sequence[R], label: str) -> list[R]:
    return [one for one in found if one.dataset == label]


def _ratio_dots(compared: SweepComparison, label: str) -> Rows:
    """Returns a row for each pass of an operator: a dot for each matching point, and a tick for their mean."""
    rows = []
    for one in _of(compared.aggregates, label):
        dots = [Dot(match.ratio, colour=COLOURS[match.verdict]) for match in one.matches if one.key]
        mean = Dot(one.ratio, colour="ink", shape=TICK)
        name = one.key.named(compared.case_fields) if one.key else "all"
        rows.append(Row(name=name, dots=[*dots, mean], cells=[f"{one.ratio:.3f}"]))
    return Rows(
        title=f"{label} against {compared.reference}",
        subtitle="one dot per matching point; number: geometric mean",
        axis=Axis(f"time of {label} / time of {compared.reference} (left is faster)"),
        columns=["mean"],
        rows=rows,
        references=[Reference(f"{compared.reference} = 1", 1.0)],
        legend=[
            LegendKey("faster", "good", shape="circle"),
            LegendKey("slower", "bad", shape="circle"),
            LegendKey("same within the noise", "wait", shape="circle"),
            LegendKey("geometric mean", "ink", shape=TICK),
        ],
    )


def _headline(compared: SweepComparison, label: str) -> str:
    """Returns by how much a dataset is faster or slower than the reference, and if the machine changed, by how much
    relative to no overlap."""
    *passes, whole = _of(compared.aggregates, label)
    # The baselines show the machine, and count only where nothing else was measured.
    *shown, all_shown = (
        replace(one, matches=[m for m in one.matches if not _is_baseline(m)]) for one in (*passes, whole)
    )
    if not all_shown.matches:
        shown, all_shown = passes, whole
    change = _mean(shown, lambda match: (match.ours.time, match.theirs.time))
    if not change:
        return f"{label} and {compared.reference} have no points in common."
    counts = ", ".join(f"{count} {verdict}" for verdict, count in all_shown.counts.items() if count)
    number = len(all_shown.matches)
    mean = f" in the geometric mean of {number} points ({counts})" if number > 1 else ""
    return " ".join([f"{change.in_words(label, compared.reference)}{mean}.", *_machine(compared, label, passes)])


def _machine(compared: SweepComparison, label: str, passes: Sequence[Aggregate]) -> list[str]:
    """Returns that the machine changed, if the times without overlap and those without communication moved alike: no
    setting of an overlap changes either. Empty where the two differ in what was measured."""
    none = _mean(passes, lambda match: _with_noise_of(match, match.ours.none_us, match.theirs.none_us))
    floor = _mean(passes, lambda match: _with_noise_of(match, match.ours.floor_us, match.theirs.floor_us))
    if compared.compared or not none or not floor or not _moved_alike(none, floor):
        return []
    floor_change = f"the same GEMMs without communication {abs(floor.ratio - 1):.1%}"
    changed = f"The machine changed: no overlap is {abs(none.ratio - 1):.1%} {none.word}, and {floor_change}."
    relative = _mean(passes, _relative_to_none)
    words = relative and f"Relative to no overlap, {relative.in_words(label, compared.reference)}."
    return [changed, *([words] if words else [])]


def _moved_alike(none: Change, floor: Change) -> bool:
    moved = [math.log(change.ratio) for change in (none, floor)]
    notable = all(change.differs for change in (none, floor)) and min(map(abs, moved)) > MACHINE_CHANGE
    return notable and moved[0] * moved[1] > 0 and abs(moved[0] - moved[1]) < min(map(abs, moved)) / 2


def _mean(passes: Sequence[Aggregate], times: Callable[[Match], Times | None]) -> Change | None:
    """Returns the mean change over the matches that have such times; None if none has."""
    found = [[known for match in one.matches if (known := times(match))] for one in passes]
    return mean_change(found) if any(found) else None


def _with_noise_of(match: Match, ours_us: float | None, theirs_us: float | None) -> Times | None:
    """Returns baselines' times, with the noise of those next to which they were measured: as shares they are alike."""
    if not ours_us or not theirs_us:
        return None
    ours, theirs = match.ours.time, match.theirs.time
    return ours.relative_to(ours.time_us / ours_us), theirs.relative_to(theirs.time_us / theirs_us)


def _is_baseline(match: Match) -> bool:
    return match.ours.key.setting in (NONE, FLOOR)


def _relative_to_none(match: Match) -> Times | None:
    ours, theirs = match.ours, match.theirs
    if not ours.none_us or not theirs.none_us or _is_baseline(match):
        return None
    return ours.time.relative_to(ours.none_us), theirs.time.relative_to(theirs.none_us)
