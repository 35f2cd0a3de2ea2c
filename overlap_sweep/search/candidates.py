"""From the values that every knob may have to the cells of an operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import product
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.overlap.space import Setting
from overlap_sweep.search.cell import Candidate
from overlap_sweep.search.choices import Choices

Refusal = Callable[[Mapping[str, Setting]], str | None]
"""Why an operator cannot be given these phases, or None."""


def candidates(
    operator: str,
    choices: Choices,
    default_knobs: Callable[[str], Mapping[str, Any]],
    supported: Collection[str],
    refusal: Refusal,
) -> tuple[dict[str, list[Candidate]], Counter[str]]:
    """By pass what its slots may be given, `none` left out; and why others may not, with their number.

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
    """Every setting of one slot, each once."""
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
