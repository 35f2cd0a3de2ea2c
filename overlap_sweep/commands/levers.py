from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overlap_sweep.commands import output
from overlap_sweep.commands.lever_values import Meant, Worth, as_lever, changes_of, meant_by, unrecorded, worth_of
from overlap_sweep.errors import UsageError, UserError
from overlap_sweep.levers import Lever, programs, shells
from overlap_sweep.levers import levers as levers_by_name
from overlap_sweep.levers.training import Training
from overlap_sweep.program import analyze_program
from overlap_sweep.report.console import GAP, print_lines, print_table
from overlap_sweep.report.numbers import as_us, shortened, some_of
from overlap_sweep.report.table import Column, Row, Table, item

if TYPE_CHECKING:
    from rich.console import Console

    from overlap_sweep.diagnosis import Finding
    from overlap_sweep.predict.predictions import Prediction
    from overlap_sweep.results.points import Point
    from overlap_sweep.workloads import UsersCommand

_text = partial(item, kind="text")
TABLE: Table[Row] = Table(
    "levers",
    "one row per lever",
    (
        _text("lever", "Its name, as in job.levers.<name>.", "lever"),
        _text("what", "What it sets.", "what"),
        _text("values", "Values worth trying.", "values", show=partial(shortened, longest=16)),
        _text("default", "Value of a script that does not set it; empty if that depends on the script."),
        _text(
            "results",
            "exact (bit by bit), rounding (sums in another order) or trains differently.",
            "results",
            show=lambda text: text.replace("trains differently", "differs"),
        ),
        _text("causes", "Causes of exposed communication that it can mend."),
        _text("mends", "With --for: those of them that the diagnosis of the trace finds.", "mends"),
        _text(
            "way",
            "environment (a variable), constructor (an argument of it), call (on the model, at the first step) or "
            "argument (of the program in the command).",
        ),
        _text(
            "applies",
            "With --for: yes, or what it depends on, or no and why.",
            "applies",
            show=lambda text: "perhaps" if text.startswith("if") else text,
        ),
        _text("value", "With --for: the value in `write`; empty if nothing says which is best."),
        _text(
            "write",
            "What to write into one's own script or command. VALUE is one of the values; empty if none gains anything.",
        ),
        _text("change", "With --for a recording: the change of `predict` whose gain follows."),
        Column(
            "gain_us",
            itemgetter("gain_us"),
            "What that is predicted to gain per step; of a bound the most that the lever gains. Empty if unknown.",
            header="gain us",
            words=lambda row: _gain_in_words(row),
        ),
        item("gain_low_us", "Least gain_us that the recording leaves open."),
        item("gain_high_us", "Largest gain_us that it leaves open."),
        _text("status", "Of the gain: predicted or bound."),
        _text("note", "When it cannot be applied, or what else to know."),
    ),
)
TABLES = {"of levers": TABLE}
Command = output.with_columns(lambda: TABLES)

_CLAUSE_ENDS = re.compile(r"[,;:]? \(|[,;:] ")
_WIDTH = 120
"""Of the list, in columns, since there is more of each lever than a terminal has room for."""
_RESULTS = "results: exact is bit by bit, rounding is sums in another order, differs is trains differently."
_PERHAPS = "applies: perhaps if the training uses what the lever is for."


@dataclass(frozen=True)
class Target:
    """A training that levers are listed for, by its trace, its command, or both."""

    about: list[str]
    """Sentences about what was found."""
    training: Training = field(default_factory=Training)
    findings: list[Finding] = field(default_factory=list)
    """What its diagnosis finds, the most worthwhile first."""
    advised: Collection[str] = ()
    """Changes of `predict` that the diagnosis names, in the words of levers."""
    predict: Callable[[Sequence[str]], list[Prediction]] = lambda changes: []
    """Returns the predictions for these changes; none without a recording."""

    @property
    def causes(self) -> list[str]:
        return list(dict.fromkeys(one.cause for one in self.findings))

    def mended_by(self, lever: Lever) -> list[str]:
        """Returns the causes that are found and that the lever can mend."""
        return list(dict.fromkeys(one.cause for one in self.findings if lever.can_mend(one)))


