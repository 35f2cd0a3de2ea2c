"""The command line of analyze.py; its commands are in `commands/`.

`analyze.py DIR` is short for `analyze.py report DIR`.
"""

import gc
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from overlap_sweep.commands.output import print_error
from overlap_sweep.errors import UserError, in_words, is_of_users_system, nearest
from overlap_sweep.program import analyze_program, end_unread, print_version, stdout_is_closed

COMMANDS = ("report", "query", "trace", "diagnose", "predict", "effect", "levers", "compare", "timeline", "history")
"""Names of the modules, each of which has a function of its name, and may have its class as `Command`. They are
imported when they are run, or their help is shown. The first is the default."""
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""Click's, of which some versions of Typer have a copy of their own."""

EXAMPLES = """
Choose the best overlap of every slot from measured points, query and compare them, or analyse profiler traces.

\b
Examples:
  python analyze.py multirun/2026-11-20                 all sweeps of a day
  python analyze.py multirun/2026-11-20/21-14-03        one sweep
  python analyze.py multirun/2026-11-20 analysis.objective=overlap_ratio
  python analyze.py multirun/2026-11-20 --fail-if 'hidden_fraction < 0.3'
  python analyze.py query multirun/2026-11-20 'num_sm > 8 and tp_size == 8'
  python analyze.py trace trace_rank0.json.gz --format json
  python analyze.py diagnose trace_rank0.json.gz trace_rank1.json.gz
  python analyze.py levers --for 'torchrun train.py'
  python analyze.py compare multirun/2026-11-20 multirun/2026-11-21
  python analyze.py timeline multirun/2026-11-20/21-14-03/llama3_8b_tp4_fc1_bulk_sm4
  python analyze.py history measurements
  python analyze.py diagnose --json-schema              the JSON schema of what --format json prints

\b
Exit status: 0 success, 1 error, 2 wrong usage, 3 a --fail-if condition holds.

DIR without a command is short for `report DIR`. Results are read, never changed.
"""


class _CommandOrDirectory(TyperGroup):
    """Treats a first argument that is not a command as the directory of the default command."""

    def list_commands(self, ctx: object) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: object, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"overlap_sweep.commands.{cmd_name}")
        function = getattr(module, cmd_name)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        help = function.__doc__.replace("python analyze.py", analyze_program())
        single.command(cmd_name, cls=getattr(module, "Command", TyperCommand), help=help)(function)
        return typer.main.get_command(single)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if args and args[0] not in COMMANDS and args[0] not in own:
            near = nearest(args[0], COMMANDS)
            if near and not Path(args[0]).exists():
                print_error(f"Unknown command {args[0]}. Did you mean {near}?")
                ctx.exit(2)
            args = [COMMANDS[0], *args]
        if args[1:] == ["--json-schema"]:
            from overlap_sweep.commands.schemas import as_text, schema_of

            try:
                sys.stdout.write(as_text(schema_of(args[0])))
            except UserError as error:
                print_error(str(error))
                ctx.exit(error.status)
            ctx.exit(0)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> object:
        """Runs the command. A UserError becomes one line on stderr and its exit status, and so does wrong usage.
        Where nobody reads any more what is printed, the process ends by SIGPIPE."""
        try:
            returned = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            if not stdout_is_closed():
                raise
            end_unread()
        except UserError as error:
            print_error(str(error))
            ctx.exit(error.status)
        except OSError as error:
            if not is_of_users_system(error):
                raise
            print_error(in_words(error))
            ctx.exit(1)
        except USAGE_ERROR as error:
            print_error(usage_error(error, ctx.command_path))
            ctx.exit(2)
        return returned


def usage_error(error: Any, program: str) -> str:
    """Returns what is wrong with a command line, in one sentence."""
    if near := getattr(error, "possibilities", None):
        return f"Unknown option {error.option_name}. Did you mean {near[0]}?"
    where = error.ctx.command_path if error.ctx else program
    message = error.format_message().removeprefix("Invalid value: ")
    # Of pydantic, which some versions of Typer check values with.
    message = message.replace("Value error, ", "").replace("Input should be", "must be")
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} See {where} --help."


app = typer.Typer(
    cls=_CommandOrDirectory,
    callback=lambda: None,
    help=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Runs the command given by the process's arguments and exits."""
    # A trace becomes some hundred thousand objects without circles, which the collector would visit again and again.
    gc.set_threshold(100_000, 50, 100)
    if sys.argv[1:] == ["--version"]:
        print_version()
        return
    if {"--help", "-h"} & {*sys.argv[1:]}:
        # Quitting a pager is not an error.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    program = analyze_program()
    app.info.help = EXAMPLES.replace("python analyze.py", program)
    app(prog_name=program.removeprefix("python "))
