"""Comparisons of training runs as they are shown and written: what is better and worse beyond the noise, and which
steps stand out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console

from overlap_sweep.report.comparison import Comparison, as_ratio, by_label, ratio_column, verdict_style
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.numbers import counted, some_of
from overlap_sweep.report.table import Column, Table, attribute
from overlap_sweep.results.provenance import describe_machine, launch_commands
from overlap_sweep.results.verdict import MARGIN
from overlap_sweep.workloads.fsdp.compare import (
    VERDICTS,
    QuantityRatio,
    RunMatch,
    TelemetryComparison,
    TelemetryDataset,
    mean_ratios,
    settings_of,
    settings_throughout,
)
from overlap_sweep.workloads.fsdp.telemetry_steps import QUANTITIES, Aggregate, MeasuredRun

FEW_RUNS = 3
"""Of more, tables of all quantities are printed only when they are asked for."""
FEW_DIPS = 10
FEW_SETTINGS = 12
FEW_CAUSES = 3
"""Of why the work is not the same."""

_UNITS = {"mhz": "MHz", "w": "W", "c": "C", "gb": "GB"}
_DETAILS = ("compute_allreduce", "compute_reducescatter", "compute_auxiliary", "utilisation", "mean_con", "max_con")
"""What their names begin with; printed only where they differ. Files have all."""


class _Row(NamedTuple):
    match: RunMatch
    one: QuantityRatio


def _of_either(name: str, value: str, **more: Any) -> Column[_Row]:
    """A column of an aggregate: of `ours`, or of `theirs` where its name begins with `reference`."""
    side = "theirs" if name.startswith("reference") else "ours"
    return Column(name, lambda row: getattr(getattr(row.one, side), value, None), **more)


def _difference(row: _Row) -> float | None:
    ours, theirs = row.one.ours, row.one.theirs
    return ours.median - theirs.median if ours and theirs else None


RATIO: Column[_Row] = ratio_column("ratio", lambda row: row.one.ratio, "ratio")
VERDICT: Column[_Row] = Column(
    "verdict", lambda row: row.one.verdict, kind="text", header="verdict", words=lambda row: row.one.verdict or "-"
)
ROWS: Table[_Row] = Table(
    "rows",
    "one row per quantity and run; values are medians, units are in the quantities' names",
    (
        attribute("dataset", read="match.dataset", kind="text"),
        attribute("reference", read="match.reference", kind="text"),
        attribute("run", read="match.ours.name", kind="text"),
        attribute("reference_run", read="match.theirs.name", kind="text"),
        attribute("quantity", read="one.quantity", kind="text"),
        _of_either("value", "median"),
        _of_either("noise", "noise"),
        _of_either("reference_value", "median"),
        _of_either("reference_noise", "noise"),
        Column("difference", _difference),
        RATIO,
        attribute("ratio_noise", read="one.ratio_noise"),
        VERDICT,
        _of_either("count", "count", kind="count"),
        _of_either("reference_count", "count", kind="count"),
    ),
)


def report(compared: TelemetryComparison, all_runs: bool) -> Comparison:
    """Returns how the comparison is shown and written; `all_runs`: tables have every quantity of each, however many."""

    # Charts take numpy and the forms of charts.
    def charts() -> Any:
        from overlap_sweep.workloads.fsdp.compare_charts import telemetry_charts

        return telemetry_charts(compared)

    return Comparison(
        table=ROWS,
        rows=_rows(compared.matches),
        show=lambda console: _print(compared, console, all_runs),
        summary=lambda: telemetry_summary(compared),
        charts=charts,
        problems=compared.problems,
        warnings=compared.warnings,
        summary_file="summary.json",
    )


def _rows(matches: Sequence[RunMatch]) -> list[_Row]:
    return [_Row(match, one) for match in matches for one in match.quantities.values()]


def telemetry_summary(compared: TelemetryComparison) -> dict[str, Any]:
    """Returns every dataset's runs with aggregates, settings and dips, how they relate to the reference's, and the
    machines and commands that measured them. NaN where something is undefined."""
    reference = compared.reference
    datasets: dict[str, Any] = {
        dataset.label: {
            "path": str(dataset.path),
            "runs": {measured.name: _run_summary(measured) for measured in dataset.runs},
            "ratios": {match.ours.name: _match_summary(match) for match in compared.of(dataset.label)},
        }
        for dataset in compared.datasets
    }
    for label in compared.candidates:
        matches = compared.of(label)
        datasets[label]["mean_ratios"] = mean_ratios(matches)
        datasets[label]["settings_that_differ_throughout"] = settings_throughout(matches)
    return {
        "kind": "telemetry",
        "reference": reference,
        "candidates": compared.candidates,
        "quantities": {name: quantity.meaning for name, quantity in QUANTITIES.items()},
        "datasets": datasets,
        "unmatched": compared.unmatched,
        "problems": compared.problems,
        "warnings": compared.warnings,
        "machines": {
            dataset.label: list(dict.fromkeys(describe_machine(one.run.environment) for one in dataset.runs))
            for dataset in compared.datasets
        },
        "commands": {
            dataset.label: launch_commands([one.run.point for one in dataset.runs if one.run.point])
            for dataset in compared.datasets
        },
    }


def _match_summary(match: RunMatch) -> dict[str, Any]:
    return {
        "reference_run": match.theirs.name,
        "settings_that_differ": match.settings,
        "different_work": match.different_work,
        "quantities": {
            name: {"ratio": one.ratio, "noise": one.ratio_noise, "verdict": one.verdict}
            for name, one in match.quantities.items()
        },
    }


def _run_summary(measured: MeasuredRun) -> dict[str, Any]:
    selection = measured.selection
    return {
        "directory": str(measured.run.directory),
        "ranks": measured.run.ranks,
        "steps": {**asdict(selection), "measured": len(selection.measured)},
        "settings": settings_of(measured.run),
        "environment": measured.run.environment,
        "aggregates": {name: asdict(known) for name, known in measured.aggregates.items()},
        "marks_disagree_with_kernels": not measured.believed,
        "dips": measured.dips,
    }


def _print(compared: TelemetryComparison, console: Console, all_runs: bool) -> None:
    """The answer first, then every quantity of each run, or with many runs of none unless all are asked for; dips."""
    for label in compared.candidates:
        console.print(f"\n{label} against {compared.reference}", style="bold")
        print_lines([_answer(compared.of(label))], console)
    print_lines(map(_dataset_line, compared.datasets), console)
    for label in compared.candidates:
        matches = compared.of(label)
        if len(matches) > 1:
            _print_runs(matches, console)
        if len(matches) <= FEW_RUNS or all_runs:
            for match in matches:
                _print_quantities(match, console)
        else:
            print_lines(["--by point prints every quantity of each run."], console, indent=0)
        _print_settings(matches, console)
    console.print()
    dips = [line for dataset in compared.datasets for line in _dip_lines(dataset)]
    notes = [
        "Medians over the steps, without warm-up and the profiler's; ratio: over "
        f"{compared.reference}'s. Noise: of the median.",
        f"same: inside the noise of both, or within {MARGIN:.1%}. hidden: communication with computation beside it.",
    ]
    print_lines([*dips, *compared.unmatched, *notes], console, indent=0)


def _answer(matches: Sequence[RunMatch]) -> str:
    if not matches:
        return "no run of both"
    return _answer_of_one(matches[0]) if len(matches) == 1 else _answer_of_many(matches)


def _answer_of_one(match: RunMatch) -> str:
    step, told = match.quantities["step_ms"], []
    if match.different_work:
        causes = [f"{name} {by_label(values)}" for name, values in match.different_work.items()]
        told.append(f"not the same work ({some_of(causes, FEW_CAUSES, '; ')})")
        told += _changes(match, "samples_per_s")
    told.append(f"step time: ratio {as_ratio(step.ratio)} ({step.verdict})")
    if match.believed:
        told += _changes(match, "hidden_share", "exposed_comm_ms")
    else:
        by_kernels = ", ".join(_changes(match, "kernels_hidden_share", "kernels_exposed_comm_ms"))
        told.append(f"marks and kernels disagree, in the profiled steps {by_kernels}")
    floor = match.quantities.get("floor_ms")
    if floor and floor.verdict:
        told.append(f"without communication {as_ratio(floor.ratio)} ({floor.verdict})")
    return "; ".join(told)


def _changes(match: RunMatch, *names: str) -> Iterator[str]:
    """From the reference's to ours; of what only one knows, that."""
    for name in names:
        if one := match.quantities.get(name):
            yield f"{_header(name)} {_both(match, name)}" + (f" ({one.verdict})" if one.verdict else "")


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


