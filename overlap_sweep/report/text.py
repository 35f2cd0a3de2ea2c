"""The answer for people: on the terminal, in a pipe, and in summary.txt."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overlap_sweep import space
from overlap_sweep.analysis.choice import PassChoice, default_sum_us, labels
from overlap_sweep.analysis.drift import NOTABLE
from overlap_sweep.analysis.frame import hidden_fraction
from overlap_sweep.analysis.points import Point
from overlap_sweep.analysis.scaling import OperatorScaling, Scaling
from overlap_sweep.analysis.sweep import Analysis, CaseAnalysis, SlotAnswer
from overlap_sweep.analysis.switches import Plan
from overlap_sweep.report import layers
from overlap_sweep.report.console import console_for, fits
from overlap_sweep.report.numbers import as_percent, as_us
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
    for layer in analysis.layers:
        _heading(console, f"Details of {layers.title(layer.point)}")
        _lines(console, [_measured([layer.point]), f"in {layer.point.directory}"])
    commands = launch_commands(analysis.reading.points)
    if commands:
        _heading(console, "Commands")
        _lines(console, commands)
    return stream.getvalue()


def print_answers(analysis: Analysis, console: Console) -> None:
    """The answer first, then the table that it comes from, then what was left out."""
    for case in analysis.cases:
        _print_case(case, console)
    for layer in analysis.layers:
        layers.print_analysis(layer, console)
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
    over = ", ".join(labels(choices))
    default_us = default_sum_us(choices)
    over_default = "" if default_us is None else f", {default_us / time_us:.2f}x the default"
    if not any(choice.chosen.settings for choice in choices):
        nothing = "nothing tried" if any(choice.default_wins for choice in choices) else "nothing"
        return f"don't overlap {over}: {nothing} beats {as_us(none_us)} us without overlap{over_default}"
    hidden = as_percent(hidden_fraction(time_us, none_us, floor_us))
    return (
        f"{none_us / time_us:.2f}x no overlap{over_default} in {over}: {as_us(time_us)} us "
        f"instead of {as_us(none_us)}, GEMMs alone {as_us(floor_us)}, hidden {hidden}"
    )


def _verdict_under_switches(plan: Plan) -> str:
    time_us, none_us, _ = _sums(plan.choices)
    lost_us = sum(
        final.time_us - choice.chosen.time_us for choice, final in zip(plan.choices, plan.finals, strict=True)
    )
    return f"{none_us / (time_us + lost_us):.2f}x in Megatron-Core, whose switches don't allow all of it at once (*)"


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
    headers = [header for header in _cells(answers[0].choice) if header != "default us" or _have_default(answers)]
    for header in headers:
        table.add_column(header, no_wrap=True, justify="right")
    for tp_size, of_size in groupby(answers, key=lambda answer: answer.choice.tp_size):
        previous = None
        for answer in of_size:
            cells = _cells(answer.choice)
            numbers = ['"' if answer.choice is previous else cells[header] for header in headers]
            style = "green" if answer.setting else ""
            table.add_row(str(tp_size), answer.slot, Text(_setting(answer), style), *numbers)
            previous = answer.choice
        table.add_section()
    if fits(table, console):
        console.print(table)
        together = any(len(list(same)) > 1 for _, same in groupby(answers, key=lambda answer: id(answer.choice)))
        notes = ['" as above: dgrad and wgrad can only be timed together'] if together else []
        notes += ["default: as Transformer Engine overlaps by itself"] if _have_default(answers) else []
        if notes:
            console.print("\n".join([*notes, ""]), style="dim")
    else:
        _print_stacked(answers, console)


def _have_default(answers: Sequence[SlotAnswer]) -> bool:
    return any(answer.choice.default for answer in answers)


def _setting(answer: SlotAnswer) -> str:
    overruled = answer.setting != answer.final_setting
    return space.brief_name(answer.setting) + (" *" if overruled else "")


def _cells(choice: PassChoice) -> dict[str, str]:
    """By header."""
    chosen, none_us = choice.chosen, choice.none.time_us
    return {
        "time us": as_us(chosen.time_us),
        "noise us": as_us(chosen.estimate.noise_us),
        "none us": as_us(none_us),
        "default us": as_us(choice.default.time_us) if choice.default else "-",
        "floor us": as_us(choice.floor_us),
        "speedup": f"{none_us / chosen.time_us:.2f}x",
        "hidden": as_percent(hidden_fraction(chosen.time_us, none_us, choice.floor_us)),
        "overlap": "-" if chosen.overlap_ratio is None else f"{chosen.overlap_ratio:.2f}",
    }


def _print_stacked(answers: Sequence[SlotAnswer], console: Console) -> None:
    previous = None
    for answer in answers:
        console.print(f"\nTP={answer.choice.tp_size} {answer.slot}: {_setting(answer)}")
        if answer.choice is previous:
            _lines(console, ["timed together with the slot above"])
        else:
            cells = _cells(answer.choice)
            default = f"default {cells['default us']} us, " if answer.choice.default else ""
            _lines(console, [f"{cells['time us']} us (noise {cells['noise us']})"])
            _lines(console, [f"none {cells['none us']} us, {default}floor {cells['floor us']} us"])
            _lines(console, [", ".join(f"{name} {cells[name]}" for name in ("speedup", "hidden", "overlap"))])
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
        return as_us(result.e2e_times[tp_size])
    mark = "" if result.scaling_efficient[tp_size] else "*"
    return f"{as_us(result.e2e_times[tp_size])} ({result.scaling_ratios[tp_size]:.2f}{mark})"


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
            if choice.default and choice.default_wins:
                lines.append(
                    f"TP={tp_size} {choice.label}: the default, {as_us(choice.default.time_us)} us, is faster than "
                    "anything tried; sweep more settings."
                )
    if case.launch_bound:
        lines.append(f"Launch-bound, left out of the choice: {', '.join(case.launch_bound)}.")
    drifted = [drift for drift in case.drift if abs(drift.change) >= NOTABLE]
    worst = {drift.baseline: drift for drift in sorted(drifted, key=lambda drift: abs(drift.change))}
    if worst:
        by_how_much = ", ".join(
            f"{baseline} by up to {drift.change:+.0%} ({drift.operator} {drift.pass_name}, TP={drift.tp_size})"
            for baseline, drift in worst.items()
        )
        lines.append(f"Baselines drifted: {by_how_much}; settings are compared by what was measured beside them.")
    if case.repeats:
        widest, *_ = case.repeats
        typical = statistics.median(repeats.spread for repeats in case.repeats)
        lines.append(
            f"Repeated points: the medians of {len(case.repeats)} passes, each measured up to "
            f"{max(len(repeats.medians_us) for repeats in case.repeats)} times, spread by {typical:.1%} in the middle "
            f"and {widest.spread:.1%} at most ({widest.point} {widest.pass_name})."
        )
    for reason, names in case.conditions.slowed.items() if case.conditions else ():
        lines.append(f"GPUs were slowed down ({reason}) around {len(names)} points, first {names[0]}.")
    lines += dict.fromkeys(warning for point in case.points if point.result for warning in point.result.warnings)
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
    _lines(console, [_measured(case.points)])
    if case.conditions:
        (coolest, hottest), (slowest, fastest) = case.conditions.temperature_c, case.conditions.sm_clock_mhz
        _lines(console, [f"GPUs before and after points: {coolest:g} to {hottest:g} C, {slowest:g} to {fastest:g} MHz"])
    if case.drift:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for header in ("TP", "baseline of", "measured", "median us", "lowest", "highest", "later half"):
            table.add_column(header, justify="left" if header == "baseline of" else "right")
        for drift in case.drift:
            times = map(as_us, (drift.median_us, drift.lowest_us, drift.highest_us))
            of = f"{drift.operator} {drift.pass_name} {drift.baseline}"
            table.add_row(str(drift.tp_size), of, str(drift.measurements), *times, f"{drift.change:+.1%}")
        console.print(table)


def _measured(points: Sequence[Point]) -> str:
    return f"Measured {measured_when(points)} on {describe_machine(environments(points)[0])}"


def _heading(console: Console, title: str) -> None:
    console.print(f"\n{title}", style="bold")


def _lines(console: Console, lines: Sequence[str], indent: int = 2) -> None:
    for line in lines:
        console.print(" " * indent + line)
