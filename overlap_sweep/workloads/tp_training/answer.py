"""Training steps of a language model by tensor-parallel stacks: which is fastest, and whether they compute the same."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import Estimate, Interval, estimate, gap_noise_us
from overlap_sweep.results.identity import key_of
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import SETTINGS_FILE, Result
from overlap_sweep.workloads.tp_training.losses import Comparison, compare, tolerance_of
from overlap_sweep.workloads.tp_training.peak_rates import peak_tflops
from overlap_sweep.workloads.tp_training.result import TpTrainingRun, TpTrainingStep
from overlap_sweep.workloads.tp_training.step_communication import StepCommunication

_USUAL = {"learning_rate": 1e-5, "weight_decay": 0.01, "max_grad_norm": 1.0, "seed": 42}
"""Of tp_training: what a case is not told with."""
_SETTING_WORDS: dict[str, Callable[[Any], str]] = {
    "zero_stage": lambda stage: "" if stage == 1 else f"zero{stage}",
    "attn_impl": lambda attention: "" if attention == "sdpa" else attention,
    "vocab_parallel": lambda on: "" if on else "whole vocabulary",
    "tp_comm_overlap": lambda on: "" if on else "no overlap",
    "tp_comm_overlap_cfg": lambda path: f"tuned {_file_word(path)}".strip(),
    "autocast": lambda on: "autocast" if on else "",
    "activation_checkpointing": lambda on: "checkpointing" if on else "",
}
"""What an option that is not null adds to the name of a setting."""
_OF_NO_SETTING = ("log_interval", "peak_tflops", "output_dir")
"""Options that change neither what is computed nor how."""
_SEQUENCE_PARALLEL = ("async_tp", "megatron")
"""Implementations that are so unasked, where there is more than one tensor-parallel rank."""


class TpTrainingCase(NamedTuple):
    """What must be equal for implementations, and sizes of tensor and data parallelism, to be compared."""

    model: str
    num_layers: int
    device: str
    dtype: str
    seq_length: int
    batch_size: int
    gradient_accumulation_steps: int
    num_training_steps: int
    warmup_steps: int
    more: str
    """The other options that are not at their defaults, in words."""
    architecture: str
    """A digest of the model's whole config."""

    def __str__(self) -> str:
        sizes = [f"{self.num_layers} layers", f"sequences of {self.seq_length}", f"batch {self.batch_size}"]
        if self.gradient_accumulation_steps > 1:
            sizes.append(f"{self.gradient_accumulation_steps} micro batches")
        more = f", {self.more}" if self.more else ""
        return f"{self.model}, {', '.join(sizes)}, {self.dtype}{more} on {self.device}"

    @property
    def brief(self) -> str:
        return f"{self.model}, {self.num_layers} layers, sequences of {self.seq_length}"


class Grid(NamedTuple):
    """How ranks are cut."""

    tp_size: int
    dp_size: int

    @property
    def ranks(self) -> int:
        return self.tp_size * self.dp_size

    def __str__(self) -> str:
        return f"TP={self.tp_size} DP={self.dp_size}"


class Shares(NamedTuple):
    """Of the timed steps; they add up to 1. The slowest rank of each part counts, so where ranks differ the parts may
    take longer than the step: then they are shares of their sum."""

    forward: float
    backward: float
    optimizer: float
    other: float


