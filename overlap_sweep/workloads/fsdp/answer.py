"""Training runs: the fastest setting among the points that may be compared, and the rows it is chosen from."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from overlap_sweep.report.comparison import flat
from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.gain import NO_GAIN, Gain
from overlap_sweep.results.identity import key_of
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.nodes import on_nodes
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import KnobRecord, KnobSearch
from overlap_sweep.workloads.fsdp.knobs import (
    OF_NODES,
    Knobs,
    brief,
    changed,
    differing,
    frozen,
    in_words,
    knobs_of,
    order,
    overrides,
    setting_in_words,
    sharding,
)
from overlap_sweep.workloads.fsdp.node_traffic import NodeTraffic, traffic_of
from overlap_sweep.workloads.fsdp.result import (
    StepTimes,
    compared_times,
    limited_by_host,
    measured,
    times_as_measured,
    together,
)


class TrainingCase(NamedTuple):
    """Properties that must be equal for training steps to be compared. Batch size, accumulation and precision may
    differ: settings are compared by time per sample."""

    model: str
    sizes: str
    """Sizes of the ranking model, in words."""
    ranks: int
    device: str
    key: str
    """Digest of all sizes, as names may be equal for different sizes."""
    nodes: int

    @property
    def brief(self) -> str:
        """Returns the case without sizes or device. Only the widths of the backbone layers are those of `model`."""
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}{on_nodes(self.nodes)}"
        return f"ranking model (widths of {self.model}), {ranks}"

    def __str__(self) -> str:
        return f"{self.brief} on {self.device}: {self.sizes}"


@dataclass(frozen=True)
class TrainingRow(StepTimes):
    """One setting, pooled over all points that measured it, or of one point. Times are per step unless noted."""

    knobs: Knobs
    setting: str
    """The changed knobs in words, without those that all settings of the case share."""
    points: tuple[str, ...]
    samples_per_step: int
    tokens_per_step: int
    parameters: int
    precision: str
    timing: Timing
    """Step times of all its points, as measured."""
    host_us: float | None
    """Time in which the host enqueues a step; None on a CPU."""
    launch_bound: bool
    """Whether the device waits for the host, so that the schedule of communication hardly matters."""
    baseline_launch_bound: bool
    """Whether `none` or `floor` is launch-bound, so that the hidden fraction is unreliable."""
    peak_memory_gb: float | None
    loss: float | None
    """Loss after the last step of the recorded run; None if it is NaN or infinite."""
    compiled: str
    """Compiler of the layers, `no`, or `no: ` and the reason."""
    traffic: NodeTraffic | None
    """Bytes that a rank sends in a step, within its node and to others; None on one node."""
    standing: str = ""
    """`best`, `best, proven`, or `only` if there is no other setting; empty for the others."""

    @property
    def of_sample(self) -> Estimate:
        """Returns the time per sample."""
        return self.step.relative_to(self.samples_per_step)

    @property
    def samples_per_s(self) -> float:
        return self.samples_per_step / self.time_us * 1e6

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.time_us * 1e6

    @property
    def simplicity(self) -> tuple[Any, ...]:
        """Returns a sort key that puts settings with fewer changed knobs first."""
        return len(changed(self.knobs)), [order(self.knobs, name) for name in sorted(self.knobs)]

    @property
    def note(self) -> str:
        """Returns what distinguishes it from rows that are simply slower."""
        notes = {
            self.standing: self.standing.startswith("best"),
            "diverges": self.loss is None,
            "launch-bound": self.launch_bound,
            "baseline launch-bound": self.baseline_launch_bound and not self.launch_bound,
            "not compiled": self.compiled.startswith("no:"),
            f"{len(self.points)} points": len(self.points) > 1,
        }
        return ", ".join(note for note, holds in notes.items() if holds)


@dataclass(frozen=True)
class TrainingAnalysis:
    """The analysis of one case."""

    case: TrainingCase
    points: list[Point]
    rows: list[TrainingRow]
    """Rows from fast to slow, by time per sample."""
    reference: TrainingRow
    """The simplest setting, which gains compare with."""
    best: TrainingRow
    """The best setting: a search's answer if there was one, else that of `choose`."""
    advantage: Gain
    """Gain per sample of the best over `against`."""
    against: str
    """The reference, or what a search compared its answer with, in words."""
    settled: bool
    """Whether a search measured the best setting again after choosing it."""
    reason: str
    """Why it is the best."""
    differing: list[str]
    """Knobs that differ between the rows."""
    shared: str
    """Changed knobs that all rows share, in words; empty if there are none."""

    @property
    def parameters(self) -> int:
        return self.reference.parameters

    @property
    def gain(self) -> float:
        """Returns the samples per second of the best over those of the reference, minus 1."""
        return self.best.samples_per_s / self.reference.samples_per_s - 1

    @property
    def overrides(self) -> str:
        """Returns the command-line overrides that select the best among the rows; empty if none are needed."""
        return overrides(self.best.knobs, self.differing)

    @property
    def how_timed(self) -> str:
        """Returns a sentence on how the times were obtained."""
        if not any(row.relative for row in self.rows):
            return "Times are as measured in each point."
        return (
            "Times are relative to the floor of the same point, which cancels drift; launch-bound settings and those "
            "whose floor no other point shares are as measured."
        )


