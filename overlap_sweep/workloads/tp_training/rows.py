"""Rows of tensor-parallel stacks: the steps of each setting, pooled over its points, and the hidden share of profiled
communication. Also results_{impl}_tp{n}_dp{m}.json of a run, with field names as in well-known benchmark scripts."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec

from overlap_sweep.report.table import Table
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Finalist
from overlap_sweep.results.traces import TraceReading
from overlap_sweep.study import in_brief
from overlap_sweep.study.settings import key, numbered
from overlap_sweep.study.times import step_times, time_of_point
from overlap_sweep.trace import TraceRow
from overlap_sweep.workloads.tp_training.config import OF_DATA_PARALLEL, SEQUENCE_PARALLEL, Asked, Resolved, TpTraining
from overlap_sweep.workloads.tp_training.language_model import peak_tflops
from overlap_sweep.workloads.tp_training.losses import Losses
from overlap_sweep.workloads.tp_training.result import TpTrainingRun, TpTrainingStep

_OF_SETTING = (
    *("zero_stage", "attn_impl", "vocab_parallel", "sequence_parallel", "compile", "tp_comm_overlap"),
    *("tp_comm_overlap_cfg", "autocast", "activation_checkpointing"),
    *dict.fromkeys(name for names in OF_DATA_PARALLEL.values() for name in names),
)
"""Options that change how a step is computed, not what."""


class Grid(NamedTuple):
    """The grid of ranks."""

    tp_size: int
    dp_size: int

    @property
    def ranks(self) -> int:
        return self.tp_size * self.dp_size

    def __str__(self) -> str:
        return f"TP={self.tp_size} DP={self.dp_size}"


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


@dataclass(eq=False)
class TpTrainingRow:
    """One setting of one implementation on one grid of ranks, over all its points."""

    grid: Grid
    setting: str
    """The implementation, with its options that are not at their defaults."""
    points: list[Point]
    step: Estimate
    """Step time."""
    communication: StepCommunication | None
    """Communication in its first point with traces."""
    losses: Losses | None = None
    """Comparison of losses; None if no other run has the same data."""
    chosen: bool = False
    """Whether it is the fastest on its grid."""
    place: str = ""
    """`fastest`, `tie` or empty, among the settings on its grid."""
    final: Finalist | None = None
    """Its times in the end of a search, where the best settings of all were measured side by side."""

    @property
    def name(self) -> str:
        return f"{self.grid} {self.setting}"

    @property
    def impl(self) -> str:
        return self.config.impl

    @property
    def config(self) -> Resolved:
        """Returns the configuration of its first point."""
        return self.points[0].config_as(Resolved)

    @property
    def run(self) -> TpTrainingRun:
        """Returns the run of its first point."""
        return self.points[0].measured_as(TpTrainingRun)

    @cached_property
    def steps(self) -> list[TpTrainingStep]:
        """Returns the timed steps."""
        return [step for point in self.points for step in point.measured_as(TpTrainingRun).timed_steps]

    @property
    def time_us(self) -> float:
        return self.step.time_us

    @property
    def decisive(self) -> Estimate:
        """Returns the time by which it wins: that of the final, for which no setting was chosen by its time."""
        final = self.final
        if final is None:
            return self.step
        return Estimate(final.time_us, final.noise_us, len(final.points), final.freedom or math.inf)

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
    def tokens_per_s(self) -> float:
        """Returns the throughput of all ranks together."""
        return self.run.tokens_per_step / self.time_us * 1e6

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.grid.ranks

    @property
    def tflops_per_gpu(self) -> float:
        return self.run.flops_per_step / self.time_us / 1e6 / self.grid.ranks

    @property
    def mfu(self) -> float | None:
        """Returns the model FLOP utilisation, a share; None if the GPU's peak is not known."""
        result = self.points[0].result
        gpu = result.environment.get("gpu") if result else None
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
    def launch_bound(self) -> bool:
        return any(point.launch_bound for point in self.points)

    @property
    def deviates(self) -> bool:
        """Returns whether its losses or gradient norms deviate from the others'."""
        return self.losses is not None and bool(self.losses.deviates)

    @property
    def may_win(self) -> bool:
        return not self.deviates and self.loss is not None

    @property
    def note(self) -> str:
        """Returns what distinguishes it from rows that are simply slower."""
        return in_brief(
            {
                self.place: bool(self.place),
                "deviates": self.deviates,
                "diverges": self.loss is None,
                "launch-bound": self.launch_bound,
                f"{len(self.points)} points": len(self.points) > 1,
            }
        )


