"""The tuner's file for a training of Megatron-LM: one that `overlap-sweep tune` wrote here before, or a new one.

What such a file is for follows from the command's own options. What they do not say is not guessed.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from overlap_sweep.errors import UserError
from overlap_sweep.gpus import elsewhere, visible_gpus
from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.levers import programs, shells
from overlap_sweep.levers.training import Training
from overlap_sweep.overlap.overlap_cfg import USERBUFFER_BACKENDS
from overlap_sweep.report.files import REPORT_FILE
from overlap_sweep.runtime import own_command
from overlap_sweep.tuner.content import Answer, Case, read_content
from overlap_sweep.workloads.job.program_options import OVERLAP_LEVER
from overlap_sweep.workloads.operator.advice import file_name

OPTION = f"{OVERLAP_LEVER}=FILE"
"""Under which it is said why no file is tried."""
GROUP = "TENSOR_MODEL_PARALLEL_GROUP"
"""What Megatron-Core calls its tensor-parallel process group."""
SEARCH_MINUTES = 2.0
"""Most minutes of the tuner's search, after which it proves what it found on a layer for less than one."""
LEAST_MINUTES = 6.0
"""Minutes that must be left for tuning: as many again for trials and their proof."""

_NOT_DENSE = (
    *("--num-experts", "--multi-latent-attention", "--hybrid-override-pattern", "--hybrid-attention-ratio"),
    *("--heterogeneous-layers-config-path", "--yaml-cfg", "--use-checkpoint-args", "--spec"),
)
"""Options with which layers are not all alike and dense, or are described elsewhere."""
_FP8_RECIPES = {"delayed": "fp8_delayed", "tensorwise": "fp8_current", "blockwise": "fp8_block", "mxfp8": "mxfp8"}
_MEASURED = re.compile(r"^# .*, (\d+) tokens, (\w+), backend \w+ on (.+)$", re.MULTILINE)
"""Line of the file's head with what it was measured for."""


@dataclass(frozen=True)
class Layers:
    """What the tuner's file depends on."""

    sizes: Mapping[str, int | bool]
    """By their names as options of `model`."""
    normalization: str
    bias: bool
    tokens: int
    """In a micro batch, on all ranks of the tensor-parallel group together."""
    micro_batch_size: int
    tp_size: int
    precision: str

    def words(self, name: str) -> list[str]:
        """Returns the arguments of `overlap-sweep tune` that tune the file for these layers."""
        model = {"source": "sizes", "name": name, **self.sizes, "normalization": self.normalization, "bias": self.bias}
        options = {f"model.{key}": value for key, value in model.items()} | {
            "tp_size": self.tp_size,
            "workload.tokens": self.tokens,
            "layer.micro_batch_size": self.micro_batch_size,
            "precision": self.precision,
        }
        return ["hf", *(f"{key}={programs.text(value)}" for key, value in options.items())]

    def fit(self, case: Case, gpu: str) -> bool:
        """Returns whether a case of the tuner is of such layers on such a GPU, or on any if that is unknown."""
        return (
            self.sizes.items() <= case.sizes.items()
            and (case.tokens, case.precision) == (self.tokens, self.precision)
            and case.backend in USERBUFFER_BACKENDS
            and not case.process_wide
            and case.device == (gpu or case.device)
        )