def analyse_training(
    points: Iterable[Point], searches: Mapping[Path, KnobRecord] | None = None
) -> list[TrainingAnalysis]:
    """Returns an analysis of the `ok` training points for each case. `searches`: records by directory."""
    cases: dict[TrainingCase, list[Point]] = defaultdict(list)
    for point in points:
        if point.workload == "fsdp" and point.status == "ok":
            cases[training_case(point)].append(point)
    return [_analyse(case, cases[case], searches or {}) for case in sorted(cases)]


def training_case(point: Point) -> TrainingCase:
    """Returns the case that a point belongs to."""
    config = point.config
    ranking, model = config["ranking"], config["model"]
    sizes = (
        f"{ranking['num_layers']} layers, {ranking['sequence_length']} events, "
        f"{ranking['num_sparse_features']} + {ranking['num_dense_features']} features"
    )
    key = key_of({"model": model, "ranking": ranking})
    return TrainingCase(
        model["name"], sizes, config["distributed"]["dp_size"], point.case.device, key, point.case.nodes
    )


def choose(rows: Sequence[TrainingRow]) -> tuple[TrainingRow, Gain, str]:
    """Returns the simplest row unless another is faster, its gain, and why. A diverging row is chosen only if all
    diverge."""
    usable = sorted((row for row in rows if row.loss is not None), key=lambda row: row.simplicity) or list(rows)
    if len(rows) == 1:
        return rows[0], NO_GAIN, "the only setting measured"
    choice = verdict.choose(usable, lambda row: row.of_sample)
    chosen, fastest = choice.chosen, choice.fastest
    if chosen is fastest or len(usable) == 1:
        reason = f"fastest of {len(usable)}"
    elif not choice.won:
        gain = choice.gain_of_fastest.in_words(chosen.setting, "per sample")
        reason = f"the fastest other, {fastest.setting}, is {gain}"
    else:
        reason = f"simplest within the noise of the fastest, {fastest.setting} (noise {choice.tie_noise:.1%})"
    return chosen, choice.gain, reason if len(chosen.points) > 1 else f"{reason}; not repeated"


def _analyse(case: TrainingCase, points: list[Point], searches: Mapping[Path, KnobRecord]) -> TrainingAnalysis:
    same: dict[frozenset[tuple[str, str]], list[Point]] = defaultdict(list)
    for point in points:
        same[frozen(knobs_of(point.config))].append(point)
    settings = [knobs_of(of_setting[0].config) for of_setting in same.values()]
    names = differing(settings)
    shown = names if len(settings) > 1 else None
    rows = {
        key: _row(knobs, shown, of_setting, times)
        for key, knobs, of_setting, times in zip(
            same, settings, same.values(), compared_times(list(same.values())), strict=True
        )
    }
    usable = [row for row in rows.values() if row.loss is not None] or list(rows.values())
    reference = min(usable, key=lambda row: row.simplicity)
    best, advantage, reason, settled = _best(rows, points, searches)
    proven = settled and best is not reference and advantage.faster
    standing = "only" if len(rows) == 1 else "best, proven" if proven else "best"
    key = frozen(best.knobs)
    rows[key] = replace(best, standing=standing)
    shared = [name for name in changed(settings[0]) if name not in names] if len(settings) > 1 else []
    return TrainingAnalysis(
        case=case,
        points=points,
        rows=sorted(rows.values(), key=lambda row: row.of_sample.time_us),
        reference=rows[frozen(reference.knobs)],
        best=rows[key],
        advantage=advantage,
        against="the search's baseline" if settled else reference.setting,
        settled=settled,
        reason=reason,
        differing=names,
        shared=", ".join(f"{brief(name)}={in_words(settings[0][name])}" for name in shared),
    )


