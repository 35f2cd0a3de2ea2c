"""Comparisons of sweeps as they are shown and written: what matched, what is faster and what slower, and what else
changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from overlap_sweep.compare.datasets import Dataset, read_dataset
from overlap_sweep.compare.sweeps import (
    Aggregate,
    Match,
    SlotChange,
    SweepComparison,
    Totals,
    compare_sweeps,
)
from overlap_sweep.report.charts import Axis, Dot, DotRow, Dots, Key, Level, Line, LinePoint, Lines, Reference
from overlap_sweep.report.charts import Column as CellColumn
from overlap_sweep.report.comparison import (
    Chart,
    Comparison,
    as_ratio,
    by_label,
    ratio_column,
    ratios_file,
    timeline_file,
    verdict_style,
)
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.numbers import as_percent, as_us, counted, some_of
from overlap_sweep.report.table import Column, Table, attribute
from overlap_sweep.results.comparable import Drift
from overlap_sweep.results.provenance import describe_machine, environments, launch_commands, measured_when
from overlap_sweep.results.verdict import MARGIN

R = TypeVar("R", Aggregate, Match, SlotChange)

FEW_POINTS = 15
NOTABLE_DRIFT = 0.02
COLOURS = {"faster": "good", "slower": "bad", "same": "wait"}


TP = attribute("tp_size", read="ours.key.tp_size", kind="count", header="TP")
RATIO: Column[Any] = ratio_column("ratio", lambda match: match.ratio, "ratio")
VERDICT = attribute("verdict", kind="text", header="verdict")
NONE_RATIO: Column[Any] = ratio_column("none_ratio", lambda match: match.none_ratio, "none", dropped=2)
FLOOR_RATIO: Column[Any] = ratio_column("floor_ratio", lambda match: match.floor_ratio, "floor", dropped=1)
_OF_KEY = (
    attribute("model", read="ours.key.model", kind="text"),
    attribute("tokens", read="ours.key.tokens", kind="count"),
    attribute("precision", read="ours.key.precision", kind="text"),
    attribute("backend", read="ours.key.backend", kind="text"),
    attribute("device", read="ours.key.device", kind="text"),
    TP,
    attribute("operator", read="ours.key.operator", kind="text"),
    attribute("pass", read="ours.key.pass_name", kind="text"),
)
_OF_TIMES = (
    attribute("dataset", kind="text"),
    attribute("reference", kind="text"),
    attribute("time_us", read="ours.time.time_us"),
    attribute("noise_us", read="ours.time.noise_us", about="Half-width of a 95 % interval."),
    attribute("reference_us", read="theirs.time.time_us"),
    attribute("reference_noise_us", read="theirs.time.noise_us"),
    *(RATIO, VERDICT),
    attribute("hidden_fraction", read="ours.hidden_fraction"),
    attribute("reference_hidden_fraction", read="theirs.hidden_fraction"),
    attribute("none_us", read="ours.none_us"),
    attribute("reference_none_us", read="theirs.none_us"),
    NONE_RATIO,
    attribute("floor_us", read="ours.floor_us"),
    attribute("reference_floor_us", read="theirs.floor_us"),
    FLOOR_RATIO,
)
"""Of a slot those of its whole pass."""

POINTS: Table[Match] = Table(
    "points",
    "one row per matching point and dataset",
    (
        *_OF_KEY,
        attribute("setting", read="ours.key.setting", kind="text"),
        attribute("reference_setting", read="theirs.key.setting", kind="text"),
        *_OF_TIMES,
        Column("measurements", lambda match: len(match.ours.points), kind="count"),
        Column("reference_measurements", lambda match: len(match.theirs.points), kind="count"),
    ),
)
REGRET: Column[SlotChange] = attribute(
    "regret",
    about="How much longer than the best reference_choice_us takes, as a fraction.",
    header="if kept",
    words=lambda slot: _regret(slot),
)
SLOTS: Table[SlotChange] = Table(
    "slots",
    "one row per slot and dataset: the best setting of each",
    (
        *_OF_KEY,
        Column("phase", lambda slot: slot.slot.partition("_")[2], kind="text"),
        attribute("slot", kind="text"),
        attribute("setting", kind="text"),
        attribute("reference_setting", kind="text"),
        attribute("changed", kind="flag"),
        *_OF_TIMES,
        attribute("reference_choice_us", about="The time in the dataset of what is best in the reference."),
        REGRET,
    ),
)
AGGREGATES: Table[Aggregate] = Table(
    "aggregates",
    "one row per dataset, case, TP size, operator and pass, and one of all together",
    (
        attribute("dataset", kind="text"),
        attribute("case", kind="text"),
        attribute("tp_size", header="TP", words=lambda one: str(one.tp_size or "all")),
        attribute("operator", kind="text"),
        attribute("pass", read="pass_name", kind="text", header="pass", words=lambda one: one.name),
        Column("points", lambda one: len(one.matches), kind="count"),
        Column("faster", lambda one: one.counts["faster"], kind="count", header="faster"),
        Column("slower", lambda one: one.counts["slower"], kind="count", header="slower"),
        Column("same", lambda one: one.counts["same"], kind="count", header="same", dropped=3),
        RATIO,
        ratio_column("best_ratio", lambda one: one.best_ratio, "best"),
        NONE_RATIO,
        FLOOR_RATIO,
    ),
)
TOTALS: Table[Totals] = Table(
    "totals",
    "one row per dataset, over the passes that all have",
    (
        attribute("", read="label", kind="text", header="dataset"),
        attribute("common_passes", kind="count"),
        attribute("best_us", header="best us", show=as_us),
        attribute("none_us", header="none us", show=as_us),
        attribute("floor_us", header="floor us", show=as_us),
        attribute("speedup", header="speedup", show="{:.2f}x".format),
        attribute("hidden_fraction", header="hidden", words=lambda one: as_percent(one.hidden_fraction)),
    ),
)


def compare(operands: Sequence[tuple[str, Path]], reference: str, by: str | None) -> Comparison:
    """Compares directories with results, given with their labels. UserError where nothing matches. Rows are points, or
    `by` slot; tables have the points that changed most, and `by` point all of them."""
    compared = compare_sweeps([read_dataset(*operand) for operand in operands], reference)
    by_slot = by == "slot"
    return Comparison(
        table=SLOTS if by_slot else POINTS,
        rows=compared.slots if by_slot else compared.matches,
        show=lambda console: _print_slots_only(compared, console) if by_slot else _print(compared, console, by),
        summary=lambda: _summary(compared),
        charts=lambda: _charts(compared),
        problems=compared.problems,
    )


def _summary(compared: SweepComparison) -> dict[str, Any]:
    """Each dataset's sums, how they relate, and what else changed."""
    base = next(totals for totals in compared.totals if totals.label == compared.reference)
    datasets = {
        dataset.label: {
            "path": str(dataset.path),
            "points": len(dataset.points),
            **dataset.counts(),
            **sums,
            "ratios": totals.over(base),
            "proofs": dataset.found.proofs,
        }
        for dataset, totals, sums in zip(
            compared.datasets, compared.totals, TOTALS.records(compared.totals), strict=True
        )
    }
    return {
        "kind": "sweeps",
        "reference": compared.reference,
        "datasets": datasets,
        "compared": compared.compared,
        "aggregates": AGGREGATES.records(compared.aggregates),
        "deviations": compared.deviations,
        "environment": compared.environment,
        "configuration": compared.configuration,
        "unmatched": [asdict(found) for found in compared.unmatched],
        "commands": {dataset.label: launch_commands(dataset.points) for dataset in compared.datasets},
    }


