"""The libraries that are installed: whether they can be used, and which attention Transformer Engine chose."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from overlap_sweep.results.identity import installed_version

OLDEST = {"transformer_engine": ("transformer-engine", (2, 15)), "megatron.core": ("megatron-core", (0, 16))}
"""Distribution and oldest supported version of each package."""

_CUDNN = re.compile(r"(/\S*)/libcudnn[^/\s]*\.so\S*$", re.MULTILINE)


@cache
def missing(package: str = "transformer_engine") -> str | None:
    """Returns why the package cannot be used here, or None."""
    parent = package.partition(".")[0]
    if find_spec(parent) is None or find_spec(package) is None:
        return f"{package} is not installed; pip install --no-build-isolation 'overlap-sweep[gpu]'"
    return None


def unusable(package: str = "transformer_engine") -> str | None:
    """Returns why the package is missing or too old, or None."""
    distribution, oldest = OLDEST[package]
    if reason := missing(package):
        return reason
    installed = installed_version(distribution)
    # None on PYTHONPATH but not installed, as Megatron-LM's sources in some images.
    if installed and tuple(map(int, re.findall(r"\d+", installed)[:2])) < oldest:
        return f"{distribution} {installed} is too old; overlap_sweep requires {'.'.join(map(str, oldest))} or later"
    return None


@cache
def cuda_major() -> int | None:
    """Returns the major version of CUDA that Transformer Engine was built for, from its package's name."""
    return next((major for major in (12, 13) if installed_version(f"transformer-engine-cu{major}")), None)


def attention_backend() -> str | None:
    """Returns the attention backend that Transformer Engine last chose in this process; None if no attention ran."""
    import torch
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    chosen = dot_product_attention._attention_backends
    if chosen["attention_params"] is None:
        return None
    if chosen["use_flash_attention"]:
        return f"flash ({chosen['flash_attention_backend']})"
    if chosen["use_fused_attention"]:
        # cuDNN 9 returns 91900 for 9.19.0.
        major, rest = divmod(torch.backends.cudnn.version() or 0, 10_000)
        return f"fused (cuDNN {major}.{rest // 100}.{rest % 100})"
    return "unfused"


def attention_warnings(backend: str | None, maps: str | None = None) -> list[str]:
    """Returns a sentence for each reason why attention is slower than it should be.

    `maps`: text of a process's /proc/<pid>/maps, by default of this process.
    """
    directories = sorted(set(_CUDNN.findall(Path("/proc/self/maps").read_text() if maps is None else maps)))
    warnings = []
    if len(directories) > 1:
        warnings.append(
            f"Two cuDNN libraries are loaded, from {' and '.join(directories)}, so that Transformer Engine may "
            "silently refuse fused attention. Set CUDNN_HOME to the one that torch uses."
        )
    if backend == "unfused":
        warnings.append(
            "Attention ran unfused and much slower than in training, so communication looks smaller than it is. "
            "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 shows why flash and fused attention were refused."
        )
    return warnings
