"""Summaries of a run's steps: the steps that count, those that hide less than the others, and every quantity over the
ranks and steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from overlap_sweep.report.numbers import some_of
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.measured import Timing
from overlap_sweep.workloads.fsdp.result import VARIANTS, hidden, measured
from overlap_sweep.workloads.fsdp.telemetry import ALL_REDUCE, AUXILIARY, COMPUTE, REDUCE_SCATTER, Run, Step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WARM_UP_SHARE = 0.1
"""Share of the steps that counts as warm-up."""
LESS_HIDDEN_BY = 0.1
"""A step is reported if its hidden share of communication is less than the median by this and by MADS."""
MADS = 6.0
"""Number of median absolute deviations."""


class Quantity(NamedTuple):
    better: str
    """`lower`, `higher`, or empty if neither is better."""
    meaning: str
    of_step: Callable[[Sequence[Step]], float] | None = None
    """Returns the value of one step from all its ranks, NaN if undefined. None for quantities of whole runs."""


def _mean(better: str, meaning: str, value: Callable[[Step], float | None]) -> Quantity:
    """Returns the quantity that is the mean over the ranks that report a value, NaN if none does."""

    def mean(steps: Sequence[Step]) -> float:
        known = [found for step in steps if (found := value(step)) is not None]
        return math.fsum(known) / len(known) if known else math.nan

    return Quantity(better, f"{meaning}, mean over the ranks", mean)


def _active(better: str, stream: str, what: str) -> Quantity:
    return _mean(better, f"{what} in a step", lambda step: step.streams_ms.get(stream, 0.0))


QUANTITIES = {
    "step_ms": Quantity("lower", "step time of the slowest rank", lambda steps: max(step.step_ms for step in steps)),
    "compute_ms": _active("lower", COMPUTE, "computation"),
    "comm_ms": _mean("lower", "any communication in a step", lambda step: step.overlap_ms + step.exposed_comm_ms),
    "hidden_comm_ms": _mean("", "communication with concurrent computation", lambda step: step.overlap_ms),
    "exposed_comm_ms": _mean(
        "lower", "communication without concurrent computation", lambda step: step.exposed_comm_ms
    ),
    "hidden_comm_fraction": _mean(
        "higher", "hidden / total communication of a step", lambda step: step.hidden_comm_fraction
    ),
    "overlap_ratio": _mean("higher", "overlap / min(computation, communication)", lambda step: step.overlap_ratio),
    "all_reduce_ms": _active("", ALL_REDUCE, "all-reduces"),
    "reduce_scatter_ms": _active("", REDUCE_SCATTER, "reduce-scatters"),
    "auxiliary_ms": _active("", AUXILIARY, "all-gathers of parameters"),
    "compute_allreduce_ms": _mean("", "overlap of computation and all-reduces", lambda step: step.compute_allreduce_ms),
    "compute_reducescatter_ms": _mean(
        "", "overlap of computation and reduce-scatters", lambda step: step.compute_reducescatter_ms
    ),
    "compute_auxiliary_ms": _mean("", "overlap of computation and all-gathers", lambda step: step.compute_auxiliary_ms),
    "samples_per_s": Quantity("higher", "samples of all ranks per second, by the slowest rank's step time"),
    "sm_clock_mhz": _mean("", "SM clock", lambda step: step.device.sm_clock_mhz),
    "power_w": _mean("", "power of the GPU", lambda step: step.device.power_w),
    "temperature_c": _mean("", "temperature of the GPU", lambda step: step.device.temperature_c),
    "final_loss": Quantity("", "loss of the last step without the profiler"),
    "time_us": Quantity("lower", "step time, timed after the recorded run, in turns with none and floor"),
    "none_us": Quantity("lower", "the same step with no overlap: each collective alone on the device"),
    "floor_us": Quantity("lower", "the same step without communication"),
    "speedup": Quantity("higher", "none_us / time_us, of samples of the same round"),
    "hidden_fraction": Quantity("higher", "median of none - time / median of none - floor, of the same rounds"),
    "peak_memory_gb": Quantity("lower", "peak memory of tensors on any rank's GPU, 10^9 bytes"),
}
"""Quantities that are compared, in order. A name without a unit is a plain number."""

Series: TypeAlias = "dict[str, NDArray[np.float64]]"
"""Values by quantity, one for each step; NaN if undefined."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run with the summary of its steps."""

    run: Run
    numbers: list[int]
    """Numbers of the steps that count."""
    steps: Series
    """Quantities of these steps."""
    aggregates: dict[str, Estimate]
    """Median and noise of each known quantity, in its own unit. The noise of a single value is NaN."""
    dips: list[int]
    """Numbers of the steps that hide much less than the others."""

    @property
    def name(self) -> str:
        return self.run.name


