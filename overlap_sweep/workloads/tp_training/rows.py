"""Rows of tensor-parallel stacks: the steps of each setting, pooled over its points, and the hidden share of profiled
communication. Also results_{impl}_tp{n}_dp{m}.json of a run, with field names as in well-known benchmark scripts."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePath
from statistics import fmean
from typing import NamedTuple

import msgspec

from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.table import Table
from overlap_sweep.results.estimate import standard_deviation
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.traces import TraceReading
from overlap_sweep.study import SettingRow, Times
from overlap_sweep.study.settings import Naming, Options, last_part, value_in_words
from overlap_sweep.trace import TraceRow
from overlap_sweep.workloads.tp_training.config import (
    DATA_PARALLEL_OPTIONS,
    SEQUENCE_PARALLEL,
    Asked,
    Resolved,
    TpTraining,
)
from overlap_sweep.workloads.tp_training.language_model import peak_tflops
from overlap_sweep.workloads.tp_training.result import TpTrainingRun, TpTrainingStep

STACK_OPTIONS = (
    "zero_stage",
    "attn_impl",
    "vocab_parallel",
    "sequence_parallel",
    "compile",
    "tp_comm_overlap",
    "tp_comm_overlap_cfg",
    "autocast",
    "activation_checkpointing",
    *DATA_PARALLEL_OPTIONS,
)
"""Options of `tp_training` that change how a step is computed, not what."""
ENVIRONMENT = "tp_training.env."
"""Beginning of variables of the workers as options."""
WORK = "token and GPU"


def options_of(config: Asked) -> Options:
    """Returns the setting of a point: grid of ranks, implementation and its options."""
    found = {
        "impl": config.impl,
        "tp_size": config.tp_size,
        "dp_size": config.dp_size,
        **{f"tp_training.{name}": getattr(config.tp_training, name) for name in STACK_OPTIONS},
        **{f"{ENVIRONMENT}{name}": value for name, value in (config.tp_training.env or {}).items()},
        "runtime.max_connections": config.runtime.max_connections,
    }
    return {name: value for name, value in found.items() if value is not None}


def _usual(options: Options, name: str) -> Scalar:
    impl, option = options.get("impl"), last_part(name)
    if option == "compile":
        return impl == "async_tp"
    if option == "sequence_parallel":
        return impl in SEQUENCE_PARALLEL and options.get("tp_size") not in (None, 1)
    usual: Scalar = getattr(TpTraining, option, None)
    return usual


def _value(value: Scalar) -> str:
    # A file's name without its folder.
    return PurePath(value).stem[:40] if isinstance(value, str) else value_in_words(value)


NAMING = Naming(value=_value, usual=_usual)


@dataclass(frozen=True)
class StepCommunication:
    """Communication of one step in microseconds, the median over the profiled steps. Concurrent parts count once.

    A collective's kernel runs from the arrival of its rank to that of the last one, so all other ranks mostly wait. The
    rank with the least communication time in the step counts.
    """

    total_us: float
    exposed_us: float
    """Time with no concurrent computation."""
    waiting_us: float = 0.0
    """Additional communication time of the rank that waits most."""

    @property
    def hidden_fraction(self) -> float:
        """Returns the hidden fraction; NaN if nothing communicates."""
        return 1 - self.exposed_us / self.total_us if self.total_us else float("nan")


class Losses(NamedTuple):
    """Comparison of a run's losses and gradient norms with those of other runs on the same data."""

    largest: float
    """Largest relative difference of a loss; infinite if one of the two is NaN or infinite."""
    deviates: str
    """First difference beyond the tolerance, such as `loss is 6.4 instead of 6.6 at step 4`; empty if there is none."""


@dataclass(frozen=True)
class TpTrainingTimes(Times):
    """The step time of a setting, and what is known of it from traces and from other settings."""

    communication: StepCommunication | None
    """Communication in its first point with traces."""
    losses: Losses | None
    """Comparison of losses; None if no other run has the same data."""


