"""One parallel linear operator with the point's overlap setting, measured in turns with none and the floor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from overlap_sweep import backends
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import models, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results.identity import key_of, point_identity
from overlap_sweep.workloads import Sample, Searchable, Workload, run_of
from overlap_sweep.workloads.layer.config import Layer
from overlap_sweep.workloads.operator.config import Config, Resolved

if TYPE_CHECKING:
    from overlap_sweep.results.run_directory import Result


NOISE_GOAL = "workload.noise_goal"


def complete(config: Config) -> Config:
    """Returns the point with its backend and with unset knobs at the backend's defaults for the method. Knobs that the
    backend lacks are null."""
    model = models.without_experts(config.model)
    backend, cublasmp = backends.chosen(config), config.with_cublasmp or None
    config = replace(config, backend=backend, model=model, with_cublasmp=cublasmp, layer=Layer())
    if config.phases is None:
        return replace(
            config, **_with_knobs({name: getattr(config, name) for name in ("method", *space.KNOBS)}, config)
        )
    if mistake := space.phases_mistake(config.phases):
        raise UserError(f"{mistake}.")
    phases = {phase: _with_knobs(setting, config) for phase, setting in config.phases.items()}
    absent: dict[str, Any] = dict.fromkeys(space.absent_knobs(backend, aggregate=config.aggregate))
    return replace(config, phases=phases, **absent)


def _with_knobs(setting: space.Asked, config: Config) -> dict[str, Any]:
    defaults = backends.default_knobs(config, space.method_of(setting))
    complete = {**setting, **{knob: value for knob, value in defaults.items() if setting.get(knob) is None}}
    absent = space.absent_knobs(config.backend, aggregate=setting.get("aggregate"))
    return complete | dict.fromkeys(absent & complete.keys())


def refusal(point: Resolved) -> str | None:
    return (
        space.refusal(point)
        or models.refusal(point.model, point.operator, point.workload.tokens, point.tp_size)
        or backends.load(point.backend).refusal(point, point.operator, space.settings(point))
    )


def _words(config: Config, overrides: Sequence[str]) -> list[str]:
    begin = [models.short_name(config.model), f"tp{config.tp_size}", config.operator]
    # A point with wrong phases is refused later, under its name.
    if config.phases and not space.phases_mistake(config.phases):
        settings = (f"{phase}.{space.brief_name(setting)}" for phase, setting in config.phases.items())
        return [*begin, "+".join(settings)]
    absent = space.absent_knobs(config.backend, aggregate=config.aggregate)
    knobs = {knob: value for knob in space.KNOBS if knob not in absent and (value := getattr(config, knob)) is not None}
    words = [*begin, *([config.phase] if config.phase != "all" else [])]
    # A search gives all its points the same, by `phases`.
    words += [override.removeprefix("workload.") for override in overrides if override.startswith(NOISE_GOAL)]
    if config.method != "none":
        return [*words, space.setting_name({"method": config.method, **knobs})]
    is_requested = "num_sm" not in absent and any(override.startswith("num_sm=") for override in overrides)
    return [*words, "none", *([f"sm{config.num_sm}"] if is_requested else [])]


def _sample(result: Result) -> Sample:
    """Returns the times of the passes under test, with and without overlap."""
    point = result.point_as(Resolved)
    times = [result.measured.times[name] for name in space.passes(point)]
    point_us, none_us = (
        tuple(map(sum, zip(*(getattr(one, name).samples_us for one in times), strict=True)))
        for name in ("point", "none")
    )
    overlap = {"phase", "method", "phases", "repetition", *space.KNOBS}
    return Sample(point_us, none_us, none_us, _identity(point, overlap))


def _identity(point: Resolved, without: Collection[str]) -> str:
    return key_of({name: value for name, value in point_identity(point).items() if name not in without})


WORKLOAD = Workload(
    name="operator",
    package=__name__,
    complete=complete,
    refusal=refusal,
    # Unset slots are not overlapped.
    overlap_configs=lambda point: {"": OverlapConfig(space.settings(point), switches={})},
    run=run_of(__name__),
    subject=lambda point: str(point.operator),
    words=_words,
    named={"tp_size", "operator", "phase", "method", "phases", NOISE_GOAL, *space.KNOBS},
    searchable=Searchable(
        sample=_sample, same_point=lambda point: _identity(point, set() if space.settings(point) else {"num_sm"})
    ),
    is_told_when_measured=False,
)
