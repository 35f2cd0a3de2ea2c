"""What a run's steps come to: which of them count, which stand out, each over the ranks, and all of them in one number
per quantity."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.measured import Timing
from overlap_sweep.workloads.fsdp.cautions import Exposed
from overlap_sweep.workloads.fsdp.result import hidden
from overlap_sweep.workloads.fsdp.telemetry import ALL_REDUCE, AUXILIARY, COMPUTE, REDUCE_SCATTER, Run, Step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WARM_UP_SHARE = 0.1

MADS = 4.0
_MAD_TO_SIGMA = 1.4826
"""Of a normal distribution."""
SLOWER_BY = 0.05
LESS_HIDDEN_BY = 0.1
FEWEST_STEPS = 5
"""Among fewer nothing is usual."""
RANK_CLOCK_LOWER_BY = 0.05


Steps = Sequence[Step]
"""One step of all ranks."""


class Quantity(NamedTuple):
    better: str
    """`lower`, `higher`, or `` where neither is."""
    meaning: str
    of_step: Callable[[Steps], float] | None = None
    """NaN where it is undefined; None of what is no step's."""
    by_marks: bool = False
    """It follows from what telemetry marked as computation and communication."""


def _mean(value: Callable[[Step], float | None]) -> Callable[[Steps], float]:
    """Over the ranks that know it; NaN of none."""

    def mean(steps: Steps) -> float:
        known = [found for step in steps if (found := value(step)) is not None]
        return math.fsum(known) / len(known) if known else math.nan

    return mean


def _marked(better: str, meaning: str, value: Callable[[Step], float | None]) -> Quantity:
    return Quantity(better, f"{meaning}, mean over the ranks", _mean(value), by_marks=True)


def _active(better: str, stream: str, what: str) -> Quantity:
    return _marked(better, f"{what} in a step", lambda step: step.streams_ms.get(stream, 0.0))


def _utilisation(stream: str, what: str) -> Quantity:
    return _marked("", f"share of the step with {what}", lambda step: step.utilisation.get(stream))


_hidden_ms = _mean(lambda step: step.overlap_ms)
_exposed_ms = _mean(lambda step: step.exposed_comm_ms)


def _hidden_share(steps: Steps) -> float:
    comm_ms = _hidden_ms(steps) + _exposed_ms(steps)
    return _hidden_ms(steps) / comm_ms if comm_ms > 0 else math.nan


def _most_concurrent(steps: Steps) -> float:
    return max((step.max_concurrency for step in steps if step.max_concurrency is not None), default=math.nan)


QUANTITIES = {
    "step_ms": Quantity("lower", "step, the slowest rank of each", lambda steps: max(step.step_ms for step in steps)),
    "compute_ms": _active("lower", COMPUTE, "computation"),
    "comm_ms": Quantity(
        *("lower", "any communication in a step, mean over the ranks: hidden and exposed"),
        *(lambda steps: _hidden_ms(steps) + _exposed_ms(steps), True),
    ),
    "hidden_comm_ms": _marked("", "communication with computation beside it", lambda step: step.overlap_ms),
    "exposed_comm_ms": _marked(
        "lower", "communication without computation beside it", lambda step: step.exposed_comm_ms
    ),
    "hidden_share": Quantity(
        "higher", "hidden / all communication of a step, all ranks together", _hidden_share, by_marks=True
    ),
    "overlap_ratio": _marked("higher", "overlap / min(computation, communication)", lambda step: step.overlap_ratio),
    "kernels_exposed_comm_ms": Quantity(
        "lower", "communication kernels without a compute kernel beside them, rank 0's profiled steps"
    ),
    "kernels_hidden_share": Quantity("higher", "hidden / all time of communication kernels, rank 0's profiled steps"),
    "all_reduce_ms": _active("", ALL_REDUCE, "all-reduces"),
    "reduce_scatter_ms": _active("", REDUCE_SCATTER, "reduce-scatters"),
    "auxiliary_ms": _active("", AUXILIARY, "all-gathers of parameters"),
    "compute_allreduce_ms": _marked(
        "", "computation and an all-reduce at once", lambda step: step.compute_allreduce_ms
    ),
    "compute_reducescatter_ms": _marked(
        "", "computation and a reduce-scatter at once", lambda step: step.compute_reducescatter_ms
    ),
    "compute_auxiliary_ms": _marked(
        "", "computation and an all-gather at once", lambda step: step.compute_auxiliary_ms
    ),
    "utilisation_compute": _utilisation(COMPUTE, "computation"),
    "utilisation_all_reduce": _utilisation(ALL_REDUCE, "an all-reduce"),
    "utilisation_reduce_scatter": _utilisation(REDUCE_SCATTER, "a reduce-scatter"),
    "utilisation_auxiliary": _utilisation(AUXILIARY, "an all-gather"),
    "mean_concurrency": _marked("", "streams that were active at a time", lambda step: step.mean_concurrency),
    "max_concurrency": Quantity(
        "", "most streams that were active at a time on any rank", _most_concurrent, by_marks=True
    ),
    "samples_per_s": Quantity("higher", "samples of all ranks per second of the slowest rank's step"),
    "sm_clock_mhz": Quantity("", "SM clock, mean over the ranks", _mean(lambda step: step.device.sm_clock_mhz)),
    "power_w": Quantity("", "power of a GPU, mean over the ranks", _mean(lambda step: step.device.power_w)),
    "temperature_c": Quantity(
        "", "temperature of a GPU, mean over the ranks", _mean(lambda step: step.device.temperature_c)
    ),
    "dips": Quantity("", "steps that were much slower, or hid much less, than usual"),
    "grad_norm": Quantity(
        "", "gradient norm of a step before clipping, over all ranks", _mean(lambda step: step.grad_norm)
    ),
    "final_loss": Quantity("", "loss of the last step without the profiler"),
    "point_ms": Quantity("lower", "whole step of the point, timed in turns with the next two after the recorded run"),
    "none_ms": Quantity("lower", "the same with every collective alone on the device"),
    "floor_ms": Quantity("lower", "the same computation without communication"),
    "speedup": Quantity("higher", "none / point, of the i-th samples of both"),
    "hidden_fraction": Quantity("higher", "median of none - point / median of none - floor, each of the i-th samples"),
    "peak_memory_gb": Quantity("lower", "most that tensors took on a GPU of any rank, 10^9 bytes"),
}
"""What is compared, in order. Where a name has no unit, it is a plain number."""

