"""What a run's steps come to: which of them count, which stand out, each over the ranks, and all of them in one number
per quantity."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.measured import Timing
from overlap_sweep.workloads.fsdp.cautions import Exposed
from overlap_sweep.workloads.fsdp.telemetry import ALL_REDUCE, AUXILIARY, COMPUTE, REDUCE_SCATTER, STREAMS
from overlap_sweep.workloads.fsdp.telemetry_runs import Run, Step
from overlap_sweep.workloads.fsdp.times import hidden

WARM_UP_SHARE = 0.1

MADS = 4.0
_MAD_TO_SIGMA = 1.4826
"""Of a normal distribution."""
SLOWER_BY = 0.05
LESS_HIDDEN_BY = 0.1
FEWEST_STEPS = 5
"""Among fewer nothing is usual."""
RANK_CLOCK_LOWER_BY = 0.05


class Quantity(NamedTuple):
    better: str
    """`lower`, `higher`, or `` where neither is."""
    meaning: str
    by_marks: bool = False
    """It follows from what telemetry marked as computation and communication."""


QUANTITIES = {
    "step_ms": Quantity("lower", "step, the slowest rank of each"),
    "compute_ms": Quantity("lower", "computation in a step, mean over the ranks", by_marks=True),
    "comm_ms": Quantity("lower", "any communication in a step, mean over the ranks: hidden and exposed", by_marks=True),
    "hidden_comm_ms": Quantity("", "communication with computation beside it, mean over the ranks", by_marks=True),
    "exposed_comm_ms": Quantity(
        "lower", "communication without computation beside it, mean over the ranks", by_marks=True
    ),
    "hidden_share": Quantity("higher", "hidden / all communication of a step, all ranks together", by_marks=True),
    "overlap_ratio": Quantity(
        "higher", "overlap / min(computation, communication), mean over the ranks", by_marks=True
    ),
    "kernels_exposed_comm_ms": Quantity(
        "lower", "communication kernels without a compute kernel beside them, rank 0's profiled steps"
    ),
    "kernels_hidden_share": Quantity("higher", "hidden / all time of communication kernels, rank 0's profiled steps"),
    "all_reduce_ms": Quantity("", "all-reduces in a step, mean over the ranks", by_marks=True),
    "reduce_scatter_ms": Quantity("", "reduce-scatters in a step, mean over the ranks", by_marks=True),
    "auxiliary_ms": Quantity("", "all-gathers of parameters in a step, mean over the ranks", by_marks=True),
    "compute_allreduce_ms": Quantity("", "computation and an all-reduce at once, mean over the ranks", by_marks=True),
    "compute_reducescatter_ms": Quantity(
        "", "computation and a reduce-scatter at once, mean over the ranks", by_marks=True
    ),
    "compute_auxiliary_ms": Quantity("", "computation and an all-gather at once, mean over the ranks", by_marks=True),
    **{
        f"utilisation_{name}": Quantity("", f"share of the step with {what}, mean over the ranks", by_marks=True)
        for name, what in zip(
            STREAMS, ("computation", "an all-reduce", "a reduce-scatter", "an all-gather"), strict=True
        )
    },
    "mean_concurrency": Quantity("", "streams that were active at a time, mean over the ranks", by_marks=True),
    "max_concurrency": Quantity("", "most streams that were active at a time on any rank", by_marks=True),
    "samples_per_s": Quantity("higher", "samples of all ranks per second of the slowest rank's step"),
    "sm_clock_mhz": Quantity("", "SM clock, mean over the ranks"),
    "power_w": Quantity("", "power of a GPU, mean over the ranks"),
    "temperature_c": Quantity("", "temperature of a GPU, mean over the ranks"),
    "dips": Quantity("", "steps that were much slower, or hid much less, than usual"),
    "grad_norm": Quantity("", "gradient norm of a step before clipping, over all ranks"),
    "final_loss": Quantity("", "loss of the last step without the profiler"),
    "point_ms": Quantity("lower", "whole step of the point, timed in turns with the next two after the recorded run"),
    "none_ms": Quantity("lower", "the same with every collective alone on the device"),
    "floor_ms": Quantity("lower", "the same computation without communication"),
    "speedup": Quantity("higher", "none / point, of the i-th samples of both"),
    "hidden_fraction": Quantity("higher", "median of none - point / median of none - floor, each of the i-th samples"),
    "peak_memory_gb": Quantity("lower", "most that tensors took on a GPU of any rank, 10^9 bytes"),
}
"""What is compared, in order. Where a name has no unit, it is a plain number."""

Series = dict[str, NDArray[np.float64]]
"""By quantity one value for each of the same steps; NaN where it is undefined."""


@dataclass(frozen=True)
class Spread:
    """What is usual: the median, and how far from it is still usual.

    Not the standard deviation, which the outliers that are looked for would widen: MADS times the median absolute
    deviation, scaled to a normal distribution's sigma. A floor below it, since among steps that are all alike any
    difference would be many MADs.
    """

    median: float
    tolerance: float


@dataclass(frozen=True)
class Selection:
    """Which steps of a run count; numbers in order."""

    measured: list[int]
    warm_up: list[int]
    """The first, and those after it that are slower than usual, up to WARM_UP_SHARE of all."""
    profiled: list[int]
    """Left out: the profiler makes them longer."""
    incomplete: list[int]
    """That some rank has not recorded."""


@dataclass(frozen=True)
class Aggregate:
    """One quantity over the steps that count, or over the samples of a timing."""

    median: float
    q1: float
    """NaN, like the next two, of what no sample has by itself."""
    q3: float
    mean: float
    noise: float | None
    """Half-width of the median's 95 % interval; None of what is one value of the whole run."""
    count: int

    def differs_from(self, other: Aggregate) -> bool:
        """As Estimate.differs_from; of what both know the noise of."""
        assert self.noise is not None
        assert other.noise is not None
        return Estimate(self.median, self.noise, self.count).differs_from(
            Estimate(other.median, other.noise, other.count)
        )


