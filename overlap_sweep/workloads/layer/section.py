"""A layer point for people: its variants side by side, and which of them is fastest."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overlap_sweep.report.console import fits
from overlap_sweep.report.numbers import as_ms, as_percent
from overlap_sweep.results.estimate import CONFIDENCE
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.layer.answer import LayerAnalysis, VariantRow, analyse_layer
from overlap_sweep.workloads.layer.result import attention_backend
from overlap_sweep.workloads.operator.proof import named


def print_layer(point: Point, console: Console) -> None:
    """Heading, table, verdict and warnings of an `ok` layer point."""
    print_analysis(analyse_layer(point), console)


def print_analysis(analysis: LayerAnalysis, console: Console) -> None:
    console.print(f"\n{title(analysis.point)}", style="bold")
    print_table(analysis, analysis.winner, console)
    console.print(verdict(analysis))
    for caution in cautions(analysis):
        console.print(caution)


def title(point: Point) -> str:
    """What was measured, and on what."""
    case, layer = point.case, point.config["layer"]
    attention = attention_backend(point.result)
    parts = [
        f"{case.model} {layer['kind']}",
        f"TP={point.config['tp_size']}",
        *([f"{layer['num_replicas']} replicas"] if layer["num_replicas"] > 1 else []),
        f"{case.tokens} tokens",
        f"{case.precision}",
        f"backend {case.backend} on {case.device}",
        *([f"attention {attention}"] if attention else []),
    ]
    return ", ".join(parts)


def verdict(analysis: LayerAnalysis) -> str:
    """One line: what is faster than the reference beyond the noise, and what is not."""
    reference, contenders = analysis.reference, analysis.contenders
    if any(row.launch_bound for row in analysis.rows if row.name == reference):
        return f"no verdict: {reference} was launch-bound, its time says nothing about the device"
    if not contenders:
        return f"no verdict: there is nothing to compare {reference} with"
    winner = analysis.winner
    backend = analysis.point.case.backend
    others = [f"{named(row.name, backend)} is {row.to_reference.in_words()}" for row in contenders if row is not winner]
    if winner:
        first = f"{named(winner.name, backend)} is {winner.to_reference.in_words(f' than {reference}')}"
        return "; ".join([first, *others])
    return f"nothing is faster than {reference}: {'; '.join(others)}"


def cautions(analysis: LayerAnalysis) -> list[str]:
    """What to know before believing the table: about it, and what the point warned of."""
    assert analysis.point.result
    return [*cautions_of_table(analysis), *analysis.point.result.warnings]


def cautions_of_table(analysis: LayerAnalysis) -> list[str]:
    """About its reference, and what was launch-bound."""
    lines = []
    if analysis.reference != "none":
        lines.append(f"none was not measured: ratios are to {analysis.reference}.")
    backend = analysis.point.case.backend
    launch_bound = [named(row.name, backend) for row in analysis.rows if row.launch_bound]
    if launch_bound:
        lines.append(f"Launch-bound, left out of the verdict: {', '.join(launch_bound)}.")
    return lines


def print_table(analysis: LayerAnalysis, best: VariantRow | None, console: Console) -> None:
    """A line for each variant, and what the ratios are; stacked where the terminal is too narrow."""
    against = "vs none" if analysis.reference == "none" else "vs first"
    rows = [_cells(row, analysis, against) for row in analysis.rows]
    shown = [header for header in rows[0] if any(row[header] for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in shown:
        left = header in ("variant", against, "note")
        table.add_column(header, justify="left" if left else "right", no_wrap=True)
    for row, cells in zip(analysis.rows, rows, strict=True):
        style = "green" if row is best else ""
        table.add_row(Text(cells["variant"], style), *(cells[header] for header in shown[1:]))
    if fits(table, console):
        console.print(table)
    else:
        _print_stacked(rows, console)
    console.print(
        f"{against}: ratio to {analysis.reference} in the same round, median of {analysis.rounds} rounds "
        f"[{CONFIDENCE:.0%} interval]; below 1 is faster\n",
        style="dim",
    )


def _cells(row: VariantRow, analysis: LayerAnalysis, against: str) -> dict[str, str]:
    """By header; an empty cell is not applicable."""
    interval = "" if row.name == analysis.reference else f" [{row.interval.low:.3f}, {row.interval.high:.3f}]"
    return {
        "variant": named(row.name, analysis.point.case.backend),
        "fwd ms": as_ms(row.fwd_us),
        "bwd ms": as_ms(row.bwd_us),
        "step ms": "" if row.step_us is None else as_ms(row.step_us),
        "all ms": as_ms(row.all_us),
        against: f"{row.ratio:.3f}{interval}",
        "hidden": as_percent(row.hidden_fraction),
        "note": "launch-bound" if row.launch_bound else "",
    }


def _print_stacked(rows: Sequence[dict[str, str]], console: Console) -> None:
    for cells in rows:
        (_, name), *others = ((header, cell) for header, cell in cells.items() if cell)
        times = [f"{header.removesuffix(' ms')} {cell} ms" for header, cell in others if header.endswith(" ms")]
        rest = [cell if header == "note" else f"{header} {cell}" for header, cell in others if " ms" not in header]
        console.print(f"\n{name}\n  {', '.join(times)}\n  {', '.join(rest)}")
    console.print()
