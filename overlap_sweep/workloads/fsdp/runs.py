"""Training runs as their telemetry shows them: every step over all ranks is a row of the table STEPS, whose columns are
compared; the steps that hide less than the others; and pairs of runs with their quantities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from overlap_sweep import workloads
from overlap_sweep.report.comparison import flat
from overlap_sweep.report.numbers import some_of
from overlap_sweep.report.table import Column, Table, attribute, to_frame
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import differ, ratio
from overlap_sweep.workloads.fsdp.config import Asked
from overlap_sweep.workloads.fsdp.result import VARIANTS, TrainingRun, hidden
from overlap_sweep.workloads.fsdp.telemetry import ALL_REDUCE, AUXILIARY, COMPUTE, REDUCE_SCATTER, AortaStep, RankStep

if TYPE_CHECKING:
    import pandas as pd

WARM_UP_SHARE = 0.1
"""Share of the steps that counts as warm-up."""
LESS_HIDDEN_BY = 0.1
"""A step is reported if its hidden share of communication is less than the median by this and by MADS."""
MADS = 6.0
"""Number of median absolute deviations."""
_OPTIONS = ("repetition", "backend", "precision")
_SECTIONS = ("model", "ranking", "fsdp", "training", "distributed", "streams", "compile")

Verdict = Literal["better", "worse", "same", "lower", "higher"]
"""`lower` and `higher` are for quantities where neither is better."""

_TIMES = ("step_ms", "compute_ms", "comm_ms", "exposed_comm_ms", "time_us", "none_us", "floor_us")
LOWER_BETTER = {*_TIMES, "peak_memory_gb"}
HIGHER_BETTER = {"hidden_comm_fraction", "overlap_ratio", "samples_per_s", "speedup", "hidden_fraction"}

_ANOTHER_MODEL = ("model.", "ranking.")
_WORK = (*_ANOTHER_MODEL, "training.batch_size", "training.gradient_accumulation", "precision", "ranks")
"""Settings, or prefixes of their names, that change the amount of work."""
_NAMES_ONLY = ("model.name", "model.source")


@dataclass(frozen=True)
class Step:
    """A step of a run."""

    run: str
    number: int
    ranks: Sequence[RankStep]
    """The step as each rank recorded it."""
    samples: int | None
    """Samples of all ranks; None if it is not recorded."""
    counted: bool
    """Whether it is recorded by all ranks, not profiled, and after warm-up."""

    @property
    def step_ms(self) -> float:
        return max(rank.step_ms for rank in self.ranks)

    @property
    def samples_per_s(self) -> float | None:
        return self.samples and self.samples / self.step_ms * 1e3

    @property
    def profiled(self) -> bool:
        return any(rank.profiled for rank in self.ranks)


def _mean(name: str, about: str, read: str = "") -> Column[Step]:
    """Returns the column of the mean over the ranks that report a value."""
    value = attrgetter(read or name)

    def mean(step: Step) -> float | None:
        known = [found for rank in step.ranks if (found := value(rank)) is not None]
        return fmean(known) if known else None

    return Column(name, mean, f"{about}, mean over the ranks.")


def _active(stream: str, about: str) -> Column[Step]:
    return Column(f"{stream}_ms", lambda step: fmean(rank.streams_ms.get(stream, 0.0) for rank in step.ranks), about)


OF_STEPS: tuple[Column[Step], ...] = (
    attribute("step_ms", "Step time of the slowest rank."),
    _active(COMPUTE, "Computation in a step, mean over the ranks."),
    _mean("comm_ms", "Any communication in a step"),
    _mean("hidden_comm_ms", "Communication with concurrent computation", "overlap_ms"),
    _mean("exposed_comm_ms", "Communication without concurrent computation"),
    _mean("hidden_comm_fraction", "Hidden / total communication of a step"),
    _mean("overlap_ratio", "Overlap / min(computation, communication)"),
    _active(ALL_REDUCE, "All-reduces in a step, mean over the ranks."),
    _active(REDUCE_SCATTER, "Reduce-scatters in a step, mean over the ranks."),
    _active(AUXILIARY, "All-gathers of parameters in a step, mean over the ranks."),
    _mean("compute_allreduce_ms", "Overlap of computation and all-reduces"),
    _mean("compute_reducescatter_ms", "Overlap of computation and reduce-scatters"),
    _mean("compute_auxiliary_ms", "Overlap of computation and all-gathers"),
    attribute("samples_per_s", "Samples of all ranks per second, by the slowest rank's step time."),
    _mean("sm_clock_mhz", "SM clock", "device.sm_clock_mhz"),
    _mean("power_w", "Power of the GPU", "device.power_w"),
    _mean("temperature_c", "Temperature of the GPU", "device.temperature_c"),
)
"""Quantities of each step that are compared."""
STEPS: Table[Step] = Table(
    "steps",
    "one row per step of a run",
    (
        attribute("run", kind="text"),
        attribute("step", "Number of the step in the run.", "count", "number"),
        attribute("profiled", "Whether torch.profiler was on.", "flag"),
        attribute("counted", "Whether all ranks recorded it, without the profiler and after warm-up.", "flag"),
        *OF_STEPS,
        _mean("loss", "Loss"),
        _mean("learning_rate", "Learning rate"),
        _mean("grad_norm", "Norm of the gradients before clipping"),
    ),
)
QUANTITIES: Mapping[str, str] = {
    **{column.name: column.about for column in OF_STEPS},
    "final_loss": "Loss of the last step without the profiler.",
    "time_us": "Step time, timed after the recorded run, in turns with none and floor.",
    "none_us": "The same step with no overlap: each collective alone on the device.",
    "floor_us": "The same step without communication.",
    "speedup": "none_us / time_us, of samples of the same round.",
    "hidden_fraction": "Median of none - time / median of none - floor, of the same rounds.",
    "peak_memory_gb": "Peak memory of tensors on any rank's GPU, 10^9 bytes.",
}
"""What is compared, in order, with its meaning. A name without a unit is a plain number."""


@dataclass(frozen=True)
class Run:
    """One training run: its telemetry, and its result if that is in the same directory."""

    name: str
    """Name of its directory, or the relative path if several have the same name."""
    directory: Path
    by_rank: Mapping[int, Mapping[int, RankStep]]
    """Steps by rank and number; no rank is empty."""
    point: Point | None = None

    @property
    def ranks(self) -> list[int]:
        return sorted(self.by_rank)

    @property
    def aorta_ranks(self) -> int | None:
        """Returns the number of ranks by AORTA's log; None for our own."""
        recorded = (step for steps in self.by_rank.values() for step in steps.values())
        return next((step.world_size for step in recorded if isinstance(step, AortaStep)), None)

    @property
    def num_ranks(self) -> int:
        """Returns the number of ranks, including those without telemetry if that is recorded."""
        # Runs that were killed may have left the number to the machine.
        asked = self.point.config_as(Asked).distributed.dp_size if self.point else None
        return asked or max(self.ranks[-1] + 1, self.aorta_ranks or 0)

    @property
    def result(self) -> Result | None:
        """Returns the point's result; None if it is not recorded."""
        return self.point.result if self.point else None

    @property
    def environment(self) -> dict[str, Any]:
        """Returns the machine's environment; empty if it is not recorded."""
        return self.result.environment if self.result else {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Returns the knobs as in result.json, such as `fsdp.forward_prefetch`; empty for logs without a result."""
        if not self.point:
            return {}
        config = self.point.recorded
        runtime = {"max_connections": config["runtime"].get("max_connections"), "nodes": workloads.nodes(config)}
        return flat({"runtime": runtime, **{name: config[name] for name in (*_OPTIONS, *_SECTIONS) if name in config}})

    @cached_property
    def steps(self) -> list[Step]:
        """Returns all steps. Those count which all ranks recorded, without the first tenth of those that were not
        profiled: it compiles, allocates, and creates communicators."""
        samples = self.result.measured_as(TrainingRun).samples_per_step if self.result else None
        numbers = sorted({number for steps in self.by_rank.values() for number in steps})
        recorded = {number: [steps[number] for steps in self.by_rank.values() if number in steps] for number in numbers}
        plain = [
            number
            for number, ranks in recorded.items()
            if len(ranks) == len(self.by_rank) and not any(rank.profiled for rank in ranks)
        ]
        counted = set(plain[math.ceil(WARM_UP_SHARE * len(plain)) :])
        return [Step(self.name, number, ranks, samples, number in counted) for number, ranks in recorded.items()]

    @cached_property
    def counted(self) -> pd.DataFrame:
        """Returns the steps that count, by number, with the columns of STEPS that any of them has."""
        rows = to_frame(STEPS.records(step for step in self.steps if step.counted), STEPS.types)
        return rows.set_index("step").dropna(axis="columns", how="all")

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Returns median and noise of each known quantity, in its own unit. The noise of a single value is NaN."""
        samples: dict[str, Sequence[float | None]]
        samples = {column.name: self.known(column.name).tolist() for column in OF_STEPS}
        last = max((step for step in self.steps if step.counted), key=lambda step: step.number, default=None)
        samples["final_loss"] = [last.ranks[0].loss] if last else []
        found = {}
        if self.result:
            result = self.result.measured_as(TrainingRun)
            time_us, none_us, floor_us = (result.step[name].samples_us for name in VARIANTS)
            samples |= {"time_us": time_us, "none_us": none_us, "floor_us": floor_us}
            samples["speedup"] = [slow / fast for fast, slow in zip(time_us, none_us, strict=True)]
            samples["peak_memory_gb"] = [result.peak_memory_gb]
            share = hidden(result.step)
            if share.known:
                found["hidden_fraction"] = Estimate(share.fraction, share.noise, len(time_us))
        known = {name: [value for value in values if value is not None] for name, values in samples.items()}
        return found | {name: estimate(values) for name, values in known.items() if values}

    @cached_property
    def dips(self) -> list[int]:
        """Returns the steps that hide a much smaller share of their communication than the run's median."""
        shares = self.known("hidden_comm_fraction")
        usual = shares.median()
        tolerance = max(LESS_HIDDEN_BY, MADS * (shares - usual).abs().median())
        return shares.index[shares < usual - tolerance].tolist()

    def describe_dips(self) -> str:
        """Returns a sentence on the steps that hide less, with their SM clock and the run's."""
        clocks, clock = self.known("sm_clock_mhz"), ""
        in_dips = clocks[clocks.index.isin(self.dips)]
        if len(in_dips):
            clock = f" (SM clock {in_dips.mean():,.0f} MHz, median of the run {clocks.median():,.0f} MHz)"
        which = f"steps {some_of(self.dips)} hide" if len(self.dips) > 1 else f"step {self.dips[0]} hides"
        others = len(self.counted) - len(self.dips)
        return f"{self.name}: {which} much less communication than the other {others}{clock}."

    def known(self, quantity: str) -> pd.Series[float]:
        """Returns the known values of a quantity of the steps that count, by step."""
        return self.counted[quantity].dropna() if quantity in self.counted else self.counted.iloc[:0, 0].astype(float)


def pairs(ours: Sequence[Run], theirs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Returns pairs in the order of `theirs`. Single runs are a pair; otherwise runs of the same name match, or, if no
    name is in both, runs with equal swept settings: none for logs without results or for ambiguous matches."""
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    by_name = {run.name: run for run in ours}
    if same_name := [(by_name[run.name], run) for run in theirs if run.name in by_name]:
        return same_name
    if not all(run.settings for run in (*ours, *theirs)):
        return []
    # As text, in which true is not 1.
    swept = [
        name
        for name in set().union(*(run.settings for run in (*ours, *theirs)))
        if any(len({str(run.settings.get(name)) for run in runs}) > 1 for runs in (ours, theirs))
    ]
    our_keys, their_keys = (
        [[str(run.settings.get(name)) for name in swept] for run in runs] for runs in (ours, theirs)
    )
    return [
        (ours[our_keys.index(key)], run)
        for key, run in zip(their_keys, theirs, strict=True)
        if our_keys.count(key) == their_keys.count(key) == 1
    ]


UNKNOWN = Estimate(math.nan, math.nan, 0)


@dataclass(frozen=True)
class Match:
    """A run and the matching run of the reference; None if the run is reported alone."""

    dataset: str
    reference: str
    ours: Run
    theirs: Run | None = None

    @cached_property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Returns the settings that differ, with the value by label, the reference's first: knobs if both are known,
        and `ranks`."""
        own, others = ({**run.settings, "ranks": run.num_ranks} for run in (self.ours, self.theirs or self.ours))
        # Logs without a result only have the number of ranks.
        names = own.keys() & others.keys() if min(len(own), len(others)) == 1 else {**others, **own}
        return {
            name: {self.reference: others.get(name), self.dataset: own.get(name)}
            for name in names
            if own.get(name) != others.get(name)
        }

    @property
    def different_work(self) -> list[str]:
        """Returns the differing settings that change the amount of work; empty if both do the same work."""
        return [name for name in self.settings if name.startswith(_WORK) and name not in _NAMES_ONLY]

    @cached_property
    def quantities(self) -> dict[str, QuantityRatio]:
        """Returns the quantities that either run has, in order; both have `step_ms`."""
        work, theirs = self.different_work, self.theirs.estimates if self.theirs else {}
        samples_differ = any(name.startswith(_ANOTHER_MODEL) for name in work)
        return {
            name: QuantityRatio(
                self,
                name,
                self.ours.estimates.get(name, UNKNOWN),
                theirs.get(name, UNKNOWN),
                judged=not work or (name == "samples_per_s" and not samples_differ),
            )
            for name in QUANTITIES
            if name in self.ours.estimates or name in theirs
        }


@dataclass(frozen=True)
class QuantityRatio:
    """One quantity of a run and of the reference's run; NaN for a run that lacks it."""

    match: Match
    quantity: str
    ours: Estimate
    theirs: Estimate
    judged: bool = True
    """False if the runs did different work, so that neither is better."""

    @property
    def ratio(self) -> float:
        """Returns the ratio to the reference; NaN if undefined."""
        return ratio(self.ours.time_us, self.theirs.time_us)

    @property
    def ratio_noise(self) -> float:
        """Returns the half-width: both relative noises in quadrature. NaN if the ratio or a noise is."""
        shares = (one.noise_us / (one.time_us or math.nan) for one in (self.ours, self.theirs))
        return abs(self.ratio) * math.hypot(*shares)

    @property
    def verdict(self) -> Verdict | None:
        """Returns `same` unless `verdict.differ` says otherwise. None if a noise is unknown."""
        if math.isnan(self.ours.noise_us + self.theirs.noise_us):
            return None
        if not differ(self.ours, self.theirs):
            return "same"
        lower = self.ours.time_us < self.theirs.time_us
        if not self.judged or self.quantity not in LOWER_BETTER | HIGHER_BETTER:
            return "lower" if lower else "higher"
        return "better" if lower == (self.quantity in LOWER_BETTER) else "worse"
