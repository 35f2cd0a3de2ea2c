"""The command `overlap-sweep` of an installed package: optimize, tune, launch, analyze and mcp."""

import sys

from overlap_sweep.errors import UsageError, UserError, end, nearest
from overlap_sweep.program import print_version

USAGE = """\
Finds the fastest way to overlap a training's communication with its GEMMs on this machine.

  overlap-sweep optimize -- COMMAND             find faster settings for your own training command, and prove them
  overlap-sweep tune MODEL [KEY=VALUE ...]      find the best settings, prove them on a whole layer, write the YAML
  overlap-sweep launch [-m] [KEY=VALUE ...]     measure one point, or a sweep of points with -m
  overlap-sweep analyze DIR                     choose the best of the measured settings; query, compare, trace, ...
  overlap-sweep mcp                             serve these as tools to a language model's agent

  overlap-sweep --version

--help explains each command. Results go to multirun/ in the current folder.
"""

TUNE_USAGE = """\
overlap-sweep tune MODEL [KEY=VALUE ...]

Finds the fastest overlap of every operator at each TP size, proves it on a whole layer against no overlap and the
library's default, and writes the YAML for Megatron-LM for each TP size.

MODEL is a preset (llama3_8b), a Hugging Face name (Qwen/Qwen3-0.6B), a local folder, or a config.json.

  overlap-sweep tune llama3_70b
  overlap-sweep tune Qwen/Qwen3-0.6B max_tp_size=4 search.max_minutes=5
  overlap-sweep tune llama3_8b tp_size=2 operator=fc1,fc2 num_sm=1,2,4,8 hydra.sweep.dir=results/llama3_8b
  overlap-sweep tune qwen3_0_6b max_tp_size=2 num_sm=1,2,4 runtime.device=cpu        without a GPU

The same command with the same hydra.sweep.dir continues an interrupted search. It is short for
`overlap-sweep launch -m +experiment=tp_overlap_tuner model=MODEL ...` and takes all options of it.
"""


COMMANDS = ("optimize", "tune", "launch", "analyze", "mcp")


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
    if command == "optimize":
        from overlap_sweep.commands.optimize import main as run
    elif command == "mcp":
        from overlap_sweep.commands.mcp import main as run
    elif command == "tune":
        run = _tune
    elif command == "launch":
        from overlap_sweep.commands.launch import main as run
    else:
        from overlap_sweep.commands.command_line import main as run
    run()


def _tune() -> None:
    """Launches the tuner's experiment with the model, the first argument. Exits with status 2 if it is missing."""
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(TUNE_USAGE, end="")
        sys.exit(0 if arguments else UsageError.status)
    model, *overrides = arguments
    if "=" in model or model.startswith("-"):
        end(UsageError(f"The model comes first, not {model}: overlap-sweep tune llama3_8b ..."))

    from overlap_sweep.commands.launch import main as launch
    from overlap_sweep.tuner import EXPERIMENT, model_overrides

    try:
        sys.argv[1:] = ["-m", EXPERIMENT, *model_overrides(model), *overrides]
    except UserError as error:
        end(error)
    launch()
