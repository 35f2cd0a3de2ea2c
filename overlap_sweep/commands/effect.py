from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from overlap_sweep.commands.output import fail_for, print_warning
from overlap_sweep.declared import shown
from overlap_sweep.errors import UserError
from overlap_sweep.report.numbers import some_of, visible, visible_json

if TYPE_CHECKING:
    from overlap_sweep.effects import Slots
    from overlap_sweep.effects.comparison import Effect
    from overlap_sweep.effects.runs import Recording

POINTS_NAMED = 3
RUNS_DIFFER = ("repetition",)
"""Options in which runs of one setting differ."""


class Format(StrEnum):
    table = "table"
    json = "json"


def effect(
    paths: Annotated[
        list[Path], typer.Argument(metavar="A...", help="Traces of a run's ranks, or the directory of a run each.")
    ],
    against: Annotated[
        list[Path], typer.Option("--against", metavar="B", help="Traces or directory of the run to compare with.")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of A that B does not have. Repeatable."),
    ] = None,
    format: Annotated[Format, typer.Option(help="json: an object, of several runs a list.")] = Format.table,
) -> None:
    """Say what changed in what ran, and whether settings were in force.

    Two recordings of the same work are compared step by step: number, sizes, kernels, grids and streams of collectives,
    what was launched before them, and what computed. Times are not compared. What varies from step to step anyway is no
    change. What differs between the settings is known of points that this program measured, else from --set; of a
    tp_comm_overlap_cfg, against a run without overlap, each slot is looked for.

    \b
    Examples:
      python analyze.py effect multirun/buckets/bucket=100 --against multirun/buckets/bucket=25
      python analyze.py effect after/ --against before/ --set NCCL_MAX_CTAS=4
      python analyze.py effect after/ --against before/ --set tp_comm_overlap_cfg=optimal_tp_comm_overlap_cfg_tp4.yaml
      python analyze.py effect a_rank0.json.gz --against b_rank0.json.gz --format json

    Exit status: 0 success, 1 error, 2 wrong usage.
    """
    from overlap_sweep.effects.comparison import effect as effect_of
    from overlap_sweep.levers import effect_entry

    given, slots = _given(set_ or [])
    others, problems = _recordings(against)
    runs, more = _recordings(paths)
    fail_for([*problems, *more], answered=bool(others and runs))
    if len(others) != 1:
        raise UserError(f"--against has {len(others)} runs ({_names(others)}); give the traces of one.")
    (other,) = others
    first, found = _options(other.directory), []
    for run in runs:
        second = _options(run.directory)
        options = {
            name: (first.get(name, ""), second.get(name, ""))
            for name in dict.fromkeys((*first, *second))
            if first.get(name, "") != second.get(name, "")
        }
        options |= given
        entries = {name: entry for name in options if (entry := effect_entry(name)) is not None}
        found.append(effect_of(run.name, run.prints, other.name, other.prints, options, slots, entries))
    if format is Format.json:
        content = msgspec.json.encode(found[0] if len(found) == 1 else found)
        sys.stdout.write(visible_json(msgspec.json.format(content, indent=2).decode()) + "\n")
        return
    for one in found:
        _print(one)


def _given(settings: list[str]) -> tuple[dict[str, tuple[str, str]], Slots]:
    """Returns the settings, and the slots of a tp_comm_overlap_cfg that is among them."""
    from overlap_sweep.effects import Slots
    from overlap_sweep.overlap import overlap_cfg, space

    found: dict[str, tuple[str, str]] = {}
    slots: dict[str, space.Setting] = {}
    for one in settings:
        name, separator, value = one.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"{one} is not NAME=VALUE", param_hint="--set")
        last = name.rpartition(".")[2].lstrip("-").replace("-", "_")
        if last == "tp_comm_overlap_cfg":
            slots |= overlap_cfg.read(Path(value)).slots
        elif space.SLOTS.get(last):
            setting = space.setting_of(value)
            if setting is None:
                raise UserError(f"--set {one}: {value} is not a setting; give one such as bulk_sm16.")
            slots[last] = setting
        else:
            found[name] = ("", value)
    return found, Slots(slots)


def _names(recordings: list[Recording]) -> str:
    return some_of([one.name for one in recordings], POINTS_NAMED) or "none"


def _recordings(paths: list[Path]) -> tuple[list[Recording], list[str]]:
    from overlap_sweep.commands.frames import find_traces
    from overlap_sweep.effects.runs import recordings

    traces, problems = find_traces(paths)
    # An operator may have traces of no overlap next to its own.
    own = [path for path in traces if not path.name.startswith("trace_none_rank")]
    found = recordings(own or traces)
    return [one for one in found if one.prints], [*problems, *(problem for one in found for problem in one.problems)]


def _options(directory: Path) -> dict[str, str]:
    """Returns the options of the point whose directory it is, by dotted name; empty if it is none."""
    from overlap_sweep.results.identity import HOW_TO_RUN
    from overlap_sweep.results.run_directory import RESULT_FILE, read_result

    if not (directory / RESULT_FILE).is_file():
        return {}
    how_to_run = {f"runtime.{name}" for name in HOW_TO_RUN}
    recorded = _flat(read_result(directory / RESULT_FILE).recorded, "")
    return {name: value for name, value in recorded if name not in how_to_run}


def _flat(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        for key, own in value.items():
            yield from _flat(own, f"{name}.{key}" if name else str(key))
    elif name not in RUNS_DIFFER:
        yield name, shown(value)


def _print(one: Effect) -> None:
    print(visible(f"{one.run}, against {one.against}:"))
    for sentence in one.sentences:
        print(visible(f"  {sentence}"))
    for setting in one.settings:
        before = f" (before {setting.before})" if setting.before else ""
        print(visible(f"  {setting.name}={setting.after}{before}: {setting.verdict}: {setting.evidence}"))
    for note in one.notes:
        print_warning(note)
