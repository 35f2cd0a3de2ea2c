"""What the launcher can know about GPUs without importing torch."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

_elsewhere = False


def run_elsewhere() -> None:
    """From now on what this process resolves is run on other machines, with as many GPUs as it needs."""
    global _elsewhere
    _elsewhere = True


def elsewhere() -> bool:
    return _elsewhere


@cache
def visible_gpus() -> int:
    """GPUs that a worker will see: CUDA_VISIBLE_DEVICES (or ROCm's two), else what the driver lists."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in os.environ:
            listed = [entry for entry in os.environ[variable].split(",") if entry.strip() not in ("", "-1")]
            return len(listed)
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
        return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    except (OSError, subprocess.SubprocessError):
        return len(list(Path("/dev").glob("nvidia[0-9]*"))) or _amd_gpus()


def _amd_gpus() -> int:
    """GPU nodes of the ROCm kernel driver: those with SIMD units, since it lists CPUs too."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return sum(_simd_count(node) > 0 for node in nodes)


def _simd_count(properties: Path) -> int:
    fields = dict(line.split() for line in properties.read_text().splitlines())
    return int(fields.get("simd_count", 0))