@dataclass(frozen=True)
class TpTrainingRow:
    """One setting of one implementation on one grid of ranks, over all its points."""

    grid: Grid
    impl: str
    setting: str
    """The implementation, with what is not at its default."""
    points: list[Point]
    step: Estimate
    q1_us: float
    q3_us: float
    shares: Shares
    tokens_per_step: int
    samples_per_step: int
    flops_per_step: float
    peak_tflops: float | None
    """Of one GPU."""
    parameters: int
    memory_allocated_gb: float | None
    memory_peak_gb: float | None
    """Both the most of the timed steps."""
    host_ahead_us: float | None
    """The least of its points."""
    communication: StepCommunication | None
    """Of its first point that has traces."""
    losses: Comparison | None
    """None where nothing was given the same data."""

    @property
    def name(self) -> str:
        return f"{self.grid} {self.setting}"

    @property
    def time_us(self) -> float:
        return self.step.time_us

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens_per_step / self.time_us * 1e6

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.grid.ranks

    @property
    def samples_per_s(self) -> float:
        return self.samples_per_step / self.time_us * 1e6

    @property
    def tflops_per_gpu(self) -> float:
        return self.flops_per_step / self.time_us / 1e6 / self.grid.ranks

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation, a share; None where the GPU's peak is not known."""
        return self.tflops_per_gpu / self.peak_tflops if self.peak_tflops else None

    @property
    def steps(self) -> list[TpTrainingStep]:
        """Of its first point, the warm-up's too."""
        return measured(self.points[0].result).steps

    @property
    def loss(self) -> float | None:
        return self.steps[-1].loss

    @property
    def host_limits(self) -> bool:
        """See `host_limits`."""
        return host_limits(self.points)

    @property
    def deviates(self) -> bool:
        """Whether it computes something else than the others."""
        return self.losses is not None and self.losses.deviates is not None

    @property
    def diverges(self) -> bool:
        return self.loss is None

    @property
    def may_win(self) -> bool:
        return not self.deviates and not self.diverges


