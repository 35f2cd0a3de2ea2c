"""What training steps compare: how collectives are scheduled and sharded, by the time per sample."""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from overlap_sweep.declared import TRAINS_DIFFERENTLY, Role
from overlap_sweep.report.charts import LOST, cut
from overlap_sweep.report.charts import Key as Part
from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.section import Exhibit
from overlap_sweep.results import verdict
from overlap_sweep.results.comparable import Sample
from overlap_sweep.results.estimate import NOTABLE_DRIFT, RunNoise, estimate, later_change, normalised, pooled_none
from overlap_sweep.results.identity import key_of
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import cpu_only
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.traces import drawn_trace, on_nodes
from overlap_sweep.study import Bar, Study
from overlap_sweep.study.exhibits import EFFECTS, effects, effects_table
from overlap_sweep.study.settings import Options
from overlap_sweep.study.words import those_with
from overlap_sweep.workloads.fsdp.config import Asked, Resolved
from overlap_sweep.workloads.fsdp.result import VARIANTS, TrainingRun, hidden
from overlap_sweep.workloads.fsdp.rows import (
    NAMING,
    Analysis,
    FsdpCase,
    FsdpRow,
    StepTimes,
    floor_key,
    knobs_of,
    launch_bound_variants,
    overrides,
    roles,
    those_of,
)
from overlap_sweep.workloads.fsdp.tables import ANSWERS, COMPARED, TABLE

LOSS_TOLERANCE = {"fp32": 1e-3}
DEFAULT_LOSS_TOLERANCE = 0.05
"""Largest relative difference of a loss, by precision. Reductions in another order round differently, and steps add
that up. It is relative to the larger of the loss and the run's first loss: rounding dominates a loss near zero."""


_PROBLEMS = {
    "baseline launch-bound": "The baseline (none or floor) is launch-bound, so the hidden fraction is unreliable",
    "not compiled": "The layers could not be compiled (see compiled in training.csv)",
}
"""Sentences on settings that have a note."""


