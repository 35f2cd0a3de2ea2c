"""The answer for people: on the terminal, in a pipe, and in summary.txt."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overlap_sweep import space
from overlap_sweep.analysis.choice import PassChoice
from overlap_sweep.analysis.drift import NOTABLE
from overlap_sweep.analysis.frame import hidden_fraction
from overlap_sweep.analysis.points import Point
from overlap_sweep.analysis.scaling import OperatorScaling, Scaling
from overlap_sweep.analysis.sweep import Analysis, CaseAnalysis, SlotAnswer
from overlap_sweep.analysis.switches import Plan
from overlap_sweep.report.console import console_for, fits
from overlap_sweep.report.overlap_yaml import USERBUFFER_BACKENDS, transfer_warning
from overlap_sweep.report.provenance import describe_machine, environments, launch_commands, measured_when
from overlap_sweep.report.tuning_report import recommendations

FILE_NAME = "summary.txt"


def summary_text(analysis: Analysis) -> str:
    """The content of summary.txt."""
    stream = io.StringIO()
    console = console_for(stream)
    print_answers(analysis, console)
    for case in analysis.cases:
        _print_details(case, analysis, console)
    commands = launch_commands(analysis.reading.points)
    if commands:
        _heading(console, "Commands")
        _lines(console, commands)
    return stream.getvalue()


def print_answers(analysis: Analysis, console: Console) -> None:
    """The answer first, then the table that it comes from, then what was left out."""
    for case in analysis.cases:
        _print_case(case, console)
    counts = {name: count for name, count in analysis.counts().items() if count}
    points = counts.pop("points")
    console.print(
        f"{points} point{'s' if points > 1 else ''}: " + ", ".join(f"{count} {name}" for name, count in counts.items())
    )
    _print_not_ok(analysis.reading.points, console)


def print_written(paths: Sequence[Path], console: Console) -> None:
    """Where the files are: the directory once, then names."""
    root = paths[0].parent
    names = ", ".join(str(path.relative_to(root)) for path in paths)
    console.print(f"\nWritten to {root}: {names}")


def _print_case(case: CaseAnalysis, console: Console) -> None:
    _heading(console, str(case.case))
    for tp_size, plan in case.plans.items():
        tried = [choice for choice in plan.choices if choice.tried_slots]
        if tried:
            _lines(console, [f"TP={tp_size}: {_verdict(tried)}"])
        if plan.overruled:
            _lines(console, [f"      {_verdict_under_switches(plan)}"])
    if case.scaling.results:
        _lines(console, [_scaling_verdict(case.scaling)])
    answers = [answer for tp_size in case.plans for answer in case.slots(tp_size) if answer.tried]
    if answers:
        _print_table(answers, console)
    for tp_size, plan in case.plans.items():
        if plan.switches:
            console.print(f"Switches to set in Megatron-Core at TP={tp_size}:")
            _lines(console, [f"{s.name}: {str(s.value).lower()}  ({s.reason})" for s in plan.switches])
        _lines(console, [f"* {sentence}" for sentence in plan.overruled], indent=0)
    if case.scaling.results:
        _print_scaling(case.scaling, console)
    _lines(console, _cautions(case), indent=0)


def _verdict(choices: Sequence[PassChoice]) -> str:
    time_us, none_us, floor_us = _sums(choices)
    over = ", ".join(_labels(choices))
    if not any(choice.chosen.settings for choice in choices):
        return f"don't overlap {over}: nothing beats {_us(none_us)} us without overlap"
    hidden = _percent(hidden_fraction(time_us, none_us, floor_us))
    return (
        f"{none_us / time_us:.2f}x no overlap in {over}: {_us(time_us)} us instead of {_us(none_us)}, "
        f"GEMMs alone {_us(floor_us)}, hidden {hidden}"
    )


def _verdict_under_switches(plan: Plan) -> str:
    time_us, none_us, _ = _sums(plan.choices)
    lost_us = sum(
        final.time_us - choice.chosen.time_us for choice, final in zip(plan.choices, plan.finals, strict=True)
    )
    return f"{none_us / (time_us + lost_us):.2f}x in Megatron-Core, whose switches don't allow all of it at once (*)"


def _labels(choices: Sequence[PassChoice]) -> list[str]:
    """`fc1` where both its passes are among the choices, else `fc1 fwd`."""
    passes = Counter(choice.operator for choice in choices)
    both = len(space.PASSES)
    return list(dict.fromkeys(c.operator if passes[c.operator] == both else c.label for c in choices))


def _sums(choices: Sequence[PassChoice]) -> tuple[float, float, float]:
    return (
        sum(choice.chosen.time_us for choice in choices),
        sum(choice.none.time_us for choice in choices),
        sum(choice.floor_us for choice in choices),
    )


def _scaling_verdict(scaling: Scaling) -> str:
    if scaling.optimal_tp_size is None:
        return f"TP size: undecided. {scaling.reason}"
    return f"TP size: use TP={scaling.optimal_tp_size}. {scaling.reason}"


def _print_table(answers: Sequence[SlotAnswer], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("TP", "slot", "setting"):
        table.add_column(header, no_wrap=True, justify="right" if header == "TP" else "left")
    for header in ("time us", "noise us", "none us", "floor us", "speedup", "hidden", "overlap"):
        table.add_column(header, no_wrap=True, justify="right")
    for tp_size, of_size in groupby(answers, key=lambda answer: answer.choice.tp_size):
        previous = None
        for answer in of_size:
            numbers = ['"'] * 7 if answer.choice is previous else _numbers(answer.choice)
            style = "green" if answer.setting else ""
            table.add_row(str(tp_size), answer.slot, Text(_setting(answer), style), *numbers)
            previous = answer.choice
        table.add_section()
    if fits(table, console):
        console.print(table)
        if any(len(list(same)) > 1 for _, same in groupby(answers, key=lambda answer: id(answer.choice))):
            console.print('" as above: dgrad and wgrad can only be timed together\n', style="dim")
    else:
        _print_stacked(answers, console)


def _setting(answer: SlotAnswer) -> str:
    overruled = answer.setting != answer.final_setting
    return space.setting_name(answer.setting) + (" *" if overruled else "")


def _numbers(choice: PassChoice) -> list[str]:
    chosen, none_us = choice.chosen, choice.none.time_us
    return [
        _us(chosen.time_us),
        _us(chosen.estimate.noise_us),
        _us(none_us),
        _us(choice.floor_us),
        f"{none_us / chosen.time_us:.2f}x",
        _percent(hidden_fraction(chosen.time_us, none_us, choice.floor_us)),
        "-" if chosen.overlap_ratio is None else f"{chosen.overlap_ratio:.2f}",
    ]


def _print_stacked(answers: Sequence[SlotAnswer], console: Console) -> None:
    previous = None
    for answer in answers:
        console.print(f"\nTP={answer.choice.tp_size} {answer.slot}: {_setting(answer)}")
        if answer.choice is previous:
            _lines(console, ["timed together with the slot above"])
        else:
            time, noise, none, floor, speedup, hidden, overlap = _numbers(answer.choice)
            _lines(console, [f"{time} us (noise {noise})", f"none {none} us, floor {floor} us"])
            _lines(console, [f"speedup {speedup}, hidden {hidden}, overlap {overlap}"])
        previous = answer.choice
    console.print()


def _print_scaling(scaling: Scaling, console: Console) -> None:
    sizes = sorted({tp_size for result in scaling.results.values() for tp_size in result.e2e_times})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("TP scaling", no_wrap=True)
    for tp_size in sizes:
        table.add_column(f"TP={tp_size} us (ratio)", justify="right", no_wrap=True)
    table.add_column("use", justify="right", no_wrap=True)
    for operator, result in scaling.results.items():
        optimal = f"TP={result.optimal_tp_size}" if result.optimal_tp_size else "?"
        table.add_row(operator, *(_scaling_cell(result, tp_size) for tp_size in sizes), optimal)
    if fits(table, console):
        console.print(table)
    else:
        _lines(console, [_scaling_line(operator, result) for operator, result in scaling.results.items()])
    console.print(
        f"ratio = time x TP / time at TP=1, forward and backward; efficient up to {1 + scaling.tolerance:.2f}, "
        "* marks what is not\n",
        style="dim",
    )


def _scaling_line(operator: str, result: OperatorScaling) -> str:
    times = ", ".join(f"TP={tp_size} {_scaling_cell(result, tp_size)}" for tp_size in result.e2e_times)
    return f"TP scaling of {operator}, us (ratio): {times}; use TP={result.optimal_tp_size or '?'}"


def _scaling_cell(result: OperatorScaling, tp_size: int) -> str:
    if tp_size not in result.e2e_times:
        return "-"
    if tp_size not in result.scaling_ratios:
        return _us(result.e2e_times[tp_size])
    mark = "" if result.scaling_efficient[tp_size] else "*"
    return f"{_us(result.e2e_times[tp_size])} ({result.scaling_ratios[tp_size]:.2f}{mark})"


def _cautions(case: CaseAnalysis) -> list[str]:
    lines = []
    if case.plans and case.case.backend not in USERBUFFER_BACKENDS:
        lines.append(transfer_warning(case.case.backend))
    for tp_size, plan in case.plans.items():
        for choice in plan.choices:
            if not choice.chosen.measured:
                lines.append(
                    f"TP={tp_size} {choice.label}: {choice.chosen.name} is predicted from its slots alone; "
                    "measure them together before you rely on it."
                )
    if case.launch_bound:
        lines.append(f"Launch-bound, left out of the choice: {', '.join(case.launch_bound)}.")
    drifted = [drift for drift in case.drift if abs(drift.change) >= NOTABLE]
    if drifted:
        worst = max(drifted, key=lambda drift: abs(drift.change))
        lines.append(
            f"The baseline without overlap drifted by up to {worst.change:+.0%} ({worst.operator} {worst.pass_name}, "
            f"TP={worst.tp_size}); settings are compared by what was measured beside them."
        )
    if len(environments(case.points)) > 1:
        lines.append("The points were measured in different environments; see tuning_report.json.")
    return lines


def _print_not_ok(points: Sequence[Point], console: Console) -> None:
    reasons: dict[tuple[str, str], list[str]] = {}
    for point in points:
        if point.status != "ok":
            error = point.result.error if point.result else "no result.json: given up, or still running"
            first_line = (error or "no reason given").strip().splitlines()[0]
            reasons.setdefault((point.status, first_line), []).append(point.name)
    for (status, reason), names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        _lines(console, [f"{status}: {names[0]}{more}: {reason}"])


def _print_details(case: CaseAnalysis, analysis: Analysis, console: Console) -> None:
    _heading(console, f"Details of {case.case}")
    _lines(console, [entry["recommendation"] for entry in recommendations(case, analysis.config.overlap_threshold)])
    _lines(console, [f"Measured {measured_when(case.points)} on {describe_machine(environments(case.points)[0])}"])
    if case.drift:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for header in ("TP", "none baseline of", "measured", "median us", "lowest", "highest", "later half"):
            table.add_column(header, justify="left" if header == "none baseline of" else "right")
        for drift in case.drift:
            times = map(_us, (drift.median_us, drift.lowest_us, drift.highest_us))
            of = f"{drift.operator} {drift.pass_name}"
            table.add_row(str(drift.tp_size), of, str(drift.measurements), *times, f"{drift.change:+.1%}")
        console.print(table)


def _heading(console: Console, title: str) -> None:
    console.print(f"\n{title}", style="bold")


def _lines(console: Console, lines: Sequence[str], indent: int = 2) -> None:
    for line in lines:
        console.print(" " * indent + line)


def _us(time_us: float) -> str:
    return f"{time_us:,.1f}"


def _percent(fraction: float) -> str:
    return "-" if math.isnan(fraction) else f"{fraction:.0%}"
