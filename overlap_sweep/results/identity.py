"""When two measurements are of the same thing: the same point, on machines that may stand for each other."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

HOW_TO_RUN = ("timeout_s", "timeout_factor", "start_timeout_s", "retries", "isolate")
"""Of a point's `runtime`: when it is given up and in whose company it runs, not what is measured."""

LIBRARIES = ("torch", "transformer-engine", "megatron-core", "nccl")
"""Of an environment's `packages`: other versions give other times."""

_SWITCHES = re.compile(r"(NVTE|UB|NCCL|TORCH_SYMM_MEM|NVSHMEM|FLUX|CUDA_DEVICE_MAX)_(?!.*DEBUG)")
"""Environment variables that change what the libraries do."""


def point_identity(point: Mapping[str, Any]) -> dict[str, Any]:
    """Of a resolved configuration what says what is measured. Without nulls: an option that a later version adds makes
    no other point while it is not used."""
    runtime = {name: value for name, value in point["runtime"].items() if name not in HOW_TO_RUN}
    identity: dict[str, Any] = _without_nulls({**point, "runtime": runtime})
    return identity


def point_key(point: Mapping[str, Any]) -> str:
    """Returns a short text that is equal for configurations that say the same of what is measured."""
    return key_of(point_identity(point))


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _without_nulls(item) for name, item in value.items() if item is not None}


def library_identity(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Of a result's environment what is the same on every machine that shares an installation."""
    packages = environment.get("packages", {})
    return {"packages": {name: packages.get(name) for name in LIBRARIES}}


def environment_identity(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Of a result's environment (`machine.machine`) what must be equal: device, driver, links between the GPUs,
    libraries. Not the host: the nodes of a cluster are alike."""
    same = {name: environment.get(name) for name in ("device", "gpus", "driver", "links")}
    if environment.get("device") == "cpu":
        same |= {name: environment.get(name) for name in ("cpu", "cpu_count")}
    variables = environment.get("variables", {})
    same["variables"] = {name: value for name, value in variables.items() if _SWITCHES.match(name)}
    return {**same, **library_identity(environment)}


def key_of(identity: Mapping[str, Any]) -> str:
    """A short text that is equal for equal identities."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