@dataclass(frozen=True)
class TpTrainingRow(SettingRow[TpTrainingTimes]):
    """One setting over all its points, or one point by itself."""

    @property
    def losses(self) -> Losses | None:
        return self.times.losses

    @cached_property
    def config(self) -> Resolved:
        """Returns the configuration of its first point."""
        return self.points[0].config_as(Resolved)

    @property
    def run(self) -> TpTrainingRun:
        """Returns the run of its first point."""
        return self.points[0].measured_as(TpTrainingRun)

    @property
    def amounts(self) -> Mapping[str, float | None]:
        return {WORK: self.run.tokens_per_step / self.config.world_size}

    @cached_property
    def steps(self) -> list[TpTrainingStep]:
        """Returns the timed steps."""
        return [step for point in self.points for step in point.measured_as(TpTrainingRun).timed_steps]

    @cached_property
    def shares(self) -> dict[str, float]:
        """Returns the shares of the step's parts, which add up to 1. Each part's slowest rank counts, so the parts may
        take longer than the step: then they are shares of their sum."""
        timed = ("forward_us", "backward_us", "optimizer_us")
        parts_us = [sum(getattr(step, name) for step in self.steps) for name in timed]
        together_us = max(sum(step.step_us for step in self.steps), sum(parts_us))
        forward, backward, optimizer = (part_us / together_us for part_us in parts_us)
        other = max(0.0, 1.0 - forward - backward - optimizer)
        return {"forward": forward, "backward": backward, "optimizer": optimizer, "other": other}

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.amount / self.time_us * 1e6

    @property
    def tflops_per_gpu(self) -> float:
        return self.run.flops_per_step / self.time_us / 1e6 / self.config.world_size

    @property
    def mfu(self) -> float | None:
        """Returns the model FLOP utilisation, a share; None if the GPU's peak is not known."""
        result = self.points[0].result
        gpu = result.machine.gpu if result else None
        peak = self.config.tp_training.peak_tflops or peak_tflops(gpu, self.config.precision)
        return self.tflops_per_gpu / peak if peak else None

    @property
    def peak_memory_gb(self) -> float | None:
        """Returns the peak memory of any timed step; None on a CPU."""
        return max((step.memory_peak_gb for step in self.steps if step.memory_peak_gb is not None), default=None)

    @property
    def loss(self) -> float | None:
        return self.run.steps[-1].loss

    @property
    def deviates(self) -> bool:
        """Returns whether its losses or gradient norms deviate from the others'."""
        return self.losses is not None and bool(self.losses.deviates)

    @property
    def may_win(self) -> bool:
        return not self.deviates and self.loss is not None

    @property
    def in_words(self) -> str:
        return f"{as_us(self.time_us)} us per step, {self.tokens_per_s_per_gpu:,.0f} tokens/s per GPU"

    @property
    def notes(self) -> Mapping[str, bool]:
        return {"deviates": self.deviates, "diverges": self.loss is None, "launch-bound": self.launch_bound}


def tolerance_of(precision: str) -> dict[str, float]:
    """Returns the relative differences of losses and gradient norms that rounding explains: bf16 and fp16 keep 8 and 11
    bits, and every implementation adds in another order."""
    return {"loss": 1e-4, "grad_norm": 1e-3} if precision == "fp32" else {"loss": 1e-2, "grad_norm": 5e-2}


def losses_by_point(points: Iterable[Point], setting: Callable[[Point], Hashable]) -> dict[Path, Losses]:
    """Returns how the losses of points with the same data compare, by run directory. Implementations are compared with
    each other, or settings if there is only one implementation. The reference is the median of all, which shows a
    single wrong one among three or more; two are compared with each other."""
    found: dict[Path, Losses] = {}
    same_data = list(points)
    several = len({point.config_as(Resolved).impl for point in same_data}) > 1
    votes: dict[Hashable, dict[Path, list[TpTrainingStep]]] = defaultdict(dict)
    for point in same_data:
        who = point.config_as(Resolved).impl if several else setting(point)
        votes[who][point.directory] = point.measured_as(TpTrainingRun).steps
    tolerance = tolerance_of(same_data[0].config_as(Resolved).precision)
    for who, runs in votes.items():
        others = [list(other.values()) for name, other in votes.items() if len(votes) > 2 or name != who]
        if others:
            found |= {directory: _compared(steps, others, tolerance) for directory, steps in runs.items()}
    return found


def _compared(
    own: Sequence[TpTrainingStep], others: Sequence[Sequence[Sequence[TpTrainingStep]]], tolerance: Mapping[str, float]
) -> Losses:
    """Returns how the losses of `own` compare. `others`: by implementation, the steps of each of its runs."""
    largest, deviates = 0.0, ""
    for number, step in enumerate(own):
        for name, most in tolerance.items():
            value: float | None = getattr(step, name)
            reference = _median(_median(getattr(run[number], name) for run in runs) for runs in others)
            difference = _relative(value, reference)
            if difference > most and not deviates:
                deviates = f"{name} is {_number(value)} instead of {_number(reference)} at step {number}"
            if name == "loss":
                largest = max(largest, difference)
    return Losses(largest, deviates)


