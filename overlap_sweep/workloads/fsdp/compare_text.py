"""Comparisons of training runs for people: what is better and worse beyond the noise, and which steps stand
out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from overlap_sweep.compare.matching import MARGIN
from overlap_sweep.compare.tables import as_ratio, counted, print_table
from overlap_sweep.report.console import print_lines
from overlap_sweep.results.provenance import describe_machine
from overlap_sweep.workloads.fsdp.compare import (
    VERDICTS,
    MeasuredRun,
    QuantityRatio,
    RunMatch,
    TelemetryComparison,
    TelemetryDataset,
    mean_ratios,
    settings_throughout,
)
from overlap_sweep.workloads.fsdp.telemetry_steps import Aggregate

FEW_RUNS = 3
"""Of more, tables of all quantities are printed only when they are asked for."""
FEW_DIPS = 10
FEW_SETTINGS = 12
FEW_CAUSES = 3
"""Of why the work is not the same."""
LONGEST_VALUE = 40

_UNITS = {"mhz": "MHz", "w": "W", "c": "C", "gb": "GB"}
_DETAILS = ("compute_allreduce", "compute_reducescatter", "compute_auxiliary", "utilisation", "mean_con", "max_con")
"""What their names begin with; printed only where they differ. Files have all."""
_STYLES = {"better": "green", "worse": "red"}


def print_telemetry(comparison: TelemetryComparison, console: Console, all_runs: bool = False) -> None:
    """The answer first, then every quantity of each run, or with many runs of none unless all are asked for; dips."""
    reference = comparison.reference
    for label in comparison.candidates:
        console.print(f"\n{label} against {reference}", style="bold")
        print_lines([_answer(comparison.of(label))], console)
    print_lines(_dataset_lines(comparison.datasets), console)
    for label in comparison.candidates:
        matches = comparison.of(label)
        if len(matches) > 1:
            _print_runs(matches, console)
        if len(matches) <= FEW_RUNS or all_runs:
            for match in matches:
                _print_quantities(match, console)
        else:
            print_lines(["--by point prints every quantity of each run."], console, indent=0)
        _print_settings(matches, console)
    console.print()
    print_lines(_dip_lines(comparison.datasets), console, indent=0)
    print_lines(comparison.unmatched, console, indent=0)
    notes = [
        f"Medians over the steps, without warm-up and the profiler's; ratio: over {reference}'s. Noise: of the median.",
        f"same: inside the noise of both, or within {MARGIN:.1%}. hidden: communication with computation beside it.",
    ]
    print_lines(notes, console, indent=0)


def _answer(matches: Sequence[RunMatch]) -> str:
    if not matches:
        return "no run of both"
    return _answer_of_one(matches[0]) if len(matches) == 1 else _answer_of_many(matches)


def _answer_of_one(match: RunMatch) -> str:
    step, told = match.quantities["step_ms"], []
    if match.different_work:
        told.append(f"not the same work ({_causes(match)})")
        told += _changes(match, ("samples_per_s",))
    told.append(f"step time: ratio {as_ratio(step.ratio)} ({step.verdict})")
    if match.believed:
        told += _changes(match, ("hidden_share", "exposed_comm_ms"))
    else:
        by_kernels = ", ".join(_changes(match, ("kernels_hidden_share", "kernels_exposed_comm_ms")))
        told.append(f"marks and kernels disagree, in the profiled steps {by_kernels}")
    floor = match.quantities.get("floor_ms")
    if floor and floor.verdict:
        told.append(f"without communication {as_ratio(floor.ratio)} ({floor.verdict})")
    return "; ".join(told)


def _causes(match: RunMatch) -> str:
    """`training.batch_size big=64, small=32`."""
    causes = [
        f"{name} {match.reference}={_word(theirs)}, {match.dataset}={_word(ours)}"
        for name, (theirs, ours) in match.different_work.items()
    ]
    more = [f"and {len(causes) - FEW_CAUSES} more"] if len(causes) > FEW_CAUSES else []
    return "; ".join([*causes[:FEW_CAUSES], *more])


def _changes(match: RunMatch, names: Sequence[str]) -> list[str]:
    """From the reference's to ours; of what only one knows, that."""
    told = []
    for name in names:
        one = match.quantities.get(name)
        if one:
            verdict = f" ({one.verdict})" if one.verdict else ""
            told.append(f"{_header(name)} {_of(name, one.theirs)} to {_of(name, one.ours)}{verdict}")
    return told


