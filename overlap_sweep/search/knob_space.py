"""The knobs of one case and its points, for a search over knobs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from overlap_sweep import workloads
from overlap_sweep.config import NO_PART_OF_A_POINT, ResolvedPoint
from overlap_sweep.errors import UserError
from overlap_sweep.options import listed
from overlap_sweep.results.records import EQUIVALENT
from overlap_sweep.runtime.group_config import shared_by
from overlap_sweep.runtime.point import resolve
from overlap_sweep.search import Setting
from overlap_sweep.search.knob_trail import Knob, joined
from overlap_sweep.search.measured import Job, SearchInputs
from overlap_sweep.workloads import Searchable

THE_BASELINE = "the baseline"
"""Key of `KnobSpace.left_out` if nothing can be measured."""
_QUEUES = "runtime.max_connections"
"""A knob of every workload, for GPUs only."""


class KnobSpace:
    """The knobs of one case, and its points."""

    def __init__(self, inputs: SearchInputs, overrides: Sequence[str]) -> None:
        """`overrides`: overrides of every point."""
        self.overrides = list(overrides)
        self.label = ""
        self.knobs: tuple[Knob, ...] = ()
        self.left_out: dict[str, str] = {}
        """Reasons why keys are not searched, by key."""
        self.refusals: dict[Setting, str | None] = {}
        """Results of `refusal` by setting."""
        self._compose = inputs.compose
        self._points: dict[tuple[str, ...], ResolvedPoint] = {}

    def point(self, *overrides: str) -> ResolvedPoint:
        """Returns the resolved point. UserError for a wrong value."""
        if overrides not in self._points:
            self._points[overrides] = resolve(self._compose([*self._others(overrides), *overrides]))
        return self._points[overrides]

    def same_point(self, *overrides: str) -> str:
        point = self.point(*overrides)
        return searchable(point.workload.name).same_point(point)

    def _others(self, overrides: Sequence[str]) -> list[str]:
        """Returns the overrides of every point whose keys are not among these: a key can be added only once, and of
        two values the later would win."""
        keys = {override.partition("=")[0] for override in overrides}
        return [override for override in self.overrides if override.partition("=")[0] not in keys]

    def overrides_of(self, setting: Setting) -> list[str]:
        """Returns the overrides for values other than the baseline's, which are the configuration's or in
        `overrides`."""
        changed = ((knob.key, v) for knob, v in zip(self.knobs, setting, strict=True) if v != knob.values[0])
        return [f"{key}={value}" for key, value in joined(changed).items()]

    def job(self, setting: Setting, repetition: int) -> Job:
        overrides = self.overrides_of(setting)
        again = [f"repetition={repetition}"] if repetition else []
        point = replace(self.point(*overrides), repetition=repetition)
        # Names of points are cut at the end, so what distinguishes them comes first.
        return Job([*overrides, *again, *self._others(overrides)], point)

    def refusal(self, setting: Setting) -> str | None:
        """Returns why the setting is invalid or equivalent to a simpler one; None if it is worth a point."""
        if setting not in self.refusals:
            self.refusals[setting] = self._refusal(setting)
        return self.refusals[setting]

    def _refusal(self, setting: Setting) -> str | None:
        overrides = self.overrides_of(setting)
        try:
            point = self.point(*overrides)
        except UserError as error:
            # Of values that are each valid alone.
            return str(error)
        if reason := workloads.of(point).refusal(point):
            return reason
        for knob, value in zip(self.knobs, setting, strict=True):
            simpler = [override for override in overrides if override != f"{knob.key}={value}"]
            if simpler != overrides and self.same_point(*simpler) == self.same_point(*overrides):
                return f"{knob.key}={value} has no effect there"
        return None

    @property
    def typed(self) -> list[str]:
        """Returns the overrides of a single run of the baseline, without an experiment that only searches."""
        workload = self.point().workload.name
        searches = f"experiment={searchable(workload).experiment}"
        no_part = tuple(name + end for name in NO_PART_OF_A_POINT for end in "=.")
        typed = [override for override in self.overrides if not override.startswith(no_part)]
        kept = [override for override in typed if override.lstrip("+") != searches]
        if any(override.lstrip("+").startswith("experiment=") for override in kept):
            return [*kept, "hydra.mode=RUN"]
        named = any(override.startswith("workload=") for override in kept)
        return kept if kept == typed or named else [f"workload={workload}", *kept]


def searchable(workload: str) -> Searchable:
    """Returns how to compare the workload's points. UserError if its knobs cannot be searched."""
    found = workloads.load(workload).searchable
    if found is None:
        known = listed(sorted(name for name in workloads.names() if workloads.load(name).searchable))
        raise UserError(
            f"hydra/sweeper=knobs is for workload={known}, not for workload={workload}; sweep that without a search."
        )
    return found


