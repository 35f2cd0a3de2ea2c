"""Settings of training steps: their options, what changing them changes and how they are typed; and the rows of their
times, which are comparable between points measured minutes apart."""

import json
import re
import shlex
import statistics
from collections.abc import Collection, Hashable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from overlap_sweep.config import Runtime
from overlap_sweep.declared import FLOOR, SCHEDULES, TRAINS_DIFFERENTLY, Role, roles_of, types_of
from overlap_sweep.overlap.overlap_cfg import NONE_IN_WORDS
from overlap_sweep.report.numbers import as_count, as_us, counted
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.gain import gain_over
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.traces import on_nodes
from overlap_sweep.study import CaseAnalysis, SettingRow, Times
from overlap_sweep.study.settings import Naming, Options, key, value_in_words
from overlap_sweep.workloads import Sample
from overlap_sweep.workloads.fsdp.config import OF_COLLECTIVES, TRAINING_ON, Asked, Config, Resolved
from overlap_sweep.workloads.fsdp.result import VARIANTS, Hidden, TrainingRun, limited_by_host

_SECTIONS = {name: types_of(Config)[name] for name in ("fsdp", "training", "distributed", "streams", "compile")}
_ENVIRONMENT, _OPTIONS = "distributed.env", "compile.options"
"""Mappings whose entries are options of their own."""
_BARE = re.compile(r"[A-Za-z0-9_.-]+")
_NO_STRINGS = {"null", "true", "false", "nan", "inf"}
"""Words that Hydra's grammar does not read as strings."""
DEVICE = "runtime.device"
"""Not an option of a setting, but kept with them since some defaults depend on it."""

ROLES: dict[str, set[Role]] = {
    **{f"{name}.{option}": roles for name, of in _SECTIONS.items() for option, roles in roles_of(of).items()},
    **{f"runtime.{option}": roles for option, roles in roles_of(Runtime).items() if roles},
}
"""What changing each option changes."""
assert all(ROLES.values()), f"options without a role: {[name for name, roles in ROLES.items() if not roles]}"

USUAL: Options = {
    f"{section}.{option}": value
    for section, schema in {**_SECTIONS, "runtime": Runtime}.items()
    for option, value in asdict(schema()).items()
    if ROLES.get(f"{section}.{option}", set()) & {SCHEDULES, FLOOR, TRAINS_DIFFERENTLY}
    and f"{section}.{option}" not in (_ENVIRONMENT, _OPTIONS)
}
"""Options of a setting with their defaults. Environment variables are not set by default."""


def knobs_of(config: Asked) -> Options:
    """Returns the setting of a point. Points with ineffective options are skipped, so equivalent settings are equal."""
    options: Options = {name: attrgetter(name)(config) for name in USUAL}
    options |= {f"{_ENVIRONMENT}.{name}": value for name, value in config.distributed.env.items()}
    for name, value in config.compile.options.items():
        options[f"{_OPTIONS}.{name}"] = json.dumps(value) if isinstance(value, dict | list) else value
    return {**options, DEVICE: config.runtime.device}


def roles(name: str) -> Collection[Role]:
    if name.startswith(f"{_ENVIRONMENT}."):
        return {SCHEDULES} if name.removeprefix(f"{_ENVIRONMENT}.").startswith(OF_COLLECTIVES) else ROLES[_ENVIRONMENT]
    return ROLES[_OPTIONS if name.startswith(f"{_OPTIONS}.") else name]


def those_of(role: Role, options: Options) -> frozenset[tuple[str, str]]:
    """Returns a key that is equal for settings whose options with this role are equal."""
    return key({name: value for name, value in options.items() if name != DEVICE and role in roles(name)})


def _usual(options: Options, name: str) -> Scalar:
    section, _, option = name.partition(".")
    on_device = TRAINING_ON.get(str(options[DEVICE]), {}) if section == "training" else {}
    return on_device.get(option, USUAL.get(name))


