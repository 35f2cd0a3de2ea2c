"""What the numbers were measured on: the lasting part, and the part that changes from moment to moment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from overlap_sweep.measure.device_samples import samples_now
from overlap_sweep.measure.ranks import Ranks


def environment(device: torch.device, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The launcher's account of the machine (`machine.machine`), and what only torch knows."""
    if device.type != "cuda":
        return dict(machine)
    properties = torch.cuda.get_device_properties(device)
    return {
        **machine,
        "gpu": properties.name,
        "gpu_count": torch.cuda.device_count(),
        "sm_count": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def conditions(ranks: Ranks) -> dict[str, Any]:
    """The machine's load, and of every rank's GPU what NVML or rocm-smi says now."""
    now: dict[str, Any] = {"load_1min": os.getloadavg()[0]}
    if ranks.device.type == "cuda":
        devices = [torch.device("cuda", index) for index in range(ranks.world_size)]
        now["gpus"] = [sample.values for sample in samples_now(devices)]
    return now