def _dataset_line(dataset: TelemetryDataset) -> str:
    environment = next((measured.run.environment for measured in dataset.runs if measured.run.environment), {})
    return f"{dataset.label}: {dataset.path}, {_runs(dataset.runs)}, on {describe_machine(environment)}"


def _runs(runs: Sequence[MeasuredRun]) -> str:
    if len(runs) > 1:
        return counted(len(runs), "run")
    selection = runs[0].selection
    left_out = {"warm-up": selection.warm_up, "profiled": selection.profiled, "incomplete": selection.incomplete}
    told = ", ".join(f"{len(steps)} {name}" for name, steps in left_out.items() if steps)
    counts = f"{counted(len(runs[0].run.ranks), 'rank')}, {counted(len(selection.measured), 'step')}"
    return f"{counts} ({told} left out)" if told else counts


def _print_runs(matches: Sequence[RunMatch], console: Console) -> None:
    ours, theirs = matches[0].dataset, matches[0].reference
    columns: tuple[Column[_Row], ...] = (
        Column("", lambda row: row.match.ours.name, kind="text", header="run"),
        Column("", lambda row: _shown(row.one, row.one.theirs), header=f"{theirs} ms"),
        Column("", lambda row: _shown(row.one, row.one.ours), header=f"{ours} ms"),
        Column("", _step_noise, header="noise ms", dropped=2),
        RATIO,
        VERDICT,
        Column("", lambda row: _by_marks_or_kernels(row.match, "hidden_share"), header="hidden"),
        Column("", lambda row: _by_marks_or_kernels(row.match, "exposed_comm_ms"), header="exposed ms", dropped=3),
        Column("", lambda row: _both(row.match, "dips"), header="dips", dropped=1),
    )
    rows = [_Row(match, match.quantities["step_ms"]) for match in matches]
    print_table("Steps of all runs", columns, rows, console, style=_style)