def _print(compared: SweepComparison, console: Console, by: str | None) -> None:
    """The answer first, then tables, then what was left out."""
    reference = compared.reference
    for label in compared.candidates:
        console.print(f"\n{label} against {reference}", style="bold")
        print_lines([_answer(_of(compared.aggregates, label)[-1])], console)
    print_lines([*compared.deviations, *_dataset_lines(compared.datasets)], console)
    for title, differences, several in (
        ("Compared", compared.compared, False),
        ("Environment", compared.environment, True),
        ("Configuration", compared.configuration, True),
    ):
        lines = [
            f"{name.removeprefix('packages.')}: {by_label(values, several)}" for name, values in differences.items()
        ]
        if lines:
            console.print(f"{title}:")
            print_lines(lines, console)
    if common := compared.totals[0].common_passes:
        base = next(totals for totals in compared.totals if totals.label == reference)
        passes = "pass that all have" if common == 1 else f"{common} passes that all have, sums"
        over: Column[Totals] = ratio_column("", lambda one: one.over(base)["best"], "ratio")
        print_table(f"The best of the {passes}", (*TOTALS.columns, over), compared.totals, console)
    for label in compared.candidates:
        title = f"{label} over {reference}, geometric means"
        print_table(title, AGGREGATES.columns, _of(compared.aggregates, label), console)
        _print_slots(_of(compared.slots, label), compared.telling, console)
        _print_points(_of(compared.matches, label), compared, by == "point", console)
    for one in compared.unmatched:
        print_lines(
            [f"{len(one.points)} only in {one.only_in}, not in {one.missing_in}: {some_of(one.points)}"], console
        )
    for dataset in compared.datasets:
        print_lines([f"{dataset.label} {proof}" for proof in dataset.found.proofs], console)
    console.print()
    notes = [
        f"ratio: time over {reference}'s, below 1 is faster; same: inside the noise of both, or within {MARGIN:.1%}.",
        "none and floor: the same ratio without overlap, and of the GEMMs alone: what the machine changed by itself.",
    ]
    print_lines(notes, console, indent=0)


