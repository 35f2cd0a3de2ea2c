"""What tensor-parallel stacks compare: implementations, their options and grids of ranks, by the time per token and
GPU."""

import shlex
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, cycle
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Self

from overlap_sweep.declared import SCHEDULES, TRAINS_DIFFERENTLY, Role
from overlap_sweep.report import charts
from overlap_sweep.report.charts import SERIES
from overlap_sweep.report.numbers import as_count, as_us
from overlap_sweep.report.section import Exhibit, File
from overlap_sweep.report.table import PointRow
from overlap_sweep.results.comparable import Key, Sample
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.identity import key_of
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point, group_points
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.traces import TraceReading, on_nodes
from overlap_sweep.study import STEP, Bar, CaseAnalysis, Study, step_times, time_of_point
from overlap_sweep.study.settings import DEFAULTS, Options, key, value_in_words
from overlap_sweep.workloads.tp_training.config import REPORTED, Resolved, TpTraining
from overlap_sweep.workloads.tp_training.result import TpTrainingRun
from overlap_sweep.workloads.tp_training.rows import (
    ENVIRONMENT,
    NAMING,
    Losses,
    StepCommunication,
    TpTrainingRow,
    TpTrainingTimes,
    losses_by_point,
    options_of,
    results_json,
    step_communication,
)
from overlap_sweep.workloads.tp_training.tables import ANSWERS, COMPARED, RESULTS, TABLE

_NOT_NAMED = ("learning_rate", "weight_decay", "max_grad_norm", "seed")
"""Options of tp_training that a case names only if they are not at their defaults."""
MOST_CURVES = 10
"""Curves in the chart, deviating ones first; more would be hard to distinguish."""
MOST_POINTS = 400
"""Points of a curve; a chart has fewer pixels."""


class TpTrainingCase(NamedTuple):
    """Properties that must be equal for implementations and grids of ranks to be compared."""

    model: str
    num_layers: int
    device: str
    precision: str
    seq_length: int
    batch_size: int
    gradient_accumulation_steps: int
    num_training_steps: int
    warmup_steps: int
    more: str
    """The other options that are not at their defaults, in words."""
    architecture: str
    """Digest of the model's full config."""
    nodes: int
    parameters: int

    @property
    def sizes(self) -> str:
        micro_batches = f" x {self.gradient_accumulation_steps}" if self.gradient_accumulation_steps > 1 else ""
        return f"{self.num_layers} layers, batch {self.batch_size}{micro_batches}"

    @property
    def brief(self) -> str:
        sizes = f"{self.sizes}, sequences of {self.seq_length}, {self.precision}{self.more}"
        return f"{self.model}, {sizes}{on_nodes(self.nodes)}"

    def __str__(self) -> str:
        return f"Training {self.brief} on {self.device}, {as_count(self.parameters)} parameters"


Analysis = CaseAnalysis[TpTrainingCase, TpTrainingRow]