def levers(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Levers or their families, such as ddp; default: all.")
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="TRACE|DIRECTORY|COMMAND",
            help="Those that apply to this trace, run or sweep directory, or command line.",
        ),
    ] = None,
    format: output.FormatOption = output.TableFormat.table,
) -> None:
    """List what can be changed in a training run without changing its script.

    Each is an option of workload=job: job.levers.ddp.bucket_cap_mb=25,4,100. The whole name of one prints all about it.
    With --for a trace, those that mend the causes of its diagnosis come first; a command line (in quotes) says which
    programs' options it takes, and which it sets itself; a directory of workload=job has both. What is written then has
    the value that is predicted to gain most. Other formats have all levers, with the reason why one does not apply.

    \b
    Examples:
      python analyze.py levers
      python analyze.py levers ddp
      python analyze.py levers nccl.max_ctas
      python analyze.py levers nccl.cta_policy=2
      python analyze.py levers --for multirun/2026-11-20/21-14-03
      python analyze.py levers --for 'torchrun pretrain_gpt.py --overlap-grad-reduce'
      python analyze.py levers --format json

    Exit status: 0 success, 1 error, 2 wrong usage.
    """
    rows, target, meant = lever_rows(names or [], for_)
    if meant.unknown:
        raise UsageError(" ".join(meant.unknown))
    if format is not output.TableFormat.table:
        output.fail_for(meant.notes, answered=True)

    def show(console: Console) -> None:
        print_lines([*meant.notes, *(target.about if target else [])], console, indent=0)
        if {row["lever"] for row in rows} <= meant.whole:
            for row in rows:
                _print_lever(row, console)
        else:
            _print_list(rows, target, console)

    output.print_rows(lambda: TABLE.frame(rows), format, show)


def lever_rows(names: Sequence[str], for_: str | None) -> tuple[list[Row], Target | None, Meant]:
    """Returns the rows of the named levers, the training that they are listed for, if any, and what the names mean."""
    meant = meant_by(names)
    target = _target(for_) if for_ is not None else None
    applies = {one: target.training.applies(one, levers_by_name()[one]) for one in meant.values} if target else {}
    possible = {one: value for one, value in meant.values.items() if applies and not applies[one].startswith("no")}
    worth: Mapping[str, Worth] = {}
    if target and target.training.libraries is not None:
        changes = (changes_of(one, value, target.advised).values() for one, value in possible.items())
        told = {one.change: one for one in target.predict(list(dict.fromkeys(chain.from_iterable(changes))))}
        worth = worth_of(possible, told, target.advised)
    rows = [
        _row(one, target, applies.get(one), worth.get(one) or unrecorded(one, value))
        for one, value in meant.values.items()
    ]
    if target and not names:
        fitting = (row for row in rows if row["applies"] == "yes" and row["write"])
        mended = {cause for row in fitting for cause in str(row["mends"]).split(", ")}
        advice = {one.cause: one.try_ for one in reversed(target.findings) if one.cause not in mended}
        unmended = "no lever that applies for certain mends it; change the script, or what it runs on"
        without = [f"{cause}: {unmended}. {advice[cause]}" for cause in advice]
        target = replace(target, about=[*target.about, *without])
    return rows, target, meant


def order_of(row: Row, target: Target | None) -> tuple[int, bool, float, int, bool]:
    """Returns the sort key by which levers come first that are predicted to gain, the most first, then those for the
    found causes, then those that may gain nothing, and last those that gain nothing."""
    gain_us, is_mending = row["gain_us"], bool(row["mends"])
    place = _place(str(row["mends"] or ""), target.causes if target else ())
    if not row["write"]:
        group = 4
    elif gain_us is not None and gain_us > 0 and (is_mending or (row["gain_low_us"] or 0.0) > 0):
        group = 0
    else:
        group = 1 if is_mending else 2 if gain_us is not None else 3
    of_program = group in (0, 2) and row["applies"] != "yes"
    return group, of_program, -(gain_us or 0.0), place, row["status"] == "bound" or row["applies"] != "yes"


