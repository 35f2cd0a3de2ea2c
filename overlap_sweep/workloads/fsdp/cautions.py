"""What to know before believing what is said about training steps; whether telemetry's marks and the profiler's kernels
say the same of the steps that have both."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from overlap_sweep.errors import UserError
from overlap_sweep.report.numbers import NAMES_TOLD, some_of
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.estimate import NOTABLE_DRIFT, later_change
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import environments, slowed_gpus
from overlap_sweep.results.run_directory import metrics_file
from overlap_sweep.results.traces import own_traces
from overlap_sweep.trace.files import TraceFile, read_trace_files
from overlap_sweep.workloads.fsdp.answer import TrainingAnalysis
from overlap_sweep.workloads.fsdp.knobs import knobs_of, same_floor, same_training
from overlap_sweep.workloads.fsdp.result import limited_by_host, measured
from overlap_sweep.workloads.fsdp.telemetry import MOST_BYTES, Step, read_steps

LOSS_TOLERANCE = {"fp32": 1e-3}
DEFAULT_LOSS_TOLERANCE = 0.05
"""By how much of itself, and of the run's first one, a loss may be off: reductions in another order round differently,
and steps add it up. What is learnt by heart has a loss that is next to nothing, and rounding is all of it."""


def cautions(analysis: TrainingAnalysis) -> list[str]:
    """Returns a sentence each, none where all is well."""
    return [
        *_trains_differently(analysis),
        *_no_losses(analysis),
        *_wrong_losses(analysis),
        *_nothing_to_hide(analysis),
        *_launch_bound(analysis),
        *_not_compiled(analysis),
        *_drift(analysis),
        *slowed_gpus(analysis.points),
        *disagreements(analysis.points),
        *dict.fromkeys(warning for point in analysis.points if point.result for warning in point.result.warnings),
        *_environments(analysis),
    ]


def _environments(analysis: TrainingAnalysis) -> Iterator[str]:
    if len(environments(analysis.points)) > 1:
        yield "The points were measured in different environments; see tuning_report.json."


def _trains_differently(analysis: TrainingAnalysis) -> Iterator[str]:
    best, reference = analysis.best, analysis.reference
    if same_training(best.knobs) != same_training(reference.knobs):
        alike = analysis.alike
        other = (
            f"of those that compute the same, {alike.setting} is the best, "
            f"{alike.samples_per_s / reference.samples_per_s:.2f}x the samples/s"
            if alike is not reference
            else "of those that compute the same, none is faster"
        )
        yield f"The best, {best.setting}, does not compute the same as {reference.setting}: {other}."


def _no_losses(analysis: TrainingAnalysis) -> Iterator[str]:
    for point in analysis.points:
        losses = measured(point.result).losses
        if None in losses:
            yield f"{point.name} has a loss that is no number from step {losses.index(None) + 1} on: it does not train."


def _wrong_losses(analysis: TrainingAnalysis) -> Iterator[str]:
    """Equal seeds have equal data: what is only scheduled differently must train alike."""
    groups: dict[tuple[Any, ...], list[Point]] = defaultdict(list)
    for point in analysis.points:
        groups[repr(point.config["workload"].get("seed")), *same_training(knobs_of(point.config))].append(point)
    for group in groups.values():
        losses = [(point.name, _numbers(measured(point.result).losses)) for point in group]
        steps = min(len(of_point) for _, of_point in losses)
        middle = [statistics.median(of_point[step] for _, of_point in losses) for step in range(steps)]
        precision = str(group[0].config["precision"])
        tolerance = LOSS_TOLERANCE.get(precision, DEFAULT_LOSS_TOLERANCE)
        for name, of_point in losses:
            pairs = enumerate(zip(of_point, middle, strict=False))
            off = [(abs(a - b) / max(abs(b), abs(middle[0])), step) for step, (a, b) in pairs if b or middle[0]]
            error, step = max(off, default=(0.0, 0))
            if error > tolerance:
                yield (
                    f"{name} has a loss of {of_point[step]:.4g} after step {step + 1}, and those that compute the same "
                    f"{middle[step]:.4g}: don't trust it before you know why."
                )


def _numbers(losses: Iterable[float | None]) -> list[float]:
    """Returns those before the first that is none."""
    return [loss for loss in takewhile(lambda loss: loss is not None, losses) if loss is not None]


def _nothing_to_hide(analysis: TrainingAnalysis) -> Iterator[str]:
    silent = [row.setting for row in analysis.rows if not row.hidden.known]
    if silent:
        yield (
            f"What communication costs without overlap cannot be told from noise {_where(silent, analysis)}: hidden "
            "fractions say nothing there."
        )


def _launch_bound(analysis: TrainingAnalysis) -> Iterator[str]:
    limited = [row.setting for row in analysis.rows if row.launch_bound]
    if limited:
        where = _where(limited, analysis)
        yield (
            f"Launch-bound: the host takes as long to enqueue a step as the device to run it {where}; what is hidden "
            "there is hidden behind the host. Larger batches, or compile.enabled=true, help."
        )
    beside = [row.setting for row in analysis.rows if row.baseline_launch_bound and not row.launch_bound]
    if beside:
        yield (
            "The host limits the step without overlap, or without communication, which the hidden fraction is measured "
            f"against, {_where(beside, analysis)}: it says how much is hidden behind the host."
        )


def _not_compiled(analysis: TrainingAnalysis) -> Iterator[str]:
    found: dict[str, list[str]] = defaultdict(list)
    for row in analysis.rows:
        if row.knobs["compile.enabled"] and row.compiled.startswith("no"):
            reason = next(iter(row.compiled.removeprefix("no").removeprefix(":").strip().splitlines()), "")
            found[reason or "no reason given"].append(row.setting)
    for reason, settings in found.items():
        yield f"The layers could not be compiled in {some_of(settings, separator='; ')}: {reason.removesuffix('.')}."


def _drift(analysis: TrainingAnalysis) -> Iterator[str]:
    """Yields by how much the steps without communication drifted, which many points measure alike."""
    times_us = defaultdict(list)
    for point in sorted(analysis.points, key=lambda point: (point.result and point.result.started) or ""):
        assert point.result
        # Where the host limits, it is the host's time.
        if "floor" not in limited_by_host(point.result):
            times_us[same_floor(knobs_of(point.config))].append(measured(point.result).step["floor"].median_us)
    changes = [later_change(of_floor) for of_floor in times_us.values() if len(of_floor) > 1]
    worst = max(changes, key=abs, default=0.0)
    if abs(worst) >= NOTABLE_DRIFT:
        as_measured = [row.setting for row in analysis.rows if not row.relative]
        but = f", but for {some_of(as_measured, separator='; ')}" if as_measured else ""
        how = f"settings are compared by the one that was measured beside them{but}"
        if len(as_measured) == len(analysis.rows):
            how = "settings are compared by their times as measured"
        yield f"Baselines drifted: the step without communication by up to {worst:+.0%}; {how}."


def _where(settings: list[str], analysis: TrainingAnalysis) -> str:
    if len(settings) < len(analysis.rows) or len(settings) == 1:
        several = f"{len(settings)} of {len(analysis.rows)} settings: " if len(settings) > NAMES_TOLD else ""
        return f"in {several}{some_of(settings, separator='; ')}"
    return "in all settings"


DISAGREE_BY = 0.05
"""Share of a step."""


@dataclass(frozen=True)
class Exposed:
    """Communication without computation beside it in rank 0's profiled steps, without start-up. Milliseconds."""

    by_marks_ms: float
    """Median, as the step's."""
    step_ms: float
    kernels_ms: Sequence[float]
    """By iteration of the traces."""
    kernels_hidden_share: Sequence[float]
    """The rest of their communication; of the iterations that have any."""

    @property
    def by_kernels_ms(self) -> float:
        return statistics.median(self.kernels_ms)

    @property
    def disagree(self) -> bool:
        return abs(self.by_kernels_ms - self.by_marks_ms) > DISAGREE_BY * self.step_ms