@dataclass(frozen=True)
class TpTrainingStudy(Study[TpTrainingCase, TpTrainingRow]):
    communication: Mapping[Path, StepCommunication | None] = field(default_factory=dict)
    """By run directory."""
    losses: Mapping[Path, Losses] = field(default_factory=dict)
    """By run directory, of points with the same data as others."""

    workload = name = "tp_training"
    shows_effects = True
    row = TpTrainingRow
    naming = NAMING
    what = "tensor-parallel stacks"
    heading = "Tensor-parallel training"
    topic = "tensor-parallel training"
    legend = (
        "time: median of the steps after warm-up, slowest rank. comm: communication in a profiled step, on the rank "
        "that waits least; hidden: its share with concurrent computation."
    )
    explained = (
        "All implementations start with the same weights and read the same data; those with deviating losses are never "
        "chosen. Settings within the noise of the fastest are ties; the one that differs least from the first wins."
    )
    measured_as = "Every point of the tensor-parallel stacks, as measured."
    points_key = "tp_training_points"
    points_table, compared, answers = TABLE, COMPARED, ANSWERS
    use = "To set"
    if_launch_bound = "use longer sequences, larger batches or tp_training.compile=true"
    bars_subtitle = "median of the steps, slowest rank, with its noise"
    bar_columns = ("time us", "tokens/s/GPU", "MFU")
    most_diagnosed = 3
    reads_traces = True
    matched = ("impl", "dp_size")
    changes_nothing = tuple(f"tp_training.{name}" for name in REPORTED)

    def over(self, points: Sequence[Point], traces: Mapping[Path, TraceReading]) -> Self:
        same_data = group_points(
            points, self.workload, lambda point: (self.case(point), point.config_as(Resolved).dp_size)
        )
        return replace(
            self,
            communication={directory: step_communication(reading) for directory, reading in traces.items()},
            losses={
                directory: losses
                for alike in same_data.values()
                for directory, losses in losses_by_point(alike, self.identity).items()
            },
        )

    def case(self, point: Point) -> TpTrainingCase:
        config = point.config_as(Resolved)
        training = config.tp_training
        others = {name: getattr(training, name) for name in _NOT_NAMED}
        return TpTrainingCase(
            model=config.model.name,
            num_layers=config.num_layers,
            device=point.case.device,
            precision=config.precision,
            seq_length=training.seq_length,
            batch_size=training.batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            num_training_steps=training.num_training_steps,
            warmup_steps=training.warmup_steps,
            more="".join(f", {name}={value:g}" for name, value in others.items() if value != getattr(TpTraining, name)),
            architecture=key_of(config.language_model)[:8],
            nodes=point.case.nodes,
            parameters=point.measured_as(TpTrainingRun).parameters,
        )

    def options(self, point: Point) -> Options:
        return options_of(point.config_as(Resolved))

    def identity(self, point: Point) -> Hashable:
        return key(self.options(point)), repr(point.config_as(Resolved).overlap_cfg)

    def roles(self, option: str) -> Collection[Role]:
        return (TRAINS_DIFFERENTLY,) if option == "dp_size" else (SCHEDULES,)

    def times(self, settings: Sequence[Sequence[Point]]) -> list[TpTrainingTimes]:
        steps = step_times(settings, _timing)
        return [self._times(step.step, points) for step, points in zip(steps, settings, strict=True)]

    def times_of_point(self, point: Point) -> TpTrainingTimes:
        return self._times(time_of_point(_timing(point)).step, [point])

    def _times(self, step: Estimate, points: Sequence[Point]) -> TpTrainingTimes:
        traced = filter(None, (self.communication.get(point.directory) for point in points))
        losses = [self.losses[point.directory] for point in points if point.directory in self.losses]
        return TpTrainingTimes(step, next(traced, None), max(losses, key=lambda one: bool(one.deviates), default=None))

    def to_use(self, analysis: Analysis) -> str:
        best, naming = analysis.best.options, self.naming
        shown = [name for name in naming.changed(best) if name in analysis.differing]
        # Hydra adds keys that the configuration does not list only with ++.
        added = ("++" if name.startswith(ENVIRONMENT) else "" for name in shown)
        return shlex.join(f"{plus}{name}={value_in_words(best[name])}" for plus, name in zip(added, shown, strict=True))

    def sentences(self, analysis: Analysis) -> Iterator[str]:
        """Yields the fastest on each grid of ranks, and whether the losses agree."""
        usable = [row for row in reversed(analysis.rows) if row.may_win]
        grids = {(row.config.tp_size, row.config.dp_size): row for row in usable}
        if len(grids) > 1 and not analysis.searched:
            fastest = (f"{row.setting} ({as_us(row.time_us)} us per step)" for _, row in sorted(grids.items()))
            yield f"The fastest on each grid of ranks: {'; '.join(fastest)}."
        compared = [(row.setting, row.losses) for row in analysis.rows if row.losses]
        deviating = [f"{name} deviates: {losses.deviates}." for name, losses in compared if losses.deviates]
        yield from deviating
        if compared and not deviating:
            yield f"The losses agree (largest relative difference {max(one.largest for _, one in compared):.1g})."

    def parts(self, analysis: Analysis) -> list[charts.Key]:
        colours = {"forward": "gemm", "backward": "series3", "optimizer": "series4", "other": "wait"}
        return [charts.Key(*part) for part in colours.items()]

    def bar(self, analysis: Analysis, row: TpTrainingRow) -> Bar:
        time_us = row.per(analysis.work).time_us
        ends = [end * time_us for end in accumulate(row.shares.values())]
        mfu = "" if row.mfu is None else f"{row.mfu:.1%}"
        return Bar(ends, [as_us(row.time_us), f"{row.tokens_per_s_per_gpu:,.0f}", mfu])

    def charts(self, analysis: Analysis) -> list[Exhibit]:
        return [Exhibit(chart=partial(loss_lines, analysis), name="losses", heading="Losses")]

    def files(self, rows: Sequence[PointRow[TpTrainingRow]]) -> list[File]:
        measured = [row.measured for row in rows if row.measured]
        return [
            File(
                directory=row.points[0].directory,
                name=f"results_{row.config.impl}_tp{row.config.tp_size}_dp{row.config.dp_size}.json",
                kind="results_*.json",
                content=partial(results_json, row, RESULTS),
                by_launch=True,
            )
            for row in sorted(measured, key=attrgetter("time_us"))
        ]

    def key(self, analysis: Analysis, row: TpTrainingRow) -> Key:
        """Returns the key with the implementation as backend, so that sweeps of two implementations compare."""
        return Key(
            model=analysis.case.model,
            tokens=row.run.tokens_per_step,
            precision=analysis.case.precision,
            backend=row.config.impl,
            device=None,
            tp_size=row.config.tp_size,
            operator=f"DP={row.config.dp_size}, {analysis.case.sizes}{analysis.case.more}",
            pass_name=STEP,
            setting=row.whole_setting.removeprefix(_stack(row.options)).removeprefix(", ").strip() or DEFAULTS,
        )

    def samples(self, result: Result) -> dict[str, Sample]:
        """Returns the sample of the step, even if it is launch-bound."""
        config = result.point_as(Resolved)
        options = _stack_options(options_of(config))
        name = f"dp{config.dp_size}{on_nodes(config.nodes)}{'' if options == DEFAULTS else f' {options}'}"
        return {name: Sample((result.measured_as(TpTrainingRun).timing,), None, STEP, config.workload.tokens)}


