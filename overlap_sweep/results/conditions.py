"""What the GPUs were like before and after the points: warm, slow, throttled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from overlap_sweep.results.points import Point

SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""NVML's clocks throttle reasons that make a time say less about the GPU than about its cooling or supply. The power
cap is none of them: large GEMMs run into it on every card."""


@dataclass(frozen=True)
class GpuConditions:
    """Over all points and GPUs of a case."""

    temperature_c: tuple[float, float]
    """Lowest and highest."""
    sm_clock_mhz: tuple[float, float]
    slowed: dict[str, list[str]]
    """By reason, the names of the points at whose start or end a GPU was slowed down."""


def gpu_conditions(points: Iterable[Point]) -> GpuConditions | None:
    """None where nothing was recorded: on a CPU, without NVML, or of a GPU that does not tell."""
    found = [
        (point.name, gpu)
        for point in points
        if point.result
        for moment in point.result.conditions.values()
        for gpu in moment.get("gpus", [])
    ]
    if not found:
        return None
    temperatures = [gpu["temperature_c"] for _, gpu in found if "temperature_c" in gpu]
    clocks = [gpu["sm_clock_mhz"] for _, gpu in found if "sm_clock_mhz" in gpu]
    if not temperatures or not clocks:
        return None
    slowed = {
        reason: list(dict.fromkeys(name for name, gpu in found if int(gpu.get("throttle_reasons", 0)) & bit))
        for bit, reason in SLOWDOWNS.items()
    }
    return GpuConditions(
        temperature_c=(min(temperatures), max(temperatures)),
        sm_clock_mhz=(min(clocks), max(clocks)),
        slowed={reason: names for reason, names in slowed.items() if names},
    )


def gpus_in_words(points: Iterable[Point]) -> list[str]:
    """Returns a sentence on how warm and fast the GPUs were; none where that was not recorded."""
    conditions = gpu_conditions(points)
    if not conditions:
        return []
    (coolest, hottest), (slowest, fastest) = conditions.temperature_c, conditions.sm_clock_mhz
    return [f"GPUs before and after points: {coolest:g} to {hottest:g} C, {slowest:g} to {fastest:g} MHz"]


def slowed_gpus(points: Iterable[Point]) -> list[str]:
    """Returns a sentence for each reason for which GPUs were slowed down."""
    conditions = gpu_conditions(points)
    return [
        f"GPUs were slowed down ({reason}) around {len(names)} points, first {names[0]}."
        for reason, names in (conditions.slowed.items() if conditions else ())
    ]