def find_spaces(inputs: SearchInputs) -> list[KnobSpace]:
    """Returns the space of each case. UserError if there is nothing to search in any, or a value is wrong."""
    # Hydra spells params as Python does.
    spelled = {key: [t.lower() if t in ("True", "False") else t for t in texts] for key, texts in inputs.values.items()}
    known = searchable(inputs.config.workload.name)

    def is_knob(key: str) -> bool:
        name = key.lstrip("+")
        return name not in known.cases and (key in inputs.params or name == _QUEUES or name.startswith(known.options))

    # A key with a single value is not a knob but part of every case.
    knobs = {key: texts for key, texts in spelled.items() if is_knob(key) and len(texts) > 1}
    if not knobs:
        raise UserError(f"There is nothing to search; give a knob several values, such as {known.example}.")
    fixed = {key: texts for key, texts in spelled.items() if key not in knobs}
    cases = [dict(zip(fixed, combination, strict=True)) for combination in product(*fixed.values())]
    spaces = [_space(inputs, [f"{key}={value}" for key, value in case.items()], knobs) for case in cases]
    labels = [space.label for space in spaces]
    more = [key for key in fixed if _is_hidden(key, cases, labels)]
    for space, case in zip(spaces, cases, strict=True):
        space.label += "".join(f", {key}={case[key]}" for key in more)
    if not any(found.knobs for found in spaces):
        reasons = dict.fromkeys(f"{key}: {why}" for found in spaces for key, why in found.left_out.items())
        raise UserError(f"There is nothing to search: {'; '.join(reasons)}.")
    return spaces


def _is_hidden(key: str, cases: Sequence[Mapping[str, str]], labels: Sequence[str]) -> bool:
    """Returns whether two cases that differ in this key alone have equal labels."""
    others = [tuple(value for other, value in case.items() if other != key) for case in cases]
    return max(Counter(zip(others, labels, strict=True)).values()) > 1


def _space(inputs: SearchInputs, overrides: Sequence[str], knobs: Mapping[str, Sequence[str]]) -> KnobSpace:
    # Without them a point may be none: a command has a placeholder of that name.
    added = [f"{key}={texts[0]}" for key, texts in knobs.items() if key.startswith("+")]
    plain = KnobSpace(inputs, [*overrides, *added])
    usual = plain.point()
    of_gpus = (_QUEUES, *searchable(usual.workload.name).of_gpus)
    first = [f"{key}={texts[0]}" for key, texts in knobs.items() if plain.point(f"{key}={texts[0]}") != usual]
    space = KnobSpace(inputs, [*plain.overrides, *first])
    ranks, workload = usual.world_size, workloads.of(usual)
    space.label = f"{usual.model.name} {workload.subject(usual)} on {ranks} rank{'' if ranks == 1 else 's'}"
    origin, found = space.point(), []
    if reason := workload.refusal(origin):
        space.left_out[THE_BASELINE] = reason
        return space
    for key, texts in knobs.items():
        if usual.runtime.device == "cpu" and key.lstrip("+").startswith(of_gpus):
            space.left_out[key] = "it has an effect on GPUs only"
            continue
        distinct = {space.same_point(f"{key}={text}"): text for text in reversed(texts)}
        kept = tuple(text for text in texts if text in distinct.values())
        if len(kept) > 1:
            restarts = any(shared_by(space.point(f"{key}={text}")) != shared_by(origin) for text in kept)
            found.append(Knob(key, kept, restarts))
        else:
            space.left_out[key] = f"{', '.join(texts)} {EQUIVALENT}"
    space.knobs = tuple(found)
    return space
