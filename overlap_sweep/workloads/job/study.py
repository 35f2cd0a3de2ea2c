"""What jobs compare: the settings of the user's own command, by the time of its steps."""

import statistics
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from decimal import Decimal
from math import sqrt
from pathlib import Path

from overlap_sweep import levers
from overlap_sweep.recorder.recording import number_of
from overlap_sweep.report.charts import Key as Part
from overlap_sweep.report.numbers import as_percent, as_us, counted, some_of
from overlap_sweep.report.section import Exhibit
from overlap_sweep.results import verdict
from overlap_sweep.results.comparable import Key, Sample
from overlap_sweep.results.estimate import Estimate, estimate, standard_deviation
from overlap_sweep.results.identity import NO_MULTICAST, key_of
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import different_environments
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.traces import drawn_trace, on_nodes
from overlap_sweep.study import STEP, Bar, Study
from overlap_sweep.study.equality import Seen
from overlap_sweep.study.exhibits import sides
from overlap_sweep.study.settings import Options, Scalar
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.job.config import Resolved
from overlap_sweep.workloads.job.result import JobRun
from overlap_sweep.workloads.job.rows import (
    CONNECTIONS,
    MULTICAST,
    NAMING,
    VARIABLES,
    Analysis,
    JobCase,
    JobRow,
    JobTimes,
    options_of,
    script_of,
)
from overlap_sweep.workloads.job.tables import ANSWERS, COMPARED, TABLE, findings

ROUNDING: Mapping[bool, Mapping[str, float]] = {
    False: {"gradients": 1e-4, "signed": 1e-4, "plain": 3e-4, "parameters": 1e-5, "loss": 1e-4},
    True: {"gradients": 5e-2, "signed": 0.15, "plain": 0.15, "parameters": 1e-3, "loss": 1e-2},
}
"""Relative differences that sums in another order explain after FEW_STEPS, with 32 bits and (True) with 16; later as
many times more as there were more steps. With 32 bits they are some hundred times what rounding does in one step; what
is rounded to 16 bits on its way, or comes from other data, differs by more. `signed` and `plain`: of sums of gradients,
relative to their norm; errors that all elements share add up in a plain one."""
FEW_STEPS = 5
GARBAGE = 0.01
"""Share of the steps' time from which on it is said how much longer steps with a long garbage collection were."""
UNEVEN = 0.05
"""Share by which the mean exceeds the median from which on steps are said to vary."""


_CHANGES = dict.fromkeys((CONNECTIONS, f"{VARIABLES}CUDA_DEVICE_MAX_CONNECTIONS"), "env.CUDA_DEVICE_MAX_CONNECTIONS")
"""Changes that `predict` knows, by options with another name than theirs."""


