"""What a search over knobs makes of a point's result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.results.identity import key_of, point_identity
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.run_directory import Result
from overlap_sweep.search.knob_trail import Failure, Sample
from overlap_sweep.workloads.fsdp.knobs import frozen, knobs_of, same_floor
from overlap_sweep.workloads.fsdp.times import limited_by_host

WORKLOADS = ("fsdp", "operator")
"""Those with one time per point that others of it can be compared with."""


def check_workload(point: Mapping[str, Any]) -> None:
    if point["workload"]["name"] not in WORKLOADS:
        raise UserError(
            f"knobs are searched for workload={' and '.join(WORKLOADS)}, not for {point['workload']['name']}; sweep it "
            "without hydra/sweeper=knobs."
        )


def measured(result: Result, samples_per_step: int | None) -> Sample | Failure:
    """Times of as much work as `samples_per_step`, the baseline's; None is as much as the point has. Where the host is
    what takes so long, as in a training step that cannot be enqueued faster, that time counts all the same."""
    if result.status != "ok":
        return Failure((result.error or result.status).splitlines()[0])
    if result.point["workload"]["name"] != "fsdp":
        times = [result.measured.times[name] for name in space.passes(result.point)]
        return Sample(
            times_us=_sum(times_of.point for times_of in times),
            beside_us=_sum(times_of.none for times_of in times),
            none_us=_sum(times_of.none for times_of in times),
            floor_us=_sum(times_of.floor for times_of in times),
            work=same_work(result.point),
        )
    step, own = result.measured.step, result.measured.samples_per_step
    scale = samples_per_step / own if samples_per_step else 1.0
    point_us, none_us, floor_us = (_sum([step[name]], scale) for name in ("point", "none", "floor"))
    # Where the host is what limits, the floor is its time, too, and dividing by that would make the slowest host the
    # fastest setting.
    beside_us = () if limited_by_host(result) else floor_us
    return Sample(point_us, beside_us, none_us, floor_us, same_work(result.point))


def _sum(timings: Iterable[Timing], scale: float = 1.0) -> tuple[float, ...]:
    return tuple(scale * sum(samples) for samples in zip(*(t.samples_us for t in timings), strict=True))


def same_work(point: Mapping[str, Any]) -> str:
    """Equal for points whose work beside the knobs' is the same: a step without communication, an operator without
    overlap."""
    if point["workload"]["name"] == "fsdp":
        return str(sorted(same_floor(knobs_of(point)), key=str))
    overlap = {"phase", "method", "phases", "repetition", *space.KNOBS}
    return key_of({name: value for name, value in point_identity(point).items() if name not in overlap})


def same_point(point: Mapping[str, Any]) -> str:
    """Equal for points that run the same, whatever idle knobs say."""
    if point["workload"]["name"] == "fsdp":
        return str(sorted(frozen(knobs_of(point)), key=str))
    idle = {"num_sm"} if not space.settings(point) else set()
    return key_of({name: value for name, value in point_identity(point).items() if name not in idle})
