"""The tuner's workflow as a Python function, `tune`, which returns a `Report`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from overlap_sweep.errors import UsageError, UserError, nearest
from overlap_sweep.program import conf_folder, environment_with_package
from overlap_sweep.runtime.start import make_new, remove_empty
from overlap_sweep.search.measured import override_value
from overlap_sweep.tuner.report import Report

__all__ = ["Report", "tune"]

EXPERIMENT = "+experiment=tp_overlap_tuner"
"""Override that makes launch.py run the tuner."""

ENDING_S = 10.0
"""Time for the tuner to end after an interrupt before it is terminated."""


def tune(
    model: str,
    *,
    max_tp_size: int = 8,
    tp_size: int | Sequence[int] | None = None,
    max_token_len: int | None = None,
    operators: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    min_num_sm: int | None = None,
    max_num_sm: int | None = None,
    max_points: int | None = None,
    max_minutes: float | None = None,
    precision: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    presets: Sequence[str | Path] = (),
    prove: bool = True,
    overlap_threshold: float | None = None,
    tp_scaling_tolerance: float | None = None,
    unmeasured: str | None = None,
    output_dir: Path | str | None = None,
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> Report:
    """Finds the fastest overlap settings of a model on this machine, and proves them on the whole layer.

    `model` is a preset of conf/model (`llama3_70b`), a Hugging Face name, a local folder or a config.json. None means
    the default of `python launch.py -m +experiment=tp_overlap_tuner`; `overrides` are further arguments of that
    command. It runs in separate processes and writes to `output_dir` (default: multirun/<date>/<time>). Called again
    with the same `output_dir`, also after Ctrl-C, it continues. `quiet` prints nothing.

    UserError with the command's error if it fails.
    """
    arguments = [*model_overrides(model), f"max_tp_size={max_tp_size}", f"tuner.prove={override_value(prove)}"]
    tp_sizes = [tp_size] if isinstance(tp_size, int) else tp_size
    lists = {"tp_size": tp_sizes, "operator": operators, "method": methods}
    arguments += [f"{key}={','.join(map(str, values))}" for key, values in lists.items() if values]
    single = {
        "workload.tokens": max_token_len,
        "search.min_num_sm": min_num_sm,
        "search.max_num_sm": max_num_sm,
        "search.max_points": max_points,
        "search.max_minutes": max_minutes,
        "precision": precision,
        "backend": backend,
        "runtime.device": device,
        "tuner.overlap_threshold": overlap_threshold,
        "tuner.tp_scaling_tolerance": tp_scaling_tolerance,
        "tuner.unmeasured": unmeasured,
    }
    arguments += [f"{key}={override_value(value)}" for key, value in single.items() if value is not None]
    if presets:
        arguments.append(f"tuner.presets={override_value(list(map(str, presets)))}")
    made = [] if output_dir else make_new(Path(f"multirun/{datetime.now():%Y-%m-%d/%H-%M-%S}"))
    directory = Path(output_dir) if output_dir else made[-1]
    arguments += [f"hydra.sweep.dir={override_value(str(directory))}", *overrides]
    command = [sys.executable, "-m", "overlap_sweep", "launch", "-m", EXPERIMENT, *arguments]
    try:
        _run(command, quiet=quiet)
    finally:
        remove_empty(made)
    return Report(directory)


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
