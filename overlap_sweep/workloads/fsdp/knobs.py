"""The setting of a training step: its options, what changing them changes, and how they are typed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from overlap_sweep.config import Runtime
from overlap_sweep.declared import FLOOR, SCHEDULES, TRAINS_DIFFERENTLY, Role, roles_of
from overlap_sweep.study.settings import Naming, Options, key, value_in_words
from overlap_sweep.workloads.fsdp.config import (
    OF_COLLECTIVES,
    TRAINING_ON,
    Compile,
    Distributed,
    Fsdp,
    Streams,
    Training,
)

_SECTIONS = {"fsdp": Fsdp, "training": Training, "distributed": Distributed, "streams": Streams, "compile": Compile}
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


def knobs_of(config: Mapping[str, Any]) -> Options:
    """Returns the setting of a training point. Points with ineffective options are skipped (`refusal`), so that
    equivalent settings are equal."""
    options = {}
    for name, default in USUAL.items():
        section, _, option = name.partition(".")
        options[name] = config[section].get(option, default)
    options |= {f"{_ENVIRONMENT}.{name}": value for name, value in (config["distributed"].get("env") or {}).items()}
    compiled = config["compile"].get("options") or {}
    options |= {f"{_OPTIONS}.{name}": _scalar(value) for name, value in compiled.items()}
    return {**options, DEVICE: config["runtime"]["device"]}


def _scalar(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def roles(name: str) -> Collection[Role]:
    """Returns what changing an option of a setting changes."""
    if name.startswith(f"{_ENVIRONMENT}."):
        return {SCHEDULES} if name.removeprefix(f"{_ENVIRONMENT}.").startswith(OF_COLLECTIVES) else ROLES[_ENVIRONMENT]
    return ROLES[_OPTIONS if name.startswith(f"{_OPTIONS}.") else name]


def those_of(role: Role, options: Options) -> frozenset[tuple[str, str]]:
    """Returns a key that is equal for settings whose options with this role are equal."""
    return key({name: value for name, value in options.items() if name != DEVICE and role in roles(name)})


def _usual(options: Options, name: str) -> Any:
    """Returns an option's default on the device of these options."""
    section, _, option = name.partition(".")
    on_device = TRAINING_ON.get(options[DEVICE], {}) if section == "training" else {}
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


def _override(name: str, value: Any) -> str:
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