def setting_of(config: Asked) -> str:
    """Returns `autotp zero_stage=2`: the implementation of a point, and its options that are not at their defaults."""
    impl, schema = str(config.impl), TpTraining()
    usual = {name: getattr(schema, name) for name in _OF_SETTING}
    usual["compile"] = impl == "async_tp"
    usual["sequence_parallel"] = impl in SEQUENCE_PARALLEL and (config.tp_size or 1) > 1
    given = {name: getattr(config.tp_training, name) for name in _OF_SETTING}
    return " ".join([impl, *(_word(name, given[name]) for name in usual if given[name] not in (None, usual[name]))])


def _word(name: str, value: Any) -> str:
    # A file's name without its folder.
    return f"{name}={str(value).lower() if isinstance(value, bool) else PurePath(str(value)).stem[:40]}"


def rows_of(
    points: Sequence[Point], communication: Mapping[Path, StepCommunication]
) -> tuple[list[TpTrainingRow], list[TpTrainingRow]]:
    """Returns a row for each setting, and one for each point by itself. `points`: the `ok` points of one case;
    `communication`: by run directory."""
    alike: dict[Hashable, list[Point]] = defaultdict(list)
    for point in points:
        alike[_identity(point.recorded)].append(point)
    groups = list(alike.values())
    # Differences that a setting omits, such as connections, get a number.
    names = numbered(f"{_grid(own[0])} {setting_of(own[0].config_as(Resolved))}" for own in groups)

    def row(name: str, points: list[Point], step: Estimate) -> TpTrainingRow:
        grid = _grid(points[0])
        of_traces = next((communication[p.directory] for p in points if p.directory in communication), None)
        return TpTrainingRow(grid, name.removeprefix(f"{grid} "), points, step, of_traces)

    times = [time.step for time in step_times(groups, _timing)]
    return (
        list(map(row, names, groups, times)),
        [
            row(name, [point], _time_of_run(point, step))
            for name, own, step in zip(names, groups, times, strict=True)
            for point in own
        ],
    )


def _grid(point: Point) -> Grid:
    config = point.config_as(Resolved)
    return Grid(config.tp_size, config.dp_size)


def _timing(point: Point) -> Timing:
    return point.measured_as(TpTrainingRun).timing


def _time_of_run(point: Point, setting: Estimate) -> Estimate:
    """Returns the time of one run, with the noise between runs that is known from all settings."""
    assert setting.between
    own = time_of_point(_timing(point)).step
    return setting.between.of_runs(own, [own.time_us])


def _identity(config: Mapping[str, Any]) -> Hashable:
    options = {name: config["tp_training"].get(name) for name in _OF_SETTING}
    overlap_cfg, connections = config.get("overlap_cfg"), config["runtime"].get("max_connections")
    more = {name: config[name] for name in ("impl", "tp_size", "dp_size")}
    return key({**options, **more, "overlap_cfg": overlap_cfg, "max_connections": connections})


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


def results(row: TpTrainingRow, table: Table[TpTrainingRow]) -> dict[str, Any]:
    """Returns the content of the results file."""
    config, run, steps, result = row.config, row.run, row.steps, row.points[0].result
    assert result
    options = dict(row.points[0].recorded["tp_training"])
    times_ms, per_s = [step.step_us / 1e3 for step in steps], fmean(1e6 / step.step_us for step in steps)
    losses = [step.loss for step in steps if step.loss is not None]
    return {
        "config": {
            "model_name": config.model.name,
            **{name: getattr(config, name) for name in ("impl", "tp_size", "dp_size")},
            "num_layers": config.language_model["num_hidden_layers"],
            "use_vocab_parallel": options.pop("vocab_parallel"),
            "output_dir": str(row.points[0].directory),
            **options,
            "language_model": config.language_model,
        },
        "steps": [_step(step, run) for step in steps],
        "summary": {
            "num_steps": len(steps),
            "avg_step_time_ms": fmean(times_ms),
            "std_step_time_ms": stdev(times_ms) if len(times_ms) > 1 else 0.0,
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


def _step(step: TpTrainingStep, run: TpTrainingRun) -> dict[str, Any]:
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
