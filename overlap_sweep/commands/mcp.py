"""Implements `overlap-sweep mcp`."""

import importlib.util
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from overlap_sweep.commands.command_line import USAGE_ERROR, usage_error
from overlap_sweep.errors import UsageError, UserError, end

NAME = "overlap-sweep mcp"


def mcp(
    root: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Read and write only there; default: the current folder. Repeatable."),
    ] = None,
    allow_run: Annotated[
        bool, typer.Option("--allow-run", help="Let optimize start the training commands that it is given.")
    ] = False,
) -> None:
    """Serve the tools of this program to a language model's agent, by the Model Context Protocol over stdin and stdout.

    Tools: diagnose, predict, levers, query, compare, docs, optimize. docs/agents.md says how to configure a client, and
    how an agent should use them. Without --allow-run nothing is ever started.

    \b
    Examples:
      overlap-sweep mcp
      overlap-sweep mcp --root results --root traces
      overlap-sweep mcp --allow-run

    Exit status: 0 when the client has ended, 1 error, 2 wrong usage.
    """
    if importlib.util.find_spec("mcp") is None:
        raise UserError(
            f"The SDK of the Model Context Protocol is not installed for {sys.executable}; "
            "pip install 'overlap-sweep[mcp]'."
        )
    for one in root or ():
        if not one.is_dir():
            raise UserError(f"--root {one} is not a directory.")
    from overlap_sweep.commands.agents.access import Access
    from overlap_sweep.commands.agents.server import serve

    # Clients end servers so: what was started must end, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    serve(Access(tuple(root or [Path()]), may_run=allow_run))


def main() -> None:
    """Runs the command on the process's arguments and exits."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(mcp)
    try:
        sys.exit(app(prog_name=NAME, standalone_mode=False))
    except UserError as error:
        end(error)
    except USAGE_ERROR as error:
        end(UsageError(usage_error(error, NAME)))
