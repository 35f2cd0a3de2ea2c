"""The best setting of every slot, as the operators were measured one by one: a table, or lines on a narrow terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import DEFAULT, named
from overlap_sweep.report.console import fits, print_lines
from overlap_sweep.report.numbers import as_percent, as_us
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.workloads.operator import async_tp
from overlap_sweep.workloads.operator.cases import SlotAnswer
from overlap_sweep.workloads.operator.choice import PassChoice


def print_slots(answers: Sequence[SlotAnswer], backend: str, console: Console) -> None:
    """One row for each; `answers` are at least one."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("TP", "slot", "setting"):
        table.add_column(header, no_wrap=True, justify="right" if header == "TP" else "left")
    headers = [header for header in _cells(answers[0].choice) if header != "default us" or _have_default(answers)]
    for header in headers:
        named_header = header.replace(DEFAULT, named(DEFAULT, backend))
        table.add_column(named_header, no_wrap=True, justify="right")
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
        if _have_default(answers) and backend != async_tp.BACKEND:
            notes.append("default: as Transformer Engine overlaps by itself")
        if notes:
            console.print("\n".join([*notes, ""]), style="dim")
    else:
        _print_stacked(answers, backend, console)


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


def _print_stacked(answers: Sequence[SlotAnswer], backend: str, console: Console) -> None:
    previous = None
    for answer in answers:
        console.print(f"\nTP={answer.choice.tp_size} {answer.slot}: {_setting(answer)}")
        if answer.choice is previous:
            print_lines(["timed together with the slot above"], console)
        else:
            cells = _cells(answer.choice)
            default = f"{named(DEFAULT, backend)} {cells['default us']} us, " if answer.choice.default else ""
            print_lines([f"{cells['time us']} us (noise {cells['noise us']})"], console)
            print_lines([f"none {cells['none us']} us, {default}floor {cells['floor us']} us"], console)
            print_lines([", ".join(f"{name} {cells[name]}" for name in ("speedup", "hidden", "overlap"))], console)
        previous = answer.choice
    console.print()