class FsdpStudy(Study[FsdpCase, FsdpRow]):
    workload = "fsdp"
    shows_effects = True
    row = FsdpRow
    naming = NAMING
    reference = "simplest"
    stopped_searches_settle = True
    name = "training"
    what = "training runs"
    heading = "Training steps"
    topic = "FSDP training"
    legend = (
        "none: the same step with no overlap (each collective alone on the GPU); floor: without communication; "
        "exposed: time - floor; hidden: (none - time) / (none - floor), - if within the noise."
    )
    explained = "Settings within the noise of the fastest are ties; the one with the fewest changed knobs wins."
    measured_as = "Every training point, as measured."
    points_key = "training_points"
    points_table, compared, answers = TABLE, COMPARED, ANSWERS
    use = "To set"
    if_launch_bound = "use larger batches or compile.enabled=true"
    bars_subtitle = "median of the steps, slowest rank, with its noise"
    bar_columns = ("time us", "hidden", "vs none", "samples/s")
    # Length of the run before its steps are timed, output, profiling and telemetry don't change the step time.
    changes_nothing = ("training.max_steps", "training.log_interval", "training.output_dir", "profiling", "telemetry")

    def case(self, point: Point) -> FsdpCase:
        config = point.config_as(Resolved)
        ranking = config.ranking
        return FsdpCase(
            model=config.model.name,
            sizes=f"{ranking.num_layers} layers, {ranking.sequence_length} events, "
            f"{ranking.num_sparse_features} + {ranking.num_dense_features} features",
            ranks=config.distributed.dp_size,
            device=point.case.device,
            key=key_of({name: point.recorded[name] for name in ("model", "ranking")}),
            nodes=point.case.nodes,
            parameters=point.measured_as(TrainingRun).parameters,
        )

    def options(self, point: Point) -> Options:
        return knobs_of(point.config_as(Asked))

    def roles(self, option: str) -> Collection[Role]:
        return roles(option)

    def times(self, settings: Sequence[Sequence[Point]]) -> list[StepTimes]:
        """Returns the times of each setting's points, for all settings of a case.

        A point's time can be given relative to its own floor, which was measured in turns with it: drift of the machine
        cancels, but the floor's noise is added. Settings measured in several points show which of the two is larger:
        relative times are used if they bring these points closer together, or if there are no such settings, since
        drift of some percent is common. Points with a launch-bound variant take no part: their floor is the host's
        time, and dividing by it would make the slowest host the fastest setting.
        """
        limited = [any(map(launch_bound_variants, points)) for points in settings]
        works = [floor_key(points[0]) for points in settings]
        floors: dict[Hashable, list[Timing]] = defaultdict(list)
        for work, points in zip(works, settings, strict=True):
            floors[work] += [_step(point)["floor"] for point in points if not launch_bound_variants(point)]
        steps = [[_step(point) for point in points] for points in settings]
        free = [own for own, bound in zip(steps, limited, strict=True) if len(own) > 1 and not bound]
        as_measured, to_floor = (
            verdict.noise_of_runs([_time(step, over_floor=way) for step in own] for own in free).share
            for way in (False, True)
        )
        relative = math.isnan(as_measured) or to_floor < as_measured
        between = verdict.noises_of_steps(
            (
                ([_time(step, over_floor=relative and not bound) for step in own], bound)
                for own, bound in zip(steps, limited, strict=True)
            ),
            settings[0][0].config.runtime.device,
        )
        # A floor that no other point shares would only add its noise.
        pools = [floors[work] if relative and len(floors[work]) > 1 else [] for work in works]
        return [
            _pooled(own, [] if bound else pool, between[bound])
            for own, pool, bound in zip(steps, pools, limited, strict=True)
        ]

    def times_of_point(self, point: Point) -> StepTimes:
        steps = _step(point)
        step, none, floor = (
            replace(estimate(steps[name].samples_us), time_us=steps[name].median_us) for name in VARIANTS
        )
        return StepTimes(step, none, floor, hidden(steps), relative=False)

    def to_use(self, analysis: Analysis) -> str:
        return overrides(analysis.best.options, analysis.differing)

    def cautions(self, analysis: Analysis) -> Iterable[str]:
        return [*_wrong_losses(analysis), *_doubtful_settings(analysis), *_drift(analysis)]

    def legend_of(self, analysis: Analysis) -> str:
        return f"{self.legend} {how_timed(analysis)}"

    def limits(self, analysis: Analysis) -> str:
        return cpu_only(analysis.points)

    def parts(self, analysis: Analysis) -> list[Part]:
        exposed, hidden = Part("exposed communication", "comm"), Part("hidden communication", "saved")
        return [Part("floor", "gemm"), exposed, hidden, LOST]

    def bar(self, analysis: Analysis, row: FsdpRow) -> Bar:
        ends = [end_us / row.run.samples_per_step for end_us in cut(row.floor_us, row.time_us, row.none_us)]
        speedup, rate = f"{row.speedup:.2f}x", f"{row.samples_per_s:,.0f}"
        return Bar(ends, [as_us(row.time_us), row.hidden.in_words, speedup, rate])

    def streams(self, analysis: Analysis) -> Mapping[str, Path | None]:
        """Returns the traces of the best setting's first point that has one: with no overlap, and as configured."""
        for point in analysis.best.points:
            if path := drawn_trace(point):
                return {"no overlap": drawn_trace(point, "none"), analysis.best.setting: path}
        return {}

    def more(self, analysis: Analysis) -> list[Exhibit]:
        return effects_table(self, analysis)

    def report(self, analysis: Analysis) -> Mapping[str, object]:
        (best,) = self.answers.records([analysis])
        return {
            "best": {**best, "knobs": analysis.best.options},
            "how_timed": how_timed(analysis),
            "knobs": EFFECTS.records(effects(self, analysis)),
        }

    def report_of_row(self, row: FsdpRow) -> Mapping[str, object]:
        return {"knobs": row.options}

    def samples(self, result: Result) -> dict[str, Sample]:
        """Returns the sample of the step, even if it is launch-bound."""
        step = result.measured_as(TrainingRun).step
        ranks = f"{result.point.world_size} ranks{on_nodes(result.point.nodes)}"
        setting = f"{ranks}, {NAMING.in_words(knobs_of(result.point_as(Resolved)))}"
        sample = Sample((step["point"],), step["none"].median_us, "step", result.point_as(Resolved).workload.tokens)
        return {setting: sample}


