"""Settings of jobs: what may differ between points that are compared, and how it is called."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from overlap_sweep.report.numbers import shortened
from overlap_sweep.results.identity import key_of
from overlap_sweep.results.run_directory import settings_file
from overlap_sweep.study.settings import Naming, Options
from overlap_sweep.workloads import nodes
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.job.template import Filling, filled, placeholders, split

VALUES, VARIABLES = "job.values.", "job.env."
CONNECTIONS, MULTICAST = "runtime.max_connections", "runtime.multicast"
LONGEST_VALUE = 60


def options_of(config: Mapping[str, Any]) -> Options:
    """Returns the setting of a point, by names such as `job.values.bucket`: what was put into its command and
    environment."""
    job, runtime = config["job"], config["runtime"]
    # Sorted, since a search has other orders than a sweep.
    found = {f"{VALUES}{name}": value for name, value in sorted(job["values"].items())}
    found |= {f"{VARIABLES}{name}": value for name, value in sorted(job["env"].items())}
    found |= {CONNECTIONS: runtime.get("max_connections"), MULTICAST: runtime.get("multicast") or None}
    return {name: value for name, value in found.items() if value is not None}


def identity(config: Mapping[str, Any]) -> str:
    """Returns a key that is equal for points with the same setting, contents of files included."""
    options = {name: repr(value) for name, value in options_of(config).items()}
    named = {name: digest for name, digest in _files(config).items() if name in config["job"]["values"].values()}
    return key_of({"options": options, "overlap_cfg": config.get("overlap_cfg"), "files": named})


def script_digest(config: Mapping[str, Any]) -> str:
    """Returns a digest of the script's content; empty if it is unknown, or if a value names the script."""
    values = config["job"]["values"].values()
    return ", ".join(digest for name, digest in _files(config).items() if name not in values)


def _files(config: Mapping[str, Any]) -> dict[str, str]:
    return config["job"].get("files") or {}


def script_of(config: Mapping[str, Any]) -> str:
    """Returns a short name of what the command runs, or the placeholder of the value that names it."""
    name = str(config["model"]["name"])
    values = config["job"]["values"].items()
    return next((f"{{{key}}}" for key, value in values if PurePath(command.in_words(value)).name == name), name)


def _brief(name: str) -> str:
    for prefix in (VALUES, VARIABLES, "runtime."):
        name = name.removeprefix(prefix)
    return name


def _value(value: Any) -> str:
    text = command.in_words(value)
    # Of a file its name is enough: settings that are called the same are numbered.
    is_path = "/" in text and len(text.split()) == 1
    return shortened(PurePath(text).name if is_path else text, LONGEST_VALUE)


NAMING = Naming(brief=_brief, value=_value)


def command_line(config: Mapping[str, Any]) -> str:
    """Returns what a shell runs for this point, without the recorder: folder, environment and command, with its values
    filled in. `{run}` becomes `run`, a folder that is made; on several nodes `{node}`, `{host}` and `{port}` become
    NODE, HOST and PORT. UserError if something has no value."""
    job, connections = config["job"], config["runtime"].get("max_connections")
    fillings = _fillings(config)
    folder = filled(job["directory"], fillings, "job.directory")
    first = [] if PurePath(folder) == PurePath() else ["cd", shlex.quote(folder), "&&"]
    if "run" in placeholders(job["directory"]):
        first = ["mkdir", "-p", shlex.quote(folder), "&&", *first]
        inside = os.path.relpath("run", folder)
        fillings |= {"run": Filling(inside, (inside,))}
    elif any("run" in placeholders(one) for one in (job["command"], *map(command.in_words, job["env"].values()))):
        first += ["mkdir", "-p", "run", "&&"]
    variables = {} if connections is None else {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    variables |= {
        name: filled(command.in_words(value), fillings, f"job.env.{name}")
        for name, value in job["env"].items()
        if value is not None
    }
    assigned = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*first, *assigned, shlex.join(split(job["command"], fillings, "job.command"))])


def _fillings(config: Mapping[str, Any]) -> dict[str, Filling]:
    """Returns what placeholders stand for in a command that is run by hand."""
    run = Path("run")
    # The user's file instead of the copy in the run directory, which the command was given.
    copy = str(run.resolve() / settings_file())
    place = command.Place("NODE", "HOST", "PORT") if nodes(config) > 1 else command.ALONE
    found = command.fillings(config, run, place)
    for name, value in config["job"]["values"].items():
        if made := found.get(f"{name}:megatron"):
            words = tuple(command.in_words(value) if word == copy else word for word in made.words)
            found[f"{name}:megatron"] = Filling(shlex.join(words), words)
    return found | {"run": Filling("run", ("run",)), "repetition": Filling("0", ("0",))}
