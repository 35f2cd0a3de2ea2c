"""The knobs of a training step, under the names that a user types."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from overlap_sweep import workloads
from overlap_sweep.workloads.fsdp.config import (
    PER_NODE,
    TRAINING_ON,
    WITHIN_NODE,
    Compile,
    Distributed,
    Fsdp,
    Streams,
    Training,
)

Knobs = dict[str, Any]
"""Scalar values by name, such as `fsdp.forward_prefetch` and `distributed.env.NCCL_ALGO`."""

_SECTIONS = {"fsdp": Fsdp, "training": Training, "distributed": Distributed, "streams": Streams, "compile": Compile}
_RUNTIME: Knobs = {"max_connections": None, "threads_per_rank": 1, "multicast": False}
_ENVIRONMENT, _OPTIONS = "distributed.env", "compile.options"
_NO_KNOBS = {
    *("training.max_steps", "training.log_interval", "training.output_dir"),
    *("distributed.dp_size", _ENVIRONMENT, _OPTIONS),
}
"""Options that are not knobs: length and output of a run, its ranks (which are never compared), and mappings whose
entries are knobs of their own."""

DEVICE = "runtime.device"
"""Not a knob, but kept with them since some defaults depend on it."""
TRAINS_DIFFERENTLY = frozenset(
    {
        *("training.batch_size", "training.gradient_accumulation", "training.mixed_precision", "fsdp.reduce_dtype"),
        *("training.learning_rate", "training.warmup_steps", "training.weight_decay", "training.grad_clip_norm"),
    }
)
"""Knobs that change what is computed, not only when."""

SCHEDULING = frozenset(
    {
        *("fsdp.forward_prefetch", "fsdp.backward_prefetch", "fsdp.limit_all_gathers", "fsdp.sync_module_states"),
        "fsdp.separate_reduce_scatter_group",
        *("distributed.enable_overlap", "distributed.overlap_reduce_scatter"),
        "distributed.overlap_clone_for_reduce_scatter",
        *("training.learning_rate", "training.warmup_steps", "training.weight_decay"),
        *(f"streams.{name}" for name in asdict(Streams())),
        *("runtime.max_connections", "runtime.multicast"),
    }
)
"""Knobs that don't change the floor, like the variables of the communication libraries. Points that differ in these
alone share a floor, by which they are compared."""

_OF_COLLECTIVES = tuple(
    f"{_ENVIRONMENT}.{library}_" for library in ("NCCL", "RCCL", "TORCH_NCCL", "FI", "OFI", "UCX", "GLOO")
)
"""Prefixes of variables that only affect communication; others may affect computation, too."""

_BARE = re.compile(r"[A-Za-z0-9_.-]+")
_NO_STRINGS = {"null", "true", "false", "nan", "inf"}
"""Words that Hydra's grammar does not read as strings."""
_BEFORE_QUOTE = re.compile(r'(\\+)(?="|$)')
"""Backslashes that would escape a quote."""


_DECLARED: Knobs = {
    **{f"{name}.{knob}": value for name, of in _SECTIONS.items() for knob, value in asdict(of()).items()},
    **{f"runtime.{name}": value for name, value in _RUNTIME.items()},
}
USUAL = {name: value for name, value in _DECLARED.items() if name not in _NO_KNOBS}
"""Default value of each knob. Environment variables are not set by default."""


OF_NODES = {"replicas": PER_NODE, "reshard_after_forward": WITHIN_NODE}
"""Values of options of `fsdp` that `sharding` replaces by numbers."""