def spread(values: Sequence[float], absolute: float = 0.0, relative: float = 0.0) -> Spread:
    """The floor is the larger of `absolute` and the `relative` part of the median."""
    median = statistics.median(values)
    mad = statistics.median(abs(value - median) for value in values)
    return Spread(median, max(MADS * _MAD_TO_SIGMA * mad, absolute, relative * median))


def select(run: Run) -> Selection:
    """The steps of all ranks, without the profiler's and without warm-up.

    The first step always is warm-up: it compiles, allocates, and makes communicators. So is each after it, up to a
    tenth of all, as long as its slowest rank is slower than usual in the second half of the run.
    """
    numbers = sorted({number for of_rank in run.steps.values() for number in of_rank})
    complete = [number for number in numbers if all(number in of_rank for of_rank in run.steps.values())]
    profiled = [number for number in complete if any(of_rank[number].profiled for of_rank in run.steps.values())]
    plain = [number for number in complete if number not in set(profiled)]
    warm_up = _warm_up([max(step.step_ms for step in _of_all(run, number)) for number in plain])
    return Selection(
        measured=plain[warm_up:],
        warm_up=plain[:warm_up],
        profiled=profiled,
        incomplete=sorted(set(numbers) - set(complete)),
    )


def _warm_up(steps_ms: Sequence[float]) -> int:
    if not steps_ms:
        return 0
    usual = spread(steps_ms[len(steps_ms) // 2 :], relative=SLOWER_BY)
    most = math.ceil(WARM_UP_SHARE * len(steps_ms))
    return next(i for i in range(1, most + 1) if i == most or steps_ms[i] <= usual.median + usual.tolerance)


def find_dips(run: Run, numbers: Sequence[int]) -> list[int]:
    """Returns those of these steps that stand out on any rank, in order.

    Each rank is judged by its own steps, since ranks may differ throughout: a step stands out when it takes longer than
    the rank's median by more than 4 MADs (see Spread) and at least 5 %, or when the hidden part of its communication is
    below the rank's median by more than 4 MADs and at least 10 points.
    """
    if len(numbers) < FEWEST_STEPS:
        return []
    found = (_outstanding([of_rank[number] for number in numbers]) for of_rank in run.steps.values())
    return sorted({number for on_rank in found for number in on_rank})


def _outstanding(steps: Sequence[Step]) -> Iterator[int]:
    """Of one rank."""
    times = spread([step.step_ms for step in steps], relative=SLOWER_BY)
    shares = [step.hidden_share for step in steps if step.hidden_share is not None]
    hidden_shares = spread(shares, absolute=LESS_HIDDEN_BY) if shares else None
    for step in steps:
        slower = step.step_ms > times.median + times.tolerance
        share = step.hidden_share
        if slower or (hidden_shares and share is not None and share < hidden_shares.median - hidden_shares.tolerance):
            yield step.step


def slow_devices(run: Run, numbers: Sequence[int]) -> list[str]:
    """Returns a sentence for each rank whose clock is below the others' throughout: then it holds up all of them."""
    told = {
        rank: [clock for number in numbers if (clock := of_rank[number].device.sm_clock_mhz)]
        for rank, of_rank in run.steps.items()
    }
    clocks = {rank: statistics.median(of_rank) for rank, of_rank in told.items() if of_rank}
    if len(clocks) < 2:
        return []
    median = statistics.median(clocks.values())
    return [
        f"{run.name}: rank {rank} runs at {clock:,.0f} MHz, the ranks' median is {median:,.0f} MHz."
        for rank, clock in sorted(clocks.items())
        if clock < median * (1 - RANK_CLOCK_LOWER_BY)
    ]


def series(run: Run, numbers: Sequence[int], samples_per_step: int | None = None) -> Series:
    """Each step over the ranks: QUANTITIES says how. Without what no step tells."""
    every = [_of_all(run, number) for number in numbers]

    def each(value: Callable[[Sequence[Step]], float]) -> NDArray[np.float64]:
        return np.array([value(steps) for steps in every], np.float64)

    def stream_ms(name: str) -> NDArray[np.float64]:
        return each(lambda steps: _mean([step.streams_ms.get(name, 0.0) for step in steps]))

    def utilisation(name: str) -> NDArray[np.float64]:
        return each(lambda steps: _mean([step.utilisation.get(name) for step in steps]))

    hidden_ms = each(lambda steps: _mean([step.overlap_ms for step in steps]))
    exposed_ms = each(lambda steps: _mean([step.exposed_comm_ms for step in steps]))
    comm_ms = hidden_ms + exposed_ms
    found = {
        "step_ms": each(lambda steps: max(step.step_ms for step in steps)),
        "compute_ms": stream_ms(COMPUTE),
        "comm_ms": comm_ms,
        "hidden_comm_ms": hidden_ms,
        "exposed_comm_ms": exposed_ms,
        "hidden_share": np.divide(hidden_ms, comm_ms, out=np.full_like(comm_ms, math.nan), where=comm_ms > 0),
        "overlap_ratio": each(lambda steps: _mean([step.overlap_ratio for step in steps])),
        "all_reduce_ms": stream_ms(ALL_REDUCE),
        "reduce_scatter_ms": stream_ms(REDUCE_SCATTER),
        "auxiliary_ms": stream_ms(AUXILIARY),
        "compute_allreduce_ms": each(lambda steps: _mean([step.compute_allreduce_ms for step in steps])),
        "compute_reducescatter_ms": each(lambda steps: _mean([step.compute_reducescatter_ms for step in steps])),
        "compute_auxiliary_ms": each(lambda steps: _mean([step.compute_auxiliary_ms for step in steps])),
        **{f"utilisation_{name}": utilisation(name) for name in STREAMS},
        "mean_concurrency": each(lambda steps: _mean([step.mean_concurrency for step in steps])),
        "max_concurrency": each(lambda steps: _largest([step.max_concurrency for step in steps])),
        "grad_norm": each(lambda steps: _mean([step.grad_norm for step in steps])),
        "sm_clock_mhz": each(lambda steps: _mean([step.device.sm_clock_mhz for step in steps])),
        "power_w": each(lambda steps: _mean([step.device.power_w for step in steps])),
        "temperature_c": each(lambda steps: _mean([step.device.temperature_c for step in steps])),
    }
    if samples_per_step:
        found["samples_per_s"] = samples_per_step / found["step_ms"] * 1e3
    return {name: values for name, values in found.items() if not np.isnan(values).all()}


def aggregate(values: Sequence[float] | NDArray[np.float64]) -> Aggregate | None:
    """Of those that are defined; None of fewer than two, whose noise nothing would tell."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    if len(known) < 2:
        return None
    q1, median, q3 = (float(value) for value in np.quantile(known, (0.25, 0.5, 0.75)))
    noise = estimate(known.tolist()).noise_us
    return Aggregate(median, q1, q3, float(known.mean()), noise, len(known))


def single(value: float) -> Aggregate:
    """Of the whole run."""
    return Aggregate(value, value, value, value, None, 1)


def aggregates(
    run: Run, of_steps: Series, selection: Selection, dips: int, kernels: Exposed | None = None
) -> dict[str, Aggregate]:
    """By quantity, in the order of QUANTITIES, those that are known; `kernels` of the run's traces."""
    found = {name: aggregate(values) for name, values in of_steps.items()}
    if kernels:
        found["kernels_exposed_comm_ms"] = _of_few(kernels.kernels_ms)
        found["kernels_hidden_share"] = _of_few(kernels.kernels_hidden_share)
    found["dips"] = single(dips)
    (last, *_) = [*reversed(selection.measured), *reversed(selection.warm_up)]
    loss = next((step.loss for step in _of_all(run, last) if step.loss is not None), None)
    found["final_loss"] = None if loss is None else single(loss)
    training = run.measured
    if training:
        found |= _timed(training.step)
        found["peak_memory_gb"] = None if training.peak_memory_gb is None else single(training.peak_memory_gb)
    return {name: known for name in QUANTITIES if (known := found.get(name)) is not None}


def _of_few(values: Sequence[float]) -> Aggregate | None:
    """Of profiled steps, of which there may be one."""
    return single(values[0]) if len(values) == 1 else aggregate(values)


def _timed(times: dict[str, Timing]) -> dict[str, Aggregate | None]:
    found = {
        f"{name}_ms": aggregate([time_us / 1e3 for time_us in times[name].samples_us])
        for name in ("point", "none", "floor")
        if name in times
    }
    if len(found) == 3:
        point, none = times["point"].samples_us, times["none"].samples_us
        found["speedup"] = aggregate([slow / fast for fast, slow in zip(point, none, strict=True)])
        of_all = hidden(times)
        if of_all.known:
            found["hidden_fraction"] = Aggregate(
                of_all.fraction, math.nan, math.nan, math.nan, of_all.noise, len(point)
            )
    return found


def _of_all(run: Run, number: int) -> list[Step]:
    """The step of every rank."""
    return [of_rank[number] for of_rank in run.steps.values()]


def _largest(values: Sequence[float | None]) -> float:
    """As `_mean`."""
    return max((value for value in values if value is not None), default=math.nan)


def _mean(values: Sequence[float | None]) -> float:
    """Of those that are known; NaN of none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan
