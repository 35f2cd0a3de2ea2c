"""One parallel linear operator with the point's overlap setting, measured in turns with none and the floor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from overlap_sweep import backends
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import models, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.results.identity import key_of, point_identity
from overlap_sweep.workloads import Sample, Searchable, Workload, run_of

if TYPE_CHECKING:
    from overlap_sweep.results.run_directory import Result


NOISE_GOAL = "workload.noise_goal"


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the point with its backend and with unset knobs at the backend's defaults for the method. Knobs that the
    backend lacks are null."""
    backend = backends.chosen(point)
    own = {name: value for name, value in point.items() if name != "layer"}
    own |= {"backend": backend, "model": models.without_experts(point["model"])}
    own |= {"with_cublasmp": point.get("with_cublasmp") or None}
    own |= dict.fromkeys(space.absent_knobs(backend, own))
    if point["phases"] is None:
        return _with_knobs(own, own)
    if mistake := space.phases_mistake(point["phases"]):
        raise UserError(f"{mistake}.")
    return {**own, "phases": {phase: _with_knobs(setting, own) for phase, setting in point["phases"].items()}}


def _with_knobs(setting: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    defaults = backends.default_knobs(point, setting["method"])
    complete = {**setting, **{knob: value for knob, value in defaults.items() if setting.get(knob) is None}}
    return complete | dict.fromkeys(space.absent_knobs(point["backend"], setting) & complete.keys())


def refusal(point: Mapping[str, Any]) -> str | None:
    tokens = point["workload"]["tokens"]
    return (
        space.refusal(point)
        or models.refusal(point["model"], point["operator"], tokens, point["tp_size"])
        or backends.load(point["backend"]).refusal(point)
    )


def _words(point: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    begin = [models.short_name(point["model"]), f"tp{point['tp_size']}", point["operator"]]
    # A point with wrong phases is refused later, under its name.
    if point.get("phases") and not space.phases_mistake(point["phases"]):
        settings = (f"{phase}.{space.brief_name(setting)}" for phase, setting in point["phases"].items())
        return [*begin, "+".join(settings)]
    absent = space.absent_knobs(point.get("backend"), point)
    knobs = {knob: point[knob] for knob in space.KNOBS if point.get(knob) is not None and knob not in absent}
    words = [*begin, *([point["phase"]] if point["phase"] != "all" else [])]
    # A search gives all its points the same, by `phases`.
    words += [override.removeprefix("workload.") for override in overrides if override.startswith(NOISE_GOAL)]
    if point["method"] != "none":
        return [*words, space.setting_name({"method": point["method"], **knobs})]
    is_requested = "num_sm" not in absent and any(override.startswith("num_sm=") for override in overrides)
    return [*words, "none", *([f"sm{point['num_sm']}"] if is_requested else [])]


def _sample(result: Result) -> Sample:
    """Returns the times of the passes under test, with and without overlap."""
    times = [result.measured.times[name] for name in space.passes(result.point)]
    point_us, none_us = (
        tuple(map(sum, zip(*(getattr(one, name).samples_us for one in times), strict=True)))
        for name in ("point", "none")
    )
    overlap = {"phase", "method", "phases", "repetition", *space.KNOBS}
    return Sample(point_us, none_us, none_us, _identity(result.point, overlap))


def _identity(point: Mapping[str, Any], without: Collection[str]) -> str:
    return key_of({name: value for name, value in point_identity(point).items() if name not in without})


WORKLOAD = Workload(
    name="operator",
    package=__name__,
    complete=complete,
    refusal=refusal,
    # Unset slots are not overlapped.
    overlap_configs=lambda point: {"": OverlapConfig(space.settings(point), switches={})},
    run=run_of(__name__),
    subject=lambda point: str(point["operator"]),
    words=_words,
    named={"tp_size", "operator", "phase", "method", "phases", NOISE_GOAL, *space.KNOBS},
    searchable=Searchable(
        sample=_sample, same_point=lambda point: _identity(point, set() if space.settings(point) else {"num_sm"})
    ),
    is_told_when_measured=False,
)
