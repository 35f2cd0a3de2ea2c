"""Where numbers come from: machine, versions, date, throttling of the GPUs, and the commands that reproduce them."""

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.program import launch_program
from overlap_sweep.results.checks import MOST_YAML_BYTES, check_place, read_yaml
from overlap_sweep.results.identity import environment_identity, key_of
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import TunerRecord
from overlap_sweep.results.run_directory import Environment

SWEEP_CONFIG = "multirun.yaml"
POINT_OVERRIDES = ".hydra/overrides.yaml"
DIFFERENT_ENVIRONMENTS = "The points were measured in different environments; see tuning_report.json for what differs."


def environments(points: Sequence[Point]) -> list[dict[str, object]]:
    """Returns the distinct environments of the points, the most frequent first."""
    found = [point.result.environment if point.result else {} for point in points]
    by_key = {key_of(environment): environment for environment in found}
    return [by_key[key] for key, _ in Counter(map(key_of, found)).most_common()]


def machines(points: Sequence[Point]) -> list[Environment]:
    """Returns what the distinct environments of the points say of the machine, the most frequent first."""
    return msgspec.convert(environments(points), list[Environment])


def recorded(points: Sequence[Point]) -> dict[str, object]:
    """Returns when and where the points were measured, for tuning_report.json."""
    environment, *others = environments(points)
    return {"measured": measured_when(points), "environment": environment, "other_environments": others}


def recorded_warnings(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(warning for point in points if point.result for warning in point.result.warnings))


def different_environments(points: Sequence[Point], swept: Collection[str] = ()) -> list[str]:
    """Returns a warning if the points were measured in different environments, else an empty list.
    CUDA_DEVICE_MAX_CONNECTIONS does not count: backends and implementations set it themselves. Nor do the environment
    variables in `swept`."""
    identities = set()
    for environment in environments(points):
        identity = environment_identity(environment)
        for name in ("CUDA_DEVICE_MAX_CONNECTIONS", *swept):
            identity["variables"].pop(name, None)
        identities.add(key_of(identity))
    return [DIFFERENT_ENVIRONMENTS] if len(identities) > 1 else []


def measured_on(points: Sequence[Point]) -> str:
    return f"Measured {measured_when(points)} on {describe_machine(machines(points)[0])}"


def machines_in_brief(points: Sequence[Point]) -> str:
    """Returns the devices, such as `2 x NVIDIA H200` or the CPU's name; empty if unknown."""
    counts: dict[str, int] = {}
    for machine in machines([point for point in points if point.result]):
        if device := machine.gpu or machine.cpu:
            count = (machine.gpu_count or 0) if machine.gpu else 0
            counts[device] = max(count, counts.get(device, 0))
    return " and ".join(f"{count} x {device}" if count else device for device, count in counts.items())


def cpu_only(points: Sequence[Point]) -> str:
    """Returns the caveat of points measured on a CPU; empty for others."""
    on_cpu = any(point.config.runtime.device == "cpu" for point in points)
    return "Measured on a CPU: the answer holds for this CPU only." if on_cpu else ""


def describe_machine(machine: Environment) -> str:
    """Returns hosts, device, and the versions that matter, in one line."""
    device = f"{machine.gpu_count} x {machine.gpu}" if machine.gpu else machine.cpu
    versions = {"driver": machine.driver, "nccl": machine.nccl, "cuda": machine.cuda, **machine.packages}
    shown = [f"{name} {version}" for name, version in versions.items() if version]
    hosts = " and ".join(filter(None, machine.hosts or (machine.host,)))
    return "; ".join(filter(None, (hosts, device, ", ".join(shown)))) or "an unrecorded machine"


def multicast(points: Sequence[Point]) -> str | None:
    """Returns whether userbuffers used NVLink multicast, by the workers' environment: `on`, `off`, or `on and off` if
    points differ. None if no GPU was used or nothing ran."""
    found = set()
    for point in points:
        if point.result and point.config.runtime.device != "cpu":
            skipped = point.result.machine.variables.get("UB_SKIPMC")
            off = not point.config.runtime.multicast if skipped is None else skipped not in ("", "0")
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
    """Returns the command lines, as Hydra or the tuner recorded them: one per sweep, or per point that ran alone."""
    records = (TunerRecord.FILE, SWEEP_CONFIG)
    folders = dict.fromkeys(
        sweep if any((sweep / name).exists() for name in records) else point.directory
        for point in points
        for sweep in [point.directory.parent]
    )
    return list(dict.fromkeys(filter(None, map(_command, folders))))


def _command(directory: Path) -> str | None:
    """Returns the command line of a sweep or of a point that ran alone; None if its record cannot be read."""
    tuner, sweep, alone = (directory / name for name in (TunerRecord.FILE, SWEEP_CONFIG, POINT_OVERRIDES))
    try:
        if tuner.exists():
            check_place(tuner, directory)
            return TunerRecord.read(tuner).command
        path = sweep if sweep.exists() else alone
        check_place(path, directory, MOST_YAML_BYTES)
        recorded = read_yaml(path)
        if path == alone:
            arguments = msgspec.convert(recorded, list[str])
        else:
            given = msgspec.convert(recorded["hydra"]["overrides"], dict[str, list[str]])
            arguments = ["-m", *given["task"], *(one for one in given["hydra"] if one.startswith("hydra/"))]
    except (UserError, msgspec.ValidationError, KeyError, TypeError, RecursionError):
        return None
    return shlex.join([*launch_program().split(), *arguments])


SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's clock throttle reasons that make a time depend on cooling or power supply. The software power cap is not among
them: large GEMMs reach it on every card."""


def highest_load(points: Iterable[Point]) -> str:
    """Returns the highest load of a machine while it measured the points, such as `5.1 on 2 cores`; empty if it had
    enough cores for it, or if that was not recorded."""
    moments = [moment for point in points if point.result for moment in point.result.conditions.values()]
    loads = [(moment["load_1min"], moment["cores"]) for moment in moments if "cores" in moment]
    load, cores = max(loads, key=lambda one: one[0] / one[1], default=(0.0, 1))
    return f"{load:.1f} on {cores} cores" if load > cores else ""


def slowed_gpus(points: Iterable[Point]) -> list[str]:
    """Returns a warning if GPUs were throttled, and why; else an empty list."""
    names, reasons = [], 0
    for point in points:
        moments = point.result.conditions.values() if point.result else ()
        found = [int(gpu.get("throttle_reasons", 0)) for moment in moments for gpu in moment.get("gpus", [])]
        own = reduce(or_, found, 0) & sum(SLOWDOWNS)
        names += [point.name] * bool(own)
        reasons |= own
    why = ", ".join(reason for bit, reason in SLOWDOWNS.items() if reasons & bit)
    points_named = f"{len(names)} point{'s' if len(names) > 1 else ''}"
    return (
        [f"GPUs were throttled ({why}) in {points_named}, first in {names[0]}: times may be too long."] if names else []
    )
