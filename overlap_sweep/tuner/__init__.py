"""The tuner's workflow as a Python function, `tune`, which returns a `Report`."""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from overlap_sweep import workloads
from overlap_sweep.declared import short_key
from overlap_sweep.errors import UsageError, UserError, in_words, nearest
from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.options import Option, listed, options_of
from overlap_sweep.program import conf_folder, environment_with_package
from overlap_sweep.runtime.start import make_new, remove_empty
from overlap_sweep.tuner.report import Report

__all__ = ["Report", "tune"]

EXPERIMENT = "+experiment=tp_overlap_tuner"
"""Override that makes launch.py run the tuner."""

PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")
"""Values that need no quotes on the command line."""

Value = bool | int | float | str | Path
"""A value of an option."""

ENDING_S = 10.0
"""Time for the tuner to end after an interrupt before it is terminated."""


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
    try:
        made = [] if output_dir else make_new(Path(f"multirun/{datetime.now():%Y-%m-%d/%H-%M-%S}"))
    except OSError as error:
        raise UserError(f"{in_words(error)}; give output_dir.") from None
    directory = Path(output_dir) if output_dir else made[-1]
    arguments += [f"hydra.sweep.dir={override_value(str(directory))}", *overrides]
    command = [sys.executable, "-m", "overlap_sweep", "launch", "-m", EXPERIMENT, *arguments]
    try:
        _run(command, quiet=quiet)
    finally:
        remove_empty(made)
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


def _run(command: Sequence[str], *, quiet: bool) -> None:
    """Runs the command and shows its output unless `quiet`. UserError with the command's error if it fails."""
    process = subprocess.Popen(
        command,
        env=environment_with_package(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert process.stderr
    reason = f"The tuner failed without a message; it was run as: {shlex.join(command)}"
    with process:
        try:
            for line in process.stderr:
                if not quiet:
                    sys.stderr.write(line)
                if line.startswith("error: ") or not reason.startswith("error: "):
                    reason = line.strip() or reason
        except KeyboardInterrupt:
            output = _ended(process)
            if not quiet:
                sys.stderr.write(output)
            raise
    if process.returncode:
        raise UserError(reason.removeprefix("error: "))


def _ended(process: subprocess.Popen[str]) -> str:
    """Waits for the interrupted process and returns the rest of its stderr. Terminals and notebook servers interrupt
    whole process groups; if the process does not end in time, it is terminated."""
    try:
        return process.communicate(timeout=ENDING_S)[1]
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()
    return process.communicate()[1]