def _print_slots_only(compared: SweepComparison, console: Console) -> None:
    for label in compared.candidates:
        console.print(f"\n{label} against {compared.reference}", style="bold")
        if slots := _of(compared.slots, label):
            _print_slots(slots, compared.telling, console)
        else:
            print_lines(["no slot of both was overlapped"], console)


def _of(found: Sequence[R], label: str) -> list[R]:
    return [one for one in found if one.dataset == label]


def _answer(whole: Aggregate) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in whole.counts.items() if count)
    ratios = {
        "ratio": whole.ratio,
        "best of each slot": whole.best_ratio,
        "no overlap": whole.none_ratio,
        "floor": whole.floor_ratio,
    }
    told = ", ".join(f"{name} {as_ratio(mean)}" for name, mean in ratios.items() if not math.isnan(mean))
    return f"{counted(len(whole.matches), 'matching point')}: {counts}. Geometric means: {told}"


def _dataset_lines(datasets: Sequence[Dataset]) -> list[str]:
    machines = [describe_machine(environments(dataset.points)[0]) for dataset in datasets]
    same = len(set(machines)) == 1
    lines = []
    for dataset, machine in zip(datasets, machines, strict=True):
        counts = ", ".join(f"{count} {name}" for name, count in dataset.counts().items())
        points = f"{counted(len(dataset.points), 'point')} ({counts})"
        on = "" if same else f" on {machine}"
        lines.append(f"{dataset.label}: {dataset.path}, {points}, measured {measured_when(dataset.points)}{on}")
    return [*lines, f"all on {machines[0]}"] if same else lines


def _print_slots(slots: Sequence[SlotChange], telling: Sequence[str], console: Console) -> None:
    if not slots:
        return
    ours, theirs = slots[0].dataset, slots[0].reference
    columns = (
        TP,
        Column("", lambda slot: f"{slot.ours.key.case(telling)} {slot.slot}".strip(), kind="text", header="slot"),
        Column("", _both_settings, kind="text", header=f"best in {theirs}, in {ours}"),
        *map(_once_a_pass, (RATIO, VERDICT, REGRET)),
    )
    print_table("The best of each slot", columns, slots, console, style=_style)
    if any(slot.changed for slot in slots):
        print_lines([f"{REGRET.header}: how much longer {theirs}'s choice takes in {ours}"], console, indent=0)


def _both_settings(slot: SlotChange) -> str:
    return f"{slot.reference_setting}, {slot.setting}" if slot.changed else f"{slot.setting}, the same"


def _once_a_pass(column: Column[SlotChange]) -> Column[SlotChange]:
    return replace(column, words=lambda slot: column.text(slot) if slot.first_of_pass else '"')


def _regret(slot: SlotChange) -> str:
    if slot.regret == 0:
        return "-"
    return "not measured" if math.isnan(slot.regret) else f"{slot.regret:+.1%}"


def _print_points(matches: Sequence[Match], compared: SweepComparison, all_points: bool, console: Console) -> None:
    if not matches:
        return
    ours, theirs = matches[0].dataset, matches[0].reference
    columns: tuple[Column[Match], ...] = (
        TP,
        Column("", lambda match: _point(match, compared), kind="text", header="point"),
        attribute("", read="theirs.time.time_us", header=f"{theirs} us", show=as_us),
        attribute("", read="ours.time.time_us", header=f"{ours} us", show=as_us),
        Column("", lambda match: as_us(_noise_us(match)), header="noise us", dropped=3),
        RATIO,
        VERDICT,
        Column("", _hidden, header="hidden", dropped=4),
        NONE_RATIO,
        FLOOR_RATIO,
    )
    shown = matches
    if not all_points and len(matches) > FEW_POINTS:
        shown = sorted(matches, key=lambda match: (match.verdict == "same", -abs(math.log(match.ratio))))[:FEW_POINTS]
    title = "Matching points" if len(shown) == len(matches) else "Matching points, those that changed most"
    print_table(title, columns, shown, console, style=_style)
    if len(shown) < len(matches):
        print_lines([f"... and {len(matches) - len(shown)} more; --by point prints all of them"], console)