def exposed(point: Point) -> Exposed | None:
    """None of points without GPUs, telemetry or traces: a CPU's marks and gloo's spans differ by threads waking up.
    UserError where the telemetry is a link out of the directory, or too large."""
    path = point.directory / metrics_file(0)
    traces = [point.directory / name for name in own_traces(point) if name.endswith("rank0.json.gz")]
    traces = [trace for trace in traces if trace.exists()]
    if point.config["runtime"]["device"] != "cuda" or not path.exists() or not traces:
        return None
    check_place(path, point.directory, MOST_BYTES)
    # What of it cannot be read is said where telemetry is compared.
    steps, _ = read_steps(path, 0)
    records = [step for step in steps.values() if step.profiled]
    files = read_trace_files(traces, with_parts=False)
    rows = [row for file in files for row in file.steady_rows if row.phase == "all"]
    records = _steady(records, files)
    if not records or not rows:
        return None
    return Exposed(
        by_marks_ms=statistics.median(record.exposed_comm_ms for record in records),
        step_ms=statistics.median(record.step_ms for record in records),
        kernels_ms=[row.exposed_comm_us / 1e3 for row in rows],
        kernels_hidden_share=[1 - row.exposed_comm_us / row.comm_busy_us for row in rows if row.comm_busy_us],
    )


def _steady(records: Sequence[Step], files: Iterable[TraceFile]) -> list[Step]:
    """Returns the records of the steps that are no start-up in their trace: both have the same steps in the same
    order."""
    startup = [row.iteration in file.startup for file in files for row in file.rows if row.phase == "all"]
    if len(startup) != len(records):
        return list(records)
    return [record for record, left_out in zip(records, startup, strict=True) if not left_out]


def disagreements(points: Iterable[Point]) -> Iterator[str]:
    """Yields a sentence for each point whose marks must not be believed."""
    for point in points:
        try:
            found = exposed(point)
        except UserError as error:
            yield str(error)
            continue
        if found and found.disagree:
            yield disagreement(point.name, found)


def disagreement(name: str, found: Exposed) -> str:
    """Returns what to believe of the point of that name."""
    return (
        f"{name}: by the telemetry's marks {found.by_marks_ms:.2f} ms of communication are exposed in a "
        f"profiled step of {found.step_ms:.1f} ms, by the kernels in the trace {found.by_kernels_ms:.2f}: "
        "believe the kernels. Gaps between a layer's kernels count as its computation, as when the host is "
        "slow, or streams wait for each other (CUDA_DEVICE_MAX_CONNECTIONS=1)."
    )
