"""Training runs as their telemetry shows them: of whole run directories, or of logs alone. A file that cannot be read
gives one sentence, and the rest is analysed."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median

from overlap_sweep.errors import UserError
from overlap_sweep.report.comparison import flat
from overlap_sweep.report.numbers import some_of
from overlap_sweep.report.table import Column, Table, attribute
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.points import Point, read_points
from overlap_sweep.results.provenance import describe_machine
from overlap_sweep.results.run_directory import Environment, Result, find_metrics, find_points, find_telemetry
from overlap_sweep.workloads.fsdp import telemetry
from overlap_sweep.workloads.fsdp.config import Asked
from overlap_sweep.workloads.fsdp.result import VARIANTS, TrainingRun, hidden

WARM_UP_SHARE = 0.1
"""Share of the steps that counts as warm-up."""
LESS_HIDDEN_BY = 0.1
"""A step is reported if its hidden share of communication is less than the median by this and by MADS."""
MADS = 6.0
"""Number of median absolute deviations."""
_GROUPS = ("model", "ranking", "fsdp", "training", "distributed", "streams", "compile")
"""Groups of options that are settings."""


@dataclass(frozen=True)
class Step:
    run: str
    number: int
    ranks: Sequence[telemetry.RankStep]
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


QUANTITIES_OF_STEPS: tuple[Column[Step], ...] = (
    attribute("step_ms", "Step time of the slowest rank."),
    _active(telemetry.COMPUTE, "Computation in a step, mean over the ranks."),
    _mean("comm_ms", "Any communication in a step"),
    _mean("hidden_comm_ms", "Communication with concurrent computation", "overlap_ms"),
    _mean("exposed_comm_ms", "Communication without concurrent computation"),
    _mean("hidden_comm_fraction", "Hidden / total communication of a step"),
    _mean("overlap_ratio", "Overlap / min(computation, communication)"),
    _active(telemetry.ALL_REDUCE, "All-reduces in a step, mean over the ranks."),
    _active(telemetry.REDUCE_SCATTER, "Reduce-scatters in a step, mean over the ranks."),
    _active(telemetry.AUXILIARY, "All-gathers of parameters in a step, mean over the ranks."),
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
        *QUANTITIES_OF_STEPS,
        _mean("loss", "Loss"),
        _mean("learning_rate", "Learning rate"),
        _mean("grad_norm", "Norm of the gradients before clipping"),
    ),
)

QUANTITIES = {
    **{column.name: column.about for column in QUANTITIES_OF_STEPS},
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
    by_rank: Mapping[int, Mapping[int, telemetry.RankStep]]
    """Steps by rank and number; no rank is empty."""
    point: Point | None = None

    @property
    def ranks(self) -> list[int]:
        return sorted(self.by_rank)

    @property
    def aorta_ranks(self) -> int | None:
        """Returns the number of ranks by AORTA's log; None for our own."""
        recorded = (step for steps in self.by_rank.values() for step in steps.values())
        return next((step.world_size for step in recorded if isinstance(step, telemetry.AortaStep)), None)

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

    @cached_property
    def settings(self) -> dict[str, object]:
        """Returns the knobs as in result.json, such as `fsdp.forward_prefetch`; empty for logs without a result."""
        if not self.point:
            return {}
        config = self.point.config_as(Asked)
        groups = {name: asdict(getattr(config, name)) for name in _GROUPS}
        groups["model"] = {name: value for name, value in groups["model"].items() if value is not None}
        runtime = {"max_connections": config.runtime.max_connections, "nodes": config.nodes}
        own = {"repetition": config.repetition, "backend": config.backend, "precision": config.precision}
        return flat({"runtime": runtime, **own, **groups})

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
    def counted(self) -> list[Step]:
        return [step for step in self.steps if step.counted]

    def known(self, quantity: str) -> dict[int, float]:
        """Returns the known values of a quantity of the steps that count, by step."""
        (value,) = (column.value for column in QUANTITIES_OF_STEPS if column.name == quantity)
        return {step.number: known for step in self.counted if isinstance(known := value(step), int | float)}

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Returns median and noise of each known quantity, in its own unit. The noise of a single value is NaN."""
        samples: dict[str, Sequence[float | None]]
        samples = {column.name: list(self.known(column.name).values()) for column in QUANTITIES_OF_STEPS}
        samples["final_loss"] = [step.ranks[0].loss for step in self.counted[-1:]]
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
        if not shares:
            return []
        usual = median(shares.values())
        tolerance = max(LESS_HIDDEN_BY, MADS * median(abs(share - usual) for share in shares.values()))
        return [step for step, share in shares.items() if share < usual - tolerance]

    @property
    def warnings(self) -> Iterator[str]:
        """Yields what to know before its numbers are believed, a sentence each."""
        if self.num_ranks > len(self.ranks):
            yield f"{self.name} has telemetry of only {len(self.ranks)} of {self.num_ranks} ranks."
        if self.result and self.result.launch_bound:
            yield f"{self.name} is launch-bound: the host could not enqueue as fast as the GPU ran."
        if self.aorta_ranks:
            yield (
                f"{self.name} is AORTA's log: its communication is all-reduces and reduce-scatters alone; auxiliary "
                "has all-gathers, copies of batches, clipping and the optimizer; the loss is rank 0's."
            )
        for warning in self.result.warnings if self.result else []:
            yield f"{self.name}: {warning}"

    @property
    def summary(self) -> dict[str, object]:
        aggregates = {
            name: {"median": known.time_us, "noise": known.noise_us, "count": known.repeats}
            for name, known in self.estimates.items()
        }
        return {
            "directory": str(self.directory),
            "ranks": self.ranks,
            "settings": self.settings,
            "aggregates": aggregates,
            "dips": self.dips,
        }

    @property
    def dips_in_words(self) -> str:
        """Returns a sentence on the steps that hide less, with their SM clock and the run's."""
        clocks, clock = self.known("sm_clock_mhz"), ""
        if in_dips := [clocks[step] for step in self.dips if step in clocks]:
            clock = f" (SM clock {fmean(in_dips):,.0f} MHz, median of the run {median(clocks.values()):,.0f} MHz)"
        which = f"steps {some_of(self.dips)} hide" if len(self.dips) > 1 else f"step {self.dips[0]} hides"
        others = len(self.counted) - len(self.dips)
        return f"{self.name}: {which} much less communication than the other {others}{clock}."


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


