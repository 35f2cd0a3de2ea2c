"""Which training run of one dataset is which of another: by their names, or by what was swept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from overlap_sweep.workloads.fsdp.telemetry_runs import Run

_KNOBS = ("model", "ranking", "fsdp", "training", "distributed", "streams", "compile")
_WHOLE_KNOBS = ("backend", "precision")


def settings_of(run: Run) -> dict[str, Any]:
    """Its knobs, as result.json has them: by `fsdp.forward_prefetch` and the like; empty of logs alone."""
    config = run.point.config if run.point else {}
    nested = {name: config[name] for name in (*_WHOLE_KNOBS, *_KNOBS) if name in config}
    connections = config.get("runtime", {}).get("max_connections")
    return _flat(nested) | ({"runtime.max_connections": connections} if config else {})


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def run_pairs(ours: Sequence[Run], theirs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """In the order of `theirs`: one run of each is a pair, else runs of the same name; where no name is in both, runs
    that were given the same of what was swept, whatever differs between the datasets throughout."""
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    by_name = {run.name: run for run in ours}
    pairs = [(by_name[run.name], run) for run in theirs if run.name in by_name]
    return pairs or _pairs_by_settings(ours, theirs)


def _pairs_by_settings(ours: Sequence[Run], theirs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """None of logs alone, and none of runs that several of a dataset are the same as."""
    own, others = ([_comparable(run) for run in runs] for runs in (ours, theirs))
    if not all(own) or not all(others):
        return []
    swept = [
        name
        for name in dict.fromkeys(name for settings in (*own, *others) for name in settings)
        if any(len({settings.get(name) for settings in of_runs}) > 1 for of_runs in (own, others))
    ]
    our_keys, their_keys = ([tuple(map(settings.get, swept)) for settings in of_runs] for of_runs in (own, others))
    our_times, their_times = Counter(our_keys), Counter(their_keys)
    return [
        (ours[our_keys.index(key)], run)
        for key, run in zip(their_keys, theirs, strict=True)
        if our_times[key] == their_times[key] == 1
    ]


def _comparable(run: Run) -> dict[str, str]:
    """Settings as text, so that lists can be keys and `true` is not 1; with the repetition, which is none."""
    settings = settings_of(run)
    if run.point and settings:
        settings["repetition"] = run.point.config.get("repetition")
    return {name: json.dumps(value, sort_keys=True) for name, value in settings.items() if value is not None}
