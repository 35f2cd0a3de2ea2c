"""Transformer Engine's own layers, whole and in parts, overlapped by its userbuffers; and who computed attention."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.backends import ParallelLayer, Purpose
from overlap_sweep.backends.transformer_engine import userbuffers_refusal
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig

if TYPE_CHECKING:
    from overlap_sweep.measure.ranks import Ranks


HAS_DEFAULT = True

_CUDNN = re.compile(r"(/\S*)/libcudnn[^/\s]*\.so\S*$", re.MULTILINE)


def refusal(point: Mapping[str, Any], config: OverlapConfig, operators: Collection[str]) -> str | None:
    if point["tp_size"] not in space.USERBUFFERS_RANKS:
        return f"userbuffers have no kernels for tp_size={point['tp_size']}; they are for 2, 4 and 8 ranks"
    if config.switches["tp_comm_overlap_disable_fc1"] and "fc1" in operators:
        return "Transformer Engine's layers cannot switch off fc1's overlap alone, as tp_comm_overlap_disable_fc1 asks"
    if reason := overlap_cfg.slots_refusal(config.slots) or overlap_cfg.switches_refusal(config, operators):
        return reason
    for slot, setting in config.slots.items():
        operator, _, phase = slot.partition("_")
        if operator in operators and "method" in setting:
            unset = {**dict.fromkeys(space.KNOBS), "phases": None}
            alone = {**point, **unset, **setting, "operator": operator, "phase": phase}
            if reason := userbuffers_refusal(alone):
                return reason
    return None


def build(point: Mapping[str, Any], purpose: Purpose, config: OverlapConfig, ranks: Ranks, seed: int) -> ParallelLayer:
    from overlap_sweep.backends.transformer_engine import modules

    return modules.build_layer(point, purpose, config, ranks, seed)


def attention(point: Mapping[str, Any], ranks: Ranks) -> tuple[str | None, list[str]]:
    backend = attention_backend()
    return backend, attention_warnings(backend)


def cudnn_directories(maps: str) -> list[str]:
    """Folders of the cuDNN libraries that a process has loaded, from the text of its /proc/<pid>/maps."""
    return sorted(set(_CUDNN.findall(maps)))


def attention_backend() -> str | None:
    """What Transformer Engine chose for the last attention that ran in this process; None where none ran."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    chosen = dot_product_attention._attention_backends
    if chosen["attention_params"] is None:
        return None
    if chosen["use_flash_attention"]:
        return f"flash ({chosen['flash_attention_backend']})"
    if chosen["use_fused_attention"]:
        return f"fused (cuDNN {_cudnn_version(_loaded_cudnn())})"
    return "unfused"


def attention_warnings(backend: str | None, maps: str | None = None) -> list[str]:
    """One sentence for everything that makes attention slower than it should be."""
    directories = cudnn_directories(Path("/proc/self/maps").read_text() if maps is None else maps)
    warnings = []
    if len(directories) > 1:
        warnings.append(
            f"Two cuDNNs are loaded, from {' and '.join(directories)}: Transformer Engine may refuse fused attention "
            "without a word. Set CUDNN_HOME to the one that torch uses."
        )
    if backend == "unfused":
        warnings.append(
            "Attention ran unfused, much slower than in training, which makes communication look smaller than it is: "
            "see NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 for why flash and fused attention were refused."
        )
    return warnings


def _loaded_cudnn() -> int:
    import torch

    return torch.backends.cudnn.version() or 0


def _cudnn_version(number: int) -> str:
    """91900 -> 9.19.0, as cuDNN 9 counts."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
