"""Summaries of a run's steps: which of them count, which hide less than the others, and every quantity over the ranks
and over the steps."""

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
LESS_HIDDEN_BY = 0.1
"""Share of its communication that a step must hide less than the others to be told of."""
MADS = 6.0
"""And so many median absolute deviations."""


class Quantity(NamedTuple):
    better: str
    """`lower`, `higher`, or `` where neither is."""
    meaning: str
    of_step: Callable[[Sequence[Step]], float] | None = None
    """Of one step of all ranks; NaN where it is undefined. None of what is no step's."""


def _mean(better: str, meaning: str, value: Callable[[Step], float | None]) -> Quantity:
    """Returns the mean over the ranks that report a value; NaN if none does."""

    def mean(steps: Sequence[Step]) -> float:
        known = [found for step in steps if (found := value(step)) is not None]
        return math.fsum(known) / len(known) if known else math.nan

    return Quantity(better, f"{meaning}, mean over the ranks", mean)


def _active(better: str, stream: str, what: str) -> Quantity:
    return _mean(better, f"{what} in a step", lambda step: step.streams_ms.get(stream, 0.0))


QUANTITIES = {
    "step_ms": Quantity("lower", "step, the slowest rank of each", lambda steps: max(step.step_ms for step in steps)),
    "compute_ms": _active("lower", COMPUTE, "computation"),
    "comm_ms": _mean("lower", "any communication in a step", lambda step: step.overlap_ms + step.exposed_comm_ms),
    "hidden_comm_ms": _mean("", "communication with computation beside it", lambda step: step.overlap_ms),
    "exposed_comm_ms": _mean("lower", "communication without computation beside it", lambda step: step.exposed_comm_ms),
    "hidden_comm_fraction": _mean(
        "higher", "hidden / all communication of a step", lambda step: step.hidden_comm_fraction
    ),
    "overlap_ratio": _mean("higher", "overlap / min(computation, communication)", lambda step: step.overlap_ratio),
    "all_reduce_ms": _active("", ALL_REDUCE, "all-reduces"),
    "reduce_scatter_ms": _active("", REDUCE_SCATTER, "reduce-scatters"),
    "auxiliary_ms": _active("", AUXILIARY, "all-gathers of parameters"),
    "compute_allreduce_ms": _mean("", "computation and an all-reduce at once", lambda step: step.compute_allreduce_ms),
    "compute_reducescatter_ms": _mean(
        "", "computation and a reduce-scatter at once", lambda step: step.compute_reducescatter_ms
    ),
    "compute_auxiliary_ms": _mean("", "computation and an all-gather at once", lambda step: step.compute_auxiliary_ms),
    "samples_per_s": Quantity("higher", "samples of all ranks per second of the slowest rank's step"),
    "sm_clock_mhz": _mean("", "SM clock", lambda step: step.device.sm_clock_mhz),
    "power_w": _mean("", "power of a GPU", lambda step: step.device.power_w),
    "temperature_c": _mean("", "temperature of a GPU", lambda step: step.device.temperature_c),
    "final_loss": Quantity("", "loss of the last step without the profiler"),
    "time_us": Quantity("lower", "whole step of the point, timed in turns with the next two after the recorded run"),
    "none_us": Quantity("lower", "the same with every collective alone on the device"),
    "floor_us": Quantity("lower", "the same computation without communication"),
    "speedup": Quantity("higher", "none / point, of the i-th samples of both"),
    "hidden_fraction": Quantity("higher", "median of none - point / median of none - floor, each of the i-th samples"),
    "peak_memory_gb": Quantity("lower", "most that tensors took on a GPU of any rank, 10^9 bytes"),
}
"""What is compared, in order. Where a name has no unit, it is a plain number."""

Series: TypeAlias = "dict[str, NDArray[np.float64]]"
"""By quantity one value for each of the same steps; NaN where it is undefined."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run with the summary of its steps."""

    run: Run
    numbers: list[int]
    """Of the steps that count."""
    steps: Series
    """Of the same steps."""
    aggregates: dict[str, Estimate]
    """By quantity, as far as it is known, the median with its noise, in the quantity's own unit. The noise of a single
    value is NaN."""
    dips: list[int]
    """The steps that hide much less than the others."""

    @property
    def name(self) -> str:
        return self.run.name


def counted_steps(run: Run) -> list[int]:
    """Returns the numbers of the steps that count: those that all ranks recorded, without the profiler's and without
    warm-up, the first tenth of them, which compiles, allocates, and makes communicators."""
    numbers = sorted(set.intersection(*map(set, run.steps.values())))
    plain = [number for number in numbers if not any(step.profiled for step in _of_all(run, number))]
    return plain[math.ceil(WARM_UP_SHARE * len(plain)) :]


def find_dips(numbers: Sequence[int], steps: Series) -> list[int]:
    """Returns the steps that hide a much smaller share of their communication than usual in the run."""
    import numpy as np

    if "hidden_comm_fraction" not in steps:
        return []
    shares = steps["hidden_comm_fraction"]
    usual = np.nanmedian(shares)
    tolerance = max(LESS_HIDDEN_BY, MADS * np.nanmedian(abs(shares - usual)))
    return [number for number, share in zip(numbers, shares, strict=True) if share < usual - tolerance]


def tell_dips(run: MeasuredRun) -> str:
    """Returns a sentence on the steps that hide less, with their clock beside the others'."""
    import numpy as np

    clocks, clock = run.steps.get("sm_clock_mhz"), ""
    if clocks is not None:
        in_dips = clocks[np.isin(run.numbers, run.dips)]
        clock = f"; their SM clock was {np.nanmean(in_dips):,.0f} MHz, the run's median is {np.nanmedian(clocks):,.0f}"
    which = f"{'steps' if len(run.dips) > 1 else 'step'} {some_of(run.dips)}"
    return f"{run.name}: of {len(run.numbers)} steps much less is hidden in {which}{clock}."


def series(run: Run, numbers: Sequence[int]) -> Series:
    """Returns each quantity by step, over the ranks, without quantities that no step has."""
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
    """Returns the samples of whole steps, and of their quotient."""
    point, none, floor = (times[name].samples_us for name in VARIANTS)
    return {
        **{"time_us": point, "none_us": none, "floor_us": floor},
        "speedup": [slow / fast for fast, slow in zip(point, none, strict=True)],
    }


def _of_all(run: Run, number: int) -> list[Step]:
    """Returns the step of every rank."""
    return [of_rank[number] for of_rank in run.steps.values()]
