"""`tune` and what it returns: the tuner's workflow as a function."""

from __future__ import annotations

import difflib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.program import conf_folder, environment_with_package
from overlap_sweep.search.measured import override_value

if TYPE_CHECKING:
    import pandas as pd

EXPERIMENT = "+experiment=tp_overlap_tuner"
"""What launch.py is told to run the tuner."""

REPORT_FILES = ("*.txt", "*.json", "*.yaml", "*.py", "*.csv", "*.parquet")
"""What lies beside the run directories and does not belong to a single point."""


@dataclass(frozen=True)
class Report:
    """The answer for one model, read from a tuner's directory."""

    directory: Path

    @cached_property
    def whole(self) -> dict[str, Any]:
        """Returns the content of tuning_report.json, without operators where none was measured. UserError when the
        directory has none."""
        path = self.directory / "tuning_report.json"
        if not path.exists():
            raise UserError(f"{self.directory} holds no tuning_report.json; give the directory of a tuner's sweep.")
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    @property
    def best(self) -> list[dict[str, Any]]:
        """Returns an entry per TP size and slot: setting, times in microseconds, speedup, hidden fraction, reason."""
        return list(self.whole.get("best", []))

    @property
    def recommendations(self) -> list[str]:
        """Returns sentences: the proofs' verdicts, one per TP size and pass of an operator; last the unproven."""
        verdicts = [(proof["proven"], f"TP={tp_size}: {proof['verdict']}") for tp_size, proof in self.proof.items()]
        proven, unproven = ([said for known, said in verdicts if known is which] for which in (True, False))
        return [*proven, *(entry["recommendation"] for entry in self.whole.get("recommendations", [])), *unproven]

    @property
    def proof(self) -> dict[int, dict[str, Any]]:
        """Returns by TP size the whole layer under none, default, tuned and presets; empty where none was run."""
        return {proof["tp_size"]: proof for proof in self.whole.get("proof", []) if proof["point"]}

    @property
    def tp_scaling(self) -> dict[str, Any] | None:
        """Returns `optimal_tp_size`, and for each operator times, ratios and the efficient TP sizes."""
        return self.whole.get("tp_scaling")

    @property
    def unmeasured_slots(self) -> list[dict[str, Any]]:
        """Returns an entry per TP size and slot that no point overlapped: whether it `runs` `off` or at the library's
        `default` in the exported files, and why."""
        return list(self.whole.get("unmeasured_slots", []))

    def ub_cfgs(self, tp_size: int) -> dict[str, dict[str, Any]] | None:
        """Returns the slots of the file for Megatron-LM; None where the answer is not to overlap at all, since an empty
        map gives every slot the library's default. UserError when there is no file for this TP size."""
        path = self.directory / f"optimal_tp_comm_overlap_cfg_tp{tp_size}.yaml"
        if not path.exists():
            raise UserError(f"{path} does not exist: TP={tp_size} was not searched.")
        config = overlap_cfg.read(path)
        return config.slots if config.switches["tp_comm_overlap"] else None

    def to_frame(self) -> pd.DataFrame:
        """Returns a row per measured point and phase; times in microseconds."""
        import pandas as pd

        return pd.read_parquet(self.directory / "points.parquet")

    def save(self, directory: Path | str) -> list[Path]:
        """Copies the reports, tables and exported files there, not the run directories; returns the copies."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        listed = sorted(path for pattern in REPORT_FILES for path in self.directory.glob(pattern))
        # A directory that somebody sent may hold links to anything.
        here = self.directory.resolve()
        found = [path for path in listed if path.is_file() and path.resolve().is_relative_to(here)]
        if target.resolve() == self.directory.resolve():
            return found
        return [Path(shutil.copy2(path, target / path.name)) for path in found]


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

    `model` is one of conf/model (`llama3_70b`), a Hugging Face name, a local folder or a config.json. What is left
    None is as `python launch.py -m +experiment=tp_overlap_tuner` has it; `overrides` are further arguments of it. It
    runs in processes of its own, over `output_dir` (default: multirun/<date>/<time> here); run again over the same
    directory it goes on where it was.

    UserError when it could not be run; then its own message says why.
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
    directory = Path(output_dir) if output_dir else Path(f"multirun/{datetime.now():%Y-%m-%d/%H-%M-%S}")
    arguments += [f"hydra.sweep.dir={override_value(str(directory))}", *overrides]
    command = [sys.executable, "-m", "overlap_sweep", "launch", "-m", EXPERIMENT, *arguments]
    output = subprocess.DEVNULL if quiet else None
    done = subprocess.run(command, env=environment_with_package(), stdout=output, check=False)
    if done.returncode:
        raise UserError(f"the tuner ended with {done.returncode}; its message is above. It was run as: {command}")
    return Report(directory)


def model_overrides(model: str) -> list[str]:
    """Returns what chooses a preset, or a Hugging Face name, a folder or a config.json. UserError where a name that is
    none of these is almost a preset's."""
    presets = sorted(path.stem for path in (conf_folder() / "model").glob("*.yaml"))
    if model in presets:
        return [f"model={model}"]
    nearest = difflib.get_close_matches(model, presets, n=1)
    if nearest and not Path(model).exists():
        raise UserError(f"Unknown model {model}. Did you mean {nearest[0]}?")
    return ["model=hf", f"model.name={override_value(model)}"]
