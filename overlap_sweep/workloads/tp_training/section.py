"""Tensor-parallel stacks for people: which is fastest on which ranks, and the table that this comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_count, as_loss, as_ms, as_percent
from overlap_sweep.report.plain_table import PlainRow, print_table
from overlap_sweep.results.identity import environment_identity, key_of
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import environments
from overlap_sweep.workloads.tp_training.answer import TpTrainingAnalysis, TpTrainingRow, analyse_tp_training
from overlap_sweep.workloads.tp_training.files import write_results
from overlap_sweep.workloads.tp_training.sentences import in_words, warnings
from overlap_sweep.workloads.tp_training.step_communication import read_communication

LEFT = ("setting", "note")
PRINTED = (
    *("TP", "DP", "setting", "step ms", "fwd", "bwd", "opt", "tokens/s/GPU", "MFU", "peak GB"),
    *("comm ms", "hidden", "exposed ms", "loss", "note"),
)
"""The rest is in the page and in tp_training.csv."""
OPTIONAL = ("loss", "comm ms", "peak GB", "opt", "hidden", "exposed ms", "fwd", "bwd", "MFU")
"""What a narrow terminal does without, the first of them first."""

LEGEND = (
    "step: median of the steps after the warm-up, of the slowest rank. fwd, bwd, opt: their shares of it. MFU: model "
    "FLOP utilisation, of the GPU's dense peak. comm: communication in a profiled step, of the rank that waits least "
    "for the others; hidden: the share with computation beside it; exposed: the rest. tie: a difference inside the "
    "noise, in which what equal points are apart is included."
)


def write_and_print(points: Iterable[Point], console: Console) -> list[str]:
    """Those among them that tensor-parallel stacks ran: the results file of each into its run directory, then what they
    say. Returns a sentence for each trace that could not be read, or not all of it was."""
    of_stacks = [point for point in points if point.is_tp_training and point.status == "ok"]
    communication = read_communication(of_stacks)
    analyses = analyse_tp_training(of_stacks, communication.of_point)
    write_results(analyses)
    print_analyses(analyses, console)
    return [*communication.problems, *communication.warnings]


def print_analyses(analyses: Sequence[TpTrainingAnalysis], console: Console) -> None:
    """The answers of each case first, then its table, and what to know before believing it."""
    for analysis in analyses:
        console.print(f"\n{title(analysis)}", style="bold")
        print_lines(in_words(analysis), console)
        _print_rows(analysis, console)
        print_lines([LEGEND, *cautions(analysis)], console, indent=0)


def title(analysis: TpTrainingAnalysis) -> str:
    """What was trained, and on what."""
    return f"Tensor-parallel training of {analysis.case}, {as_count(analysis.parameters)} parameters"


def cautions(analysis: TpTrainingAnalysis) -> list[str]:
    """A sentence each."""
    lines = warnings(analysis)
    if len({_identity(environment) for environment in environments(analysis.points)}) > 1:
        lines.append("The points were measured in different environments; see tuning_report.json.")
    return lines


def _identity(environment: dict[str, Any]) -> str:
    """Without what belongs to an implementation: how many connections it needs."""
    identity = environment_identity(environment)
    identity["variables"].pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    return key_of(identity)


def note(row: TpTrainingRow, analysis: TpTrainingAnalysis) -> str:
    """What tells a row from those that are simply slower."""
    answer = next(answer for answer in analysis.answers if answer.grid == row.grid)
    several = len(answer.rows) > 1
    tied = any(row is one for one in answer.ties)
    notes = [
        *(["best of all"] if row is analysis.best and len(analysis.answers) > 1 else []),
        *(["fastest" if len(answer.ties) == 1 else "tie"] if several and tied else []),
        *(["deviates"] if row.deviates else []),
        *(["diverges"] if row.diverges else []),
        *(["launch-bound"] if row.host_limits else []),
        *([f"{len(row.points)} points"] if len(row.points) > 1 else []),
    ]
    return ", ".join(notes)


def cells(row: TpTrainingRow, analysis: TpTrainingAnalysis) -> dict[str, str]:
    """By header; an empty cell is unknown."""
    shares, communication = row.shares, row.communication
    return {
        "TP": str(row.grid.tp_size),
        "DP": str(row.grid.dp_size),
        "setting": row.setting,
        "step ms": as_ms(row.time_us),
        "quartiles ms": f"{as_ms(row.q1_us)} to {as_ms(row.q3_us)}",
        **{name: f"{share:.0%}" for name, share in zip(("fwd", "bwd", "opt", "other"), shares, strict=True)},
        "tokens/s": f"{row.tokens_per_s:,.0f}",
        "tokens/s/GPU": f"{row.tokens_per_s_per_gpu:,.0f}",
        "samples/s": f"{row.samples_per_s:,.3g}",
        "TFLOP/s": f"{row.tflops_per_gpu:,.3g}",
        "MFU": "" if row.mfu is None else f"{row.mfu:.1%}",
        "alloc GB": _as_gb(row.memory_allocated_gb),
        "peak GB": _as_gb(row.memory_peak_gb),
        "comm ms": as_ms(communication.total_us) if communication else "",
        "hidden": as_percent(communication.hidden_fraction) if communication else "",
        "exposed ms": as_ms(communication.exposed_us) if communication else "",
        "loss": "-" if row.loss is None else as_loss(row.loss),
        "note": note(row, analysis),
    }


def _as_gb(gigabytes: float | None) -> str:
    return "" if gigabytes is None else f"{gigabytes:.1f}"


def _print_rows(analysis: TpTrainingAnalysis, console: Console) -> None:
    rows = [(row, cells(row, analysis)) for row in analysis.rows]
    headers = [header for header in PRINTED if any(of_row[header] for _, of_row in rows)]
    fastest = [answer.best for answer in analysis.answers if answer.best]
    last = [answer.rows[-1] for answer in analysis.answers[:-1]]
    table = [
        PlainRow(
            [of_row[header] for header in headers],
            "green" if any(row is one for one in fastest) else "",
            ends_section=any(row is one for one in last),
        )
        for row, of_row in rows
    ]
    if not print_table(headers, table, LEFT, console, OPTIONAL):
        for row, of_row in rows:
            told = f" ({of_row['note']})" if of_row["note"] else ""
            print_lines([f"{row.name}{told}: {of_row['step ms']} ms"], console)
            parts = f"forward {of_row['fwd']}, backward {of_row['bwd']}, optimizer {of_row['opt']}"
            print_lines([f"{parts}, {of_row['tokens/s/GPU']} tokens/s/GPU"], console, indent=4)
