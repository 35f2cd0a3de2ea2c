"""`overlap-sweep tune MODEL`: the tuner's experiment of launch.py, with the model as an argument."""

from __future__ import annotations

import sys

from overlap_sweep.errors import UserError

USAGE = """\
overlap-sweep tune MODEL [KEY=VALUE ...]

Searches the fastest overlap of every operator at each TP size, proves it on the whole layer against no overlap and the
library's default, and writes, per TP size, the file that Megatron-LM trains with.

MODEL is a preset (llama3_8b), a Hugging Face name (Qwen/Qwen3-0.6B), a local folder or a config.json.

  overlap-sweep tune llama3_70b
  overlap-sweep tune Qwen/Qwen3-0.6B max_tp_size=4 search.max_minutes=5
  overlap-sweep tune llama3_8b tp_size=2 operator=fc1,fc2 num_sm=1,2,4,8 hydra.sweep.dir=results/llama3_8b
  overlap-sweep tune qwen3_0_6b max_tp_size=2 num_sm=1,2,4 runtime.device=cpu        without a GPU

Run again with the same hydra.sweep.dir it goes on where it was. It is short for
`overlap-sweep launch -m +experiment=tp_overlap_tuner model=MODEL ...` and takes all its options.
"""


def main() -> None:
    """Runs the tuner on the arguments of the process. Exits with status 2 where the model is missing."""
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(USAGE, end="")
        return
    model, *overrides = arguments
    if "=" in model or model.startswith("-"):
        print(
            f"error: The first argument names the model, not {model}: overlap-sweep tune llama3_8b ...", file=sys.stderr
        )
        sys.exit(2)

    from overlap_sweep.commands.launch import main as launch
    from overlap_sweep.tuner import EXPERIMENT, model_overrides

    try:
        sys.argv[1:] = ["-m", EXPERIMENT, *model_overrides(model), *overrides]
    except UserError as error:
        sys.exit(f"error: {error}")
    launch()
