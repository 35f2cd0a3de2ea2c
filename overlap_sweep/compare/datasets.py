"""One operand, read: what its points measured, by keys that are the same whoever measured them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from msgspec import structs

from overlap_sweep.compare.measured import Key, Measured, key_of_pass
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.overlap.variants import DEFAULT
from overlap_sweep.results.points import Case, Point, PointStatus, group_cases, read_points
from overlap_sweep.results.records import read_records
from overlap_sweep.results.traces import TraceReading
from overlap_sweep.workloads.copy_engine.compare import measured_copies
from overlap_sweep.workloads.kernel.compare import measured_kernels
from overlap_sweep.workloads.layer.compare import measured_layers
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice, choose_all
from overlap_sweep.workloads.operator.failures import failures, of_pass
from overlap_sweep.workloads.operator.proof import Outcome, outcomes
from overlap_sweep.workloads.tp_training.compare import measured_tp_training


@dataclass(frozen=True)
class Dataset:
    """Results at or below one directory."""

    label: str
    path: Path
    points: list[Point]
    measured: list[Measured]
    choices: dict[Key, PassChoice]
    """The decisions about passes; the setting of their keys is empty."""
    outcomes: list[Outcome]
    """What tuners proved, or could not."""
    not_ok: dict[tuple[int, str, str, str], str]
    """By TP size, operator, pass and setting: what became of that which has no time."""
    problems: list[str]

    def counts(self) -> dict[str, int]:
        """How many points there are of each status, without those that there are none of."""
        found = Counter(point.status for point in self.points)
        return {status: found[status] for status in get_args(PointStatus) if found[status]}


def read_dataset(label: str, path: Path) -> Dataset:
    """Read the results at or below `path`. UserError where nothing was measured."""
    reading = read_points(path)
    points = [_with_plain_settings(point) for point in reading.points]
    cases = group_cases(points)
    records = read_records(path)
    choices = _choices(points, cases)
    measured = [
        *_measured_passes(choices),
        *measured_layers(points, records.tuners),
        *measured_kernels(points),
        *measured_copies(points),
        *measured_tp_training(points),
    ]
    if not measured and any(point.is_training and point.status == "ok" for point in points):
        raise UserError(
            f"{path} has training results without telemetry; copy the rank_<r>_metrics.jsonl of their run directories, "
            "too, to compare them."
        )
    if not measured:
        what = ", ".join(f"{n} {status}" for status, n in Counter(p.status for p in points).items()) or "none readable"
        raise UserError(f"{path} has no point with times to compare ({what}); measure it again with launch.py.")
    return Dataset(
        label=label,
        path=path,
        points=points,
        measured=measured,
        choices=choices,
        outcomes=outcomes(records.tuners, points, cases),
        not_ok=_not_ok(points),
        problems=[*reading.problems, *records.problems],
    )


def plain_setting(slot: str, setting: space.Setting) -> space.Setting:
    """Without the SMs of a ring whose chunks copy engines move, and with the knobs that are always named: equal
    settings are equal, whichever backend recorded them."""
    operator, _, phase = slot.partition("_")
    method = setting["method"]
    usual = space.USERBUFFERS_DEFAULTS[method]
    named = set(space.knobs_of(operator, phase, method)) & {"aggregate", "num_splits"} & usual.keys()
    plain = {**{knob: usual[knob] for knob in sorted(named)}, **setting}
    if method == "ring_exchange" and plain.get("use_ce"):
        plain.pop("num_sm", None)
    return plain


def measured_candidate(key: Key, choice: PassChoice, candidate: Candidate) -> Measured:
    """`key` is the pass's."""
    return Measured(
        key=key._replace(setting=candidate.name),
        time=candidate.estimate,
        none_us=choice.none.time_us,
        floor_us=choice.floor_us,
        points=candidate.points,
    )


def _with_plain_settings(point: Point) -> Point:
    if not point.result:
        return point
    settings = {slot: plain_setting(slot, setting) for slot, setting in point.result.settings.items()}
    return replace(point, result=structs.replace(point.result, settings=settings))


def _choices(points: Sequence[Point], cases: Mapping[Case, Sequence[Point]]) -> dict[Key, PassChoice]:
    """Of the passes that some point is about: the others were only timed beside it."""
    failed = failures(points)
    found = {}
    for case, of_case in cases.items():
        about = {(p.config["tp_size"], p.config["operator"], name) for p in of_case for name in space.passes(p.config)}
        for choice in choose_all(of_case, {p.directory: TraceReading() for p in of_case}, "time", failed):
            if (choice.tp_size, choice.operator, choice.pass_name) in about:
                found[key_of_pass(case, choice.tp_size, choice.operator, choice.pass_name)] = choice
    return found


def _measured_passes(choices: Mapping[Key, PassChoice]) -> list[Measured]:
    found = []
    for key, choice in choices.items():
        found += [measured_candidate(key, choice, candidate) for candidate in choice.candidates if candidate.measured]
        if choice.default:
            none_us, floor_us = choice.none.time_us, choice.floor_us
            found.append(Measured(key._replace(setting=DEFAULT), choice.default, none_us, floor_us, ()))
    return found


def _not_ok(points: Iterable[Point]) -> dict[tuple[int, str, str, str], str]:
    found: dict[tuple[int, str, str, str], str] = {}
    for point in points:
        launch_bound = point.result is not None and point.result.launch_bound
        if not point.is_operator or (point.status == "ok" and not launch_bound):
            continue
        status = "launch-bound" if point.status == "ok" else point.status
        asked = {slot: plain_setting(slot, setting) for slot, setting in space.settings(point.config).items()}
        for name in space.passes(point.config):
            setting = space.settings_name(of_pass(asked, name))
            found[point.config["tp_size"], point.config["operator"], name, setting] = status
    return found