def _step_noise(row: _Row) -> str:
    noises = (one.noise or 0.0 for one in (row.one.ours, row.one.theirs) if one)
    return _value("step_ms", math.hypot(*noises))


def _by_marks_or_kernels(match: RunMatch, name: str) -> str:
    return _both(match, name if match.believed else f"kernels_{name}")


def _both(match: RunMatch, name: str) -> str:
    one = match.quantities.get(name)
    return f"{_shown(one, one.theirs)} to {_shown(one, one.ours)}" if one else "-"


def _print_quantities(match: RunMatch, console: Console) -> None:
    columns: tuple[Column[_Row], ...] = (
        Column("", lambda row: _header(row.one.quantity), kind="text", header="quantity"),
        Column("", lambda row: _shown(row.one, row.one.theirs), header=match.reference),
        Column("", lambda row: _shown_noise(row.one, row.one.theirs), header="noise", dropped=2),
        Column("", lambda row: _shown(row.one, row.one.ours), header=match.dataset),
        Column("", lambda row: _shown_noise(row.one, row.one.ours), header="noise ", dropped=3),
        RATIO,
        Column("", lambda row: as_ratio(row.one.ratio_noise), header="noise  ", dropped=1),
        VERDICT,
    )
    rows = [
        row
        for row in _rows([match])
        if any(known and known.median for known in (row.one.ours, row.one.theirs))
        and (not row.one.quantity.startswith(_DETAILS) or row.one.verdict not in ("same", None))
    ]
    other = "" if match.theirs.name == match.ours.name else f", beside {match.theirs.name}"
    print_table(f"{match.ours.name}{other}", columns, rows, console, style=_style)


def _style(row: _Row) -> str:
    return verdict_style(row.one.verdict)


def _shown(one: QuantityRatio, known: Aggregate | None) -> str:
    return "-" if known is None else _value(one.quantity, known.median)


def _shown_noise(one: QuantityRatio, known: Aggregate | None) -> str:
    return "-" if known is None or known.noise is None else _value(one.quantity, known.noise)


def _value(name: str, value: float) -> str:
    if name.endswith(("hidden_share", "hidden_fraction")) or name.startswith("utilisation"):
        return f"{value:.1%}"
    if name.endswith(("_ms", "_gb", "_ratio", "speedup", "_concurrency", "_norm")):
        return f"{value:,.3f}"
    return f"{value:.4g}" if name.endswith("loss") else f"{value:,.5g}"


def _header(name: str) -> str:
    """`step ms` of step_ms."""
    words, _, unit = name.replace("_per_s", "/s").rpartition("_")
    return f"{words} {_UNITS.get(unit, unit)}".strip().replace("_", " ").replace("sm clock", "SM clock")


def _print_settings(matches: Sequence[RunMatch], console: Console) -> None:
    common = settings_throughout(matches)
    if not common:
        return
    console.print("\nSettings that differ throughout:" if len(matches) > 1 else "\nSettings that differ:")
    lines = [f"{name}: {by_label(values)}" for name, values in common.items()]
    more = [f"... and {len(lines) - FEW_SETTINGS} more"] if len(lines) > FEW_SETTINGS else []
    print_lines([*lines[:FEW_SETTINGS], *more], console)


def _dip_lines(dataset: TelemetryDataset) -> Iterator[str]:
    """Which steps stand out, a line for each run that has such."""
    for measured in dataset.runs:
        if measured.dips:
            run = f" {measured.name}" if len(dataset.runs) > 1 else ""
            numbers = some_of(measured.dips, FEW_DIPS)
            dips = f"{counted(len(measured.dips), 'dip')} in {counted(len(measured.selection.measured), 'step')}"
            steps = "steps" if len(measured.dips) > 1 else "step"
            yield f"{dataset.label}{run}: {dips}, much slower or less hidden: {steps} {numbers}"
