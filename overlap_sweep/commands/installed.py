"""The command `overlap-sweep` that an installed package brings: launch.py, the tuner and analyze.py in any folder."""

from __future__ import annotations

import sys

from overlap_sweep.errors import nearest
from overlap_sweep.program import print_version

USAGE = """\
Finds how a model should overlap its communication with its GEMMs on this machine.

  overlap-sweep tune MODEL [KEY=VALUE ...]      search, prove on the whole layer, write the file for Megatron-LM
  overlap-sweep launch [-m] [KEY=VALUE ...]     measure one point, or with -m a sweep of points
  overlap-sweep analyze DIR                     choose from what was measured; query, compare, trace and more

  overlap-sweep --version

Each explains itself with --help. Results go to multirun/ in the current folder.
"""

COMMANDS = ("tune", "launch", "analyze")


def main() -> None:
    """Runs the command that the first argument names, on the others. Exits with status 2 where there is no such one."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return
    if command == "--version":
        print_version()
        return
    if command == "-sc":
        # Hydra's shell completion asks the command by its name.
        command, arguments = "launch", [command, *arguments]
    if command not in COMMANDS:
        near = nearest(command, COMMANDS)
        mend = f"Did you mean {near}?" if near else f"Choose one of {', '.join(COMMANDS)}."
        sys.exit(_usage_error(f"Unknown command {command}. {mend}"))
    sys.argv[1:] = arguments
    # Each imports what only it needs: analysis runs without torch.
    if command == "tune":
        from overlap_sweep.commands.tune import main as run
    elif command == "launch":
        from overlap_sweep.commands.launch import main as run
    else:
        from overlap_sweep.commands.command_line import main as run
    run()


def _usage_error(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
