"""Who computed attention, and whether it is the one that training would use."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_CUDNN = re.compile(r"(/\S*)/libcudnn[^/\s]*\.so\S*$", re.MULTILINE)


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
        return f"fused (cuDNN {_version(_loaded_cudnn())})"
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
    return torch.backends.cudnn.version() or 0


def _version(number: int) -> str:
    """91900 -> 9.19.0, as cuDNN 9 counts."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