def _timing(point: Point) -> Timing:
    return point.measured_as(TpTrainingRun).timing


def _stack(options: Options) -> str:
    return NAMING.in_words(options, ("impl", "tp_size", "dp_size"))


def _stack_options(options: Options) -> str:
    return NAMING.in_words(options, [name for name in options if name not in ("impl", "tp_size", "dp_size")])


def loss_lines(analysis: Analysis) -> charts.Lines:
    """Returns the losses over the steps, from wide to narrow lines, since curves that agree overlap."""
    rows = sorted(analysis.rows, key=lambda row: not row.deviates)[:MOST_CURVES]
    drawn = f"{len(rows)} of {len(analysis.rows)} settings" if len(rows) < len(analysis.rows) else "all settings"
    return charts.Lines(
        title=f"Losses, {analysis.case.brief}",
        subtitle=f"mean over all tokens; {drawn}",
        x=charts.Axis("step"),
        y=charts.Axis("loss, nats per token", format=".4~g"),
        lines=[
            charts.Line(row.setting, _points(row), series, shape="", width_px=float(len(rows) - i))
            for i, (row, series) in enumerate(zip(rows, cycle(SERIES), strict=False))
        ],
    )


def _points(row: TpTrainingRow) -> list[charts.LinePoint]:
    steps = [(step.step, step.loss) for step in row.run.steps if step.loss is not None]
    every = -(-len(steps) // MOST_POINTS) or 1
    return [
        charts.LinePoint(number, loss, details={"setting": row.setting, "at": f"step {number}", "loss": f"{loss:.6g}"})
        for number, loss in steps[::every]
    ]


STUDY = TpTrainingStudy()
