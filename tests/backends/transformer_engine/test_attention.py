from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_sweep.backends.transformer_engine import attention_backend, attention_warnings


def test_only_unfused_attention_is_warned_of() -> None:
    assert not any(map(attention_warnings, (None, "flash (2.8.3)", "fused (cuDNN 9.19.0)")))
    (warning,) = attention_warnings("unfused")
    assert "NVTE_DEBUG=1" in warning


CHOSEN: dict[str, Any] = {
    "attention_params": object(),
    "use_flash_attention": False,
    "flash_attention_backend": "2.8.3",
    "use_fused_attention": False,
}


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({"attention_params": None}, None),
        ({"use_flash_attention": True}, "flash (2.8.3)"),
        ({"use_fused_attention": True}, "fused (cuDNN 9.19.0)"),
        ({}, "unfused"),
    ],
)
def test_who_computed_attention(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], backend: str | None) -> None:
    parent = "transformer_engine.pytorch.attention.dot_product_attention"
    library = ModuleType(parent)
    library.dot_product_attention = SimpleNamespace(_attention_backends={**CHOSEN, **changes})  # type: ignore[attr-defined]
    # Whether or not Transformer Engine is installed, this is the one that is imported.
    for depth in range(1, parent.count(".") + 1):
        name = ".".join(parent.split(".")[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, parent, library)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert attention_backend() == backend