def _answer_of_many(matches: Sequence[RunMatch]) -> str:
    ratios = mean_ratios(matches)
    different = sum(bool(match.different_work) for match in matches)
    counts = [match.quantities["step_ms"].verdict for match in matches]
    numbers = ", ".join(f"{counts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in counts)
    means = ", ".join(
        f"{_header(name)} {as_ratio(ratios[name])}"
        for name in (*(["samples_per_s"] if different else []), "step_ms", "exposed_comm_ms", "floor_ms")
        if name in ratios and all(match.quantities[name].believed for match in matches)
    )
    work = f", {different} not the same work" if different else ""
    return (
        f"{counted(len(matches), 'matching run')}{work}, by step time {numbers}. Geometric means of the ratios: {means}"
    )


def _dataset_lines(datasets: Sequence[TelemetryDataset]) -> list[str]:
    machines = {dataset.label: describe_machine(_environment(dataset)) for dataset in datasets}
    return [
        f"{dataset.label}: {dataset.path}, {_runs(dataset.runs)}, on {machines[dataset.label]}" for dataset in datasets
    ]


def _environment(dataset: TelemetryDataset) -> dict[str, Any]:
    """The first that is recorded."""
    return next((measured.run.environment for measured in dataset.runs if measured.run.environment), {})


def _runs(runs: Sequence[MeasuredRun]) -> str:
    if len(runs) > 1:
        return counted(len(runs), "run")
    selection = runs[0].selection
    left_out = {"warm-up": selection.warm_up, "profiled": selection.profiled, "incomplete": selection.incomplete}
    told = ", ".join(f"{len(steps)} {name}" for name, steps in left_out.items() if steps)
    return f"{counted(len(runs[0].run.ranks), 'rank')}, {counted(len(selection.measured), 'step')}" + (
        f" ({told} left out)" if told else ""
    )


def _print_runs(matches: Sequence[RunMatch], console: Console) -> None:
    ours, theirs = matches[0].dataset, matches[0].reference
    headers = ["run", f"{theirs} ms", f"{ours} ms", "noise ms", "ratio", "verdict", "hidden", "exposed ms", "dips"]
    rows: list[list[str | Text]] = []
    for match in matches:
        step = match.quantities["step_ms"]
        assert step.ours
        assert step.theirs
        rows.append(
            [
                match.ours.name,
                _value("step_ms", step.theirs.median),
                _value("step_ms", step.ours.median),
                _value("step_ms", math.hypot(step.ours.noise or 0.0, step.theirs.noise or 0.0)),
                as_ratio(step.ratio),
                _verdict(step),
                _both(match, "hidden_share" if match.believed else "kernels_hidden_share"),
                _both(match, "exposed_comm_ms" if match.believed else "kernels_exposed_comm_ms"),
                _both(match, "dips"),
            ]
        )
    print_table("Steps of all runs", headers, rows, {"run", "verdict"}, console, ("dips", "noise ms", "exposed ms"))


def _both(match: RunMatch, name: str) -> str:
    one = match.quantities.get(name)
    return f"{_of(name, one.theirs)} to {_of(name, one.ours)}" if one else "-"


def _print_quantities(match: RunMatch, console: Console) -> None:
    headers = ["quantity", match.reference, "noise", match.dataset, "noise ", "ratio", "noise  ", "verdict"]
    shown = [
        one
        for one in match.quantities.values()
        if any(known and known.median for known in (one.ours, one.theirs))
        and (not one.quantity.startswith(_DETAILS) or one.verdict not in ("same", None))
    ]
    rows: list[list[str | Text]] = [
        [
            _header(one.quantity),
            *_with_noise(one.quantity, one.theirs),
            *_with_noise(one.quantity, one.ours),
            as_ratio(one.ratio),
            as_ratio(one.ratio_noise),
            _verdict(one),
        ]
        for one in shown
    ]
    other = "" if match.theirs.name == match.ours.name else f", beside {match.theirs.name}"
    print_table(
        f"{match.ours.name}{other}", headers, rows, {"quantity", "verdict"}, console, ("noise  ", "noise", "noise ")
    )


def _with_noise(name: str, known: Aggregate | None) -> list[str]:
    noise = "-" if known is None or known.noise is None else _value(name, known.noise)
    return [_of(name, known), noise]


def _of(name: str, known: Aggregate | None) -> str:
    return "-" if known is None else _value(name, known.median)


def _value(name: str, value: float) -> str:
    if name.endswith(("hidden_share", "hidden_fraction")) or name.startswith("utilisation"):
        return f"{value:.1%}"
    if name.endswith(("_ms", "_gb", "_ratio", "speedup", "_concurrency", "_norm")):
        return f"{value:,.3f}"
    return f"{value:.4g}" if name.endswith("loss") else f"{value:,.5g}"


def _verdict(one: QuantityRatio) -> Text:
    return Text(one.verdict or "-", _STYLES.get(one.verdict or "", ""))


def _header(name: str) -> str:
    """`step ms` of step_ms."""
    words, _, unit = name.replace("_per_s", "/s").rpartition("_")
    return f"{words} {_UNITS.get(unit, unit)}".strip().replace("_", " ").replace("sm clock", "SM clock")


def _print_settings(matches: Sequence[RunMatch], console: Console) -> None:
    common = settings_throughout(matches)
    if not common:
        return
    console.print("\nSettings that differ throughout:" if len(matches) > 1 else "\nSettings that differ:")
    lines = [
        f"{name}: {matches[0].reference}={_word(theirs)}, {matches[0].dataset}={_word(ours)}"
        for name, (theirs, ours) in common.items()
    ]
    more = [f"... and {len(lines) - FEW_SETTINGS} more"] if len(lines) > FEW_SETTINGS else []
    print_lines([*lines[:FEW_SETTINGS], *more], console)


def _word(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else "-" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _dip_lines(datasets: Sequence[TelemetryDataset]) -> list[str]:
    """Which steps stand out, a line for each run that has such."""
    lines = []
    for dataset in datasets:
        for measured in dataset.runs:
            run = f" {measured.name}" if len(dataset.runs) > 1 else ""
            steps = [str(number) for number in measured.dips[:FEW_DIPS]]
            more = f" and {len(measured.dips) - FEW_DIPS} more" if len(measured.dips) > FEW_DIPS else ""
            if steps:
                of_all = counted(len(measured.selection.measured), "step")
                dips = counted(len(measured.dips), "dip")
                numbers = f"step{'s' if len(steps) > 1 else ''} {', '.join(steps)}{more}"
                lines.append(f"{dataset.label}{run}: {dips} in {of_all}, much slower or less hidden: {numbers}")
    return lines