@dataclass(frozen=True)
class Dataset:
    """All runs at or below a directory that have at least two steps that count."""

    label: str
    path: Path
    runs: list[Run]
    problems: list[str]
    """A sentence for each file that could not be read completely, and for each run that is too short."""
    warnings: list[str]
    """Caveats for the reader: missing ranks, failed runs that are left out."""

    @property
    def machine(self) -> str:
        return describe_machine(next((run.result.machine for run in self.runs if run.result), Environment()))


def read_dataset(label: str, path: Path) -> Dataset:
    """Returns the runs at or below `path`. UserError if there is none."""
    directories = find_telemetry(path)
    # Logs that were copied alone have no results.
    results = read_points(path) if find_points(path) else None
    points = {point.directory: point for point in results.points if point.workload == "fsdp"} if results else {}
    own_names = {directory: directory.resolve().name or "run" for directory in directories}
    often = Counter(own_names.values())
    runs: list[Run] = []
    problems, warnings = list(results.problems) if results else [], []
    for directory, own_name in own_names.items():
        name = own_name if often[own_name] == 1 else directory.relative_to(path).as_posix()
        point = points.get(directory)
        if point and point.status not in ("ok", "missing"):
            warnings.append(f"{name} is left out: {point.status}: {point.why_not_ok}")
            continue
        read = {rank: telemetry.read_rank(file, path, rank) for rank, file in find_metrics(directory).items()}
        problems += [problem for _, problem in read.values() if problem]
        if by_rank := {rank: steps for rank, (steps, _) in read.items() if steps}:
            runs.append(Run(name, directory, by_rank, point))
            warnings += runs[-1].warnings
    long = [run for run in runs if len(run.counted) > 1]
    too_short = [
        f"{run.directory} has fewer than two steps of all ranks after warm-up, not profiled; train for more steps."
        for run in runs
        if len(run.counted) < 2
    ]
    if not runs:
        reason = [*problems, *warnings, "no rank_<r>_metrics.jsonl found; give a run directory."][0]
        raise UserError(f"{path} has no telemetry to compare: {reason}")
    if not long:
        raise UserError([*problems, *too_short][0])
    warnings += [run.dips_in_words for run in long if run.dips]
    return Dataset(label, path, long, [*problems, *too_short], [f"{label}: {warning}" for warning in warnings])