def _style(match: Match) -> str:
    return verdict_style(match.verdict)


def _noise_us(match: Match) -> float:
    return math.hypot(match.ours.time.noise_us, match.theirs.time.noise_us)


def _hidden(match: Match) -> str:
    return f"{as_percent(match.theirs.hidden_fraction)} to {as_percent(match.ours.hidden_fraction)}"


def _point(match: Match, compared: SweepComparison) -> str:
    key = match.ours.key
    ours, theirs = _brief(key.setting), _brief(match.theirs.key.setting)
    setting = f"{theirs} to {ours}" if "setting" in compared.compared and ours != theirs else ours
    return f"{key.case(compared.telling)} {key.operator} {key.pass_name} {setting}".strip()


def _brief(setting: str) -> str:
    """`dgrad+wgrad bulk_sm4` where both have the same."""
    dgrad, _, wgrad = setting.partition(" + ")
    same = dgrad.startswith("dgrad ") and wgrad == f"wgrad {dgrad.removeprefix('dgrad ')}"
    return f"dgrad+wgrad {dgrad.removeprefix('dgrad ')}" if same else setting


def _charts(compared: SweepComparison) -> list[Chart]:
    """Returns the ratios of each dataset to the reference, and how the baseline of each held during its sweep."""
    charts = []
    for label in compared.candidates:
        if _of(compared.matches, label):
            dots = _ratio_dots(_of(compared.aggregates, label), compared.reference)
            charts.append(Chart(ratios_file(label, compared.candidates), [dots]))
    for dataset in compared.datasets:
        if drift := dataset.found.drift:
            charts.append(Chart(timeline_file(dataset.label), [_drift_lines(dataset.label, drift)]))
    return charts


def _ratio_dots(aggregates: Sequence[Aggregate], reference: str) -> Dots:
    """A row for each pass of an operator: a dot for each matching point, a tick for their mean."""
    label = aggregates[0].dataset
    rows = []
    for one in aggregates:
        dots = [Dot(match.ratio, colour=COLOURS[match.verdict]) for match in one.matches if one.operator]
        mean = Dot(one.ratio, colour="ink", shape="tick")
        name = f"{one.case} TP={one.tp_size} {one.operator} {one.pass_name}".strip() if one.operator else "all"
        rows.append(DotRow(name=name, dots=[*dots, mean], cells=[f"{one.ratio:.3f}"]))
    return Dots(
        title=f"{label} against {reference}",
        subtitle="a dot for each matching point; number: geometric mean",
        axis=Axis(f"time of {label} over {reference}: left is faster"),
        columns=[CellColumn("mean")],
        rows=rows,
        references=[Reference(1.0, f"{reference} = 1")],
        legend=[
            Key("faster", "good", shape="dot"),
            Key("slower", "bad", shape="dot"),
            Key("the same within the noise", "wait", shape="dot"),
            Key("geometric mean", "ink", shape="tick"),
        ],
    )


def _drift_lines(label: str, drift: Sequence[Drift]) -> Lines:
    notable = [one for one in sorted(drift, key=lambda one: -abs(one.change))[:3] if abs(one.change) >= NOTABLE_DRIFT]
    most = max(NOTABLE_DRIFT, *(abs(one.change) for one in drift)) * 1.15
    points = [
        LinePoint(one.number, one.change, label=f"{one.name} {one.change:+.1%}" if one in notable else "")
        for one in drift
    ]
    return Lines(
        title=f"{label}: how the baseline held",
        subtitle="A dot for each point: its operator without overlap, measured beside it. A trend is drift.",
        x=Axis("points in the order of measuring"),
        y=Axis("time without overlap, from its median", format="+.1%", domain=(-most, most)),
        lines=[Line("baseline", points, "series1", connected=False, label="")],
        levels=[Level("median", 0.0, "ink", width_px=1)],
    )
