"""Comparisons of sweeps for people: what matched, what is faster and what slower, and what else changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from overlap_sweep.compare.datasets import Dataset
from overlap_sweep.compare.differences import Difference
from overlap_sweep.compare.matching import MARGIN, Match, Unmatched
from overlap_sweep.compare.slots import SlotChange
from overlap_sweep.compare.sweeps import SweepComparison
from overlap_sweep.compare.tables import as_ratio, counted, print_table, styled
from overlap_sweep.compare.totals import Aggregate, Totals
from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_percent, as_us
from overlap_sweep.results.provenance import describe_machine, environments, measured_when

FEW_POINTS = 15
FEW_NAMES = 5
FEW_VALUES = 3
LONGEST_VALUE = 60

KEPT = "if kept"


def print_sweeps(comparison: SweepComparison, console: Console, all_points: bool = False) -> None:
    """The answer first, then tables, then what was left out; every point, or only those that changed most."""
    reference = comparison.reference
    for label in comparison.candidates:
        console.print(f"\n{label} against {reference}", style="bold")
        of_label = [aggregate for aggregate in comparison.aggregates if aggregate.dataset == label]
        print_lines([_answer(of_label[-1])], console)
    print_lines(comparison.deviations, console)
    print_lines(_dataset_lines(comparison.datasets), console)
    _print_changes("Compared", _compared(comparison), console)
    _print_changes("Environment", map(_difference, comparison.environment), console)
    _print_changes("Configuration", map(_difference, comparison.configuration), console)
    _print_totals(comparison.totals, reference, console)
    for label in comparison.candidates:
        of_label = [aggregate for aggregate in comparison.aggregates if aggregate.dataset == label]
        _print_aggregates(of_label, reference, console)
        slots = [slot for slot in comparison.slots if slot.dataset == label]
        if slots:
            _print_slots(slots, comparison.telling, console)
        matches = [match for match in comparison.matches if match.dataset == label]
        _print_points(matches, comparison, all_points, console)
    print_lines([_unmatched(found) for found in comparison.unmatched], console)
    for dataset in comparison.datasets:
        proofs = [f"{dataset.label} TP={outcome.tp_size}: {outcome.verdict}" for outcome in dataset.outcomes]
        print_lines(proofs, console)
    notes = [
        f"ratio: time over {reference}'s, below 1 is faster; same: inside the noise of both, or within {MARGIN:.1%}.",
        "none and floor: the same ratio without overlap, and of the GEMMs alone: what the machine changed by itself.",
    ]
    console.print()
    print_lines(notes, console, indent=0)


def print_slots_only(comparison: SweepComparison, console: Console) -> None:
    """The best of every slot, and nothing else."""
    for label in comparison.candidates:
        slots = [slot for slot in comparison.slots if slot.dataset == label]
        console.print(f"\n{label} against {comparison.reference}", style="bold")
        if slots:
            _print_slots(slots, comparison.telling, console)
        else:
            print_lines(["no slot of both was overlapped"], console)


def _answer(whole: Aggregate) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in whole.counts.items() if count)
    ratios = {
        "ratio": whole.ratio,
        "best of each slot": whole.best_ratio,
        "no overlap": whole.none_ratio,
        "floor": whole.floor_ratio,
    }
    told = ", ".join(f"{name} {as_ratio(ratio)}" for name, ratio in ratios.items() if not math.isnan(ratio))
    return f"{counted(whole.points, 'matching point')}: {counts}. Geometric means: {told}"


def _dataset_lines(datasets: Sequence[Dataset]) -> list[str]:
    machines = {dataset.label: describe_machine(environments(dataset.points)[0]) for dataset in datasets}
    same = len(set(machines.values())) == 1
    lines = []
    for dataset in datasets:
        counts = ", ".join(f"{count} {name}" for name, count in dataset.counts().items())
        points = f"{counted(len(dataset.points), 'point')} ({counts})"
        on = "" if same else f" on {machines[dataset.label]}"
        lines.append(f"{dataset.label}: {dataset.path}, {points}, measured {measured_when(dataset.points)}{on}")
    return [*lines, f"all on {machines[datasets[0].label]}"] if same else lines


def _compared(comparison: SweepComparison) -> list[str]:
    return [
        f"{name}: " + ", ".join(f"{label}={_value(value)}" for label, value in values.items())
        for name, values in comparison.compared.items()
    ]


def _difference(difference: Difference) -> str:
    return f"{difference.name.removeprefix('packages.')}: " + ", ".join(
        f"{label}={_values(values)}" for label, values in difference.values.items()
    )


def _values(values: Sequence[Any]) -> str:
    shown = [_value(value) for value in values[:FEW_VALUES]]
    more = f" and {len(values) - FEW_VALUES} more" if len(values) > FEW_VALUES else ""
    return " or ".join(shown) + more if shown else "-"


def _value(value: Any) -> str:
    if isinstance(value, str) and "\n" in value:
        return f"({len(value.splitlines())} lines)"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _print_changes(title: str, lines: Iterable[str], console: Console) -> None:
    if found := list(lines):
        console.print(f"{title}:")
        print_lines(found, console)


def _print_totals(totals: Sequence[Totals], reference: str, console: Console) -> None:
    base = next(of_one for of_one in totals if of_one.label == reference)
    if not base.passes:
        return
    headers = ["dataset", "best us", "none us", "floor us", "speedup", "hidden", "ratio"]
    rows = [
        [
            of_one.label,
            as_us(of_one.best_us),
            as_us(of_one.none_us),
            as_us(of_one.floor_us),
            f"{of_one.speedup:.2f}x",
            as_percent(of_one.hidden_fraction),
            as_ratio(of_one.best_us / base.best_us),
        ]
        for of_one in totals
    ]
    passes = "pass that all have" if base.passes == 1 else f"{base.passes} passes that all have, sums"
    print_table(f"The best of the {passes}", headers, rows, {"dataset"}, console)


def _print_aggregates(aggregates: Sequence[Aggregate], reference: str, console: Console) -> None:
    headers = ["TP", "pass", "faster", "slower", "same", "ratio", "best", "none", "floor"]
    rows = []
    for aggregate in aggregates:
        ratios = (aggregate.ratio, aggregate.best_ratio, aggregate.none_ratio, aggregate.floor_ratio)
        group = [str(aggregate.tp_size), f"{aggregate.case} {aggregate.operator} {aggregate.pass_name}".strip()]
        rows.append(
            [
                *(["all", ""] if aggregate.operator is None else group),
                *(str(count) for count in aggregate.counts.values()),
                *map(as_ratio, ratios),
            ]
        )
    label = aggregates[0].dataset
    print_table(
        f"{label} over {reference}, geometric means", headers, rows, {"pass"}, console, ("floor", "none", "same")
    )


def _print_slots(slots: Sequence[SlotChange], telling: Sequence[str], console: Console) -> None:
    ours, theirs = slots[0].dataset, slots[0].reference
    best = f"best in {theirs}, in {ours}"
    headers = ["TP", "slot", best, "ratio", "verdict", KEPT]
    rows: list[list[str | Text]] = []
    previous = None
    for slot in slots:
        cells: list[str | Text] = [as_ratio(slot.ratio), styled(slot.verdict), _regret(slot)]
        setting = f"{slot.reference_setting}, {slot.setting}" if slot.changed else f"{slot.setting}, the same"
        name = f"{slot.ours.key.case(telling)} {slot.slot}".strip()
        again = slot.ours.key == previous
        rows.append([str(slot.ours.key.tp_size), name, setting, *(['"', '"', '"'] if again else cells)])
        previous = slot.ours.key
    print_table("The best of each slot", headers, rows, {"slot", best, "verdict"}, console)
    if any(slot.changed for slot in slots):
        print_lines([f"{KEPT}: how much longer {theirs}'s choice takes in {ours}"], console, indent=0)


def _regret(slot: SlotChange) -> str:
    if slot.regret == 0:
        return "-"
    return "not measured" if math.isnan(slot.regret) else f"{slot.regret:+.1%}"


def _print_points(matches: Sequence[Match], comparison: SweepComparison, all_points: bool, console: Console) -> None:
    if not matches:
        return
    settings_differ = "setting" in comparison.compared
    ours, theirs = matches[0].dataset, matches[0].reference
    headers = ["TP", "point", f"{theirs} us", f"{ours} us", "noise us", "ratio", "verdict", "hidden", "none", "floor"]
    shown = list(matches)
    if not all_points and len(matches) > FEW_POINTS:
        shown = sorted(matches, key=lambda match: (match.verdict == "same", -abs(math.log(match.ratio))))[:FEW_POINTS]
    rows: list[list[str | Text]] = [
        [
            str(match.ours.key.tp_size),
            _point(match, comparison.telling, settings_differ),
            as_us(match.theirs.time.time_us),
            as_us(match.ours.time.time_us),
            as_us(math.hypot(match.ours.time.noise_us, match.theirs.time.noise_us)),
            as_ratio(match.ratio),
            styled(match.verdict),
            f"{as_percent(match.theirs.hidden_fraction)} to {as_percent(match.ours.hidden_fraction)}",
            as_ratio(match.none_ratio),
            as_ratio(match.floor_ratio),
        ]
        for match in shown
    ]
    title = "Matching points" if len(shown) == len(matches) else "Matching points, those that changed most"
    print_table(title, headers, rows, {"point", "verdict"}, console, optional=("floor", "none", "noise us", "hidden"))
    if len(shown) < len(matches):
        print_lines([f"... and {len(matches) - len(shown)} more; --by point prints all of them"], console)


def _point(match: Match, telling: Sequence[str], settings_differ: bool) -> str:
    key = match.ours.key
    return f"{key.case(telling)} {key.operator} {key.pass_name} {_setting(match, settings_differ)}".strip()


def _setting(match: Match, differ: bool) -> str:
    ours, theirs = (_brief(measured.key.setting) for measured in (match.ours, match.theirs))
    return f"{theirs} to {ours}" if differ and ours != theirs else ours


def _brief(setting: str) -> str:
    """`dgrad+wgrad bulk_sm4` where both have the same."""
    dgrad, _, wgrad = setting.partition(" + ")
    same = dgrad.startswith("dgrad ") and wgrad == f"wgrad {dgrad.removeprefix('dgrad ')}"
    return f"dgrad+wgrad {dgrad.removeprefix('dgrad ')}" if same else setting


def _unmatched(found: Unmatched) -> str:
    names = ", ".join(found.names[:FEW_NAMES])
    more = f", ... and {len(found.names) - FEW_NAMES} more" if len(found.names) > FEW_NAMES else ""
    return f"{len(found.names)} only in {found.only_in}, not in {found.missing_in}: {names}{more}"
