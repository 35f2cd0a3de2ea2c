from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overlap_sweep.commands import output
from overlap_sweep.errors import UsageError, UserError, nearest
from overlap_sweep.levers import Lever, programs, shells
from overlap_sweep.levers import levers as known_levers
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.numbers import some_of
from overlap_sweep.report.table import Listing, Row, Table, item

if TYPE_CHECKING:
    from rich.console import Console

_text = partial(item, kind="text")
TABLE: Table[Row] = Table(
    "levers",
    "one row per lever",
    (
        _text("lever", "Its name, as in job.levers.<name>.", "lever"),
        _text("what", "What it sets.", "what", dropped=1),
        _text("values", "Values worth trying.", "values"),
        _text("default", "Value of a script that does not set it; empty if that depends on the script."),
        _text("results", "exact (bit by bit), rounding (sums in another order) or trains differently.", "results"),
        _text("causes", "Causes of exposed communication that it can mend.", "causes"),
        _text("mends", "With --for: those of them that the diagnosis of the trace finds.", "mends"),
        _text(
            "way",
            "environment (a variable), constructor (an argument of it), call (on the model, at the first step) or "
            "argument (of the program in the command).",
            "way",
            dropped=2,
        ),
        _text("applies", "With --for: yes, or what it depends on, or no and why.", "applies"),
        _text("write", "What to write into one's own script or command, with the first value."),
        _text("note", "When it cannot be applied, or what else to know."),
    ),
)
TABLES = {"of levers": TABLE}
Command = output.with_columns(lambda: TABLES)


@dataclass(frozen=True)
class _Target:
    """A training that levers are listed for, by its trace or its command."""

    applies: Callable[[Lever], str]
    about: str
    """Sentence about what was found."""
    causes: list[str] = field(default_factory=list)
    """Causes that its diagnosis finds, the most worthwhile first."""


def levers(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Levers or their families, such as ddp; default: all.")
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="TRACE|COMMAND", help="Those that apply to this trace, directory or command line."
        ),
    ] = None,
    format: output.FormatOption = output.TableFormat.table,
) -> None:
    """List what can be changed in a training run without changing its script.

    Each is an option of workload=job: +job.levers.ddp.bucket_cap_mb=25,4,100. With --for a trace, those that mend the
    causes of its diagnosis come first; a command line (in quotes) says which programs' options it takes, and which it
    sets itself. Other formats have all levers, with the reason why one does not apply.

    \b
    Examples:
      python analyze.py levers
      python analyze.py levers ddp nccl.max_ctas
      python analyze.py levers --for multirun/2026-11-20/21-14-03/train.py_ranks2
      python analyze.py levers --for 'torchrun pretrain_gpt.py --overlap-grad-reduce'
      python analyze.py levers --format json

    Exit status: 0 success, 1 error, 2 wrong usage.
    """
    chosen = _named(names or [])
    target = _target(for_) if for_ is not None else None
    rows = [_row(name, lever, target) for name, lever in chosen.items()]
    shown = [row for row in rows if not str(row["applies"]).startswith("no")]
    if target:
        shown.sort(key=lambda row: (_place(row["mends"], target.causes), row["applies"] != "yes"))

    def show(console: Console) -> None:
        print_lines([target.about] if target else [], console, indent=0)
        if shown:
            print_table("", Listing(TABLE, shown).columns, shown, console)
        if left := len(rows) - len(shown):
            print_lines([f"{left} more do not apply; --format json says why."], console, indent=0)

    output.print_rows(TABLE.frame(rows), format, show)


def _place(mends: str, causes: Sequence[str]) -> int:
    return min((causes.index(cause) for cause in mends.split(", ") if cause), default=len(causes))


def _named(names: Iterable[str]) -> dict[str, Lever]:
    known = known_levers()
    found: dict[str, Lever] = {}
    for name in names:
        own = {each: lever for each, lever in known.items() if each.startswith(name)}
        if not own:
            near = nearest(name, [*known, *(each.partition(".")[0] for each in known)])
            raise UsageError(
                f"Unknown lever {name}. {f'Did you mean {near}?' if near else 'Leave it out to list all.'}"
            )
        found |= own
    return found or known


def _row(name: str, lever: Lever, target: _Target | None) -> Row:
    return {
        "lever": name,
        "what": lever.what,
        "values": in_words(lever.values),
        "default": None if lever.default is None else in_words([lever.default]),
        "results": lever.results,
        "causes": in_words(lever.causes),
        "mends": in_words(cause for cause in target.causes if cause in lever.causes) if target else None,
        "way": lever.way,
        "applies": target.applies(lever) if target else None,
        "write": lever.written(lever.values[0]),
        "note": lever.note,
    }


def in_words(values: Iterable[object]) -> str:
    """Returns values as they are typed."""
    return ", ".join(programs.text(value) for value in values)


def _target(given: str) -> _Target:
    if Path(given).exists():
        return _trace(Path(given))
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise UserError(f"--for {given} cannot be understood ({error}); quote it as for a shell.") from None
    if len(words) < 2:
        raise UserError(f"--for {given} is no file or directory, and no command line; give one of them.")
    return _command(words)


def _trace(path: Path) -> _Target:
    """Returns what the traces of one run show. UserError if there are several runs."""
    from overlap_sweep.commands.frames import read_runs_of_nodes
    from overlap_sweep.diagnosis.runs import read_rank

    runs, problems, _ = read_runs_of_nodes([path], None)
    output.fail_for(problems, answered=any(run.found for run in runs))
    if len(runs) != 1:
        raise UserError(f"--for {path} has {len(runs)} runs ({some_of([run.name for run in runs], 3)}); give one.")
    (run,) = runs
    assert run.found
    facts = read_rank(next(file.path for file in run.files if not file.problem)).facts
    assert facts
    causes = [one.cause for one in run.found.diagnosis.findings if one.cause != "none"]

    def applies(lever: Lever) -> str:
        if lever.gpu and not facts.on_device:
            return "no: it has a meaning on GPUs, and the trace has none"
        if lever.of and not facts.libraries & {*lever.of}:
            return f"no: the trace shows no {' or '.join(lever.of)}"
        return f"if it uses {programs.PROGRAMS[lever.program].title}" if lever.way == "argument" else "yes"

    causes = list(dict.fromkeys(causes))
    return _Target(applies, f"{run.name}: {', '.join(causes) or 'communication costs next to nothing'}.", causes)


def _command(words: list[str]) -> _Target:
    paths = {name: Path(name) for name in programs.files_of(shells.program_words(words))}
    texts = {name: path.read_text(errors="replace") for name, path in paths.items() if path.is_file()}

    def applies(lever: Lever) -> str:
        if lever.way != "argument":
            needed = [" or ".join(lever.of)] * bool(lever.of) + ["GPUs"] * lever.gpu
            return f"if it uses {' and '.join(needed)}" if needed else "yes"
        changes = ({"it": programs.change(lever, value)} for value in lever.values)
        reason = next(filter(None, (shells.refusal(one, words, texts, override=False) for one in changes)), "")
        return f"no: {reason.removeprefix('it cannot be applied: ')}" if reason else "yes"

    found = [programs.PROGRAMS[name].title for name in shells.recognised(words, texts)]
    return _Target(applies, f"Programs whose options are levers: {', '.join(found) or 'none is found'}.")
