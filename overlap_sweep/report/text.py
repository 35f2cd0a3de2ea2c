"""The answer for people: on the terminal, in a pipe, and in summary.txt."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.overlap.overlap_cfg import DEFAULT
from overlap_sweep.report.console import console_for, fits, print_lines
from overlap_sweep.report.numbers import as_percent, as_us
from overlap_sweep.report.searches import knob_searches, pass_searches, print_titled
from overlap_sweep.report.section import Section
from overlap_sweep.report.terminal import print_section
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import gpus_in_words, launch_commands, measured_on
from overlap_sweep.workloads.operator import async_tp, proofs
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.cautions import cautions
from overlap_sweep.workloads.operator.choice import PassChoice, default_sum_us, labels
from overlap_sweep.workloads.operator.proof import spoken
from overlap_sweep.workloads.operator.scaling import OperatorScaling, Scaling
from overlap_sweep.workloads.operator.slot_table import print_slots
from overlap_sweep.workloads.operator.switches import Plan
from overlap_sweep.workloads.operator.tuning_report import recommendations

FILE_NAME = "summary.txt"


def summary_text(analysis: Analysis) -> str:
    """The content of summary.txt."""
    stream = io.StringIO()
    console = console_for(stream)
    print_answers(analysis, console, whole=True)
    for case in analysis.operators.cases:
        _print_details(case, analysis, console)
    for answer in (answer for section in analysis.sections for answer in section.answers if answer.details):
        _heading(console, f"Details of {answer.title}")
        print_lines(answer.details, console)
    print_titled(pass_searches(analysis.records, analysis.reading.root), console)
    commands = launch_commands(analysis.reading.points)
    if commands:
        _heading(console, "Commands")
        print_lines(commands, console)
    return stream.getvalue()


def print_answers(analysis: Analysis, console: Console, whole: bool = False) -> None:
    """Prints the answer first, then the table that it comes from, then what was left out; `whole`: every table, with
    all its rows."""
    for case in analysis.operators.cases:
        _print_case(case, analysis.operators.folder(case), console)
    print_titled(knob_searches(analysis.records.knobs, analysis.reading.root), console)
    for section in analysis.sections:
        print_section(section, console, whole)
    proofs.print_tuners(analysis.operators, console)
    counts = {name: count for name, count in analysis.counts().items() if count}
    points = counts.pop("points")
    console.print(
        f"\n{points} point{'s' if points > 1 else ''}: "
        + ", ".join(f"{count} {name}" for name, count in counts.items())
    )
    _print_not_ok(analysis.reading.points, console)


def print_written(paths: Sequence[Path], console: Console, sections: Sequence[Section] = ()) -> None:
    """Where the files are: the directory once, then names; of those in run directories, how many."""
    root = paths[0].parent
    files = [file for section in sections for file in section.files]
    in_runs = {file.name for file in files}
    names = [str(path.relative_to(root)) for path in paths if path.parent == root or path.name not in in_runs]
    names += [f"{kind} of {number} run directories" for kind, number in Counter(file.kind for file in files).items()]
    console.print(f"\nWritten to {root}: {', '.join(names)}")


def _print_case(case: CaseAnalysis, folder: str, console: Console) -> None:
    _heading(console, str(case.case))
    for tp_size in sorted({*case.plans, *case.outcomes}):
        _print_answer(case, tp_size, folder, console)
    if case.scaling.results:
        print_lines([_scaling_verdict(case.scaling)], console)
    if case.outcomes:
        console.print()
        proofs.print_outcomes(case, console)
    answers = [answer for tp_size in case.plans for answer in case.slots(tp_size) if answer.tried]
    if answers and case.outcomes:
        console.print("The operators one by one:")
    if answers:
        print_slots(answers, case.case.backend, console)
    for tp_size in case.tp_sizes:
        if (switches := case.switches(tp_size)) and case.case.backend != async_tp.BACKEND:
            console.print(f"Switches to set in Megatron-Core at TP={tp_size}:")
            print_lines([f"{s.name}: {str(s.value).lower()}  ({s.reason})" for s in switches], console)
        overruled = case.plans[tp_size].overruled if tp_size in case.plans else []
        print_lines([f"* {sentence}" for sentence in overruled], console, indent=0)
    if case.scaling.results:
        _print_scaling(case.scaling, console)
    if notes := cautions(case):
        console.print()
        print_lines(notes, console, indent=0)


def _print_answer(case: CaseAnalysis, tp_size: int, folder: str, console: Console) -> None:
    """What was proven, where a tuner ran; and what the operators say one by one."""
    plan, outcome = case.plans.get(tp_size), case.outcomes.get(tp_size)
    if outcome:
        print_lines([proofs.headline(outcome, folder)], console, hanging=6)
    tried = [choice for choice in plan.choices if choice.tried_slots] if plan else []
    if tried:
        if outcome:
            print_lines([f"operators one by one: {_verdict(tried, case.case.backend)}"], console, indent=8)
        else:
            print_lines([f"TP={tp_size}: {_verdict(tried, case.case.backend)}"], console, hanging=6)
    if plan and plan.overruled:
        print_lines([_verdict_under_switches(plan)], console, indent=8)


def _verdict(choices: Sequence[PassChoice], backend: str) -> str:
    time_us, none_us, floor_us = _sums(choices)
    over = ", ".join(labels(choices))
    default_us = default_sum_us(choices)
    over_default = "" if default_us is None else f", {default_us / time_us:.2f}x {spoken(DEFAULT, backend)}"
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
        print_lines([_scaling_line(operator, result) for operator, result in scaling.results.items()], console)
    console.print(
        f"ratio = time x TP / time at TP=1, forward and backward; efficient up to {1 + scaling.tolerance:.2f}, "
        "* marks what is not",
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


def _print_not_ok(points: Sequence[Point], console: Console) -> None:
    reasons: dict[tuple[str, str], list[str]] = {}
    for point in points:
        if point.status != "ok":
            reasons.setdefault((point.status, point.why_not_ok), []).append(point.name)
    for (status, reason), names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print_lines([f"{status}: {names[0]}{more}: {reason}"], console)


def _print_details(case: CaseAnalysis, analysis: Analysis, console: Console) -> None:
    _heading(console, f"Details of {case.case}")
    print_lines(
        [entry["recommendation"] for entry in recommendations(case, analysis.config.overlap_threshold)], console
    )
    print_lines([measured_on(case.points), *gpus_in_words(case.points)], console)
    if case.drift:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for header in ("TP", "baseline of", "measured", "median us", "lowest", "highest", "later half"):
            table.add_column(header, justify="left" if header == "baseline of" else "right")
        for drift in case.drift:
            times = map(as_us, (drift.median_us, drift.lowest_us, drift.highest_us))
            of = f"{drift.operator} {drift.pass_name} {drift.baseline}"
            table.add_row(str(drift.tp_size), of, str(drift.measurements), *times, f"{drift.change:+.1%}")
        console.print(table)


def _heading(console: Console, title: str) -> None:
    console.print(f"\n{title}", style="bold")