Series: TypeAlias = "dict[str, NDArray[np.float64]]"
"""By quantity one value for each of the same steps; NaN where it is undefined."""


class Spread(NamedTuple):
    median: float
    tolerance: float
    """How far from it is still usual."""


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
    """Half-width of the median's 95 % interval; None of a single value."""
    count: int

    @property
    def estimate(self) -> Estimate | None:
        """With its own unit in place of microseconds; None where the noise is unknown."""
        return None if self.noise is None else Estimate(self.median, self.noise, self.count)


@dataclass(frozen=True)
class MeasuredRun:
    """A run with what its steps come to."""

    run: Run
    selection: Selection
    steps: Series
    """Of the steps that count."""
    aggregates: dict[str, Aggregate]
    """By quantity, in the order of QUANTITIES, those that are known."""
    dips: list[int]
    """The steps that stand out."""
    kernels: Exposed | None
    """What its traces tell; None without traces of a GPU."""

    @property
    def believed(self) -> bool:
        """Whether no trace speaks against telemetry's marks."""
        return self.kernels is None or not self.kernels.disagree

    @property
    def name(self) -> str:
        return self.run.name


def spread(values: Sequence[float], absolute: float = 0.0, relative: float = 0.0) -> Spread:
    """Returns what is usual. The tolerance is not the standard deviation, which the outliers that are looked for would
    widen: MADS times the median absolute deviation, scaled to a normal distribution's sigma. But at least the larger of
    `absolute` and the `relative` part of the median: among steps that are all alike any difference would be many MADs.
    """
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


def series(run: Run, numbers: Sequence[int]) -> Series:
    """Returns each step over the ranks, without what no step tells."""
    import numpy as np

    every = [_of_all(run, number) for number in numbers]
    found = {
        name: np.array([quantity.of_step(steps) for steps in every], np.float64)
        for name, quantity in QUANTITIES.items()
        if quantity.of_step
    }
    if run.measured:
        found["samples_per_s"] = run.measured.samples_per_step / found["step_ms"] * 1e3
    return {name: values for name, values in found.items() if not np.isnan(values).all()}


def aggregate(values: Sequence[float] | NDArray[np.float64]) -> Aggregate | None:
    """Returns what those that are defined come to; None where none is."""
    import numpy as np

    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return None
    q1, median, q3 = (float(value) for value in np.quantile(known, (0.25, 0.5, 0.75)))
    noise = estimate(known.tolist()).noise_us if len(known) > 1 else None
    return Aggregate(median, q1, q3, float(known.mean()), noise, len(known))


def measure(run: Run, selection: Selection, kernels: Exposed | None = None) -> MeasuredRun:
    """Returns the run with what its steps come to; `kernels` of its traces."""
    of_steps = series(run, selection.measured)
    dips = find_dips(run, selection.measured)
    found = {name: aggregate(values) for name, values in of_steps.items()}
    if kernels:
        found["kernels_exposed_comm_ms"] = aggregate(kernels.kernels_ms)
        found["kernels_hidden_share"] = aggregate(kernels.kernels_hidden_share)
    found["dips"] = aggregate([len(dips)])
    last = (selection.measured or selection.warm_up)[-1]
    found["final_loss"] = aggregate([step.loss for step in _of_all(run, last) if step.loss is not None][:1])
    if run.measured:
        found |= _timed(run.measured.step)
        memory_gb = run.measured.peak_memory_gb
        found["peak_memory_gb"] = aggregate([] if memory_gb is None else [memory_gb])
    known = {name: value for name in QUANTITIES if (value := found.get(name)) is not None}
    return MeasuredRun(run, selection, of_steps, known, dips, kernels)


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
