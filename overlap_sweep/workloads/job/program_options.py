"""Levers that are options of the program which a command starts: what they change in its words and in files that these
name. `levers.programs` knows the programs."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from overlap_sweep import levers
from overlap_sweep.levers import programs, shells
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results.measured import Scalar
from overlap_sweep.workloads.job.config import Config, Resolved

OVERLAP_LEVER = "megatron.tp_comm_overlap"
JSON_FILE = "deepspeed.json"
"""Copy of DeepSpeed's configuration in the run directory, with what levers change."""


def changes(point: Config, tuned_file: str = "") -> dict[str, programs.Change]:
    """Returns what levers change in the words of the command, by their names and values. `tuned_file`: as
    `overlap_words`."""
    known, found = levers.levers(), {}
    for name, value in levers.flat(point.job.levers):
        # Results may have levers of a package that is not installed where they are analysed.
        if name in known and known[name].way == "argument":
            made = programs.change(known[name], value)
            if name == OVERLAP_LEVER:
                made = replace(made, words=overlap_words(point, value, tuned_file))
            found[f"job.levers.{name}={programs.text(value)}"] = made
    return found


def overlap_words(point: Config, value: Scalar, tuned_file: str = "") -> tuple[str, ...]:
    """Returns Megatron-LM's arguments of none, default or a tp_comm_overlap_cfg file. `tuned_file`: its copy in the run
    directory; empty: the file itself."""
    lines: list[str] = []
    if isinstance(point, Resolved) and point.overlap_cfg:
        lines = overlap_cfg.overlap_arguments(point.overlap_cfg, tuned_file or str(value))
    elif value == overlap_cfg.DEFAULT:
        lines = overlap_cfg.overlap_arguments(OverlapConfig())
    return tuple(shlex.split(" ".join(lines)))


def refusal(point: Resolved, words: Sequence[str], texts: Mapping[str, str]) -> str:
    """Returns which lever the command cannot be given, and why; empty if there is none. `texts`: those of
    `programs.files_of` that can be read."""
    return shells.refusal(changes(point), words, texts, override=point.job.levers_override)


def write_files(point: Resolved, words: Sequence[str], texts: Mapping[str, str], directory: Path) -> None:
    """Writes the files that the command is given in place of the user's, with what levers change in them."""
    if changed := [one for one in changes(point).values() if one.program == "deepspeed"]:
        text = texts[programs.json_file(shells.program_words(words))]
        (directory / JSON_FILE).write_text(programs.changed_json(text, changed))