class JobStudy(Study[JobCase, JobRow]):
    workload = "job"
    shows_effects = True
    shows_predictions = True
    row = JobRow
    naming = NAMING
    times_of_proof = True
    name = "jobs"
    what = "jobs"
    heading = "Training jobs"
    topic = "training jobs"
    legend = (
        "time: mean of the steps and runs, slowest rank, without rare long garbage collections; noise: half of its "
        "95 % confidence interval, with the noise between runs; exposed: of a profiled step, which may take longer "
        "than a timed one, communication while nothing computes."
    )
    explained = "The setting that was started first is the reference; another is best only if it is faster beyond the "
    explained += "noise."
    measured_as = "Every job, as measured; noise here is that within the run."
    points_key = "job_points"
    points_table, compared, answers = TABLE, COMPARED, ANSWERS
    bar_columns = ("time us", "exposed", "speedup", "rate")
    most_diagnosed = 6
    matched = ("job.ranks", "job.values", "job.env", "job.levers", CONNECTIONS, MULTICAST)
    # How many steps are looked at, how they are marked, and what happens after them.
    changes_nothing = ("job.skip_steps", "job.steps", "job.profile_steps", "job.attach", "job.finish", "job.loss")

    def case(self, point: Point) -> JobCase:
        config = point.config_as(Resolved)
        job = config.job
        return JobCase(
            script=script_of(config),
            ranks=job.ranks,
            device=point.case.device,
            command=job.command,
            directory=job.directory,
            content=", ".join(digest for name, digest in job.files.items() if name not in job.values.values()),
            optimizer_steps=job.optimizer_steps,
            metric=job.metric,
            metric_is=job.metric_is,
            unit=point.measured_as(JobRun).unit,
            nodes=point.case.nodes,
        )

    def order(self, case: JobCase) -> tuple[object, ...]:
        return case.script, case.ranks, *map(str, case)

    def options(self, point: Point) -> Options:
        return options_of(point.config_as(Resolved))

    def identity(self, point: Point) -> Hashable:
        config = point.config_as(Resolved)
        options = {name: repr(value) for name, value in self.options(point).items()}
        # Contents of files included.
        overlap_cfg = config.overlap_cfg and asdict(config.overlap_cfg)
        named = {name: digest for name, digest in config.job.files.items() if name in config.job.values.values()}
        return key_of({"options": options, "overlap_cfg": overlap_cfg, "files": named})

    def times(self, settings: Sequence[Sequence[Point]]) -> list[JobTimes]:
        timed = [_timed(points) for points in settings]
        means_us = [_means_us(points) for points in timed]
        between = verdict.noise_of_runs(means_us)
        return [
            JobTimes(between.over_runs(_pooled(points), means), standard_deviation(means) if len(means) > 1 else None)
            for points, means in zip(timed, means_us, strict=True)
        ]

    def times_of_point(self, point: Point) -> JobTimes:
        return JobTimes(_pooled([point]), None)

    def computed(self, point: Point) -> dict[str, Seen]:
        run, config = point.measured_as(JobRun), point.config_as(Resolved)
        state = run.state
        is_short = state.is_short if state else config.runtime.device == "cuda"
        more = max(1.0, (state.step if state else config.job.skip_steps) / FEW_STEPS)
        rounding = {name: share * more for name, share in ROUNDING[is_short].items()}
        found = {
            f"loss number {number} in the output": _printed(text, rounding["loss"])
            for number, text in enumerate(run.losses, 1)
        }
        if state is None:
            return found
        at = f"after step {state.step}"
        if state.loss is not None:
            found[f"loss {at}"] = Seen(number_of(state.loss), rounding["loss"])
        for name, norm, total, of_sum in (
            ("gradients", state.gradients_norm, state.gradients_sum, "plain"),
            ("parameters", state.parameters_norm, state.parameters_sum, "parameters"),
        ):
            if norm is not None and total is not None:
                found[f"norm of {name} {at}"] = Seen(number_of(norm), rounding[name])
                # What all ranks have alike adds up in the sum, and in the norm as the root of their number.
                ratio = number_of(total) / (sqrt(config.job.ranks) * (number_of(norm) or 1.0))
                found[f"sum over norm of {name} {at}"] = Seen(ratio, rounding[of_sum], scale=1.0)
        gradients_norm = number_of(state.gradients_norm or 1.0)
        for number, signed in enumerate(state.signed_sums, 1):
            # Only of the same sizes: with others, signs are those of other elements.
            what = f"sum {number} with random signs over norm of gradients of sizes {state.layout}, {at}"
            found[what] = Seen(number_of(signed or 0.0) / gradients_norm, rounding["signed"], scale=1.0)
        return found

    def effect_entry(self, option: str) -> str | None:
        return levers.effect_entry(option)

    def change(self, option: str, value: Scalar) -> str | None:
        # Imported here, because numpy is only needed to read traces.
        from overlap_sweep.predict.named import CHANGES

        change = levers.change_of(_CHANGES.get(option, option.removeprefix(levers.OPTION)), command.in_words(value))
        return change if change.partition("=")[0] in CHANGES else None

    def to_use(self, analysis: Analysis) -> str:
        return command.command_line(analysis.best.points[0].config_as(Resolved))

    def to_write(self, analysis: Analysis) -> str:
        return command.to_write(analysis.best.points[0].config_as(Resolved))

    def sentences(self, analysis: Analysis) -> Iterator[str]:
        """Yields what the command alone lacks, and how much communication is exposed with the best setting and with the
        reference."""
        point = analysis.best.points[0].config_as(Resolved)
        if lacking := command.in_processes(point):
            yield f"The command alone lacks what {_as_options(lacking)} changed in the script's processes."
        if lacking := command.in_json(point):
            file = command.json_file(point)
            yield f"The command alone lacks what {_as_options(lacking)} changed in a copy of {file}."
        rows = {row.setting: row.exposed_fraction for row in analysis.shown_first}
        known = [f"{as_percent(share)} with {setting}" for setting, share in rows.items() if share is not None]
        if known:
            yield f"Exposed communication, of a profiled step: {'; '.join(known)}."

    def cautions(self, analysis: Analysis) -> Iterator[str]:
        rows, work = analysis.rows, analysis.work
        unknown = [row.setting for row in rows if not row.samples_per_step]
        if work == STEP and any(row.samples_per_step or row.tokens_per_step for row in rows):
            yield (
                f"The samples of a step are unknown for {some_of(unknown, separator='; ')}, so settings are compared "
                "by the time of a step; give job.samples_per_step to all."
            )
        amounts = {row.amounts.get(work) for row in rows}
        if work != STEP and len(amounts) > 1:
            differing = some_of(f"{amount:,.6g}" for amount in sorted(filter(None, amounts)))
            yield f"Settings differ in {work}s per step ({differing}): they train differently, so compare their losses."
        if len({row.calls_per_step for row in rows if row.calls_per_step}) > 1:
            calls = some_of(f"{row.calls_per_step} with {row.setting}" for row in rows if row.calls_per_step)
            yield (
                f"Steps have different numbers of optimizer calls ({calls}), so they may not be the same work; set "
                "job.optimizer_steps."
            )
        if len({row.timed_by for row in rows}) > 1:
            by = some_of(f"{row.setting} by {row.timed_by}" for row in rows)
            yield f"Settings were timed in different ways ({by}), so small differences mean nothing."
        # A few slow steps make up much of the time, of which a short measurement has few.
        shares = {row.setting: row.time_us / row.median_us - 1 for row in analysis.shown_first}
        points = _timed(analysis.best.points)
        asked = sum(point.config_as(Resolved).job.steps for point in points)
        timed = sum(len(point.measured_as(JobRun).step.samples_us) for point in points)
        more = "; raise job.steps" if timed >= asked else ""
        if uneven := [f"{share:.0%} with {setting}" for setting, share in shares.items() if share > UNEVEN]:
            yield (
                f"Steps vary: the mean, which counts, is above the median by {some_of(uneven)}. Few steps measure rare "
                f"events (waiting for data, logging) poorly{more}."
            )
        yield from _of_garbage(analysis.shown_first)
        on_gpus = analysis.case.ranks > 1 and analysis.points[0].config.runtime.device == "cuda"
        if on_gpus and not all(map(_has_multicast, rows)):
            yield "NVLink multicast was off (runtime.multicast=false); a training run with it may differ."

    def environments(self, analysis: Analysis) -> list[str]:
        # Variables that settings set make no other environment.
        swept = {name.removeprefix(VARIABLES) for row in analysis.rows for name in row.options}
        swept |= NO_MULTICAST.keys() if any(map(_has_multicast, analysis.rows)) else set()
        return different_environments(analysis.points, swept)

    def parts(self, analysis: Analysis) -> list[Part]:
        if all(row.exposed_fraction is None for row in analysis.rows):
            return [Part("time, not profiled", "gemm")]
        return [Part("other", "gemm"), Part("exposed communication", "comm")]

    def bar(self, analysis: Analysis, row: JobRow) -> Bar:
        time_us, share = row.per(analysis.work).time_us, row.exposed_fraction
        profiled = len(self.parts(analysis)) > 1
        exposed = ("-" if share is None else f"{share:.0%}") if profiled else ""
        ends = [time_us * (1 - (share or 0.0)), time_us] if profiled else [time_us]
        return Bar(ends, [as_us(row.time_us), exposed, f"{row.over_reference:.3f}x", row.rate])

    def streams(self, analysis: Analysis) -> Mapping[str, Path | None]:
        return {
            row.setting: path
            for row in reversed(analysis.shown_first)
            for point in row.points[::-1]
            if (path := drawn_trace(point))
        }

    def more(self, analysis: Analysis) -> list[Exhibit]:
        return findings(analysis, diagnosed=len(sides(self, analysis)))

    def details(self, analysis: Analysis) -> list[str]:
        return [f"Command: {analysis.case.command}"]

    def report_of_row(self, row: JobRow) -> Mapping[str, object]:
        return {"options": row.options, "exposed_us_by_group": row.exposed_us_by_group, "causes": row.causes}

    def key(self, analysis: Analysis, row: JobRow) -> Key:
        return Key(
            model=analysis.case.script,
            tokens=None,
            precision=None,
            backend="job",
            device=None,
            tp_size=1,
            operator=counted(analysis.case.ranks, "rank"),
            pass_name=analysis.case.unit or STEP,
            setting=None,
        )

    def samples(self, result: Result) -> dict[str, Sample]:
        """Returns the sample of the step, even if it is launch-bound."""
        run, point = result.measured_as(JobRun), result.point_as(Resolved)
        ranks = counted(point.job.ranks, "rank")
        tokens = int(run.tokens_per_step) if run.tokens_per_step else None
        sample = Sample((run.step,), None, run.unit or STEP, tokens)
        return {f"{ranks}{on_nodes(point.nodes)}, {NAMING.in_words(options_of(point))}": sample}