def deviation(result: Result, reference: Result) -> str:
    """Returns how an `ok` result's losses or gradient norms differ from those of another one on the same data beyond
    what rounding explains; empty if they don't, or if the data are not the same."""
    own, other = result.measured_as(TpTrainingRun).steps, reference.measured_as(TpTrainingRun).steps
    if own[-1].loss is None:
        return "the loss is NaN or infinite"
    if result.point_as(Resolved).dp_size != reference.point_as(Resolved).dp_size or len(own) != len(other):
        return ""
    return _compared(own, [[other]], tolerance_of(result.point_as(Resolved).precision)).deviates


def _median(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are not None; None if most are."""
    of_all = list(values)
    known = [value for value in of_all if value is not None]
    return statistics.median(known) if 2 * len(known) >= len(of_all) else None


def _relative(value: float | None, reference: float | None) -> float:
    if value is None or reference is None:
        return 0.0 if value is reference else math.inf
    return abs(value - reference) / abs(reference) if reference else math.inf if value else 0.0


def _number(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.6g}"


def step_communication(reading: TraceReading) -> StepCommunication | None:
    """Returns the communication of a point's traces; None without a whole step."""
    iterations: dict[int, list[TraceRow]] = defaultdict(list)
    for row in reading.rows:
        if row.phase == "all":
            iterations[row.iteration].append(row)
    if not iterations:
        return None
    least = [min(ranks, key=lambda row: row.comm_us) for ranks in iterations.values()]
    most_us = [max(row.comm_us for row in ranks) for ranks in iterations.values()]
    return StepCommunication(
        statistics.median(row.comm_us for row in least),
        statistics.median(row.exposed_comm_us for row in least),
        statistics.median(high_us - low.comm_us for high_us, low in zip(most_us, least, strict=True)),
    )


def results_json(row: TpTrainingRow, table: Table[TpTrainingRow]) -> bytes:
    """Returns the file for a single point's row; `table` has the columns of the measurements."""
    return msgspec.json.format(msgspec.json.encode(results(row, table)), indent=2) + b"\n"


def results(row: TpTrainingRow, table: Table[TpTrainingRow]) -> dict[str, object]:
    """Returns the content of the results file."""
    config, run, steps, result = row.config, row.run, row.steps, row.points[0].result
    assert result
    options = asdict(config.tp_training)
    times_ms, per_s = [step.step_us / 1e3 for step in steps], fmean(1e6 / step.step_us for step in steps)
    losses = [step.loss for step in steps if step.loss is not None]
    return {
        "config": {
            "model_name": config.model.name,
            "impl": config.impl,
            "tp_size": config.tp_size,
            "dp_size": config.dp_size,
            "num_layers": config.num_layers,
            "use_vocab_parallel": options.pop("vocab_parallel"),
            **options,
            "output_dir": str(row.points[0].directory),
            "language_model": config.language_model,
        },
        "steps": [_step(step, run) for step in steps],
        "summary": {
            "num_steps": len(steps),
            "avg_step_time_ms": fmean(times_ms),
            "std_step_time_ms": standard_deviation(times_ms) if len(times_ms) > 1 else 0.0,
            "avg_tokens_per_sec": run.tokens_per_step * per_s,
            "avg_samples_per_sec": run.samples_per_step * per_s,
            "avg_loss": fmean(losses) if losses else None,
            "final_loss": steps[-1].loss,
            "peak_memory_gb": row.peak_memory_gb,
            "timing_breakdown": {f"{name}_pct": 100 * share for name, share in row.shares.items()},
        },
        "measured": table.records([row])[0],
        "deviates": row.losses.deviates if row.losses else None,
        "details": run.details,
        "warnings": result.warnings,
    }


def _step(step: TpTrainingStep, run: TpTrainingRun) -> dict[str, float | None]:
    parts = ("step", "forward", "backward", "optimizer")
    return {
        "step": step.step,
        "loss": step.loss,
        **{f"{part}_time_s": getattr(step, f"{part}_us") / 1e6 for part in parts},
        "tokens_per_sec": run.tokens_per_step / step.step_us * 1e6,
        "samples_per_sec": run.samples_per_step / step.step_us * 1e6,
        "memory_allocated_gb": step.memory_allocated_gb,
        "memory_peak_gb": step.memory_peak_gb,
        "grad_norm": step.grad_norm,
    }
