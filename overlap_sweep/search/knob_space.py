"""Which knobs a sweep searches, and what their values make of a point.

A swept key is searched if the sweeper's `params` name it, or if it schedules training: everything below `fsdp`,
`streams` and `distributed` but `distributed.strategy` and `distributed.dp_size`, and `runtime.max_connections`. Every
combination of the other swept keys' values (`model=a,b`, `distributed.dp_size=4,8`, `distributed.strategy=fsdp2,ddp`)
is a search of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hydra.types import HydraContext
from omegaconf import DictConfig

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.results.identity import key_of, point_identity
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.run_directory import Result
from overlap_sweep.runtime.composition import compose_point
from overlap_sweep.runtime.group_config import shared_by
from overlap_sweep.runtime.point import resolve
from overlap_sweep.search.knob_trail import Failure, Knob, Sample, Setting
from overlap_sweep.search.measured import Job
from overlap_sweep.workloads.fsdp.knobs import frozen, knobs_of, same_floor
from overlap_sweep.workloads.fsdp.times import limited_by_host

Values = Mapping[str, Sequence[str]]
"""By key as it is typed, its values as text."""

_SECTIONS = ("fsdp.", "streams.", "distributed.")
_CASES = ("distributed.strategy", "distributed.dp_size")
_OF_GPUS = ("streams.", "distributed.env.", "runtime.max_connections")
"""Nothing of these is there on a CPU."""

WORKLOADS = ("fsdp", "operator")
"""Those with one time per point that others of it can be compared with."""


def is_searched(key: str, params: Collection[str]) -> bool:
    name = key.lstrip("+")
    return key in params or name == "runtime.max_connections" or (name.startswith(_SECTIONS) and name not in _CASES)


def split(values: Values, params: Collection[str]) -> tuple[Values, Values]:
    """Knobs, and what makes cases. A single value that is given by hand is no knob, but part of every case."""
    knobs = {key: texts for key, texts in values.items() if is_searched(key, params) and len(texts) > 1}
    return knobs, {key: texts for key, texts in values.items() if key not in knobs}


@dataclass
class KnobSpace:
    """The knobs of one case, and its points."""

    config: DictConfig
    context: HydraContext
    overrides: list[str]
    """Of every point."""
    label: str
    knobs: tuple[Knob, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    """By key, why it is not searched."""
    _points: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)
    _refusals: dict[Setting, str | None] = field(default_factory=dict)

    @property
    def baseline(self) -> Setting:
        return tuple(knob.values[0] for knob in self.knobs)

    def overrides_of(self, setting: Setting) -> list[str]:
        """Values that are not the baseline's; those are in `overrides` where the configuration has others."""
        return [f"{k.key}={v}" for k, v in zip(self.knobs, setting, strict=True) if v != k.values[0]]

    def point(self, *overrides: str) -> dict[str, Any]:
        """Resolved. UserError for a wrong value."""
        if overrides not in self._points:
            loader, given = self.context.config_loader, [*self.overrides, *overrides]
            self._points[overrides] = resolve(compose_point(loader, self.config, given))
        return self._points[overrides]

    def job(self, setting: Setting, repetition: int) -> Job:
        overrides = self.overrides_of(setting)
        again = [f"repetition={repetition}"] if repetition else []
        point = {**self.point(*overrides), "repetition": repetition}
        # What tells the points apart comes first in their names, which are cut where they are long.
        return Job([*overrides, *again, *self.overrides], point)

    def refusal(self, setting: Setting) -> str | None:
        """Why the setting makes no sense, or is another one in fact; None where it is worth a point."""
        if setting not in self._refusals:
            self._refusals[setting] = self._refusal(setting)
        return self._refusals[setting]

    def _refusal(self, setting: Setting) -> str | None:
        point = self.point(*self.overrides_of(setting))
        reason: str | None = workloads.of(point).refusal(point)
        if reason:
            return reason
        for index, knob in enumerate(self.knobs):
            simpler = (*setting[:index], knob.values[0], *setting[index + 1 :])
            if simpler != setting and same_point(self.point(*self.overrides_of(simpler))) == same_point(point):
                return f"{knob.key}={setting[index]} changes nothing there"
        return None


def find_spaces(config: DictConfig, context: HydraContext, values: Values, params: Collection[str]) -> list[KnobSpace]:
    """One for each case. UserError when there is nothing to search in any, or a value is wrong."""
    knobs, fixed = split({key: [_spelled(text) for text in texts] for key, texts in values.items()}, params)
    if not knobs:
        raise UserError(
            "there is nothing to search: give a knob several values, such as fsdp.forward_prefetch=false,1."
        )
    swept = [key for key, texts in fixed.items() if len(texts) > 1]
    spaces = []
    for combination in product(*fixed.values()):
        spaces.append(_space(config, context, dict(zip(fixed, combination, strict=True)), knobs, swept))
    if not any(found.knobs for found in spaces):
        reasons = dict.fromkeys(f"{key}: {why}" for found in spaces for key, why in found.left_out.items())
        raise UserError(f"there is nothing to search: {'; '.join(reasons)}.")
    return spaces


