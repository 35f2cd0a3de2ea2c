"""Where numbers come from: machine, versions, date, what the GPUs were like, and the commands that make them again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import MOST_YAML_BYTES, check_place, read_yaml
from overlap_sweep.results.identity import environment_identity, key_of
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import TunerRecord

T = TypeVar("T")

SWEEP_CONFIG = "multirun.yaml"
POINT_OVERRIDES = ".hydra/overrides.yaml"


class _Overrides(msgspec.Struct):
    task: list[str]
    hydra: list[str]


class _Hydra(msgspec.Struct):
    overrides: _Overrides


class _Sweep(msgspec.Struct):
    """What Hydra records of a sweep, as far as it is of use here."""

    hydra: _Hydra


def environments(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Returns the different environments of the points, the most frequent first."""
    found: list[tuple[dict[str, Any], int]] = []
    for point in points:
        environment = point.result.environment if point.result else {}
        at = next((i for i, (known, _) in enumerate(found) if known == environment), None)
        if at is None:
            found.append((environment, 1))
        else:
            found[at] = (environment, found[at][1] + 1)
    return [environment for environment, _ in sorted(found, key=lambda pair: -pair[1])]


def recorded(points: Sequence[Point]) -> dict[str, Any]:
    """Returns when and where the points were measured, for tuning_report.json."""
    environment, *others = environments(points)
    return {"measured": measured_when(points), "environment": environment, "other_environments": others}


def recorded_warnings(points: Sequence[Point]) -> list[str]:
    """Returns what measuring the points warned of, and whether their environments differ: a sentence each."""
    told = dict.fromkeys(warning for point in points if point.result for warning in point.result.warnings)
    return [*told, *different_environments(points)]


def different_environments(points: Sequence[Point]) -> list[str]:
    """Returns a sentence where the points were measured in different environments; none where they were not. The CUDA
    connections don't count, which backends and implementations set for themselves."""
    identities = set()
    for environment in environments(points):
        identity = environment_identity(environment)
        identity["variables"].pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        identities.add(key_of(identity))
    said = "The points were measured in different environments; see tuning_report.json for what differs."
    return [said] if len(identities) > 1 else []


def measured_on(points: Sequence[Point]) -> str:
    """Returns when and on what the points were measured."""
    return f"Measured {measured_when(points)} on {describe_machine(environments(points)[0])}"


def describe_machine(environment: dict[str, Any]) -> str:
    """Returns host, device, and the versions that matter, in one line."""
    gpu, count = environment.get("gpu"), environment.get("gpu_count")
    device = f"{count} x {gpu}" if gpu else environment.get("cpu")
    versions = {"driver": environment.get("driver"), "nccl": environment.get("nccl"), "cuda": environment.get("cuda")}
    versions |= environment.get("packages", {})
    shown = [f"{name} {version}" for name, version in versions.items() if version]
    return "; ".join(filter(None, (environment.get("host"), device, ", ".join(shown)))) or "an unrecorded machine"


def multicast(points: Sequence[Point]) -> str | None:
    """Returns how userbuffers ran, as the workers' environment tells: with NVLink multicast `on`, `off`, or `on and
    off` in different points. None where no GPU was used, or nothing ran."""
    found = set()
    for point in points:
        if point.result and point.config["runtime"]["device"] != "cpu":
            skipped = point.result.environment.get("variables", {}).get("UB_SKIPMC")
            off = not point.config["runtime"]["multicast"] if skipped is None else skipped not in ("", "0")
            found.add("off" if off else "on")
    return " and ".join(sorted(found, reverse=True)) or None


def measured_when(points: Sequence[Point]) -> str:
    """Returns the first and the last start, UTC."""
    started = sorted(point.result.started for point in points if point.result and point.result.started)
    if not started:
        return "at an unrecorded time"
    first, last = (f"{time[:10]} {time[11:16]}" for time in (started[0], started[-1]))
    return f"{first} to {last} UTC" if first != last else f"{first} UTC"


def launch_commands(points: Sequence[Point]) -> list[str]:
    """Returns what was typed, as Hydra or the tuner recorded it: one command for each sweep, or for a point run
    alone."""
    sweeps = {point.directory.parent for point in points}
    of_sweep = {directory: _tuner_command(directory) or _sweep_command(directory) for directory in sweeps}
    found = []
    for point in points:
        command = of_sweep[point.directory.parent]
        found.append(_point_command(point.directory) if command is None else command)
    return list(dict.fromkeys(filter(None, found)))


def _tuner_command(directory: Path) -> str | None:
    path = directory / TunerRecord.FILE
    try:
        check_place(path, directory)
        return TunerRecord.read(path).command
    except (UserError, RecursionError):
        # That it cannot be read is said elsewhere.
        return None


def _sweep_command(directory: Path) -> str | None:
    """None where there was no sweep; empty where its record was cut short."""
    path = directory / SWEEP_CONFIG
    if not path.exists():
        return None
    recorded = _recorded(path, directory, _Sweep)
    if recorded is None:
        return ""
    given = recorded.hydra.overrides
    return _command(["-m", *given.task, *(override for override in given.hydra if override.startswith("hydra/"))])


def _point_command(directory: Path) -> str | None:
    overrides = _recorded(directory / POINT_OVERRIDES, directory, list[str])
    return None if overrides is None else _command(overrides)


def _recorded(path: Path, directory: Path, kind: type[T]) -> T | None:
    """None where it cannot be read: that costs the command that it would have been, nothing else."""
    try:
        check_place(path, directory, MOST_YAML_BYTES)
        return msgspec.convert(read_yaml(path), kind)
    except (UserError, msgspec.ValidationError):
        return None


def _command(arguments: Sequence[str]) -> str:
    return shlex.join(["python", "launch.py", *arguments])


SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's clocks throttle reasons that make a time say less about the GPU than about its cooling or supply. The power
cap is none of them: large GEMMs run into it on every card."""


def _gpu_moments(points: Iterable[Point]) -> list[tuple[str, dict[str, float]]]:
    """Returns a point's name and what a GPU was like, for each GPU before and after each point; nothing of a CPU, or
    without NVML."""
    return [
        (point.name, gpu)
        for point in points
        if point.result
        for moment in point.result.conditions.values()
        for gpu in moment.get("gpus", [])
    ]


def gpus_in_words(points: Iterable[Point]) -> list[str]:
    """Returns a sentence on how warm and fast the GPUs were; none where that was not recorded."""
    moments = [gpu for _, gpu in _gpu_moments(points)]
    temperatures = [gpu["temperature_c"] for gpu in moments if "temperature_c" in gpu]
    clocks = [gpu["sm_clock_mhz"] for gpu in moments if "sm_clock_mhz" in gpu]
    if not temperatures or not clocks:
        return []
    ranges = (f"{min(values):g} to {max(values):g} {unit}" for values, unit in ((temperatures, "C"), (clocks, "MHz")))
    return [f"GPUs before and after points: {', '.join(ranges)}"]


def slowed_gpus(points: Iterable[Point]) -> list[str]:
    """Returns a sentence for each reason for which GPUs were slowed down."""
    moments = _gpu_moments(points)
    slowed = {
        reason: list(dict.fromkeys(name for name, gpu in moments if int(gpu.get("throttle_reasons", 0)) & bit))
        for bit, reason in SLOWDOWNS.items()
    }
    return [
        f"GPUs were slowed down ({reason}) around {len(names)} points, first {names[0]}."
        for reason, names in slowed.items()
        if names
    ]
