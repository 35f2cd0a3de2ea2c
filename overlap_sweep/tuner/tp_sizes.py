"""Which TP sizes are worth a search."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.operator.result import OperatorTimes
from overlap_sweep.workloads.operator.scaling import ROUNDING

CANDIDATES = (2, 4, 8)


def tp_sizes_up_to(most: int, gpus: int | None) -> tuple[list[int], str | None]:
    """TP sizes to search, smallest first, and what to say of those that the machine has too few GPUs for.

    `gpus` is None on a CPU, where ranks need none. UserError when none is left.
    """
    asked = [size for size in CANDIDATES if size <= most]
    if not asked:
        raise UserError(f"max_tp_size={most} leaves nothing that communicates; give 2 or more.")
    possible = [size for size in asked if gpus is None or size <= gpus]
    if not possible:
        raise UserError(f"tensor parallelism needs 2 GPUs at least and {gpus} is visible; or use runtime.device=cpu.")
    missing = [f"TP={size}" for size in asked if size not in possible]
    return possible, f"{', '.join(missing)} left out: {gpus} GPUs are visible" if missing else None


def cannot_scale(baselines: Sequence[Result], tolerance: float) -> str | None:
    """Why a TP size cannot be efficient whatever its overlap, given its operators without overlap; or None.

    Its times can at best be the floor's. It scales while they are at most (1 + tolerance) x TP=1's / TP size.
    """
    tp_size = baselines[0].point["tp_size"]
    floor_us, tp1_us = 0.0, 0.0
    for result in baselines:
        for times in (result.measured_as(OperatorTimes).times[pass_name] for pass_name in space.PASSES):
            if times.tp1 is None:
                return None
            floor_us += times.floor.median_us
            tp1_us += times.tp1.median_us
    ratio = floor_us * tp_size / tp1_us
    if ratio <= 1 + tolerance + ROUNDING:
        return None
    return (
        f"even with all communication hidden it would take {ratio:.2f} times TP=1's time / {tp_size}, and "
        f"{1 + tolerance:.2f} is allowed (tuner.drop_tp_sizes=false searches it all the same)"
    )