def layers_of(options: Mapping[str, str]) -> Layers:
    """Returns the layers that options of Megatron-LM, by their plain names, describe. UserError if they do not.

    What is left out is Megatron-LM's default (0.19.2, training/arguments.py)."""

    def number(name: str, default: int | None = None) -> int:
        text = options.get(name, "" if default is None else str(default))
        if not text.isdecimal() or not int(text):
            raise UserError(f"the command gives no number after {name}")
        return int(text)

    if several := [name for name in _NOT_DENSE if name in options]:
        raise UserError(f"with {several[0]} its options do not say the widths of all layers")
    tp_size = number("--tensor-model-parallel-size", 1)
    if tp_size < 2:
        raise UserError("the command has no --tensor-model-parallel-size above 1")
    hidden, heads, gated = number("--hidden-size"), number("--num-attention-heads"), "--swiglu" in options
    sizes: dict[str, int | bool] = {
        "hidden_size": hidden,
        "ffn_hidden_size": number("--ffn-hidden-size", hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden),
        "num_attention_heads": heads,
        "num_kv_heads": number("--num-query-groups") if "--group-query-attention" in options else heads,
        "head_dim": number("--kv-channels", hidden // heads),
        "gated_mlp": gated,
    }
    micro_batch_size = number("--micro-batch-size")
    return Layers(
        sizes,
        normalization=options.get("--normalization", "LayerNorm"),
        bias="--disable-bias-linear" not in options,
        tokens=number("--seq-length") * micro_batch_size // number("--context-parallel-size", 1),
        micro_batch_size=micro_batch_size,
        tp_size=tp_size,
        precision=_precision(options),
    )


def _precision(options: Mapping[str, str]) -> str:
    if "--fp4-format" in options:
        return "nvfp4"
    if "--fp8-format" in options:
        recipe = options.get("--fp8-recipe", "delayed")
        if recipe not in _FP8_RECIPES:
            raise UserError(f"the tuner has no precision for --fp8-recipe {recipe}")
        return _FP8_RECIPES[recipe]
    return next((name for name in ("bf16", "fp16") if f"--{name}" in options), "fp32")


def tuner_files(training: Training, gpu: str, minutes: float) -> tuple[list[Path], str]:
    """Returns the tuner's files to try in a training, and why none was written for its layers; empty if one was.

    `gpu`: the name of the training's; empty: unknown. `minutes`: that are left, for tuning if it is worth them; 0: only
    look for files."""
    words = shells.program_words(training.words)
    options = programs.options_of("megatron", programs.Command(words, training.texts))
    try:
        layers = layers_of(options)
    except UserError as error:
        makes = "overlap-sweep tune MODEL tp_size=N workload.tokens=N"
        return [], f"{error}; `{makes}` makes a file for --tp-comm-overlap --tp-comm-overlap-cfg FILE"
    beside = _beside(layers, gpu)
    answer = _written(layers, gpu)
    if answer is None:
        typed = layers.words(PurePath(programs.script_of(words)).stem)
        if reason := _not_now(layers, minutes):
            return beside, f"{reason}; `{shlex.join(['overlap-sweep', 'tune', *typed])}` makes it"
        try:
            answer = _tuned(layers, typed)
        except UserError as error:
            return beside, f"overlap-sweep tune failed: {str(error).rstrip('.')}"
    path, has_overlap = answer
    if not has_overlap:
        return beside, f"the tuner found no overlap that is faster than none ({path})"
    own = Path(options.get("--tp-comm-overlap-cfg", ""))
    if own.is_file() and own.read_bytes() == path.read_bytes():
        return beside, f"the command has it itself ({path})"
    return [path, *(one for one in beside if one.read_bytes() != path.read_bytes())], ""


def of_a_loop(training: Training, tp_size: int) -> str:
    """Returns why no file is tried in a loop of one's own on Megatron-Core with Transformer Engine; empty for other
    trainings."""
    is_known = "megatron" in shells.recognised(training.words, training.texts)
    if is_known or tp_size < 2 or "transformer_engine" not in (training.libraries or ()):
        return ""
    return (
        "Megatron-LM is not found in the command (pretrain_*.py), so the widths of its layers are not known, and no "
        f"argument takes a file; `overlap-sweep tune MODEL tp_size={tp_size} workload.tokens=N` makes one for your own "
        "call of initialize_ub"
    )


def _beside(layers: Layers, gpu: str) -> list[Path]:
    """Returns the file in the current directory, if there is one without a report, which would say of which widths it
    is, and its head names nothing else than these layers have. Whether it helps, its trial says."""
    path = Path(file_name(layers.tp_size))
    if not path.is_file() or Path(REPORT_FILE).exists():
        return []
    measured = _MEASURED.search(path.read_text(errors="replace"))
    wanted = (str(layers.tokens), layers.precision, gpu or (measured[3] if measured else ""))
    return [path] if not measured or measured.groups() == wanted else []


def _written(layers: Layers, gpu: str) -> tuple[Path, bool] | None:
    """Returns the newest file for these layers in the current directory and those of sweeps below multirun, and whether
    it has an overlap; None if there is none. Prints a warning for a report that cannot be read."""
    reports = [path for pattern in ("", "multirun/*/", "multirun/*/*/") for path in Path().glob(pattern + REPORT_FILE)]
    for path in sorted(reports, key=lambda path: -path.stat().st_mtime):
        try:
            content = read_content(path)
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)
            continue
        cases = {case.name for case in content.cases if layers.fit(case, gpu)}
        for answer in content.answers:
            if answer.case in cases and (found := _file_of(answer, layers, path.parent)):
                return found
    return None


def _file_of(answer: Answer, layers: Layers, directory: Path) -> tuple[Path, bool] | None:
    path = directory / answer.file
    return (path, bool(answer.use)) if answer.tp_size == layers.tp_size and path.is_file() else None


def _not_now(layers: Layers, minutes: float) -> str:
    """Returns why a file cannot be tuned here and now; empty if it can."""
    if minutes < LEAST_MINUTES:
        return f"none is written for these layers, and tuning it needs {LEAST_MINUTES:g} of --minutes"
    if elsewhere() or visible_gpus() < layers.tp_size:
        return f"none is written for these layers, and tuning it needs {layers.tp_size} GPUs of this machine"
    return ""


def _tuned(layers: Layers, typed: list[str]) -> tuple[Path, bool]:
    """Tunes a file for these layers in a new directory below multirun, shown on standard error, and returns it and
    whether it has an overlap. UserError if that fails."""
    print(f"optimize: no tuner's file is for these layers; overlap-sweep tune {shlex.join(typed)}", flush=True)
    with own_command.results_in(None) as directory:
        more = [f"search.max_minutes={SEARCH_MINUTES:g}", f"hydra.sweep.dir={override_value(str(directory))}"]
        own_command.run([*own_command.PROGRAM, "tune", *typed, *more], quiet=False, stdout=sys.stderr)
    found = (_file_of(one, layers, directory) for one in read_content(directory / REPORT_FILE).answers)
    if answer := next(filter(None, found), None):
        return answer
    raise UserError(f"{directory} has no file for TP={layers.tp_size}")
