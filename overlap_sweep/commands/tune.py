"""Implements `overlap-sweep tune MODEL`: launches the tuner's experiment with the model as an argument."""

from __future__ import annotations

import sys

from overlap_sweep.errors import UsageError, UserError, end

USAGE = """\
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


def main() -> None:
    """Runs the tuner on the process's arguments. Exits with status 2 if the model is missing."""
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(USAGE, end="")
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