def counted_steps(run: Run) -> list[int]:
    """Returns the numbers of the steps that count: recorded by all ranks, not profiled, and after warm-up, the first
    tenth, which compiles, allocates, and creates communicators."""
    numbers = sorted(set.intersection(*map(set, run.steps.values())))
    plain = [number for number in numbers if not any(step.profiled for step in _of_all(run, number))]
    return plain[math.ceil(WARM_UP_SHARE * len(plain)) :]


def find_dips(numbers: Sequence[int], steps: Series) -> list[int]:
    """Returns the steps that hide a much smaller share of their communication than the run's median."""
    import numpy as np

    if "hidden_comm_fraction" not in steps:
        return []
    shares = steps["hidden_comm_fraction"]
    usual = np.nanmedian(shares)
    tolerance = max(LESS_HIDDEN_BY, MADS * np.nanmedian(abs(shares - usual)))
    return [number for number, share in zip(numbers, shares, strict=True) if share < usual - tolerance]


def describe_dips(run: MeasuredRun) -> str:
    """Returns a sentence on the steps that hide less, with their SM clock and the run's."""
    import numpy as np

    clocks, clock = run.steps.get("sm_clock_mhz"), ""
    if clocks is not None:
        in_dips = clocks[np.isin(run.numbers, run.dips)]
        clock = f" (SM clock {np.nanmean(in_dips):,.0f} MHz, median of the run {np.nanmedian(clocks):,.0f} MHz)"
    which = f"steps {some_of(run.dips)} hide" if len(run.dips) > 1 else f"step {run.dips[0]} hides"
    return f"{run.name}: {which} much less communication than the other {len(run.numbers) - len(run.dips)}{clock}."


def series(run: Run, numbers: Sequence[int]) -> Series:
    """Returns each quantity by step, over all ranks, without quantities that no step has."""
    import numpy as np

    every = [_of_all(run, number) for number in numbers]
    found = {
        name: np.array([quantity.of_step(steps) for steps in every], np.float64)
        for name, quantity in QUANTITIES.items()
        if quantity.of_step
    }
    if run.result:
        found["samples_per_s"] = measured(run.result).samples_per_step / found["step_ms"] * 1e3
    return {name: values for name, values in found.items() if not np.isnan(values).all()}


def measure(run: Run) -> MeasuredRun:
    """Returns the run with the summary of its steps."""
    numbers = counted_steps(run)
    steps = series(run, numbers)
    found: dict[str, Sequence[float | None]] = {name: values.tolist() for name, values in steps.items()}
    if numbers:
        found["final_loss"] = [_of_all(run, numbers[-1])[0].loss]
    aggregates = {}
    if run.result:
        result = measured(run.result)
        found |= _timed(result.step)
        found["peak_memory_gb"] = [result.peak_memory_gb]
        share = hidden(result.step)
        if share.known:
            aggregates["hidden_fraction"] = Estimate(share.fraction, share.noise, len(found["speedup"]))
    for name, values in found.items():
        if known := [value for value in values if value is not None and not math.isnan(value)]:
            aggregates[name] = estimate(known)
    return MeasuredRun(run, numbers, steps, aggregates, find_dips(numbers, steps))


def _timed(times: Mapping[str, Timing]) -> dict[str, list[float]]:
    """Returns the samples of the timed steps and of the speedup."""
    point, none, floor = (times[name].samples_us for name in VARIANTS)
    return {
        **{"time_us": point, "none_us": none, "floor_us": floor},
        "speedup": [slow / fast for fast, slow in zip(point, none, strict=True)],
    }


def _of_all(run: Run, number: int) -> list[Step]:
    """Returns the step of every rank."""
    return [of_rank[number] for of_rank in run.steps.values()]
