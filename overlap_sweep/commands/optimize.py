"""Implements `overlap-sweep optimize -- COMMAND`."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.main import get_command

from overlap_sweep.commands import output as out
from overlap_sweep.commands.command_line import USAGE_ERROR, usage_error
from overlap_sweep.errors import UsageError, UserError, end

if TYPE_CHECKING:
    import pandas as pd

    from overlap_sweep.optimizer.answer import Answer


NAME = "overlap-sweep optimize"


class Allow(StrEnum):
    exact = "exact"
    rounding = "rounding"
    training = "training"


class Format(StrEnum):
    text = "text"
    json = "json"


def optimize(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE ...] -- COMMAND", help="Options of launch, such as job.steps=10; then your command."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Most minutes, the proof included.", min=0.1, max=1e5)] = 30.0,
    runs: Annotated[
        int | None, typer.Option(help="Most runs of the command; default: no limit.", min=2, max=10**6)
    ] = None,
    allow: Annotated[
        Allow, typer.Option(help="Also levers that sum in another order (rounding) or train differently (training).")
    ] = Allow.exact,
    memory: Annotated[str, typer.Option(help="Largest share of a GPU's memory.")] = "95%",
    levers: Annotated[str | None, typer.Option(help="Only these levers or families, separated by commas.")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Training processes that the command starts; found out otherwise.", min=1)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Directory of the runs; default: multirun/<date>/<time>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the last one, or --output, ended.")] = False,
    format: Annotated[Format, typer.Option(help="json: for programs; `--json-schema` alone says how.")] = Format.text,
    fail_expressions: Annotated[list[str] | None, out.fail_if_option("gain > 0.05", "the answer")] = None,
) -> None:
    """Find faster settings for your own training.

    Runs the command as it is, says why its communication is exposed, tries what is predicted to gain most without
    changing the script, proves the best in runs that take turns with the command as it is, and says what to write.
    Only changes that keep results equal bit by bit are tried, unless --allow says more.

    \b
    Examples:
      overlap-sweep optimize -- torchrun --nproc-per-node=8 train.py --config mine.yaml
      overlap-sweep optimize --minutes 10 --allow rounding --memory 90% -- bash run.sh
      overlap-sweep optimize runtime.device=cpu -- torchrun --nproc-per-node=2 docs/train.py
      overlap-sweep optimize hydra/launcher=slurm hydra.launcher.partition=gpu -- srun python train.py

    Exit status: 0 whatever the answer, 1 error, 2 wrong usage, 3 if --fail-if holds, 130 Ctrl-C.
    """
    overrides, command = _parted(words or [])
    if other := next((word for word in overrides if word.lstrip("+").startswith("job.command=")), ""):
        raise UsageError(f"{other}: the command is given after --; leave that out.")
    wanted = [one.strip() for one in levers.split(",")] if levers is not None else []
    if not all(wanted):
        raise UsageError(f"--levers {levers!r} has an empty name; give levers or families, such as ddp,nccl.max_ctas.")
    if fail_expressions:
        out.check_fail_if(fail_expressions, _frame(None))
    from overlap_sweep.commands.launch import main as launch
    from overlap_sweep.hydra_adapter.overrides import override_value
    from overlap_sweep.levers.launchers import started_processes
    from overlap_sweep.optimizer import as_template
    from overlap_sweep.results.provenance import SWEEP_CONFIG
    from overlap_sweep.runtime.outcome import outcomes

    if resume and output and not (output / SWEEP_CONFIG).exists():
        raise UserError(f"{output} has nothing to resume; leave out --resume to begin there, or give another --output.")
    outcomes.resumed_by = partial(resumed, sys.argv[1:])
    outcomes.options = {"search.max_minutes": "--minutes", "search.max_points": "--runs"}
    sys.argv[1:] = [
        "-m",
        "workload=job",
        "hydra/sweeper=optimize",
        f"job.command={override_value(as_template(command))}",
        f"search.max_minutes={minutes:g}",
        *([f"search.max_points={runs}"] if runs else []),
        f"optimize.allow={allow}",
        f"optimize.memory={_share(memory):g}",
        *([f"optimize.levers={override_value(wanted)}"] if wanted else []),
        # What a script sets itself is what its user wants to know better.
        "job.levers_override=true",
        f"job.ranks={ranks or started_processes(command, {}) or 1}",
        *([f"hydra.sweep.dir={override_value(str(output))}"] if output else []),
        *(["resume=last"] if resume and not output else []),
        *overrides,
    ]
    status: object = 0
    # The answer alone goes to standard output.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            launch(headlines=False)
        except SystemExit as ended:
            status = ended.code
    # An error before the search has begun leaves the answer of earlier runs as it is.
    has_begun, root = outcomes.searching, outcomes.root
    if not root or not has_begun or (not outcomes.answered and not (root / "optimize.json").exists()):
        sys.exit(status or 1)  # type: ignore[arg-type]
    answer = _printed(root, format)
    if status == 130:
        sys.exit(130)
    if fail_expressions:
        out.fail_if(fail_expressions, _frame(answer), "answers")


def _parted(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns the overrides and the user's command, between which a `--` stood. UsageError without a command."""
    typed = sys.argv[1:]
    if "--" not in typed:
        raise UsageError("The command is missing; give it after --, as in: overlap-sweep optimize -- torchrun train.py")
    command = typed[typed.index("--") + 1 :]
    if not command:
        raise UsageError("The command is missing after --.")
    return words[: len(words) - len(command)], command