def _spelled(text: str) -> str:
    """As one types it: Hydra gives Python's spelling."""
    return text.lower() if text in ("True", "False") else text


def _space(
    config: DictConfig, context: HydraContext, given: Mapping[str, str], knobs: Values, swept: Sequence[str]
) -> KnobSpace:
    overrides = [f"{key}={value}" for key, value in given.items()]
    plain = KnobSpace(config, context, overrides, "")
    usual = plain.point()
    check_workload(usual)
    first = [f"{key}={texts[0]}" for key, texts in knobs.items() if plain.point(f"{key}={texts[0]}") != usual]
    based = KnobSpace(config, context, [*overrides, *first], _label(usual, given, swept))
    origin, found = based.point(), []
    if reason := workloads.of(origin).refusal(origin):
        based.left_out["the baseline"] = reason
        return based
    for key, texts in knobs.items():
        if usual["runtime"]["device"] == "cpu" and key.lstrip("+").startswith(_OF_GPUS):
            based.left_out[key] = "it concerns GPUs only"
            continue
        points = {text: based.point(f"{key}={text}") for text in texts}
        distinct = {same_point(point): text for text, point in reversed(points.items())}
        kept = [text for text in texts if text in distinct.values()]
        if len(kept) > 1:
            restarts = any(shared_by(points[text]) != shared_by(origin) for text in kept)
            found.append(Knob(key, tuple(kept), restarts))
        else:
            based.left_out[key] = f"{', '.join(texts)} are the same here"
    based.knobs = tuple(found)
    return based


def _label(point: Mapping[str, Any], given: Mapping[str, str], swept: Sequence[str]) -> str:
    ranks = workloads.world_size(point)
    said = ("model", "model.name", "tp_size", "operator", *_CASES)
    more = [f"{key}={given[key]}" for key in swept if key.lstrip("+") not in said]
    start = f"{point['model']['name']} {workloads.of(point).subject(point)} on {ranks} rank{'' if ranks == 1 else 's'}"
    return ", ".join([start, *more])


def check_workload(point: Mapping[str, Any]) -> None:
    if point["workload"]["name"] not in WORKLOADS:
        raise UserError(
            f"knobs are searched for workload={' and '.join(WORKLOADS)}, not for {point['workload']['name']}; sweep it "
            "without hydra/sweeper=knobs."
        )


def measured(result: Result, samples_per_step: int | None) -> Sample | Failure:
    """Times of as much work as `samples_per_step`, the baseline's; None is as much as the point has. Where the host is
    what takes so long, as in a training step that cannot be enqueued faster, that time counts all the same."""
    if result.status != "ok":
        return Failure((result.error or result.status).splitlines()[0])
    if result.point["workload"]["name"] != "fsdp":
        times = [result.measured.times[name] for name in space.passes(result.point)]
        return Sample(
            times_us=_sum(times_of.point for times_of in times),
            beside_us=_sum(times_of.none for times_of in times),
            none_us=_sum(times_of.none for times_of in times),
            floor_us=_sum(times_of.floor for times_of in times),
            work=same_work(result.point),
        )
    step, own = result.measured.step, result.measured.samples_per_step
    scale = samples_per_step / own if samples_per_step else 1.0
    point_us, none_us, floor_us = (_sum([step[name]], scale) for name in ("point", "none", "floor"))
    # Where the host is what limits, the floor is its time, too, and dividing by that would make the slowest host the
    # fastest setting.
    beside_us = () if limited_by_host(result) else floor_us
    return Sample(point_us, beside_us, none_us, floor_us, same_work(result.point))


def _sum(timings: Iterable[Timing], scale: float = 1.0) -> tuple[float, ...]:
    return tuple(scale * sum(samples) for samples in zip(*(t.samples_us for t in timings), strict=True))


def same_work(point: Mapping[str, Any]) -> str:
    """Equal for points whose work beside the knobs' is the same: a step without communication, an operator without
    overlap."""
    if point["workload"]["name"] == "fsdp":
        return str(sorted(same_floor(knobs_of(point)), key=str))
    overlap = {"phase", "method", "phases", "repetition", *space.KNOBS}
    return key_of({name: value for name, value in point_identity(point).items() if name not in overlap})


def same_point(point: Mapping[str, Any]) -> str:
    """Equal for points that run the same, whatever idle knobs say."""
    if point["workload"]["name"] == "fsdp":
        return str(sorted(frozen(knobs_of(point)), key=str))
    idle = {"num_sm"} if not space.settings(point) else set()
    return key_of({name: value for name, value in point_identity(point).items() if name not in idle})
