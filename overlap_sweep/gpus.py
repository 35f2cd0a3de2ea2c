"""The GPUs that worker processes will see, as far as the launcher's process can know."""

import os
import re
import subprocess
from functools import cache
from pathlib import Path

from omegaconf import DictConfig

from overlap_sweep.config import PointConfig
from overlap_sweep.errors import UserError

_elsewhere = False

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that list the GPUs that a process sees, the last two ROCm's."""
RANKS_ON_CPU = 2
"""Number of ranks on a CPU where none is given: the fewest that communicate."""


def run_elsewhere() -> None:
    """Declares that the points of this process run on other machines, which have enough GPUs."""
    global _elsewhere
    _elsewhere = True


def elsewhere() -> bool:
    return _elsewhere


@cache
def visible_gpus() -> int:
    """Returns the number of GPUs that a worker will see, by CUDA_VISIBLE_DEVICES (or ROCm's two variables), else by the
    driver."""
    for variable in VISIBLE:
        if variable in os.environ:
            return len(_listed(variable))
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
        return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    except (OSError, subprocess.SubprocessError):
        return len(list(Path("/dev").glob("nvidia[0-9]*"))) or _amd_gpus()


def _listed(variable: str) -> list[str]:
    return [entry for entry in os.environ[variable].split(",") if entry.strip() not in ("", "-1")]


def _amd_gpus() -> int:
    """Returns the number of GPUs of the ROCm kernel driver: its nodes with SIMD units, since it lists CPUs too."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return sum(bool(re.search(r"^simd_count [1-9]", node.read_text(), re.MULTILINE)) for node in nodes)


def beginning_with(first_gpu: int) -> dict[str, str]:
    """Returns the variable by which a process sees this GPU as its first, and all others after it in turn."""
    if not first_gpu:
        return {}
    variable = next((name for name in VISIBLE if name in os.environ), VISIBLE[0])
    gpus = _listed(variable) if variable in os.environ else [str(number) for number in range(visible_gpus())]
    return {variable: ",".join([*gpus[first_gpu:], *gpus[:first_gpu]])}


def all_ranks(config: PointConfig | DictConfig, option: str, others: int = 1) -> int:
    """Returns the number of ranks of a composed point whose `option` leaves it open: one for each visible GPU of its
    nodes, over `others` that each has; without GPUs RANKS_ON_CPU. UserError on Slurm, whose nodes are not known, and
    if they cannot be divided."""
    if config.runtime.device == "cpu":
        return RANKS_ON_CPU
    if elsewhere():
        raise UserError(f"{option}=null means all GPUs of the nodes, whose number only Slurm knows; give {option}.")
    gpus = visible_gpus() * (config.runtime.nodes or 1)
    if gpus % others:
        raise UserError(f"{option}=null: {gpus} GPUs are not divisible by {others} data-parallel ranks; give {option}.")
    return gpus // others or RANKS_ON_CPU
