"""What a search may choose among: read from a multirun's values, and as the candidates of every cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hydra.types import HydraContext
from omegaconf import DictConfig

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import space
from overlap_sweep.overlap.space import Setting
from overlap_sweep.runtime.composition import compose_point
from overlap_sweep.search.cell import Candidate

SEARCHED = ("phase", "method", *space.KNOBS)
"""Keys whose values a search chooses among; every other key's values make cases that are searched apart."""

Refusal = Callable[[Mapping[str, Setting]], str | None]
"""Why an operator cannot be given these phases, or None."""


@dataclass(frozen=True)
class Choices:
    """The search space of one operator."""

    methods: Sequence[str]
    knobs: Mapping[str, Sequence[Any]]
    """By knob its values, the first of which the search prefers; None is what the backend gives the method by
    default."""
    phase: str = "all"
    """Or the only phase that may be overlapped."""


def compose(config: DictConfig, context: HydraContext, overrides: Sequence[str]) -> DictConfig:
    """Returns what Hydra gives the job with these overrides."""
    return compose_point(context.config_loader, config, overrides)


def combined(values: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Returns overrides for every combination of the values that are not searched."""
    fixed = {key: of_key for key, of_key in values.items() if key not in SEARCHED}
    return [
        [f"{key}={value}" for key, value in zip(fixed, combination, strict=True)]
        for combination in product(*fixed.values())
    ]


def read_choices(
    config: DictConfig, composed: Callable[[list[str]], DictConfig], values: Mapping[str, Sequence[str]]
) -> Choices:
    """The searched keys' values, as Hydra's configuration has them. What is not swept has one value.

    `composed` gives the configuration of a point with some more overrides. UserError when no num_sm is left.
    """
    searched = {key: of_key for key, of_key in values.items() if key in SEARCHED}
    rows = max(map(len, searched.values()), default=1)
    # The keys don't depend on each other: the first composition has the first value of each, and so on.
    jobs = [
        composed([f"{key}={of_key[min(row, len(of_key) - 1)]}" for key, of_key in searched.items()])
        for row in range(rows)
    ]
    found = {key: [jobs[row][key] for row in range(len(of_key))] for key, of_key in searched.items()}
    knobs = {knob: found.get(knob, [jobs[0][knob]]) for knob in space.KNOBS}
    least, most = config.search.min_num_sm, config.search.max_num_sm
    counts = [count for count in knobs["num_sm"] if least <= count <= most]
    if not counts:
        raise UserError(
            f"no num_sm of {', '.join(map(str, knobs['num_sm']))} lies between search.min_num_sm={least} and "
            f"search.max_num_sm={most}; widen them."
        )
    phases = found.get("phase", [jobs[0].phase])
    if len(phases) > 1:
        raise UserError(f"phase={','.join(phases)} is searched at once with phase=all.")
    methods = [method for method in found.get("method", [jobs[0].method]) if method != "none"]
    return Choices(methods, {**knobs, "num_sm": counts}, phases[0])


def candidates(
    operator: str,
    choices: Choices,
    default_knobs: Callable[[str], Mapping[str, Any]],
    supported: Collection[str],
    refusal: Refusal,
) -> tuple[dict[str, list[Candidate]], Counter[str]]:
    """Returns by pass what its slots may be given, `none` left out; and why others may not, with their number.

    Only knobs that are `supported` are varied at all.
    """
    phases = space.PHASES if choices.phase == "all" else (choices.phase,)
    of_phase = {phase: _settings(operator, phase, choices, default_knobs, supported) for phase in phases}
    found: dict[str, list[Candidate]] = {name: [] for name in space.PASSES}
    refused: Counter[str] = Counter()
    for pass_name in space.PASSES:
        own = [phase for phase in phases if space.PASS_OF_PHASE[phase] == pass_name]
        # Both phases before one of them.
        for combination in product(*([*of_phase[phase], None] for phase in own)):
            given = {phase: setting for phase, setting in zip(own, combination, strict=True) if setting}
            slots = {space.slot(operator, phase): setting for phase, setting in given.items()}
            if not given or space.wgrad_refusal(operator, slots):
                continue
            if reason := refusal(given):
                refused[reason] += 1
            else:
                found[pass_name].append(Candidate.of(slots))
    return found, refused


def _settings(
    operator: str,
    phase: str,
    choices: Choices,
    default_knobs: Callable[[str], Mapping[str, Any]],
    supported: Collection[str],
) -> list[Setting]:
    """Returns every setting of one slot, each once."""
    found: dict[Any, Setting] = {}
    for method in choices.methods:
        if method not in space.methods_of(operator, phase):
            continue
        names = [knob for knob in space.knobs_of(operator, phase, method) if knob in supported]
        for values in product(*(choices.knobs.get(name, (None,)) for name in names)):
            given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
            setting = space.without_idle_knobs({"method": method, **default_knobs(method), **given})
            known = {k: v for k, v in setting.items() if k == "method" or k in names}
            found.setdefault(tuple(sorted(known.items())), known)
    return list(found.values())