def _brief(name: str) -> str:
    for prefix in (f"{_ENVIRONMENT}.", "fsdp.", "training.", "distributed.", "runtime."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return "compile" if name == "compile.enabled" else name


NAMING = Naming(_brief, value_in_words, _usual, ignored={DEVICE})


def overrides(options: Options, shown: Collection[str]) -> str:
    """Returns the changed options among `shown` as shell arguments."""
    return " ".join(shlex.quote(_override(name, options[name])) for name in NAMING.changed(options) if name in shown)


def _override(name: str, value: Scalar) -> str:
    # Hydra adds keys that the configuration does not list only with ++.
    added = "++" if name.startswith((f"{_ENVIRONMENT}.", f"{_OPTIONS}.")) else ""
    return f"{added}{name}={_quoted(value) if isinstance(value, str) else value_in_words(value)}"


def _quoted(text: str) -> str:
    """Returns the text as a string of Hydra's grammar: bare if it is a plain word or number, else quoted."""
    if _BARE.fullmatch(text) and text.lower() not in _NO_STRINGS:
        return text
    # Importing Hydra takes longer than analysing a small sweep.
    from overlap_sweep.hydra_adapter.overrides import in_quotes

    return in_quotes(text)


class FsdpCase(NamedTuple):
    """What must be equal for steps to be compared; batch size, accumulation and precision may differ."""

    model: str
    sizes: str
    """Sizes of the ranking model, in words."""
    ranks: int
    device: str
    key: str
    """Digest of all sizes, as names may be equal for different sizes."""
    nodes: int
    parameters: int

    @property
    def brief(self) -> str:
        """Returns the case without sizes or device. Only the widths of the backbone layers are those of `model`."""
        return f"ranking model (widths of {self.model}), {counted(self.ranks, 'rank')}{on_nodes(self.nodes)}"

    def __str__(self) -> str:
        return f"Training {self.brief} on {self.device}: {self.sizes}, {as_count(self.parameters)} parameters"


@dataclass(frozen=True)
class StepTimes(Times):
    """The times of a step in one setting, over all its points: as configured, and of its baselines."""

    none: Estimate
    """Time with every collective alone on the device."""
    floor: Estimate
    """Time without communication."""
    hidden: Hidden
    """Hidden fraction from the rounds of its points."""
    relative: bool
    """Whether times are relative to the floors of the same points; else they are as measured."""


@dataclass(frozen=True)
class FsdpRow(SettingRow[StepTimes]):
    """One setting over all its points, or one point by itself. Times are per step unless noted."""

    @cached_property
    def runs(self) -> list[TrainingRun]:
        return [point.measured_as(TrainingRun) for point in self.points]

    @cached_property
    def limited(self) -> set[str]:
        return {name for point in self.points for name in launch_bound_variants(point)}

    @property
    def run(self) -> TrainingRun:
        return self.runs[0]

    @property
    def config(self) -> Resolved:
        return self.points[0].config_as(Resolved)

    @property
    def none_us(self) -> float:
        return self.times.none.time_us

    @property
    def floor_us(self) -> float:
        return self.times.floor.time_us

    @property
    def speedup(self) -> float:
        return self.none_us / self.time_us

    @property
    def hidden(self) -> Hidden:
        return self.times.hidden

    @property
    def amounts(self) -> Mapping[str, float | None]:
        return {"sample": self.run.samples_per_step}

    @property
    def samples_per_s(self) -> float:
        return self.run.samples_per_step / self.time_us * 1e6

    @property
    def host_us(self) -> float | None:
        """Returns the time in which the host enqueues a step; None on a CPU."""
        found = [run.host_us["point"] for run in self.runs if "point" in run.host_us]
        return statistics.median(found) if found else None

    @property
    def launch_bound(self) -> bool:
        """Returns whether the device waits for the host, so that the schedule of communication hardly matters."""
        return "point" in self.limited

    @property
    def baseline_launch_bound(self) -> bool:
        """Returns whether `none` or `floor` is launch-bound, so that the hidden fraction is unreliable."""
        return bool(self.limited - {"point"})

    @property
    def peak_memory_gb(self) -> float | None:
        return max((run.peak_memory_gb for run in self.runs if run.peak_memory_gb is not None), default=None)

    @property
    def loss(self) -> float | None:
        """Returns the loss after the last step of the recorded run; None if it is NaN or infinite."""
        return self.runs[-1].losses[-1]

    @property
    def may_win(self) -> bool:
        return self.loss is not None

    @property
    def in_words(self) -> str:
        hidden = f"{self.hidden.in_words} hidden" if self.hidden.known else "hidden fraction unknown"
        over_none = gain_over(self.times.none, self.step).in_words(NONE_IN_WORDS)
        return f"{as_us(self.time_us)} us per step, {over_none}, {hidden}, {self.samples_per_s:,.0f} samples/s"

    @property
    def notes(self) -> Mapping[str, bool]:
        return {
            "diverges": not self.may_win,
            "launch-bound": self.launch_bound,
            "baseline launch-bound": self.baseline_launch_bound and not self.launch_bound,
            "not compiled": self.run.compiled.startswith("no:"),
        }


Analysis = CaseAnalysis[FsdpCase, FsdpRow]


def launch_bound_variants(point: Point) -> list[str]:
    return limited_by_host(point.result) if point.result else []


def floor_key(point: Point) -> Hashable:
    """Returns a key that is equal for points with the same floor."""
    return those_of(FLOOR, knobs_of(point.config_as(Asked)))


def sample(result: Result) -> Sample:
    """Returns the step's sample for a search over knobs. A launch-bound step counts, but not relative to its floor:
    that is the host's time, too, so that the slowest host would seem the fastest setting."""
    run = result.measured_as(TrainingRun)
    point_us, none_us, floor_us = (tuple(run.step[name].samples_us) for name in VARIANTS)
    work = str(sorted(those_of(FLOOR, knobs_of(result.point_as(Resolved))), key=str))
    return Sample(point_us, () if limited_by_host(result) else floor_us, none_us, work, run.samples_per_step)
