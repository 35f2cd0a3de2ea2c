"""The tuner's workflow as a Python function, `tune`, which returns a `Report`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from overlap_sweep import workloads
from overlap_sweep.declared import short_key
from overlap_sweep.errors import UsageError, nearest
from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.options import Option, listed, options_of
from overlap_sweep.program import conf_folder
from overlap_sweep.runtime import own_command
from overlap_sweep.tuner.report import Report

__all__ = ["Report", "tune"]

EXPERIMENT = "+experiment=tp_overlap_tuner"
"""Override that makes launch.py run the tuner."""

PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")
"""Values that need no quotes on the command line."""

Value = bool | int | float | str | Path
"""A value of an option."""


def tune(
    model: str,
    *,
    output_dir: Path | str | None = None,
    overrides: Sequence[str] = (),
    quiet: bool = False,
    **options: Value | Sequence[Value] | None,
) -> Report:
    """Finds the fastest overlap settings of a model on this machine, and proves them on the whole layer.

    `model` is a preset of conf/model (`llama3_70b`), a Hugging Face name, a local folder or a config.json. `options`
    are those of `overlap-sweep tune`, with its defaults: `tp_size=[2, 4]`, `operator="fc1"`, `max_minutes=5`. The last
    part of a name is enough where it is unique; None leaves an option out. `overrides` are further words of that
    command line. It runs in separate processes and writes to `output_dir` (default: multirun/<date>/<time>). Called
    again with the same `output_dir`, also after Ctrl-C, it continues. `quiet` prints nothing.

    UserError for an unknown option, and with the command's error if it fails.
    """
    arguments = [*model_overrides(model), *option_overrides(options)]
    with own_command.results_in(output_dir) as directory:
        arguments += [f"hydra.sweep.dir={override_value(str(directory))}", *overrides]
        own_command.run([*own_command.PROGRAM, "launch", "-m", EXPERIMENT, *arguments], quiet=quiet)
    return Report(directory)


def option_overrides(options: Mapping[str, Value | Sequence[Value] | None]) -> list[str]:
    """Returns the options as words of the command line. UsageError for an unknown name."""
    schema = workloads.schema("operator")
    known = {short_key(option.name, schema): option for option in options_of(schema)}
    known |= {option.name: option for option in known.values()}
    words = []
    for name, value in options.items():
        if name not in known:
            same = [full for full in known if full.endswith(f".{name}")]
            near = nearest(name, list(known))
            mend = f"Did you mean {near}?" if near else "See overlap-sweep launch --help."
            raise UsageError(
                f"There are several options {name}: give one of {listed(same)} in `overrides`, as '{same[0]}=...'."
                if same
                else f"tune has no option {name}. {mend}"
            )
        if value is not None:
            words.append(f"{known[name].name}={_text(value, known[name])}")
    return words


def _text(value: Value | Sequence[Value], option: Option) -> str:
    """Returns the value as it is typed: several values of an option are tried one after the other."""
    if isinstance(value, str | Path):
        return str(value) if PLAIN.fullmatch(str(value)) else override_value(str(value))
    if not isinstance(value, Sequence):
        return override_value(value)
    if option.values == "list":
        return override_value(list(map(str, value)))
    return ",".join(_text(one, option) for one in value)


def model_overrides(model: str) -> list[str]:
    """Returns the overrides that choose a preset, a Hugging Face name, a folder or a config.json. UsageError for a
    misspelt preset."""
    presets = sorted(path.stem for path in (conf_folder() / "model").glob("*.yaml"))
    if model in presets:
        return [f"model={model}"]
    # With a slash it is a name on Hugging Face, or a path.
    near = None if "/" in model or Path(model).exists() else nearest(model, presets)
    if near:
        raise UsageError(f"Unknown model {model}. Did you mean {near}?")
    return ["model=hf", f"model.name={override_value(model)}"]