def _print_lever(row: Row, console: Console) -> None:
    """Prints all that is said of a lever, and how it is swept."""
    console.print(f"\n{row['lever']}", style="bold")
    for column in (one for one in TABLE.columns[1:] if one.kind == "text" and one.name != "status"):
        if row[column.name] is not None and row[column.name] != "":
            first, *more = str(row[column.name]).splitlines()
            print_lines([f"{column.name:9}{first}", *(" " * 9 + line for line in more)], console, hanging=9)
    if row["gain_us"] is not None:
        interval = f"{as_us(row['gain_low_us'] or 0.0)} to {as_us(row['gain_high_us'])}"
        print_lines([f"{'gain':9}{as_us(row['gain_us'])} us per step ({interval}), {row['status']}"], console)
    if not str(row["applies"]).startswith("no"):
        print_lines([f"{'sweep':9}job.levers.{row['lever']}={str(row['values']).replace(', ', ',')}"], console)


def _print_list(rows: list[Row], target: Target | None, console: Console) -> None:
    """Prints one line for each lever that may apply, those for the found causes first."""
    shown = [row for row in rows if not str(row["applies"]).startswith("no")]
    columns = {column.name: column for column in TABLE.shown}
    if target:
        shown.sort(key=partial(order_of, target=target))
    is_told = any(row["gain_us"] is not None for row in shown)
    more = ["applies"] * bool(target) + ["gain_us"] * is_told
    first = [columns[name] for name in ("lever", "values", "results", *more)]
    last = columns["mends" if target and target.causes else "what"]
    if shown:
        widths = (max(map(len, [column.header, *map(column.text, shown)])) for column in first)
        room = _WIDTH - sum(width + GAP for width in widths)
        print_table("", [*first, replace(last, show=partial(_brief, longest=room))], shown, console, cut_last=True)
        console.print()
        is_open = any(str(row["applies"]).startswith("if") for row in shown)
        all_about = f"`{analyze_program()} levers NAME{' --for ...' if target else ''}` has all about one."
        print_lines([_RESULTS, *([_PERHAPS] if is_open else []), all_about], console, indent=0)
    if left := len(rows) - len(shown):
        print_lines([f"{left} more do not apply; their names and --format json say why."], console, indent=0)


def _brief(text: str, longest: int) -> str:
    """Returns a sentence, of a longer one the first clause, cut between words."""
    clause = text if len(text) <= longest else _CLAUSE_ENDS.split(text, maxsplit=1)[0]
    return textwrap.shorten(clause, longest, placeholder=" ...")


def _gain_in_words(row: Row) -> str:
    if row["gain_us"] is None:
        return ""
    is_bound = row["status"] == "bound"
    value = row["value"] or ("" if is_bound else row["change"].partition("=")[2])
    return f"{value}{': ' * bool(value)}{'<= ' * is_bound}{as_us(row['gain_us'])}"


def _place(mends: str, causes: Sequence[str]) -> int:
    return min((causes.index(cause) for cause in mends.split(", ") if cause), default=len(causes))


def _row(name: str, target: Target | None, applies: str | None, worth: Worth) -> Row:
    lever, gain, value = levers_by_name()[name], worth.gain, worth.value
    low_us = gain.gain_low_us if gain else None
    if lever.at_most and low_us is not None:
        low_us = min(low_us, 0.0)
    doubt = "" if worth.gains else "No value is predicted to gain. "
    if worth.gains and gain and low_us is not None and low_us <= 0:
        doubt = "It may gain nothing. " if (gain.gain_us or 0.0) > 0 else "It is predicted to be slower. "
    return {
        "lever": name,
        "what": lever.what,
        "values": in_words(dict.fromkeys([*lever.values, *([value] * (value is not None))])),
        "default": None if lever.default is None else in_words([lever.default]),
        "results": lever.results,
        "causes": in_words(lever.causes),
        "mends": in_words(target.mended_by(lever)) if target else None,
        "way": lever.way,
        "applies": applies,
        "value": None if value is None or not target else programs.text(value),
        "write": lever.shown(value) if worth.gains else None,
        "change": gain.change if gain else None,
        "gain_us": gain.gain_us if gain else None,
        "gain_low_us": low_us,
        "gain_high_us": gain.gain_high_us if gain else None,
        "status": ("bound" if lever.at_most else gain.status) if gain else None,
        "note": f"{doubt}{lever.note}".strip(),
    }


def in_words(values: Iterable[object]) -> str:
    """Returns values as they are typed."""
    return ", ".join(programs.text(value) for value in values)