def missing_dashes(typed: Sequence[str], options: Mapping[str, bool]) -> str:
    """Returns what to say of a command that begins without `--`; empty if it has them. `options`: of each option,
    whether a value follows it."""
    words = iter(enumerate(typed))
    for at, word in words:
        name, equals, _ = word.partition("=")
        if word == "--" or (word.startswith("-") and name not in options):
            return ""
        if word.startswith("-"):
            if options[name] and not equals:
                next(words, None)
        elif not equals and "--" in typed:
            return f"{word} is no option KEY=VALUE; put -- before your command: {NAME} -- torchrun train.py"
        elif not equals:
            line = shlex.join([*NAME.split(), *typed[:at], "--", *typed[at:]])
            return f"The command is given after --; put -- before {word}: {line}"
    return ""


def resumed(typed: Sequence[str], directory: Path) -> list[str]:
    """Returns the words of a command that goes on in the directory, from those that were typed after its name."""
    end = typed.index("--")
    options = [*typed[:end]]
    if "--output" in options:
        at = options.index("--output")
        del options[at : at + 2]
    kept = (word for word in options if word != "--resume" and not word.startswith(("--output=", "hydra.sweep.dir=")))
    return [*NAME.split(), "--resume", "--output", str(directory), *kept, *typed[end:]]


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(f"--memory {text} is no share of the memory; give such as 90% or 0.9.")
    return share


def _printed(directory: Path, format: Format) -> Answer:
    """Prints the answer and returns it."""
    import msgspec

    from overlap_sweep.optimizer.answer import in_lines, read_answer
    from overlap_sweep.report.page import FILE_NAME
    from overlap_sweep.results.records import KnobRecord

    answer, page = read_answer(directory), directory / FILE_NAME
    if format is Format.json:
        print(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        print("\n".join(in_lines(answer, page if page.exists() else directory / KnobRecord.FILE)))
    return answer


def _frame(answer: Answer | None) -> pd.DataFrame:
    """Returns the answer's numbers as a row, for --fail-if; None: the columns alone."""
    import pandas as pd
    from msgspec.structs import fields

    from overlap_sweep.optimizer.answer import Answer

    types = {one.name: one.type for one in fields(Answer) if one.type in (bool, int, float)}
    rows = [] if answer is None else [{name: getattr(answer, name) for name in types}]
    return pd.DataFrame(rows, columns=[*types]).astype(types)


def main() -> None:
    """Runs the command on the process's arguments and exits."""
    if sys.argv[1:] == ["--json-schema"]:
        from overlap_sweep.commands.schemas import as_text, schema_of

        sys.stdout.write(as_text(schema_of("optimize")))
        return
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(optimize)
    options = {name: not getattr(one, "is_flag", False) for one in get_command(app).params for name in one.opts}
    try:
        if said := missing_dashes(sys.argv[1:], options):
            raise UsageError(said)
        sys.exit(app(prog_name=NAME, standalone_mode=False))
    except UserError as error:
        end(error)
    except USAGE_ERROR as error:
        end(UsageError(usage_error(error, NAME)))