def point_row(point: Point, standing: str = "") -> TrainingRow:
    """Returns the row of a single `ok` point."""
    knobs = knobs_of(point.config)
    return replace(_row(knobs, None, [point], times_as_measured(point)), standing=standing)


def _best(
    rows: Mapping[frozenset[tuple[str, str]], TrainingRow], points: Sequence[Point], searches: Mapping[Path, KnobRecord]
) -> tuple[TrainingRow, Gain, str, bool]:
    """Returns the best row, its gain, why it is the best, and whether a search settled it: a search measures its answer
    again, in alternation with the baseline, so that it is not just the luckiest of many."""
    settled = {
        frozen(knobs_of(point.config)): search
        for directory, record in searches.items()
        for search in record.searches
        for point in points
        if search.settles and point.directory.is_relative_to(directory) and _has_answer(point.config, search)
    }
    if not settled:
        return *choose(list(rows.values())), False
    best, *_ = choose([rows[key] for key in settled])
    search = settled[frozen(best.knobs)]
    if search.best and search.gain and search.gain.faster:
        return best, search.gain, "proven by the search", True
    return best, NO_GAIN, "the search found nothing faster", True


def _has_answer(config: Mapping[str, Any], search: KnobSearch) -> bool:
    baseline = {key: values[0] for key, values in search.knobs.items() if values}
    options = dict(override.partition("=")[::2] for override in search.overrides)
    wanted = {key.lstrip("+"): value for key, value in {**options, **baseline, **search.best}.items()}
    # Points have numbers where the user's values refer to nodes.
    given = {key: wanted[f"fsdp.{key}"] for key, words in OF_NODES.items() if wanted.get(f"fsdp.{key}") == words}
    meant = sharding({**config, "fsdp": {**config["fsdp"], **given}})
    wanted |= {f"fsdp.{key}": in_words(meant[key]) for key in given}
    settings = flat(config)
    # Keys that are not part of a point are ignored; the choice of a group, such as model=llama3_8b, is its name.
    return all(
        _alike(key, in_words(settings.get(key, settings.get(f"{key}.name")))) == _alike(key, value)
        for key, value in wanted.items()
        if key.split(".")[0] in config
    )


def _alike(key: str, value: str) -> str:
    """Returns the value without quotes; a number in its shortest form."""
    plain = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
    if key == "fsdp.forward_prefetch":
        plain = {"false": "0", "true": "1"}.get(plain.lower(), plain)
    return f"{float(plain):g}" if re.fullmatch(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", plain, re.IGNORECASE) else plain.lower()


def _row(knobs: Knobs, shown: Collection[str] | None, points: Sequence[Point], times: StepTimes) -> TrainingRow:
    """Returns the row of one setting over its points. `shown`: the knobs that name it, None for all."""
    runs = [measured(point.result) for point in points]
    limited = {name for point in points if point.result for name in limited_by_host(point.result)}
    hosts_us = [run.host_us["point"] for run in runs if "point" in run.host_us]
    memory_gb = [run.peak_memory_gb for run in runs if run.peak_memory_gb is not None]
    return TrainingRow(
        **vars(times),
        knobs=knobs,
        setting=setting_in_words(knobs, shown),
        points=tuple(point.name for point in points),
        samples_per_step=runs[0].samples_per_step,
        tokens_per_step=points[0].config["workload"]["tokens"],
        parameters=runs[0].parameters,
        precision=points[0].config["precision"],
        timing=together([run.step["point"] for run in runs]),
        host_us=statistics.median(hosts_us) if hosts_us else None,
        launch_bound="point" in limited,
        baseline_launch_bound=bool(limited - {"point"}),
        peak_memory_gb=max(memory_gb, default=None),
        loss=runs[-1].losses[-1],
        compiled=runs[0].compiled,
        traffic=traffic_of(points[0].config, runs[0].parameters),
    )