def _target(given: str) -> Target:
    path = Path(given)
    if given.strip() and path.exists():
        if path.suffix in (".py", ".sh"):
            start = "torchrun" if path.suffix == ".py" else "bash"
            raise UserError(f"--for {given} is a script; give the whole command line, such as '{start} {given}'.")
        return (path.is_dir() and _of_point(path)) or _of_traces(path)
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise UserError(f"--for {given} cannot be understood ({error}); quote it as for a shell.") from None
    if len(words) < 2 or Path(words[0]).is_dir():
        raise UserError(f"--for {shlex.quote(given)} is no file or directory, and no command line; give one of them.")
    paths = {name: Path(name) for name in programs.files_of(shells.program_words(words))}
    texts = {name: path.read_text(errors="replace") for name, path in paths.items() if path.is_file()}
    return Target(_about_command(words, texts), Training(words=words, texts=texts))


def _of_traces(path: Path) -> Target:
    """Returns what the traces of one run show. UserError if there are several runs."""
    from overlap_sweep.commands.frames import read_runs_of_nodes
    from overlap_sweep.diagnosis.facts import read_rank
    from overlap_sweep.predict.runs import mends_of, predictions_of, readable

    runs, problems, _ = read_runs_of_nodes([path], None)
    if problems and not any(run.found for run in runs):
        raise UserError(" ".join(problems))
    output.fail_for(problems, answered=True)
    if len(runs) != 1:
        raise UserError(f"--for {path} has {len(runs)} runs ({some_of([run.name for run in runs], 3)}); give one.")
    (run,) = runs
    assert run.found
    facts = read_rank(next(file.path for file in run.files if not file.problem)).facts
    assert facts
    findings = [one for one in run.found.diagnosis.findings if one.cause != "none"]
    found = Target([], Training(facts.libraries, on_cpu=not facts.on_device), findings)
    about = [f"{run.name}: {', '.join(found.causes) or 'communication costs next to nothing'}."]
    try:
        mends = mends_of(run)
    except UserError as error:
        return replace(found, about=[*about, f"What levers gain is not predicted: {error}"])
    advised = [as_lever(mend.change) for mend in (*mends.of_findings, mends.best) if mend]
    predict = partial(predictions_of, readable(run), seen=run.seen)
    return replace(found, about=about, advised=advised, predict=lambda changes: predict(changes) if changes else [])


def _of_point(directory: Path) -> Target | None:
    """Returns what the recorded command of a sweep says, and the traces of its point with the fewest levers. None if
    its points run no command of the user's. UserError if there are several commands."""
    from overlap_sweep import workloads
    from overlap_sweep.results.points import read_points
    from overlap_sweep.results.run_directory import find_points

    points = read_points(directory).points if find_points(directory) else []
    kinds = [(point, workloads.of(point.config).users_command) for point in points]
    jobs = [(point, command(point.config)) for point, command in kinds if command]
    if not jobs:
        return None
    commands = {job.template: point.name for point, job in jobs}
    if len(commands) > 1:
        runs = some_of(commands.values(), 3)
        raise UserError(f"--for {directory} has {len(commands)} commands ({runs}); give the directory of one.")

    def order(one: tuple[Point, UsersCommand]) -> tuple[bool, int]:
        return not _has_traces(one[0]), one[1].number_of_levers

    point, job = min(jobs, key=order)
    target = _of_traces(point.directory) if _has_traces(point) else Target([])
    about = [*target.about, *_about_command(job.words, job.texts)]
    training = replace(
        target.training,
        words=job.words,
        texts=job.texts,
        elsewhere=job.elsewhere,
        on_cpu=target.training.on_cpu or point.config.runtime.device == "cpu",
    )
    return replace(target, about=about, training=training)


def _has_traces(point: Point) -> bool:
    return bool(point.result and point.result.traces)


def _about_command(words: Sequence[str], texts: Mapping[str, str]) -> list[str]:
    found = [programs.PROGRAMS[name].title for name in shells.recognised(words, texts)]
    script = programs.script_of(shells.program_words(words))
    if found:
        return [f"Programs whose options are levers: {', '.join(found)}."]
    reason = shells.hidden(words)
    if not reason and script.endswith(".py") and script not in texts:
        reason = f"{script} is not there to be read"
    return [f"Programs whose options are levers: none is found{f'; {reason}' if reason else ''}."]
