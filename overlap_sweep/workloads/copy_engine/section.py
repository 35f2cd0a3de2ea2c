"""GEMMs beside copies for people: what a copy engine hides, by direction and size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_rate, as_us
from overlap_sweep.report.plain_table import PlainRow, print_table
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.copy_engine.answer import CopyAnalysis, CopyRow, analyse_copies
from overlap_sweep.workloads.fsdp.warnings import copy_warnings

LEFT = ("direction", "size", "note")
OPTIONAL = ("GB/s", "TFLOP/s", "noise us", "slowdown", "of sequential")
"""What a narrow terminal does without, the first of them first."""

LEGEND = (
    "An iteration is all its GEMMs and copies. saved: sequential less overlapped, round by round; of the ideal: of the "
    "shorter of the two alone; slowdown: overlapped over the longer. Rates are alone, then over the overlapped time."
)


def print_copies(points: Iterable[Point], console: Console) -> None:
    """Those among them that are GEMMs beside copies."""
    print_analyses(analyse_copies(points), console)


def print_analyses(analyses: Sequence[CopyAnalysis], console: Console) -> None:
    """The answers of all directions, then a table of all sizes."""
    if not analyses:
        return
    console.print(f"\n{title(analyses)}", style="bold")
    print_lines([analysis.answer for analysis in analyses], console)
    rows = [(row, analysis) for analysis in analyses for row in analysis.rows]
    told = [cells(row, analysis) for row, analysis in rows]
    headers = [header for header in told[0] if any(of_row[header] for of_row in told)]
    table = [
        PlainRow(
            [of_row[header] for header in headers],
            "green" if row.saves and not row.launch_bound else "",
            ends_section=row is analysis.rows[-1] and analysis is not analyses[-1],
        )
        for (row, analysis), of_row in zip(rows, told, strict=True)
    ]
    if not print_table(headers, table, LEFT, console, OPTIONAL):
        for of_row in told:
            noted = f" ({of_row['note']})" if of_row["note"] else ""
            print_lines([f"{of_row['direction']}, {of_row['size']}{noted}"], console)
            saved = f"saved {of_row['saved us']}, {of_row['of the ideal']} of the ideal"
            times = f"overlapped {of_row['overlapped us']} us, sequential {of_row['sequential us']}"
            print_lines([f"{times}, {saved}"], console, indent=4)
    print_lines([LEGEND, *cautions(analyses)], console, indent=0)


def title(analyses: Sequence[CopyAnalysis]) -> str:
    devices = dict.fromkeys(analysis.case.device for analysis in analyses)
    return f"GEMMs beside copies on {', '.join(devices)}"


def cautions(analyses: Sequence[CopyAnalysis]) -> list[str]:
    """What to know before believing the answers: a sentence each."""
    return copy_warnings([row for analysis in analyses for row in analysis.rows])


def cells(row: CopyRow, analysis: CopyAnalysis) -> dict[str, str]:
    """By header."""
    return {
        "direction": analysis.case.direction,
        "size": row.size,
        "GEMM us": as_us(row.gemm.time_us),
        "copy us": as_us(row.copy.time_us),
        "sequential us": as_us(row.sequential.time_us),
        "overlapped us": as_us(row.overlapped.time_us),
        "saved us": as_us(row.saving.time_us),
        "noise us": as_us(row.saving.noise_us),
        "of sequential": f"{row.saving_share:.0%}",
        "of the ideal": f"{row.hidden_fraction:.0%}",
        "slowdown": f"{row.slowdown:+.0%}",
        "TFLOP/s": " to ".join(as_rate(row.tflops(beside)) for beside in (False, True)),
        "GB/s": " to ".join(as_rate(row.gb_per_s(beside)) for beside in (False, True)),
        "note": note(row),
    }


def note(row: CopyRow) -> str:
    """What tells a row from others."""
    if row.launch_bound:
        return "launch-bound"
    if row.saves:
        return "hides all" if row.hidden_fraction > 0.95 else ""
    if row.slower:
        return "slower"
    return "cannot tell" if row.unclear else "hides nothing"
