"""What a setting of a tensor-parallel stack measured: its steps, over all points of the same setting and ranks."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.identity import key_of
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import SETTINGS_FILE, Result
from overlap_sweep.workloads.tp_training.language_model import peak_tflops
from overlap_sweep.workloads.tp_training.losses import Comparison, compare, tolerance_of
from overlap_sweep.workloads.tp_training.result import TpTrainingRun, TpTrainingStep
from overlap_sweep.workloads.tp_training.step_communication import StepCommunication

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
    peak_tflops: float | None
    """Of one GPU."""
    memory_allocated_gb: float | None
    memory_peak_gb: float | None
    """Both the most of the timed steps."""
    host_ahead_us: float | None
    """The least of its points."""
    communication: StepCommunication | None
    """Of its first point that has traces."""
    losses: Comparison | None
    """None where nothing was given the same data."""
    chosen: bool = False
    """Whether it is the fastest on its ranks."""
    place: tuple[str, ...] = ()
    """Among those on its ranks: `fastest`, `tie`; and `best of all`."""

    @property
    def name(self) -> str:
        return f"{self.grid} {self.setting}"

    @property
    def run(self) -> TpTrainingRun:
        """Of its first point."""
        return measured(self.points[0].result)

    @property
    def time_us(self) -> float:
        return self.step.time_us

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.run.tokens_per_step / self.time_us * 1e6

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.grid.ranks

    @property
    def samples_per_s(self) -> float:
        return self.run.samples_per_step / self.time_us * 1e6

    @property
    def tflops_per_gpu(self) -> float:
        return self.run.flops_per_step / self.time_us / 1e6 / self.grid.ranks

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation, a share; None where the GPU's peak is not known."""
        return self.tflops_per_gpu / self.peak_tflops if self.peak_tflops else None

    @property
    def loss(self) -> float | None:
        return self.run.steps[-1].loss

    @property
    def launch_bound(self) -> bool:
        return is_launch_bound(self.points)

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

    @property
    def note(self) -> str:
        """What tells it from those that are simply slower."""
        notes = {
            "deviates": self.deviates,
            "diverges": self.diverges,
            "launch-bound": self.launch_bound,
            f"{len(self.points)} points": len(self.points) > 1,
        }
        return ", ".join([*self.place, *(note for note, holds in notes.items() if holds)])


def measured(result: Result | None) -> TpTrainingRun:
    """Of a point that is ok."""
    assert result
    return result.measured_as(TpTrainingRun)


def is_launch_bound(points: Iterable[Point]) -> bool:
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


def rows_of(
    points: Sequence[Point], communication: Mapping[Path, StepCommunication]
) -> tuple[list[TpTrainingRow], list[TpTrainingRow]]:
    """Returns a row for each setting, and one for each point by itself. `points`: of one case, that are ok;
    `communication`: by run directory."""
    named = _named(points)
    losses = _losses(named)
    steps = (([estimate(_timed_us(point)) for point in of_one], is_launch_bound(of_one)) for of_one in named.values())
    between = verdict.scatters_of_steps(steps, points[0].config["runtime"]["device"])

    def row(grid: Grid, setting: str, points: list[Point]) -> TpTrainingRow:
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
            step=between[is_launch_bound(points)].added_to(estimate(*map(_timed_us, points)), len(points)),
            q1_us=q1_us,
            q3_us=q3_us,
            shares=shares_of(steps),
            peak_tflops=config["tp_training"].get("peak_tflops") or peak_tflops(gpu, config["precision"]),
            memory_allocated_gb=_most(step.memory_allocated_gb for step in steps),
            memory_peak_gb=_most(step.memory_peak_gb for step in steps),
            host_ahead_us=min((run.host_ahead_us for run in runs if run.host_ahead_us is not None), default=None),
            communication=next((communication[p.directory] for p in points if p.directory in communication), None),
            losses=next((one for one in compared if one.deviates), compared[0] if compared else None),
        )

    return (
        [row(*key, of_one) for key, of_one in named.items()],
        [row(*key, [point]) for key, of_one in named.items() for point in of_one],
    )


_Named = dict[tuple[Grid, str], list[Point]]


def _named(points: Iterable[Point]) -> _Named:
    """By grid and setting. What a setting's words don't tell, such as connections, gets a number."""
    alike: dict[tuple[Grid, str], dict[str, list[Point]]] = defaultdict(dict)
    for point in points:
        grid = Grid(point.config["tp_size"], point.config["dp_size"])
        alike[grid, setting_of(point.config)].setdefault(_identity(point.config), []).append(point)
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
            steps = {
                name: {point.directory: measured(point.result).steps for point in of_one}
                for name, of_one in votes.items()
            }
            precision = next(iter(of_size.values()))[0].config["precision"]
            found |= compare(steps, tolerance_of(precision))
    return found


def _timed_us(point: Point) -> list[float]:
    return [step.step_us for step in measured(point.result).timed_steps]


def shares_of(steps: Sequence[TpTrainingStep]) -> Shares:
    """Of all steps together. At least one."""
    parts_us = [
        sum(of_part) for of_part in zip(*((s.forward_us, s.backward_us, s.optimizer_us) for s in steps), strict=True)
    ]
    together_us = max(sum(step.step_us for step in steps), sum(parts_us))
    forward, backward, optimizer = (part_us / together_us for part_us in parts_us)
    return Shares(forward, backward, optimizer, max(0.0, 1.0 - forward - backward - optimizer))


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
