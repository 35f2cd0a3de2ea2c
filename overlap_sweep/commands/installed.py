"""The command `overlap-sweep` of an installed package: tune, launch and analyze."""

from __future__ import annotations

import sys

from overlap_sweep.errors import UsageError, end, nearest
from overlap_sweep.program import print_version

USAGE = """\
Finds the fastest way to overlap a model's communication with its GEMMs on this machine.

  overlap-sweep tune MODEL [KEY=VALUE ...]      find the best settings, prove them on a whole layer, write the YAML
  overlap-sweep launch [-m] [KEY=VALUE ...]     measure one point, or a sweep of points with -m
  overlap-sweep analyze DIR                     choose the best of the measured settings; query, compare, trace, ...

  overlap-sweep --version

--help explains each command. Results go to multirun/ in the current folder.
"""

COMMANDS = ("tune", "launch", "analyze")


def main() -> None:
    """Runs the command named by the first argument. Exits with status 2 if there is none, or it is unknown."""
    command, *arguments = sys.argv[1:] or [""]
    if command in ("", "-h", "--help"):
        print(USAGE, end="")
        sys.exit(0 if command else UsageError.status)
    if command == "--version":
        print_version()
        return
    if command == "-sc":
        # Hydra's shell completion calls the command with -sc.
        command, arguments = "launch", [command, *arguments]
    if command not in COMMANDS:
        near = nearest(command, COMMANDS)
        mend = f"Did you mean {near}?" if near else f"Choose one of {', '.join(COMMANDS)}."
        end(UsageError(f"Unknown command {command}. {mend}"))
    sys.argv[1:] = arguments
    # Imported here, because analysis must run without torch.
    if command == "tune":
        from overlap_sweep.commands.tune import main as run
    elif command == "launch":
        from overlap_sweep.commands.launch import main as run
    else:
        from overlap_sweep.commands.command_line import main as run
    run()