def sharding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `fsdp` with numbers for what refers to nodes, so that equal shardings are equal points. As
    they are if the number of ranks is not known, of a point that was not measured."""
    fsdp, nodes, ranks = config["fsdp"], workloads.nodes(config), config["distributed"].get("dp_size")
    replicas, reshard = fsdp.get("replicas"), fsdp.get("reshard_after_forward")
    if replicas == PER_NODE:
        replicas = nodes
    if reshard == WITHIN_NODE and ranks:
        of_node = ranks // nodes
        # One rank alone keeps what it has gathered.
        reshard = replicas * of_node >= ranks or (of_node > 1 and of_node)
    return {**fsdp, "replicas": replicas, "reshard_after_forward": reshard}


def knobs_of(config: Mapping[str, Any]) -> Knobs:
    """Returns every knob of a training point. Points with ineffective knobs are skipped (`refusal`), so that equivalent
    settings are equal."""
    flat = {f"{name}.{knob}": value for name in _SECTIONS for knob, value in config[name].items()}
    flat |= {f"runtime.{name}": config["runtime"].get(name, default) for name, default in _RUNTIME.items()}
    knobs = {name: flat.get(name, default) for name, default in USUAL.items()}
    knobs |= {f"{_ENVIRONMENT}.{name}": value for name, value in (config["distributed"].get("env") or {}).items()}
    options = config["compile"].get("options") or {}
    knobs |= {f"{_OPTIONS}.{name}": _scalar(value) for name, value in options.items()}
    return {**knobs, DEVICE: config["runtime"]["device"]}


def _scalar(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def usual(knobs: Knobs, name: str) -> Any:
    """Returns a knob's default on the device of these knobs."""
    group, _, knob = name.partition(".")
    on_device = TRAINING_ON.get(knobs[DEVICE], {}) if group == "training" else {}
    return on_device.get(knob, USUAL.get(name))


def changed(knobs: Knobs) -> list[str]:
    """Returns the knobs that are not at their defaults; the simplest setting has none."""
    return [name for name, value in knobs.items() if name != DEVICE and value != usual(knobs, name)]


def differing(settings: Iterable[Knobs]) -> list[str]:
    """Returns the knobs that differ between the settings."""
    all_knobs = list(settings)
    names = dict.fromkeys(name for knobs in all_knobs for name in knobs)
    return [name for name in names if len({repr(knobs.get(name)) for knobs in all_knobs}) > 1]


def frozen(knobs: Knobs) -> frozenset[tuple[str, str]]:
    """Returns a hashable key that ignores unset knobs and distinguishes true from 1."""
    return frozenset((name, repr(value)) for name, value in knobs.items() if value is not None)


def same_floor(knobs: Knobs) -> frozenset[tuple[str, str]]:
    """Returns a key that is equal for settings with the same floor."""
    return frozen(
        {name: v for name, v in knobs.items() if name not in SCHEDULING and not name.startswith(_OF_COLLECTIVES)}
    )


def same_training(knobs: Knobs) -> tuple[Any, ...]:
    """Returns a key that is equal for settings that compute the same, up to rounding."""
    return tuple(knobs.get(name) for name in sorted(TRAINS_DIFFERENTLY))


def brief(name: str) -> str:
    """Returns the knob's name as in tables."""
    for prefix in (f"{_ENVIRONMENT}.", "fsdp.", "training.", "distributed.", "runtime."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return "compile" if name == "compile.enabled" else name


def in_words(value: Any) -> str:
    """Returns the value in Hydra's syntax."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)


def setting_in_words(knobs: Knobs, shown: Collection[str] | None = None) -> str:
    """Returns `forward_prefetch=1, batch_size=32`: the changed knobs that are among `shown`."""
    names = [name for name in changed(knobs) if shown is None or name in shown]
    return ", ".join(f"{brief(name)}={in_words(knobs[name])}" for name in names) or "defaults"


def overrides(knobs: Knobs, shown: Collection[str]) -> str:
    """Returns the changed knobs among `shown` as shell arguments."""
    return " ".join(shlex.quote(_override(name, knobs[name])) for name in changed(knobs) if name in shown)


def _override(name: str, value: Any) -> str:
    # Hydra adds keys that the configuration does not list only with ++.
    added = "++" if name.startswith((f"{_ENVIRONMENT}.", f"{_OPTIONS}.")) else ""
    return f"{added}{name}={_quoted(value) if isinstance(value, str) else in_words(value)}"


def _quoted(text: str) -> str:
    """Returns the text as a string of Hydra's grammar: bare if it is a plain word or number, else quoted."""
    if _BARE.fullmatch(text) and text.lower() not in _NO_STRINGS:
        return text
    escaped = _BEFORE_QUOTE.sub(r"\1\1", text).replace('"', r"\"")
    return f'"{escaped}"'


def order(knobs: Knobs, name: str) -> tuple[bool, float, str]:
    """Returns a sort key for a knob's values: the default first, then numbers ascending, then words."""
    value = knobs.get(name)
    number = float(value) if isinstance(value, int | float) else math.inf
    return value != usual(knobs, name), number, in_words(value)