def _as_options(values: Mapping[str, levers.Value]) -> str:
    return some_of(f"+{levers.OPTION}{name}={command.in_words(value)}" for name, value in values.items())


def _printed(text: str, rounding: float) -> Seen:
    """Returns a loss as it was printed: its last digit may be another one."""
    value, exponent = float(text), Decimal(text).as_tuple().exponent
    if not isinstance(exponent, int) or not value:
        return Seen(value, rounding)
    return Seen(value, max(rounding, 1.5 * 10.0**exponent / abs(value)))


def _timed(points: Sequence[Point]) -> list[Point]:
    """Returns the runs of a setting whose times count: those with at least half as many steps as another has. What was
    given up counts as what it was asked for: the rest of its steps would have been as slow."""

    def steps(point: Point) -> int:
        run = point.measured_as(JobRun)
        return point.config_as(Resolved).job.steps if run.gave_up else len(run.step.samples_us)

    most = max(map(steps, points))
    return [point for point in points if 2 * steps(point) >= most]


def _pooled(points: Sequence[Point]) -> Estimate:
    """Returns the time of all runs, with the noise of their steps, without that between runs."""
    means_us = _means_us(points)
    time_us = statistics.fmean(means_us)
    scaled = [
        [sample * time_us / mean_us for sample in point.measured_as(JobRun).times_us]
        for point, mean_us in zip(points, means_us, strict=True)
    ]
    return replace(estimate(*scaled, by_mean=True), time_us=time_us)


def _means_us(points: Iterable[Point]) -> list[float]:
    return [point.measured_as(JobRun).mean_us for point in points]


def _of_garbage(rows: Sequence[JobRow]) -> Iterator[str]:
    """Yields how much time long garbage collections took that are left out, where that is much."""
    found: dict[str, str] = {}
    for row in rows:
        if (row.garbage_share or 0.0) < GARBAGE:
            continue
        left_out = sum(len(run.long_collections) for run in row.runs)
        steps = sum(len(run.step.samples_us) for run in row.runs)
        longer = f"{sum(run.longer_us for run in row.runs) / left_out / 1e3:,.0f} ms longer"
        share = f"{row.garbage_share:.1%} of the time with {row.setting}"
        found[row.setting] = f"{share}: {left_out} of {steps} steps took {longer}"
    if found:
        yield (
            f"Python collected garbage for long ({some_of(found.values(), separator='; ')}). Such steps are left out, "
            "since so few come by chance; a training run has them: collect between steps, and less often "
            f"(+{levers.OPTION}host.collect_every)."
        )


def _has_multicast(row: JobRow) -> bool:
    return MULTICAST in row.options


STUDY = JobStudy()