@dataclass(frozen=True)
class GridAnswer:
    """The implementations on one grid of ranks."""

    grid: Grid
    rows: list[TpTrainingRow]
    """From fast to slow."""

    @property
    def comparable(self) -> list[TpTrainingRow]:
        return [row for row in self.rows if row.may_win]

    @property
    def best(self) -> TpTrainingRow | None:
        """None where none computes what it should."""
        return next(iter(self.comparable), None)

    @property
    def ties(self) -> list[TpTrainingRow]:
        """The best, and what cannot be told from it."""
        slower = self.slower
        return [row for row in self.comparable if row not in slower]

    @property
    def slower(self) -> list[TpTrainingRow]:
        """What is slower than the best beyond the noise: any of them might have come out best by chance, so that all
        pairs count."""
        best, rows = self.best, self.comparable
        pairs = max(len(rows) * (len(rows) - 1) // 2, 1)
        return [row for row in rows if best and row.time_us > best.time_us and row.step.differs_from(best.step, pairs)]


@dataclass(frozen=True)
class LossesAnswer:
    """Of all that was given the same data: of one data-parallel size."""

    dp_size: int
    rows: list[TpTrainingRow]

    @property
    def deviating(self) -> list[TpTrainingRow]:
        return [row for row in self.rows if row.deviates]


@dataclass(frozen=True)
class TpTrainingAnalysis:
    """One case."""

    case: TpTrainingCase
    rows: list[TpTrainingRow]
    """By number of ranks and grid, then from fast to slow."""
    of_points: list[TpTrainingRow]
    """The same of every point by itself."""

    @property
    def points(self) -> list[Point]:
        return [point for row in self.rows for point in row.points]

    @property
    def parameters(self) -> int:
        return self.rows[0].parameters

    @property
    def answers(self) -> list[GridAnswer]:
        grids = dict.fromkeys(row.grid for row in self.rows)
        return [GridAnswer(grid, [row for row in self.rows if row.grid == grid]) for grid in grids]

    @property
    def best(self) -> TpTrainingRow | None:
        """Of all, by what one GPU does; None where none computes what it should."""
        return max((row for row in self.rows if row.may_win), key=lambda row: row.tokens_per_s_per_gpu, default=None)

    @property
    def losses(self) -> list[LossesAnswer]:
        """Where there is something to compare."""
        sizes = sorted({row.grid.dp_size for row in self.rows if row.losses})
        return [LossesAnswer(size, [row for row in self.rows if row.grid.dp_size == size]) for size in sizes]


def ratio_of(slower: TpTrainingRow, faster: TpTrainingRow) -> float:
    """Of the times of a step."""
    return slower.time_us / faster.time_us


def ratio_interval(slower: TpTrainingRow, faster: TpTrainingRow) -> Interval:
    """From the noise of both, relative to them and in quadrature. A factor to both sides: a ratio is positive, however
    large the noise. NaN where there is a single timed step."""
    ratio = ratio_of(slower, faster)
    factor = 1 + gap_noise_us(slower.step.relative_to(slower.time_us), faster.step.relative_to(faster.time_us))
    return Interval(ratio / factor, ratio * factor)


def measured(result: Result | None) -> TpTrainingRun:
    """Of a point that is ok."""
    assert result
    return result.measured_as(TpTrainingRun)


def host_limits(points: Iterable[Point]) -> bool:
    """Returns whether the host, or a stack that waits for the device, decides how long a step of any of them takes."""
    return any(point.result and point.result.launch_bound for point in points)


def step_timing(result: Result) -> Timing:
    """Of the timed steps."""
    times_us = [step.step_us for step in measured(result).timed_steps]
    q1_us, q3_us = _quartiles(times_us)
    return Timing(statistics.median(times_us), q1_us, q3_us, times_us)


def _quartiles(times_us: Sequence[float]) -> tuple[float, float]:
    if len(times_us) == 1:
        return times_us[0], times_us[0]
    q1_us, _, q3_us = statistics.quantiles(times_us, n=4, method="inclusive")
    return q1_us, q3_us


def grid_of(config: Mapping[str, Any]) -> Grid:
    return Grid(config["tp_size"], config["dp_size"])


def setting_of(config: Mapping[str, Any]) -> str:
    """`autotp zero2`: the implementation of a resolved point, and which options are not at their defaults."""
    impl, options = str(config["impl"]), config["tp_training"]
    return " ".join([impl, *filter(None, _option_words(impl, options, config["tp_size"]))])


def _option_words(impl: str, options: Mapping[str, Any], tp_size: int) -> Iterator[str]:
    yield from (word(options[name]) for name, word in _SETTING_WORDS.items() if options.get(name) is not None)
    in_sequence = options.get("sequence_parallel")
    if in_sequence is not None and in_sequence != (impl in _SEQUENCE_PARALLEL and tp_size > 1):
        yield "sequence parallel" if in_sequence else "no sequence parallel"
    if options.get("compile") and impl != "async_tp":
        yield "compiled"


def _file_word(path: str) -> str:
    """Of a tuned file what its name says beyond what all are called."""
    stem = PurePath(path).stem.removeprefix("optimal_")
    return stem.removeprefix(PurePath(SETTINGS_FILE).stem).strip("_")[:40]


def tp_training_case(point: Point) -> TpTrainingCase:
    """Of a point that is ok."""
    config, options = point.config, point.config["tp_training"]
    more = [f"{name}={options[name]:g}" for name, usual in _USUAL.items() if options[name] != usual]
    return TpTrainingCase(
        model=config["model"]["name"],
        num_layers=config["language_model"]["num_hidden_layers"],
        device=point.case.device,
        dtype=options["dtype"],
        **{name: options[name] for name in ("seq_length", "batch_size", "gradient_accumulation_steps")},
        **{name: options[name] for name in ("num_training_steps", "warmup_steps")},
        more=", ".join(more),
        architecture=key_of(config["language_model"])[:8],
    )


def analyse_tp_training(
    points: Iterable[Point], communication: Mapping[Path, StepCommunication]
) -> list[TpTrainingAnalysis]:
    """The `ok` points by case; `communication` by run directory."""
    cases: dict[TpTrainingCase, list[Point]] = defaultdict(list)
    for point in points:
        if point.is_tp_training and point.status == "ok":
            cases[tp_training_case(point)].append(point)
    return [_analysis(case, cases[case], communication) for case in sorted(cases)]


def _analysis(
    case: TpTrainingCase, points: Sequence[Point], communication: Mapping[Path, StepCommunication]
) -> TpTrainingAnalysis:
    named = _named(points)
    losses = _losses(named)
    steps = (([estimate(_timed_us(point)) for point in of_one], host_limits(of_one)) for of_one in named.values())
    between = verdict.scatters_of_steps(steps, points[0].config["runtime"]["device"])
    rows = [_row(*key, of_one, losses, communication, between) for key, of_one in named.items()]
    of_points = [
        _row(*key, [point], losses, communication, between) for key, of_one in named.items() for point in of_one
    ]
    return TpTrainingAnalysis(case, _in_order(rows), _in_order(of_points))


def _in_order(rows: Iterable[TpTrainingRow]) -> list[TpTrainingRow]:
    return sorted(rows, key=lambda row: (row.grid.ranks, row.grid, row.time_us))


_Named = dict[tuple[Grid, str], list[Point]]


def _named(points: Iterable[Point]) -> _Named:
    """By grid and setting. What a setting's words don't tell, such as connections, gets a number."""
    alike: dict[tuple[Grid, str], dict[str, list[Point]]] = defaultdict(dict)
    for point in points:
        of_setting = alike[grid_of(point.config), setting_of(point.config)]
        of_setting.setdefault(_identity(point.config), []).append(point)
    named: _Named = {}
    for (grid, setting), different in alike.items():
        for number, of_one in enumerate(different.values(), start=1):
            named[grid, f"{setting} #{number}" if number > 1 else setting] = of_one
    return named


def _identity(config: Mapping[str, Any]) -> str:
    options = {name: value for name, value in config["tp_training"].items() if name not in _OF_NO_SETTING}
    connections = config["runtime"].get("max_connections")
    return key_of({"options": options, "overlap_cfg": config.get("overlap_cfg"), "max_connections": connections})


def _losses(named: _Named) -> dict[Path, Comparison]:
    """By run directory, of those that others were given the same data as. Implementations are held against each other;
    where there is one only, its settings are."""
    found: dict[Path, Comparison] = {}
    for dp_size in {grid.dp_size for grid, _ in named}:
        of_size = {key: points for key, points in named.items() if key[0].dp_size == dp_size}
        several = len({points[0].config["impl"] for points in of_size.values()}) > 1
        votes: dict[str, list[Point]] = defaultdict(list)
        for (grid, setting), points in of_size.items():
            votes[points[0].config["impl"] if several else f"{grid} {setting}"] += points
        if len(votes) > 1:
            steps = {name: [measured(point.result).steps for point in of_one] for name, of_one in votes.items()}
            precision = next(iter(of_size.values()))[0].config["precision"]
            compared = compare(steps, tolerance_of(precision))
            found |= {votes[name][i].directory: comparison for (name, i), comparison in compared.items()}
    return found


def _row(
    grid: Grid,
    setting: str,
    points: list[Point],
    losses: Mapping[Path, Comparison],
    communication: Mapping[Path, StepCommunication],
    between: Mapping[bool, verdict.Scatter],
) -> TpTrainingRow:
    config, runs = points[0].config, [measured(point.result) for point in points]
    steps = [step for run in runs for step in run.timed_steps]
    q1_us, q3_us = _quartiles([step.step_us for step in steps])
    compared = [losses[point.directory] for point in points if point.directory in losses]
    gpu = points[0].result.environment.get("gpu") if points[0].result else None
    return TpTrainingRow(
        grid=grid,
        impl=config["impl"],
        setting=setting,
        points=points,
        step=between[host_limits(points)].added_to(estimate(*map(_timed_us, points)), len(points)),
        q1_us=q1_us,
        q3_us=q3_us,
        shares=shares_of(steps),
        tokens_per_step=runs[0].tokens_per_step,
        samples_per_step=runs[0].samples_per_step,
        flops_per_step=runs[0].flops_per_step,
        peak_tflops=config["tp_training"].get("peak_tflops") or peak_tflops(gpu, config["precision"]),
        parameters=runs[0].parameters,
        memory_allocated_gb=_most(step.memory_allocated_gb for step in steps),
        memory_peak_gb=_most(step.memory_peak_gb for step in steps),
        host_ahead_us=min((run.host_ahead_us for run in runs if run.host_ahead_us is not None), default=None),
        communication=next((communication[p.directory] for p in points if p.directory in communication), None),
        losses=next((one for one in compared if one.deviates), compared[0] if compared else None),
    )


def _timed_us(point: Point) -> list[float]:
    return [step.step_us for step in measured(point.result).timed_steps]


def shares_of(steps: Sequence[TpTrainingStep]) -> Shares:
    """Of all steps together. At least one."""
    whole_us = sum(step.step_us for step in steps)
    parts_us = [
        sum(of_part) for of_part in zip(*((s.forward_us, s.backward_us, s.optimizer_us) for s in steps), strict=True)
    ]
    together_us = max(whole_us, sum(parts_us))
    forward, backward, optimizer = (part_us / together_us for part_us in parts_us)
    return Shares(forward, backward, optimizer, max(0.0, 1.0 - forward - backward - optimizer))


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