def how_timed(analysis: Analysis) -> str:
    if not any(row.times.relative for row in analysis.rows):
        return "Times are as measured in each point."
    return (
        "Times are relative to the floor of the same point, which cancels drift; launch-bound settings and those whose "
        "floor no other point shares are as measured."
    )


def _wrong_losses(analysis: Analysis) -> Iterator[str]:
    """Yields points that diverge or deviate: with equal seeds, schedules must not change the losses."""
    groups: dict[tuple[int, Hashable], list[Point]] = defaultdict(list)
    for point in analysis.points:
        if None in (own := point.measured_as(TrainingRun).losses):
            yield f"{point.name} diverges: the loss is NaN or infinite from step {own.index(None) + 1} on."
        seed = point.config_as(Resolved).workload.seed
        groups[seed, those_of(TRAINS_DIFFERENTLY, knobs_of(point.config_as(Asked)))].append(point)
    for group in groups.values():
        losses = [(point.name, _numbers(point.measured_as(TrainingRun).losses)) for point in group]
        steps = min(len(found) for _, found in losses)
        middle = [statistics.median(found[step] for _, found in losses) for step in range(steps)]
        precision = group[0].config_as(Resolved).precision
        tolerance = LOSS_TOLERANCE.get(precision, DEFAULT_LOSS_TOLERANCE)
        for name, found in losses:
            pairs = enumerate(zip(found, middle, strict=False))
            off = [(abs(a - b) / max(abs(b), abs(middle[0])), step) for step, (a, b) in pairs if b or middle[0]]
            error, step = max(off, default=(0.0, 0))
            if error > tolerance:
                yield (
                    f"{name} has a loss of {found[step]:.4g} after step {step + 1}, equivalent settings have "
                    f"{middle[step]:.4g}: find out why before you use it."
                )


def _numbers(losses: Iterable[float | None]) -> list[float]:
    return [loss for loss in takewhile(lambda loss: loss is not None, losses) if loss is not None]


def _doubtful_settings(analysis: Analysis) -> Iterator[str]:
    if which := those_with([(row.setting, not row.hidden.known) for row in analysis.rows]):
        yield f"Hidden fraction unknown, since none - floor is within the noise: {which}."
    for note, problem in _PROBLEMS.items():
        if which := those_with([(row.setting, row.notes[note]) for row in analysis.rows]):
            yield f"{problem}: {which}."


def _drift(analysis: Analysis) -> Iterator[str]:
    """Yields the drift of the floor, which many points measure alike."""
    times_us: dict[Hashable, list[float]] = defaultdict(list)
    for point in sorted(analysis.points, key=lambda point: (point.result and point.result.started) or ""):
        # A launch-bound floor is the host's time.
        if "floor" not in launch_bound_variants(point):
            times_us[floor_key(point)].append(point.measured_as(TrainingRun).step["floor"].median_us)
    worst = max((later_change(alike) for alike in times_us.values() if len(alike) > 1), key=abs, default=0.0)
    if abs(worst) >= NOTABLE_DRIFT:
        yield f"Baselines drifted: the floor changed by up to {worst:+.0%} during the sweep."


def _pooled(steps: Sequence[dict[str, Timing]], floors: Sequence[Timing], between: RunNoise) -> StepTimes:
    if floors:
        floor = pooled_none(floors)
        step, none = (normalised([(one[name], one["floor"]) for one in steps], floor) for name in ("point", "none"))
    else:
        step, none, floor = (pooled_none([one[name] for one in steps]) for name in VARIANTS)
    level_us = floor.time_us if floors else 1.0
    runs_us = [level_us * _time(one, over_floor=bool(floors)) for one in steps]
    return StepTimes(between.over_runs(step, runs_us), none, floor, hidden(*steps), relative=bool(floors))


def _step(point: Point) -> dict[str, Timing]:
    return point.measured_as(TrainingRun).step


def _time(step: Mapping[str, Timing], *, over_floor: bool) -> float:
    return step["point"].median_us / (step["floor"].median_us if over_floor else 1.0)


STUDY = FsdpStudy()
