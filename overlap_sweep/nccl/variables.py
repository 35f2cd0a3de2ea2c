"""Variables of the environment that workloads set for NCCL, RCCL and their transports."""

from __future__ import annotations

import re
from collections.abc import Mapping

from overlap_sweep.errors import UserError

_KNOWN = re.compile(r"(NCCL|RCCL|TORCH_NCCL|HSA|GPU|UCX|FI|OFI|GLOO|MSCCLPP)_[A-Z0-9_]+")
_REFUSED = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "give runtime.max_connections instead",
    "NCCL_NVLS_ENABLE": "give runtime.multicast instead",
    "NCCL_CONF_FILE": "give its variables instead, so that results record them",
    "NCCL_ALGO=NVLS": "multicast is off; leave it out",
    "GPU_DEVICE_ORDINAL": "set HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES in your shell",
}
"""Refused variables, or values of them, with what to do instead."""


def checked(option: str, variables: Mapping[str, object]) -> dict[str, str]:
    """Returns the variables that are set. UserError for one that is not of NCCL, RCCL or their transports. `option`:
    what they are given by."""
    for name, value in variables.items():
        if name not in _REFUSED and not _KNOWN.fullmatch(name):
            raise UserError(f"{option}.{name} is not a variable of NCCL, RCCL or HIP; set it in your shell.")
        if isinstance(value, list | dict):
            raise UserError(f"{option}.{name}={value} is not a single value; quote it: '\"a,b\"'.")
        for refused in (name, f"{name}={str(value)[:4].upper()}"):
            if refused in _REFUSED and value is not None:
                raise UserError(f"{option}.{name}={value}: {_REFUSED[refused]}.")
    return {name: str(int(v) if isinstance(v, bool) else v) for name, v in variables.items() if v is not None}
